// Tokens drawn from rows of logits, as engine/distribution.py defines them: what a row gives depends on that row and
// its wishes alone, to the bit, and is what plain numpy gives.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "philox.h"
#include "selection.h"
#include "thread_pool.h"
#include "weights.h"

namespace crossdock {

// How one token is drawn: engine/sequence.py packs it. top_k: 0 is off. The noise is that of (seed, position).
struct Draw {
    double temperature, top_p, min_p;
    int64_t top_k;
    uint64_t seed;
};

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kRun = 512;  // tokens whose weights are summed at once, to find the drawn one again
constexpr int64_t kShares[] = {512, 32768};  // of all weight: what is less is not looked at in the first place
constexpr int kHalvings = 6;  // in search of a bound: each costs as much as a hundred tokens too many
constexpr int64_t kAlone = 1 << 20;  // logits that the caller looks at before others are awake
constexpr int64_t kWeighing = 16;    // what it costs to weigh a token, in looks at a logit

// Draws from one row after the other, in the memory of one thread.
class Drawing {
  public:
    static size_t bytes(size_t count) { return count * (2 * sizeof(int64_t) + sizeof(float) + sizeof(int32_t)); }

    // memory: `bytes` for rows of `count` logits.
    Drawing(void* memory, size_t count)
        : count_(count),
          weights_(static_cast<int64_t*>(memory)),
          sums_(weights_ + count),
          values_(reinterpret_cast<float*>(sums_ + count)),
          ids_(reinterpret_cast<int32_t*>(values_ + count)) {}

    // The token, or -1 where the row is no row of numbers.
    int64_t draw(const float* logits, const Draw& wish, uint64_t position) {
        logits_ = logits;
        const auto [most, place] = peak_of(logits, count_);
        if (!std::isfinite(most)) return -1;
        if (wish.temperature == 0.0) return place;
        const Weights weights(most, wish.temperature);
        const uint64_t noise = noise_of(wish.seed, position);
        const bool fewer = wish.top_k > 0 && static_cast<size_t>(wish.top_k) < count_;
        if (!fewer && wish.top_p >= 1.0 && wish.min_p <= 0.0) return any(weights, noise);
        const int64_t least = std::ceil(wish.min_p * kHeaviest);
        if (fewer) {
            keep_largest(most, wish.top_k);
            weigh(weights);
        } else if (wish.top_p >= 1.0) {
            gather(weights, least);
        }
        if (wish.top_p < 1.0) keep_nucleus(weights, wish.top_p, fewer);
        keep([least](int64_t weight) { return weight >= least; });
        return pick(noise);
    }

    // Ids of the `wanted` largest, the largest first, the lower id first among equals.
    void likeliest(const float* logits, float most, size_t wanted, int64_t* ids) {
        logits_ = logits;
        keep_largest(most, wanted);
        std::copy_n(ids_, kept_, ids);
        std::sort(ids, ids + kept_, [logits](int64_t one, int64_t other) {
            return logits[one] > logits[other] || (logits[one] == logits[other] && one < other);
        });
    }

  private:
    // From all tokens.
    int64_t any(const Weights& weights, uint64_t noise) {
        int64_t target = scaled(noise, sum_runs(weights));
        size_t run = 0;
        for (; target >= sums_[run]; ++run) target -= sums_[run];
        size_t id = run * kRun;
        for (int64_t weight; target >= (weight = weights.of(logits_[id])); ++id) target -= weight;
        return id;
    }

    // Of all tokens; the sum of each run is in sums_.
    int64_t sum_runs(const Weights& weights) {
        int64_t total = 0;
        for (size_t i = 0; i < count_; i += kRun) {
            total += sums_[i / kRun] = weights.sum(logits_ + i, std::min(kRun, count_ - i));
        }
        return total;
    }

    // Of those that are kept.
    int64_t pick(uint64_t noise) const {
        int64_t target = scaled(noise, sum_kept());
        size_t at = 0;
        for (; target >= weights_[at]; ++at) target -= weights_[at];
        return ids_[at];
    }

    // noise is in 2^-53.
    static int64_t scaled(uint64_t noise, int64_t total) {
        return static_cast<unsigned __int128>(noise) * static_cast<uint64_t>(total) >> 53;
    }

    int64_t sum_kept() const { return std::accumulate(weights_, weights_ + kept_, int64_t{0}); }

    // The `wanted` largest logits; the lower ids among equals at the border.
    void keep_largest(float most, size_t wanted) {
        kept_ = all_from(logits_, count_, wanted < count_ ? bound_of(most, wanted) : -kInfinity, ids_);
        fetch();
        const auto border = border_of(values_, kept_, wanted, [](float) { return 1; });
        int64_t equals = border.equals;
        size_t kept = 0;
        for (size_t i = 0; i < kept_; ++i) {
            const float logit = logits_[ids_[kept] = ids_[i]];
            kept += logit > border.value || (logit == border.value && equals-- > 0);
        }
        kept_ = kept;
    }

    // A logit that at least `wanted` reach, and as a rule not many more.
    float bound_of(float most, size_t wanted) const {
        const auto reach = [&](float depth) { return number_from(logits_, count_, most - depth); };
        float depth = 1.0f, too_little = 0.0f;
        for (; reach(depth) < wanted; depth *= 2.0f) {
            if (depth == kInfinity) return -kInfinity;
            too_little = depth;
        }
        for (int i = 0; i < kHalvings && reach(depth) > 4 * wanted + 256; ++i) {
            const float middle = too_little + (depth - too_little) / 2.0f;
            (reach(middle) < wanted ? too_little : depth) = middle;
        }
        return most - depth;
    }

    void fetch() {
        for (size_t i = 0; i < kept_; ++i) values_[i] = logits_[ids_[i]];
    }

    void weigh(const Weights& weights) {
        fetch();
        weights.weigh(values_, kept_, weights_);
    }

    // All that weigh at least so much.
    void gather(const Weights& weights, int64_t least) {
        kept_ = all_from(logits_, count_, least > 0 ? weights.bound(least) : -kInfinity, ids_);
        weigh(weights);
        keep([least](int64_t weight) { return weight >= least; });
    }

    // The fewest of the heaviest that hold top_p of all weight. chosen: what is kept already is all.
    void keep_nucleus(const Weights& weights, double top_p, bool chosen) {
        const int64_t total = chosen ? sum_kept() : sum_runs(weights);
        const int64_t wanted = std::min<int64_t>(total, std::ceil(top_p * static_cast<double>(total)));
        if (!chosen) gather_nucleus(weights, total, wanted);
        std::copy_n(weights_, kept_, sums_);
        const auto border = border_of(sums_, kept_, wanted, [](int64_t weight) { return weight; });
        int64_t equals = border.equals;
        keep([&](int64_t weight) { return weight > border.value || (weight == border.value && equals-- > 0); });
    }

    // Those that weigh most and hold what is wanted, with all that weigh as much as any of them.
    void gather_nucleus(const Weights& weights, int64_t total, int64_t wanted) {
        for (int64_t share : kShares) {
            gather(weights, std::max<int64_t>(1, total / share));
            if (sum_kept() >= wanted) return;
        }
        gather(weights, 0);
    }

    template <class Stays>
    void keep(const Stays& stays) {
        size_t kept = 0;
        for (size_t i = 0; i < kept_; ++i) {
            const int64_t weight = weights_[i];
            ids_[kept] = ids_[i];
            weights_[kept] = weight;
            kept += stays(weight);
        }
        kept_ = kept;
    }

    const size_t count_;
    const float* logits_ = nullptr;
    size_t kept_ = 0;  // tokens at hand: their ids, ascending, and weights
    int64_t* weights_;
    int64_t* sums_;
    float* values_;
    int32_t* ids_;
};

// body(row, drawing) for all rows, over whoever is free where there is enough to do. weighed: how many rows are.
template <class Body>
void each_row(ThreadPool& pool, int64_t rows, int64_t vocab, int64_t weighed, const Body& body) {
    alignas(64) std::atomic<int64_t> next{0};
    const auto job = [&](int thread) {
        Drawing drawing(pool.scratch(thread, Drawing::bytes(vocab)), vocab);
        for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) body(row, drawing);
    };
    if (rows < 2 || (rows + weighed * kWeighing) * vocab < kAlone) {
        job(0);
    } else {
        pool.run(job);
    }
}

}  // namespace
}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// logits [rows, vocab], `stride` floats between rows; fewer than 2^21 tokens. tokens: -1 for a row that holds a NaN or
// +inf, or nothing but -inf.
void crossdock_draw(void* pool, const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                    const crossdock::Draw* draws, const uint64_t* positions, int64_t* tokens) {
    using namespace crossdock;
    const int64_t weighed = std::count_if(draws, draws + rows, [](const Draw& draw) { return draw.temperature > 0; });
    each_row(*static_cast<ThreadPool*>(pool), rows, vocab, weighed, [&](int64_t row, Drawing& drawing) {
        tokens[row] = drawing.draw(logits + row * stride, draws[row], positions[row]);
    });
}

// Of each row: the sum of its weights at temperature 1, and ids of its counts[row] likeliest tokens, the likeliest
// first, at ids + row * most. Every row holds a finite greatest logit.
void crossdock_describe(void* pool, const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                        const int64_t* counts, int64_t most, int64_t* totals, int64_t* ids) {
    using namespace crossdock;
    each_row(*static_cast<ThreadPool*>(pool), rows, vocab, rows, [&](int64_t row, Drawing& drawing) {
        const float* values = logits + row * stride;
        const float high = greatest_of(values, vocab);
        totals[row] = Weights(high, 1.0).sum(values, vocab);
        if (counts[row]) drawing.likeliest(values, high, counts[row], ids + row * most);
    });
}
}
#pragma GCC visibility pop
