// The threads of one backend: its own, and one on each core that may be borrowed from other workers. Which thread
// does what never changes a result. One caller at a time.
//
// A call is offered to whoever is free, and work is taken piece by piece: nobody waits for a thread that has not
// begun. Threads on borrowed cores run behind everybody else there, so that a core is its owner's again as soon as
// the owner wakes up; what such a thread has begun is then finished on the caller's core.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core_board.h"

namespace crossdock {

class ThreadPool {
  public:
    // The caller is thread 0, so `threads` - 1 are started, on the cores `own` (empty: on any), and one for each
    // core that the board, if there is one, may let us borrow. Throws std::system_error.
    ThreadPool(int threads, std::vector<int> own, std::unique_ptr<CoreBoard> board);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // The most that can take part in a call.
    int threads() const { return static_cast<int>(crew_.size()) + 1; }

    // job(thread) on the caller and on every thread that is free, in [0, threads()); returns when all that began are
    // done. The job hands its work out by itself: a thread may never come, or come when all is taken.
    template <class Job>
    void run(const Job& job) {
        call(entry<Job>, &job, crew_.size());
    }

    // body(begin, end) over [0, count) in contiguous pieces. Stays on the caller's thread when there are fewer than
    // 2 * grain items: waking somebody costs more than doing it.
    template <class Body>
    void split(size_t count, size_t grain, const Body& body) {
        const size_t shares = std::min<size_t>(threads(), count / grain);
        if (shares < 2) {
            body(size_t{0}, count);
            return;
        }
        const size_t piece = std::max(grain, count / (shares * kPieces) + 1);
        alignas(kCacheLine) std::atomic<size_t> next{0};
        const auto job = [&](int) {
            for (size_t begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < count;)
                body(begin, std::min(begin + piece, count));
        };
        call(entry<decltype(job)>, &job, shares - 1);
    }

    // At least `bytes` of memory for one thread, aligned to a cache line; valid until its next call.
    void* scratch(int thread, size_t bytes);

    // How long threads on borrowed cores have been at work, in nanoseconds of one core.
    int64_t borrowed_ns() const { return borrowed_ns_; }

  private:
    static constexpr size_t kCacheLine = 64;
    static constexpr size_t kPieces = 4;  // per thread: fewer wait for the last one, more wait for memory

    using Entry = void (*)(const void* context, int thread);

    enum class State { kWaiting, kAsleep, kCalled, kWorking };

    // A thread beside the caller's. `called` and `fetched` are the caller's notes about the call that is going on.
    struct alignas(kCacheLine) Member {
        std::atomic<State> state{State::kWaiting};
        int lent_core = -1;
        bool called = false;
        bool fetched = false;
        std::mutex mutex;
        std::condition_variable woken;
        std::thread thread;

        bool lent() const { return lent_core >= 0; }
    };

    template <class Job>
    static void entry(const void* context, int thread) {
        (*static_cast<const Job*>(context))(thread);
    }

    void call(Entry entry, const void* context, size_t most);
    bool summon(Member& member);
    void dismiss(Member& member);
    void gather();
    void fetch();
    void work(Member& member, int thread);
    bool await_call(Member& member);
    void sleep(Member& member);
    void stop();

    const std::vector<int> own_;
    const std::vector<int> anywhere_;  // that this process may use
    const std::unique_ptr<CoreBoard> board_;
    std::vector<std::unique_ptr<Member>> crew_;
    std::vector<std::vector<char>> scratch_;
    std::mutex mutex_;
    std::condition_variable finished_;
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stopping_{false};
    std::atomic<int64_t> borrowed_ns_{0};
    Entry entry_ = nullptr;
    const void* context_ = nullptr;
};

}  // namespace crossdock
