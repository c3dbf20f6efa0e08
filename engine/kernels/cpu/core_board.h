// Which cores of this machine compute for their owners: a page of memory that the workers of the machine share.
//
// One cache line per core. Its first word is the worker that borrows the core, 0 for none. Each byte from kFirstSeat
// on is one worker's seat: it does not own the core, owns it and rests, or owns it and computes. The page is made,
// and the seats are written, by service/core_board.py; here they are read and cores are borrowed, never waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crossdock {

class CoreBoard {
  public:
    // seat: number of this worker. Throws std::system_error when the file cannot be mapped.
    CoreBoard(const char* path, int seat);
    ~CoreBoard();
    CoreBoard(const CoreBoard&) = delete;
    CoreBoard& operator=(const CoreBoard&) = delete;

    // Cores that others own and this worker does not.
    std::vector<int> others() const;

    // Whether all owners of the core rest.
    bool resting(int core) const;

    // False when an owner computes or somebody else has borrowed the core. Ended by `give_back`.
    bool borrow(int core);
    void give_back(int core);

  private:
    static constexpr size_t kLine = 64;
    static constexpr size_t kFirstSeat = 8;
    static constexpr uint64_t kEachByte = 0x0101010101010101u;
    static constexpr uint64_t kComputes = 2;

    uint32_t* borrower(int core) const { return reinterpret_cast<uint32_t*>(page_ + core * kLine); }

    uint8_t* page_ = nullptr;
    size_t bytes_ = 0;
    const int seat_;
};

}  // namespace crossdock
