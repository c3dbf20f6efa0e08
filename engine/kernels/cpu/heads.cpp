#include "heads.h"

#include "rows.h"

namespace crossdock {
namespace {

void norm_heads(float* heads, int64_t count, int64_t dim, const float* weight, float eps) {
    if (!weight) return;
    for (int64_t head = 0; head < count; ++head) {
        norm_row(heads + head * dim, weight, eps, dim, heads + head * dim);
    }
}

template <class Element>
void place_row(const Heads& heads, const Cache<Element>& cache, int64_t row) {
    const int64_t width = cache.kv_heads * cache.dim, half = cache.dim / 2;
    float* q = heads.at + row * (heads.heads * cache.dim + 2 * width);
    float* k = q + heads.heads * cache.dim;
    norm_heads(q, heads.heads, cache.dim, heads.q_norm, heads.eps);
    norm_heads(k, cache.kv_heads, cache.dim, heads.k_norm, heads.eps);
    const int64_t angle = heads.positions[row] * half;
    rotate_heads(q, heads.heads + cache.kv_heads, half, heads.cos + angle, heads.sin + angle);
    store_key_value(cache, heads.slots[row], k, k + width);
}

}  // namespace

template <class Element>
void store_key_value(const Cache<Element>& cache, int64_t slot, const float* k, const float* v) {
    const int64_t offset = slot % cache.block_size * cache.token_stride;
    Element* to = cache.keys + slot / cache.block_size * cache.block_stride + offset;
    for (int64_t head = 0; head < cache.kv_heads; ++head, k += cache.dim, v += cache.dim) {
        store_row(k, cache.dim, to + head * cache.head_stride());
        store_row(v, cache.dim, to + head * cache.head_stride() + cache.half);
    }
}

template <class Element>
void place_heads(ThreadPool& pool, const Heads& heads, const Cache<Element>& cache) {
    const size_t width = (heads.heads + 2 * cache.kv_heads) * cache.dim;
    pool.split(heads.rows, row_grain(width), [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) place_row(heads, cache, row);
    });
}

template void store_key_value(const Cache<float>&, int64_t, const float*, const float*);
template void store_key_value(const Cache<uint16_t>&, int64_t, const float*, const float*);
template void store_key_value(const Cache<int8_t>&, int64_t, const float*, const float*);
template void place_heads(ThreadPool&, const Heads&, const Cache<float>&);
template void place_heads(ThreadPool&, const Heads&, const Cache<uint16_t>&);
template void place_heads(ThreadPool&, const Heads&, const Cache<int8_t>&);

}  // namespace crossdock
