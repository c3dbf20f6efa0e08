// A softmax that is fed chunk by chunk (Milakov & Gimelshein 2018; Dao et al. 2022), and the sum that it weighs.
//
// A row's scores and weights are in the order of positions, relative to the chunk. What a row ends with depends
// on the positions that it sees alone: all others get the weight 0 and are not even multiplied by it.
#pragma once

#include <limits>

#include "packed_chunk.h"

namespace crossdock {

// Up to kTileRows queries that are computed together, each behind the other.
template <class Word>
struct Rows {
    const Word* q;             // [rows][depth]
    float* sums;               // [rows][padded], weighted values
    float* totals;             // [rows][kLanes], weights
    float* greatest;           // [rows], scores
    Range seen[kTileRows]{};   // positions, relative to the chunk
    Range all{0, 0};           // some row sees them
    Range common{0, 1 << 30};  // every row sees them
    int count = 0;

    void add(Range range) {
        seen[count++] = range;
        common = intersect(common, range);
        if (range.empty()) return;
        all = all.empty() ? range : Range{std::min(all.begin, range.begin), std::max(all.end, range.end)};
    }
};

// Scores and weights of the rows at hand.
template <class Word>
struct Weights {
    float scores[kTileRows][kChunk<Word>];
    Word weights[kTileRows][kChunk<Word> / kPerWord<Word>];
};

// All bits of a lane are set where first + lane lies in the range.
INLINE Ints lanes_in(Range range, int first) {
    const Ints index = iota() + first;
    return (index >= range.begin) & (index < range.end);
}

template <int Count, class Word>
INLINE void score_tile(const Word* q, const PackedChunk<Word>& chunk, const Word* keys, float* scores) {
    Floats acc[Count][kTileVectors];
    UNROLL
    for (int r = 0; r < Count; ++r) {
        UNROLL
        for (int v = 0; v < kTileVectors; ++v) acc[r][v] = Floats{};
    }
    const int64_t words = (chunk.dim + kPerWord<Word> - 1) / kPerWord<Word>;
    accumulate(acc, q, chunk.depth, keys, kTileColumns, words);
    UNROLL
    for (int r = 0; r < Count; ++r) {
        UNROLL
        for (int v = 0; v < kTileVectors; ++v) store(scores + r * kChunk<Word> + v * kLanes, acc[r][v]);
    }
}

// Stores the weights of one or two vectors of scores, and returns their sum as rounded.
INLINE Floats store_weights(const float* scores, Floats greatest, float* to) {
    const Floats weight = decay(load(scores) - greatest);
    store(to, weight);
    return weight;
}

#if defined(__AVX512BF16__)
INLINE Floats store_weights(const float* scores, Floats greatest, Pair* to) {
    const Words pairs =
        round_pairs(decay(load(scores) - greatest), decay(load(scores + kLanes) - greatest));
    store(to, pairs);
    return (Floats)(pairs << 16) + (Floats)(pairs & 0xffff0000u);
}
#endif

// Turns a row's scores into weights, and moves its running softmax on.
template <class Word>
void soften(const PackedChunk<Word>& chunk, Range seen, float* scores, Word* weights, float* sums,
            float* totals, float* greatest_before) {
    constexpr int step = kLanes * kPerWord<Word>;
    const Range vectors{seen.begin / step * step, (seen.end + step - 1) / step * step};
    const float before = *greatest_before;
    Floats highest = splat(before);
    for (int j = vectors.begin; j < vectors.end; j += kLanes) {
        Floats score = load(scores + j);
        if (j < seen.begin || j + kLanes > seen.end) {
            score = lanes_in(seen, j) ? score : splat(-std::numeric_limits<float>::infinity());
            store(scores + j, score);
        }
        highest = score > highest ? score : highest;
    }
    const float now = greatest(highest);
    Floats total = load(totals);
    if (now != before) {
        const Floats fade = decay(splat(before - now));
        total *= fade;
        for (int64_t d = 0; d < chunk.padded; d += kLanes) store(sums + d, load(sums + d) * fade);
        *greatest_before = now;
    }
    for (int j = vectors.begin; j < vectors.end; j += step) {
        total += store_weights(scores + j, splat(now), weights + j / kPerWord<Word>);
    }
    store(totals, total);
}

template <int Count, int Vectors, class Word>
INLINE void weigh_columns(const Word* weights, const Word* values, int64_t padded, int words, float* to) {
    Floats acc[Count][Vectors];
    UNROLL
    for (int r = 0; r < Count; ++r) {
        UNROLL
        for (int v = 0; v < Vectors; ++v) acc[r][v] = load(to + r * padded + v * kLanes);
    }
    accumulate(acc, weights, kChunk<Word> / kPerWord<Word>, values, padded, words);
    UNROLL
    for (int r = 0; r < Count; ++r) {
        UNROLL
        for (int v = 0; v < Vectors; ++v) store(to + r * padded + v * kLanes, acc[r][v]);
    }
}

INLINE Floats dot(float factor, Words value, Floats acc) { return fma(splat(factor), (Floats)value, acc); }

// Adds what one row sees of the words in `range`; the other half of a pair may hold anything.
template <class Word>
void weigh_seen(const PackedChunk<Word>& chunk, Range seen, Range range, const Word* weights, float* sums) {
    constexpr int per_word = kPerWord<Word>;
    range = intersect(range, {seen.begin / per_word, (seen.end + per_word - 1) / per_word});
    for (int word = range.begin; word < range.end; ++word) {
        Words mask = Words{} - 1;
        if (per_word == 2 && word * 2 < seen.begin) mask <<= 16;
        if (per_word == 2 && word * 2 + 1 >= seen.end) mask &= 0xffffu;
        const Word* values = chunk.value_row(word);
        for (int64_t d = 0; d < chunk.padded; d += kLanes) {
            store(sums + d, dot(weights[word], load_words<Word>(values + d) & mask, load(sums + d)));
        }
    }
}

// Adds the weighted values in order of position: words that every row sees for all at once.
template <int Count, class Word>
void weigh(const PackedChunk<Word>& chunk, const Rows<Word>& rows, const Weights<Word>& memory) {
    constexpr int per_word = kPerWord<Word>;
    constexpr int end = kChunk<Word> / per_word;
    Range shared{(rows.common.begin + per_word - 1) / per_word, rows.common.end / per_word};
    if (shared.empty()) shared = {end, end};
    for (int r = 0; r < Count; ++r) {
        float* sums = rows.sums + r * chunk.padded;
        weigh_seen(chunk, rows.seen[r], {0, shared.begin}, memory.weights[r], sums);
    }
    const int words = shared.end - shared.begin;
    const Word* weights = memory.weights[0] + shared.begin;
    const Word* values = chunk.value_row(shared.begin);
    int64_t d = 0;
    for (; d + kTileColumns <= chunk.padded; d += kTileColumns) {
        weigh_columns<Count, kTileVectors>(weights, values + d, chunk.padded, words, rows.sums + d);
    }
    for (; d < chunk.padded; d += kLanes) {
        weigh_columns<Count, 1>(weights, values + d, chunk.padded, words, rows.sums + d);
    }
    for (int r = 0; r < Count; ++r) {
        float* sums = rows.sums + r * chunk.padded;
        weigh_seen(chunk, rows.seen[r], {shared.end, end}, memory.weights[r], sums);
    }
}

template <int Count, class Word, class Element>
void fold(const PackedChunk<Word>& chunk, const Rows<Word>& rows, Weights<Word>& memory,
          Ahead<Element>& ahead) {
    for (int j = rows.all.begin / kTileColumns * kTileColumns; j < rows.all.end; j += kTileColumns) {
        ahead.fetch(kShareOfTile);
        score_tile<Count>(rows.q, chunk, chunk.key_tile(j), memory.scores[0] + j);
    }
    for (int r = 0; r < Count; ++r) {
        if (rows.seen[r].empty()) continue;
        ahead.fetch(kShareOfVector);
        soften(chunk, rows.seen[r], memory.scores[r], memory.weights[r], rows.sums + r * chunk.padded,
               rows.totals + r * kLanes, rows.greatest + r);
    }
    ahead.fetch(kShareOfTile);
    weigh<Count>(chunk, rows, memory);
}

// Folds a packed chunk into the rows' softmax.
template <class Word, class Element>
void fold_rows(const PackedChunk<Word>& chunk, const Rows<Word>& rows, Weights<Word>& memory,
               Ahead<Element>& ahead) {
    using Fold = void (*)(const PackedChunk<Word>&, const Rows<Word>&, Weights<Word>&, Ahead<Element>&);
    static constexpr Fold folds[kTileRows] = {fold<1, Word, Element>, fold<2, Word, Element>,
                                              fold<3, Word, Element>, fold<4, Word, Element>,
                                              fold<5, Word, Element>, fold<6, Word, Element>};
    if (!rows.all.empty()) folds[rows.count - 1](chunk, rows, memory, ahead);
}

}  // namespace crossdock
