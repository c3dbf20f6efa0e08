// Attention as the rest of a step calls it: the cache, the rows, and an entry for each dtype of the cache.
#pragma once

#include <cstdint>

namespace crossdock {

// Elements behind each head of a position: signed bytes have the float32 there that they are multiplied by.
template <class Element>
constexpr int64_t kScaleElements = 0;
template <>
constexpr int64_t kScaleElements<int8_t> = sizeof(float);

// Strides count elements. `keys` is the cache at block 0 of the layer and at the first head; values are `half` behind the
// keys. Between two positions there may be more heads than these.
template <class Element>
struct Cache {
    Element* keys;
    int64_t block_stride, half, block_size, kv_heads, dim, token_stride;
    int64_t head_stride() const { return dim + kScaleElements<Element>; }
};

struct Queries {
    const float* q;
    int64_t q_stride, heads;
    const int32_t* positions;
    const int32_t* query_starts;
    const int32_t* block_tables;
    int64_t sequences, table_stride;
    float scale;
    int window;  // positions that a row sees, itself included; 0 for all
    float* out;
};

}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

void crossdock_attention_f32(void* pool, const crossdock::Cache<float>* cache,
                             const crossdock::Queries* queries);
void crossdock_attention_bf16(void* pool, const crossdock::Cache<uint16_t>* cache,
                              const crossdock::Queries* queries);
void crossdock_attention_int8(void* pool, const crossdock::Cache<int8_t>* cache,
                              const crossdock::Queries* queries);
}
#pragma GCC visibility pop
