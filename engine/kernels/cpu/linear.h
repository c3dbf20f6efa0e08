// The product of rows and a packed weight, whatever the weight is stored as.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_pool.h"

namespace crossdock {

// What a group of codes has beside its scale.
enum class Offsets : int { kNone, kLeast, kZeros };

// What a weight is stored as. bits: 32 for float32, 16 for bfloat16, 8 and 4 for codes with a scale for each group;
// offsets and zero belong to codes. zero: the code that stands for no weight, where groups have no offsets.
struct Format {
    int bits;
    Offsets offsets;
    int zero;
};

// A weight [out, in]. bias: padded to whole tiles, or null.
struct Linear {
    int64_t in, out;
    const void* packed;
    const float* bias;
    Format format;
};

// What is done to a row, in place, just before it is multiplied: once for each row, in no order, on any thread. Refers
// to the function it is made from.
class RowWork {
  public:
    RowWork() = default;

    template <class Work>
    explicit RowWork(const Work& work)
        : entry_([](const void* context, size_t row) { (*static_cast<const Work*>(context))(row); }),
          context_(&work) {}

    void operator()(size_t row) const {
        if (entry_) entry_(context_, row);
    }

    bool empty() const { return entry_ == nullptr; }

  private:
    void (*entry_)(const void* context, size_t row) = nullptr;
    const void* context_ = nullptr;
};

// `count` rows, `stride` floats apart, that are multiplied once `work` has been done to them.
struct Rows {
    float* at;
    size_t count, stride;
    RowWork work;
};

// out [rows, linear.out].
void multiply(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out);

// The same for one kind of format each.
void multiply_float32(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out);
void multiply_bfloat16(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out);
void multiply_codes(ThreadPool& pool, const Linear& linear, const Rows& rows, float* out);

}  // namespace crossdock
