// On which cores a thread runs, and whom it makes way for. Where the system does not know of it, nothing happens.
#pragma once

#include <algorithm>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace crossdock {

#if defined(__linux__)

inline void place(pthread_t thread, const std::vector<int>& cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core : cores) CPU_SET(core, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

inline void place(std::thread& thread, const std::vector<int>& cores) { place(thread.native_handle(), cores); }

inline void place_here(const std::vector<int>& cores) { place(pthread_self(), cores); }

// Cores that this thread may run on.
inline std::vector<int> allowed() {
    cpu_set_t set;
    CPU_ZERO(&set);
    pthread_getaffinity_np(pthread_self(), sizeof set, &set);
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &set)) cores.push_back(core);
    return cores;
}

inline bool take_policy(int policy) {
    const sched_param none{};
    return pthread_setschedparam(pthread_self(), policy, &none) == 0;
}

// From now on this thread runs only while its core has nothing else to do.
inline void stand_back() { take_policy(SCHED_IDLE); }

// As any other thread again. False where the system does not let this user.
inline bool step_forward() { return take_policy(SCHED_OTHER); }

#else

inline void place(std::thread&, const std::vector<int>&) {}
inline void place_here(const std::vector<int>&) {}
inline std::vector<int> allowed() { return {}; }
inline void stand_back() {}
inline bool step_forward() { return true; }

#endif

// Those of the cores that this thread may run on.
inline std::vector<int> allowed(std::vector<int> cores) {
    const std::vector<int> here = allowed();
    const auto not_here = [&](int core) { return std::find(here.begin(), here.end(), core) == here.end(); };
    cores.erase(std::remove_if(cores.begin(), cores.end(), not_here), cores.end());
    return cores;
}

}  // namespace crossdock
