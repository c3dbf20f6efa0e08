// A whole forward step: all layers of a decoder over a flat batch, from token ids to logits, in one call. It allocates
// nothing: the caller gives the memory that rows need between the kernels.
#include <algorithm>
#include <utility>

#include "attention.h"
#include "heads.h"
#include "linear.h"
#include "rows.h"
#include "simd.h"
#include "thread_pool.h"

namespace crossdock {

// Norms are [hidden]; those of heads [dim], or null. window: positions that a row sees, 0 for all.
struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    Linear qkv, output, gate_up, down;
    int64_t window;
};

// embedding: [vocab, hidden], of embedding_bits 32 (float32) or 16 (bfloat16). cos, sin: [positions, dim / 2].
struct Decoder {
    const Layer* layers;
    int64_t layer_count;
    const void* embedding;
    int64_t embedding_bits, hidden, heads, kv_heads, dim;
    const float* final_norm;
    Linear head;
    const float *cos, *sin;
    float eps, scale;
};

// Of T rows and S sequences. kv: [blocks, layers, 2, block_size, kv_heads, dim], of kv_bits 32 or 16, or 8 with a scale
// behind each head. block_tables: [S, table_stride]. chosen: rows whose logits are wanted, [chosen_count], at most T;
// logits: [chosen_count, vocab]. memory: crossdock_decoder_floats of T rows.
struct Batch {
    const int64_t* token_ids;
    const int32_t* positions;
    const int64_t* slots;
    int64_t rows;
    const int32_t* query_starts;
    const int32_t* block_tables;
    int64_t sequences, table_stride;
    void* kv;
    int64_t kv_bits, block_size;
    const int64_t* chosen;
    int64_t chosen_count;
    float* memory;
    float* logits;
};

namespace {

int64_t qkv_width(const Decoder& decoder) { return (decoder.heads + 2 * decoder.kv_heads) * decoder.dim; }

// What a row holds at once besides its residual and its hidden state: heads and their mixture, or gates and what
// they gate.
int64_t widest(const Decoder& decoder) {
    int64_t width = qkv_width(decoder) + decoder.heads * decoder.dim;
    for (int64_t i = 0; i < decoder.layer_count; ++i) width = std::max(width, decoder.layers[i].gate_up.out);
    return width;
}

bool within(const int64_t* indices, int64_t count, int64_t end) {
    return std::all_of(indices, indices + count, [end](int64_t index) { return 0 <= index && index < end; });
}

void attention(ThreadPool& pool, const Cache<float>& cache, const Queries& queries) {
    crossdock_attention_f32(&pool, &cache, &queries);
}

void attention(ThreadPool& pool, const Cache<uint16_t>& cache, const Queries& queries) {
    crossdock_attention_bf16(&pool, &cache, &queries);
}

void attention(ThreadPool& pool, const Cache<int8_t>& cache, const Queries& queries) {
    crossdock_attention_int8(&pool, &cache, &queries);
}

template <class Element>
class Step {
  public:
    Step(ThreadPool& pool, const Decoder& decoder, const Batch& batch)
        : pool_(pool),
          decoder_(decoder),
          batch_(batch),
          hidden_(decoder.hidden),
          rows_(batch.rows),
          residual_(batch.memory),
          x_(residual_ + rows_ * hidden_),
          wide_(x_ + rows_ * hidden_),
          mixed_(wide_ + rows_ * qkv_width(decoder)) {}

    void run() {
        embed();
        const int64_t last = decoder_.layer_count - 1;
        for (int64_t index = 0; index <= last; ++index) {
            const Layer& layer = decoder_.layers[index];
            const Cache<Element> cache = cache_of(index);
            project(layer, cache);
            if (index == last && batch_.chosen_count == 0) return;
            mix(layer, cache);
            if (index == last) keep_chosen();
            feed_forward(layer);
        }
        multiply_normed(decoder_.head, decoder_.final_norm, batch_.logits);
    }

  private:
    void embed() {
        pool_.split(rows_, row_grain(hidden_), [&](size_t begin, size_t end) {
            std::fill(residual_ + begin * hidden_, residual_ + end * hidden_, 0.0f);
            for (size_t row = begin; row < end; ++row) {
                embed_row(batch_.token_ids[row] * hidden_, x_ + row * hidden_);
            }
        });
    }

    void embed_row(size_t at, float* to) {
        if (decoder_.embedding_bits == 32) {
            return store_row(static_cast<const float*>(decoder_.embedding) + at, hidden_, to);
        }
        const auto* from = static_cast<const uint16_t*>(decoder_.embedding) + at;
        for (size_t i = 0; i < hidden_; ++i) to[i] = from_bf16(from[i]);
    }

    // To queries in wide_, and keys and values in the cache.
    void project(const Layer& layer, const Cache<Element>& cache) {
        multiply_normed(layer.qkv, layer.input_norm, wide_);
        const int64_t rows = rows_;
        const Heads heads{wide_,        rows,             decoder_.heads, layer.q_norm, layer.k_norm,
                          decoder_.eps, batch_.positions, batch_.slots,   decoder_.cos, decoder_.sin};
        place_heads(pool_, heads, cache);
    }

    // From queries in wide_ to mixed_.
    void mix(const Layer& layer, const Cache<Element>& cache) {
        const Queries queries{wide_,
                              qkv_width(decoder_),
                              decoder_.heads,
                              batch_.positions,
                              batch_.query_starts,
                              batch_.block_tables,
                              batch_.sequences,
                              batch_.table_stride,
                              decoder_.scale,
                              static_cast<int>(layer.window),
                              mixed_};
        attention(pool_, cache, queries);
    }

    // Behind the last attention only those rows go on whose logits are wanted.
    void keep_chosen() {
        const size_t width = decoder_.heads * decoder_.dim;
        rows_ = batch_.chosen_count;
        for (size_t i = 0; i < rows_; ++i) {
            std::copy_n(residual_ + batch_.chosen[i] * hidden_, hidden_, x_ + i * hidden_);
            std::copy_n(mixed_ + batch_.chosen[i] * width, width, wide_ + i * width);
        }
        std::swap(residual_, x_);
        mixed_ = wide_;
    }

    // From mixed_ to the next x_.
    void feed_forward(const Layer& layer) {
        const size_t mixed = layer.output.in, both = layer.gate_up.out, width = layer.down.in;
        multiply(pool_, layer.output, {mixed_, rows_, mixed, {}}, x_);
        multiply_normed(layer.gate_up, layer.post_norm, wide_);
        const auto gated = [&](size_t row) {
            float* gate = wide_ + row * both;
            silu_mul_row(gate, gate + width, width);
        };
        multiply(pool_, layer.down, {wide_, rows_, both, RowWork(gated)}, x_);
    }

    // x_ joins the residual and is replaced by the normed sum, which is multiplied.
    void multiply_normed(const Linear& linear, const float* norm, float* out) {
        const auto normed = [&](size_t row) {
            add_norm_row(x_ + row * hidden_, residual_ + row * hidden_, norm, decoder_.eps, hidden_);
        };
        multiply(pool_, linear, {x_, rows_, hidden_, RowWork(normed)}, out);
    }

    Cache<Element> cache_of(int64_t layer) const {
        Cache<Element> cache{nullptr, 0, 0, batch_.block_size, decoder_.kv_heads, decoder_.dim, 0};
        cache.token_stride = cache.kv_heads * cache.head_stride();
        cache.half = cache.block_size * cache.token_stride;
        cache.block_stride = decoder_.layer_count * 2 * cache.half;
        cache.keys = static_cast<Element*>(batch_.kv) + layer * 2 * cache.half;
        return cache;
    }

    ThreadPool& pool_;
    const Decoder& decoder_;
    const Batch& batch_;
    const size_t hidden_;
    size_t rows_;
    float *residual_, *x_, *wide_, *mixed_;
};

}  // namespace
}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// Floats of memory that a step of so many rows needs.
int64_t crossdock_decoder_floats(const crossdock::Decoder* decoder, int64_t rows) {
    return rows * (2 * decoder->hidden + crossdock::widest(*decoder));
}

// 0, and nothing done, when a token or a chosen row is out of range.
int crossdock_decoder_forward(void* pool, const crossdock::Decoder* decoder, const crossdock::Batch* batch) {
    using namespace crossdock;
    if (!within(batch->token_ids, batch->rows, decoder->head.out)) return 0;
    if (!within(batch->chosen, batch->chosen_count, batch->rows)) return 0;
    auto& crew = *static_cast<ThreadPool*>(pool);
    if (batch->kv_bits == 32) {
        Step<float>(crew, *decoder, *batch).run();
    } else if (batch->kv_bits == 16) {
        Step<uint16_t>(crew, *decoder, *batch).run();
    } else {
        Step<int8_t>(crew, *decoder, *batch).run();
    }
    return 1;
}
}
#pragma GCC visibility pop
