#include "thread_pool.h"

#include <chrono>
#include <system_error>

#include "placement.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace crossdock {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(30);       // about what a sleep and a wake-up cost
constexpr auto kLookout = std::chrono::microseconds(100);   // more than lies between two calls of a step
constexpr auto kPatience = std::chrono::microseconds(100);  // with a thread that was pushed off its core

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(const Condition& condition, Clock::duration most) {
    const auto end = Clock::now() + most;
    do {
        for (int i = 0; i < 16; ++i) {
            if (condition()) return true;
            relax();
        }
    } while (Clock::now() < end);
    return condition();
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::vector<int> own, std::unique_ptr<CoreBoard> board)
    : own_(std::move(own)), anywhere_(allowed()), board_(std::move(board)) {
    for (int thread = 1; thread < threads; ++thread) crew_.push_back(std::make_unique<Member>());
    for (int core : board_ ? allowed(board_->others()) : std::vector<int>{}) {
        crew_.push_back(std::make_unique<Member>());
        crew_.back()->lent_core = core;
    }
    scratch_.resize(crew_.size() + 1);
    try {
        for (size_t i = 0; i < crew_.size(); ++i)
            crew_[i]->thread = std::thread(&ThreadPool::work, this, std::ref(*crew_[i]), static_cast<int>(i) + 1);
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    stopping_ = true;
    for (const auto& member : crew_) {
        if (!member->thread.joinable()) continue;
        { std::lock_guard<std::mutex> lock(member->mutex); }  // it is either before its check or asleep
        member->woken.notify_one();
        member->thread.join();
    }
}

void* ThreadPool::scratch(int thread, size_t bytes) {
    std::vector<char>& memory = scratch_[thread];
    if (memory.size() < bytes + kCacheLine) memory.resize(bytes + kCacheLine);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<void*>((address + kCacheLine - 1) / kCacheLine * kCacheLine);
}

void ThreadPool::call(Entry entry, const void* context, size_t most) {
    entry_ = entry;
    context_ = context;
    size_t called = 0;
    for (const auto& member : crew_) {
        if (called == most) break;
        called += summon(*member);
    }
    entry(context, 0);
    if (called == 0) return;
    for (const auto& member : crew_) {
        State state = State::kCalled;
        if (member->called) member->state.compare_exchange_strong(state, State::kWaiting);  // too late to begin
    }
    gather();
    for (const auto& member : crew_) dismiss(*member);
}

bool ThreadPool::summon(Member& member) {
    if (member.lent() && !board_->borrow(member.lent_core)) return false;
    member.called = true;
    if (member.state.exchange(State::kCalled) == State::kAsleep) {
        { std::lock_guard<std::mutex> lock(member.mutex); }
        member.woken.notify_one();
    }
    return true;
}

void ThreadPool::dismiss(Member& member) {
    if (!member.called) return;
    member.called = false;
    if (member.fetched) place(member.thread, {member.lent_core});
    member.fetched = false;
    if (member.lent()) board_->give_back(member.lent_core);
}

// Returns when nobody works any more.
void ThreadPool::gather() {
    const auto all_done = [this] {
        return std::all_of(crew_.begin(), crew_.end(),
                           [](const auto& member) { return member->state != State::kWorking; });
    };
    if (spin_until(all_done, kSpin)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_ = true;
    if (!finished_.wait_for(lock, kPatience, all_done)) {
        fetch();
        finished_.wait(lock, all_done);
    }
    caller_sleeps_ = false;
}

// Whoever lost a borrowed core in the midst of its work goes on with it here.
void ThreadPool::fetch() {
    const std::vector<int> here = allowed();
    for (const auto& member : crew_) {
        if (!member->lent() || member->state != State::kWorking) continue;
        member->fetched = true;
        place(member->thread, here);
    }
}

void ThreadPool::work(Member& member, int thread) {
    if (member.lent()) {
        place_here({member.lent_core});
        stand_back();
    } else if (!own_.empty()) {
        place_here(own_);
    }
    while (await_call(member)) {
        const auto begin = Clock::now();
        entry_(context_, thread);
        if (member.lent()) borrowed_ns_ += std::chrono::nanoseconds(Clock::now() - begin).count();
        member.state = State::kWaiting;
        if (!caller_sleeps_) continue;
        std::lock_guard<std::mutex> lock(mutex_);  // the caller is either before its check or asleep
        finished_.notify_one();
    }
}

// False when it is time to end. Nobody looks out for a call on a core whose owner computes.
bool ThreadPool::await_call(Member& member) {
    const auto over = [&] {
        return member.state == State::kCalled || stopping_ ||
               (member.lent() && !board_->resting(member.lent_core));
    };
    for (;; sleep(member)) {
        spin_until(over, kLookout);
        if (stopping_) return false;
        State state = State::kCalled;
        if (member.state.compare_exchange_strong(state, State::kWorking)) return true;
    }
}

void ThreadPool::sleep(Member& member) {
    // A process that is killed is there until its last thread has run: none may have to wait until one certain core
    // has nothing else to do.
    const bool anywhere = member.lent() && !step_forward();
    if (anywhere) place_here(anywhere_);
    {
        std::unique_lock<std::mutex> lock(member.mutex);
        State state = State::kWaiting;
        if (member.state.compare_exchange_strong(state, State::kAsleep))
            member.woken.wait(lock, [&] { return member.state != State::kAsleep || stopping_; });
    }
    if (anywhere) place_here({member.lent_core});
    if (member.lent()) stand_back();
}

}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// cores: `count` of them, on which the threads run; none: on any. board: path of the core board, or null.
// nullptr when the system refuses a thread or the board.
void* crossdock_thread_pool_start(int threads, const int* cores, int count, const char* board, int seat) {
    using namespace crossdock;
    try {
        auto lent = board ? std::make_unique<CoreBoard>(board, seat) : nullptr;
        return new ThreadPool(threads, std::vector<int>(cores, cores + count), std::move(lent));
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void crossdock_thread_pool_stop(void* pool) { delete static_cast<crossdock::ThreadPool*>(pool); }

int64_t crossdock_thread_pool_borrowed_ns(void* pool) {
    return static_cast<crossdock::ThreadPool*>(pool)->borrowed_ns();
}
}
#pragma GCC visibility pop
