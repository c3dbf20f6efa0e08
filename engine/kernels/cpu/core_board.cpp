#include "core_board.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace crossdock {

CoreBoard::CoreBoard(const char* path, int seat) : seat_(seat) {
    const int file = open(path, O_RDWR | O_CLOEXEC);
    struct stat status {};
    void* mapped = MAP_FAILED;
    if (file >= 0 && fstat(file, &status) == 0)
        mapped = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const int error = errno;
    if (file >= 0) close(file);
    if (mapped == MAP_FAILED) throw std::system_error(error, std::generic_category(), path);
    page_ = static_cast<uint8_t*>(mapped);
    bytes_ = status.st_size;
}

CoreBoard::~CoreBoard() { munmap(page_, bytes_); }

std::vector<int> CoreBoard::others() const {
    std::vector<int> cores;
    for (size_t core = 0; core < bytes_ / kLine; ++core) {
        const uint8_t* line = page_ + core * kLine;
        bool owned = false;
        for (size_t place = kFirstSeat; place < kLine; ++place) owned |= line[place] != 0;
        if (owned && line[kFirstSeat + seat_] == 0) cores.push_back(static_cast<int>(core));
    }
    return cores;
}

bool CoreBoard::resting(int core) const {
    const auto* seats = reinterpret_cast<const uint64_t*>(page_ + core * kLine + kFirstSeat);
    uint64_t all = 0;
    for (size_t i = 0; i < (kLine - kFirstSeat) / sizeof *seats; ++i) all |= __atomic_load_n(seats + i, __ATOMIC_RELAXED);
    return (all & kEachByte * kComputes) == 0;
}

bool CoreBoard::borrow(int core) {
    uint32_t nobody = 0;
    return resting(core) && __atomic_compare_exchange_n(borrower(core), &nobody, seat_ + 1, false, __ATOMIC_ACQUIRE,
                                                        __ATOMIC_RELAXED);
}

void CoreBoard::give_back(int core) { __atomic_store_n(borrower(core), 0, __ATOMIC_RELEASE); }

}  // namespace crossdock
