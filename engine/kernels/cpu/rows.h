// What a model does to one row at a time. Each result depends on its row alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock {

// Rows of so many elements that are worth waking a thread for.
inline size_t row_grain(size_t elements) { return (size_t{1} << 14) / elements + 1; }

// out = x / rms(x) * weight, over n floats. out may be x.
void norm_row(const float* x, const float* weight, float eps, size_t n, float* out);

// total += added, then added = the normed total: n floats.
void add_norm_row(float* added, float* total, const float* weight, float eps, size_t n);

// heads [count, 2 * half], in place, halves layout. cos, sin: of the row's position, half floats each.
void rotate_heads(float* heads, size_t count, size_t half, const float* cos, const float* sin);

// gate = silu(gate) * up, n floats.
void silu_mul_row(float* gate, const float* up, size_t n);

// n floats, rounded to the type of `to`.
void store_row(const float* from, size_t n, float* to);
void store_row(const float* from, size_t n, uint16_t* to);

}  // namespace crossdock
