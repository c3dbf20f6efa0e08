#include "thread_pool.h"

#include <chrono>
#include <new>
#include <system_error>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace crossdock {
namespace {

constexpr size_t kCacheLine = 64;
constexpr auto kSpin = std::chrono::microseconds(30);  // about what a sleep and a wake-up cost

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            if (condition()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return condition();
}

}  // namespace

ThreadPool::ThreadPool(int threads) : scratch_(threads) {
    workers_.reserve(threads - 1);
    try {
        for (int thread = 1; thread < threads; ++thread)
            workers_.emplace_back(&ThreadPool::work, this, thread);
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    called_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void* ThreadPool::scratch(int thread, size_t bytes) {
    std::vector<char>& memory = scratch_[thread];
    if (memory.size() < bytes + kCacheLine) memory.resize(bytes + kCacheLine);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<void*>((address + kCacheLine - 1) / kCacheLine * kCacheLine);
}

void ThreadPool::call(Entry entry, const void* context) {
    if (!workers_.empty()) {
        std::lock_guard<std::mutex> lock(mutex_);
        entry_ = entry;
        context_ = context;
        unfinished_ = static_cast<int>(workers_.size());
        ++calls_;
    }
    called_.notify_all();
    entry(context, 0);
    const auto all_finished = [this] { return unfinished_ == 0; };
    if (spin_until(all_finished)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, all_finished);
}

void ThreadPool::work(int thread) {
    for (uint64_t seen = 0; await_call(seen); ++seen) {
        entry_(context_, thread);
        if (--unfinished_ == 0) {
            std::lock_guard<std::mutex> lock(mutex_);  // the caller is either before its check or asleep
            finished_.notify_one();
        }
    }
}

bool ThreadPool::await_call(uint64_t seen) {
    const auto changed = [&] { return calls_ != seen || stopping_; };
    if (!spin_until(changed)) {
        std::unique_lock<std::mutex> lock(mutex_);
        called_.wait(lock, changed);
    }
    return !stopping_;
}

}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// nullptr when the system refuses a thread.
void* crossdock_thread_pool_start(int threads) {
    try {
        return new crossdock::ThreadPool(threads);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void crossdock_thread_pool_stop(void* pool) { delete static_cast<crossdock::ThreadPool*>(pool); }
}
#pragma GCC visibility pop
