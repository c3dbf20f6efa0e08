// What tokens weigh: integers in proportion to e^(logit / temperature), the likeliest one 2^kWeightBits.
//
// Sums of integers do not depend on their order, and each weight is made by additions and multiplications alone, none
// of them fused: plain numpy makes the very same ones (engine/distribution.py says the same in its words).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace crossdock {

constexpr int kWeightBits = 42;  // as many as leave room for the sum of 2^21 tokens
constexpr int64_t kHeaviest = int64_t{1} << kWeightBits;
constexpr int kDoubles = kLanes / 2;

typedef double Doubles __attribute__((vector_size(kDoubles * 8)));
typedef int64_t Longs __attribute__((vector_size(kDoubles * 8)));
typedef float HalfFloats __attribute__((vector_size(kDoubles * 4)));

// Of one row of logits at one temperature.
class Weights {
  public:
    Weights(float greatest, double temperature)
        : greatest_(greatest), scale_(std::min(1.4426950408889634 / temperature, 1e300)) {}

    int64_t of(float logit) const {
        const double power = (static_cast<double>(logit) - greatest_) * scale_;
        return raised(power - Doubles{})[0];
    }

    // kDoubles of them.
    INLINE Longs of(const float* logits) const {
        HalfFloats values;
        std::memcpy(&values, logits, sizeof values);
        return raised((__builtin_convertvector(values, Doubles) - greatest_) * scale_);
    }

    int64_t sum(const float* logits, size_t count) const {
        Longs sums[kStreams]{};
        size_t i = 0;
        for (; i + kStreams * kDoubles <= count; i += kStreams * kDoubles) {
            UNROLL
            for (int s = 0; s < kStreams; ++s) sums[s] += of(logits + i + s * kDoubles);
        }
        int64_t total = 0;
        for (int s = 0; s < kStreams; ++s) {
            for (int lane = 0; lane < kDoubles; ++lane) total += sums[s][lane];
        }
        for (; i < count; ++i) total += of(logits[i]);
        return total;
    }

    void weigh(const float* logits, size_t count, int64_t* to) const {
        size_t i = 0;
        for (; i + kDoubles <= count; i += kDoubles) {
            const Longs here = of(logits + i);
            std::memcpy(to + i, &here, sizeof here);
        }
        for (; i < count; ++i) to[i] = of(logits[i]);
    }

    // Logits below this weigh less than `weight`, which is above 0. Some that weigh as little may be above it. The
    // margin is wider by far than what a weight may be off, and no float lies between the two roundings.
    float bound(int64_t weight) const {
        const double power = std::log2(static_cast<double>(weight) - 0.5) - kWeightBits - 1e-6;
        const float logit = static_cast<float>(greatest_ + power / scale_);
        return std::nextafter(logit, -std::numeric_limits<float>::infinity());
    }

  private:
    static constexpr int kStreams = 4;  // as many as hide how long a multiplication takes

    // Whole parts of x are the low bits of x + kWhole.
    static constexpr double kWhole = 6755399441055744.0;  // 1.5 * 2^52

    // 2^(x + kWeightBits) to the nearest integer, for x <= 0: a polynomial of degree 10, fitted at Chebyshev nodes.
    INLINE static Longs raised(Doubles x) {
        x = x > kFaintest ? x : kFaintest - Doubles{};
        const Doubles whole = x + kWhole;
        const Doubles r = x - (whole - kWhole);
        Doubles p = 7.070977866508138e-09 - Doubles{};
        p = p * r + 1.0205905413765595e-07;
        p = p * r + 1.3215451633221434e-06;
        p = p * r + 1.5252672924850737e-05;
        p = p * r + 0.00015403530424776529;
        p = p * r + 0.0013333558200794592;
        p = p * r + 0.009618129107618665;
        p = p * r + 0.05550410866465167;
        p = p * r + 0.24022650695910075;
        p = p * r + 0.6931471805599462;
        p = p * r + 1.0;
        const Doubles weight = (Doubles)((Longs)p + (((Longs)whole + kWeightBits) << 52));
        return (Longs)(weight + kWhole) - (Longs)(kWhole - Doubles{});
    }

    static constexpr double kFaintest = -64.0;  // a power of 2 that weighs nothing

    double greatest_, scale_;
};

}  // namespace crossdock
