// Keys and values of one layer in blocks that lie anywhere: where a sequence's positions are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "simd.h"

namespace crossdock {

struct Range {
    int begin, end;
    bool empty() const { return begin >= end; }
};

inline Range intersect(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// offsets[i]: elements from `keys` to the position chunk + i, for those in `range`; for others in
// [chunk, chunk + count) to one in it, so that all of them may be read. `range` is not empty.
template <class Element>
void locate(const Cache<Element>& cache, const int32_t* table, int chunk, int count, Range range,
            int64_t* offsets) {
    const int64_t token_stride = cache.token_stride;
    const int block_size = static_cast<int>(cache.block_size);
    int64_t at = 0;
    for (int position = range.begin; position < range.end;) {
        const int block = position / block_size;
        const int end = std::min((block + 1) * block_size, range.end);
        at = table[block] * cache.block_stride + (position - block * block_size) * token_stride;
        for (; position < end; ++position, at += token_stride) offsets[position - chunk] = at;
    }
    std::fill(offsets + (range.end - chunk), offsets + count, at - token_stride);
    std::fill(offsets, offsets + (range.begin - chunk), at - token_stride);
}

// Shares of what is to be asked for that go with a piece of work, about in proportion to its time.
constexpr int kShareOfRow = 1;     // packing values
constexpr int kShareOfVector = 4;  // packing keys; turning scores into weights
constexpr int kShareOfTile = 8;    // scores; weighing

// Places that will be read soon. They are asked for in small shares, spread over the work before: all at once
// would wait for the memory just as reading them does. Heads side by side are asked for together, since memory
// is fastest in long runs.
template <class Element>
struct Ahead {
    const char* keys;
    int64_t half, width;     // bytes; `width` of them from each place on
    const int64_t* offsets;  // of the places still to be asked for, elements from `keys`
    const int64_t* end;
    int64_t at;    // bytes of the first of them that have been asked for
    int64_t pace;  // cache lines of keys, and of values, per share

    // So that as many shares ask for everything.
    void spread(int64_t shares) {
        const int64_t lines = (end - offsets) * ((width + kLine - 1) / kLine);
        pace = (lines + shares - 1) / shares;
    }

    INLINE void fetch(int shares) {
        for (int64_t lines = shares * pace; offsets < end && lines > 0; --lines) {
            const char* place = keys + *offsets * static_cast<int64_t>(sizeof(Element)) + at;
            __builtin_prefetch(place, 0, 3);
            __builtin_prefetch(place + half, 0, 3);
            at += kLine;
            if (at >= width) {
                at = 0;
                ++offsets;
            }
        }
    }

    void fetch_rest() {
        while (offsets < end) fetch(1);
    }

    static constexpr int64_t kLine = 64;
};

}  // namespace crossdock
