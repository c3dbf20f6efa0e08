// A fixed crew of threads for one backend. Work is handed out by the caller and shared by all of them; which
// thread does what never changes a result. One caller at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace crossdock {

class ThreadPool {
  public:
    // The caller is thread 0, so `threads` - 1 are started. Throws std::system_error.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // job(thread) on every thread; returns when all are done.
    template <class Job>
    void run(const Job& job) {
        call([](const void* context, int thread) { (*static_cast<const Job*>(context))(thread); }, &job);
    }

    // body(begin, end) over [0, count) in contiguous shares. Stays on the caller's thread when there are
    // fewer than 2 * grain items: waking somebody costs more than doing it.
    template <class Body>
    void split(size_t count, size_t grain, const Body& body) {
        const size_t shares = std::min<size_t>(threads(), std::max<size_t>(count / grain, 1));
        if (shares == 1) {
            body(size_t{0}, count);
            return;
        }
        run([&](int thread) {
            const size_t begin = count * std::min<size_t>(thread, shares) / shares;
            const size_t end = count * std::min<size_t>(thread + 1, shares) / shares;
            if (begin < end) body(begin, end);
        });
    }

    // At least `bytes` of memory for one thread, aligned to a cache line; valid until its next call.
    void* scratch(int thread, size_t bytes);

  private:
    using Entry = void (*)(const void* context, int thread);

    void call(Entry entry, const void* context);
    void work(int thread);
    bool await_call(uint64_t seen);
    void stop();

    std::vector<std::thread> workers_;
    std::vector<std::vector<char>> scratch_;
    std::mutex mutex_;
    std::condition_variable called_;
    std::condition_variable finished_;
    std::atomic<uint64_t> calls_{0};
    std::atomic<int> unfinished_{0};
    std::atomic<bool> stopping_{false};
    Entry entry_ = nullptr;
    const void* context_ = nullptr;
};

}  // namespace crossdock
