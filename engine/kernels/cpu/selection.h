// Which of many values are the largest, without sorting them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace crossdock {

// value: the least that is needed, counted from the largest down. equals: how many of this value are.
template <class Value>
struct Border {
    Value value;
    int64_t equals;
};

// Where the largest values have come to `wanted`, each counted as mass(value), above 0; all together have that much.
// Leaves the values in another order.
template <class Value, class Mass>
Border<Value> border_of(Value* values, size_t count, int64_t wanted, const Mass& mass) {
    Value *first = values, *last = values + count;
    for (;;) {
        const Value one = *first, other = first[(last - first) / 2], third = last[-1];
        const Value pivot = std::max(std::min(one, other), std::min(std::max(one, other), third));
        Value *equal = first, *less = last;  // [first, equal) is above the pivot, [less, last) below
        int64_t above = 0, same = 0;
        for (Value* at = first; at < less;) {
            if (*at > pivot) {
                above += mass(*at);
                std::swap(*at++, *equal++);
            } else if (*at == pivot) {
                same += mass(*at++);
            } else {
                std::swap(*at, *--less);
            }
        }
        if (above >= wanted) {
            last = equal;
        } else if (above + same >= wanted) {
            return {pivot, (wanted - above + mass(pivot) - 1) / mass(pivot)};
        } else {
            wanted -= above + same;
            first = less;
        }
    }
}

// The greatest of a row, or NaN or an infinity where there is nothing to be drawn.
inline float greatest_of(const float* row, size_t count) {
    constexpr int streams = 4;  // as many as hide how long a comparison takes
    Floats high[streams];
    Ints broken{};
    UNROLL
    for (int s = 0; s < streams; ++s) high[s] = splat(-std::numeric_limits<float>::infinity());
    size_t i = 0;
    for (; i + streams * kLanes <= count; i += streams * kLanes) {
        UNROLL
        for (int s = 0; s < streams; ++s) {
            const Floats values = load(row + i + s * kLanes);
            high[s] = values > high[s] ? values : high[s];
            broken |= values != values;
        }
    }
    float most = greatest(high[0]);
    for (int s = 1; s < streams; ++s) most = std::max(most, greatest(high[s]));
    bool nan = false;
    for (int lane = 0; lane < kLanes; ++lane) nan |= broken[lane] != 0;
    for (; i < count; ++i) {
        most = std::max(most, row[i]);
        nan |= row[i] != row[i];
    }
    return nan ? std::numeric_limits<float>::quiet_NaN() : most;
}

// How many reach the bound.
inline size_t number_from(const float* row, size_t count, float bound) {
    Ints number{};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) number -= load(row + i) >= bound;
    size_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += number[lane];
    for (; i < count; ++i) total += row[i] >= bound;
    return total;
}

// Ids of those that reach the bound, ascending; returns how many these are.
inline size_t all_from(const float* row, size_t count, float bound, int32_t* ids) {
    constexpr size_t block = 64;
    size_t found = 0;
    for (size_t i = 0; i < count; i += block) {
        const size_t here = std::min(block, count - i);
        if (number_from(row + i, here, bound) == 0) continue;
        for (size_t j = i; j < i + here; ++j) {
            ids[found] = static_cast<int32_t>(j);
            found += row[j] >= bound;
        }
    }
    return found;
}

// The greatest value of a row, as greatest_of, and the first place where it is.
struct Peak {
    float value;
    size_t place;
};

inline Peak peak_of(const float* row, size_t count) {
    constexpr size_t block = 2048;
    float most = -std::numeric_limits<float>::infinity();
    size_t at = 0;
    for (size_t i = 0; i < count; i += block) {
        const float here = greatest_of(row + i, std::min(block, count - i));
        if (here != here) return {here, i};
        if (here > most) {
            most = here;
            at = i;
        }
    }
    while (row[at] != most) ++at;
    return {most, at};
}

}  // namespace crossdock
