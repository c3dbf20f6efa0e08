// Single kernels as tests and benchmarks call them: what a step does to its rows, one thing at a time, on the caller's
// thread. A step itself calls none of these.
#include "heads.h"
#include "linear.h"
#include "rows.h"

namespace crossdock {
namespace {

template <class Element>
void write_kv(const Cache<Element>& cache, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
              const int64_t* slots, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
        store_key_value(cache, slots[row], k + row * k_stride, v + row * v_stride);
    }
}

}  // namespace
}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// x [rows, linear.in].
void crossdock_linear(void* pool, const crossdock::Linear* linear, float* x, int64_t rows, float* out) {
    const size_t count = rows, stride = linear->in;
    crossdock::multiply(*static_cast<crossdock::ThreadPool*>(pool), *linear, {x, count, stride, {}}, out);
}

void crossdock_rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out) {
    for (int64_t row = 0; row < rows; ++row) crossdock::norm_row(x + row * n, weight, eps, n, out + row * n);
}

// x is replaced by the result.
void crossdock_add_rms_norm(float* x, float* residual, const float* weight, float eps, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; ++row) {
        crossdock::add_norm_row(x + row * n, residual + row * n, weight, eps, n);
    }
}

// x [rows, heads, 2 * half] with `stride` floats between rows, in place.
void crossdock_rotary(float* x, int64_t stride, int64_t rows, int64_t heads, int64_t half,
                      const int32_t* positions, const float* cos, const float* sin) {
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t angle = positions[row] * half;
        crossdock::rotate_heads(x + row * stride, heads, half, cos + angle, sin + angle);
    }
}

// gate_up [rows, 2 * n]; the result is left in its first halves.
void crossdock_silu_mul(float* gate_up, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; ++row) {
        float* gate = gate_up + row * 2 * n;
        crossdock::silu_mul_row(gate, gate + n, n);
    }
}

void crossdock_write_kv_f32(const crossdock::Cache<float>* cache, const float* k, int64_t k_stride,
                            const float* v, int64_t v_stride, const int64_t* slots, int64_t rows) {
    crossdock::write_kv(*cache, k, k_stride, v, v_stride, slots, rows);
}

void crossdock_write_kv_bf16(const crossdock::Cache<uint16_t>* cache, const float* k, int64_t k_stride,
                             const float* v, int64_t v_stride, const int64_t* slots, int64_t rows) {
    crossdock::write_kv(*cache, k, k_stride, v, v_stride, slots, rows);
}
}
#pragma GCC visibility pop
