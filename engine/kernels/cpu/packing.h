// What both kinds of packed weight need: sizes in whole tiles, and memory that is read at full speed.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace crossdock {

inline size_t divide_up(size_t value, size_t divisor) { return (value + divisor - 1) / divisor; }

// Weights are read once per step: with 4 KiB pages the walk, not the memory, sets the pace.
inline void prefer_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t page = 4096;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

}  // namespace crossdock
