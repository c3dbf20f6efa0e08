// From the fused projection of a layer to rotated queries, and to keys and values in the cache.
#pragma once

#include <cstdint>

#include "attention.h"
#include "thread_pool.h"

namespace crossdock {

// Rows of [heads + 2 kv_heads, dim]: queries, keys, values; kv_heads and dim are the cache's. q_norm, k_norm: [dim], or
// null. cos, sin: [positions, dim / 2]. slots: block * block_size + offset.
struct Heads {
    float* at;
    int64_t rows, heads;
    const float *q_norm, *k_norm;
    float eps;
    const int32_t* positions;
    const int64_t* slots;
    const float *cos, *sin;
};

// Stores a row's keys and values [kv_heads, dim], rounded, at its slot.
template <class Element>
void store_key_value(const Cache<Element>& cache, int64_t slot, const float* k, const float* v);

// Norms (where there are norms) and rotates queries and keys in place, and stores keys and values, rounded, at their
// slots: one pass over each row.
template <class Element>
void place_heads(ThreadPool& pool, const Heads& heads, const Cache<Element>& cache);

}  // namespace crossdock
