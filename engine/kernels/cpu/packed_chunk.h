// Keys and values of consecutive positions in the order in which `accumulate` reads them.
//
// Words are floats, or pairs of bfloat16 numbers: two elements of a key, or one element of the values of an
// even position and the next. Keys: tiles of kTileColumns positions, each [word of the key][position].
// Values: [position, or pair of them][dim].
#pragma once

#include "paged_cache.h"
#include "pairs.h"
#include "simd.h"

namespace crossdock {

template <class Word>
constexpr int kPerWord = 1;
template <>
constexpr int kPerWord<Pair> = 2;

// Positions per chunk: its keys and values stay in the first-level cache. Both kinds of chunk are whole tiles.
template <class Word>
constexpr int kChunk = 64 * kPerWord<Word>;

static_assert(kChunk<float> % kTileColumns == 0 && kTileColumns % kLanes == 0, "tiles divide evenly");

// Elements, up to whole vectors of packed ones.
template <class Word>
constexpr int64_t pad(int64_t elements) {
    constexpr int step = kLanes * kPerWord<Word>;
    return (elements + step - 1) / step * step;
}

template <class Word, class Element>
INLINE Words load_words(const Element* from) {
    if constexpr (kPerWord<Word> == 2) {
        return load(reinterpret_cast<const Pair*>(from));
    } else {
        return (Words)load(from);
    }
}

// The first `count` elements, zeros behind them.
template <class Word, class Element>
INLINE Words load_words(const Element* from, int64_t count) {
    Element row[kLanes * kPerWord<Word>] = {};
    std::memcpy(row, from, count * sizeof(Element));
    return load_words<Word>(row);
}

template <int Bit>
INLINE void exchange(Words (&rows)[kLanes]) {
    const Ints here = (iota() & Bit) == 0;
    UNROLL
    for (int i = 0; i < kLanes; ++i) {
        if (i & Bit) continue;
        const Words a = rows[i];
        const Words b = rows[i | Bit];
        rows[i] = shuffle(a, b, here ? iota() : (iota() ^ Bit) + kLanes);
        rows[i | Bit] = shuffle(a, b, here ? iota() ^ Bit : iota() + kLanes);
    }
}

INLINE void transpose(Words (&rows)[kLanes]) {
    exchange<1>(rows);
    exchange<2>(rows);
    if constexpr (kLanes > 4) exchange<4>(rows);
    if constexpr (kLanes > 8) exchange<8>(rows);
}

template <class Word>
INLINE void store_columns(Words (&rows)[kLanes], Word* to) {
    transpose(rows);
    UNROLL
    for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * kTileColumns, &rows[i], sizeof rows[i]);
}

// kLanes keys into kLanes columns of a tile.
template <class Word, class Element>
void pack_keys(const Element* head, const int64_t* offsets, int64_t dim, Word* to) {
    constexpr int step = kLanes * kPerWord<Word>;
    int64_t d = 0;
    for (; d + step <= dim; d += step, to += kLanes * kTileColumns) {
        Words rows[kLanes];
        UNROLL
        for (int i = 0; i < kLanes; ++i) rows[i] = load_words<Word>(head + offsets[i] + d);
        store_columns(rows, to);
    }
    if (d == dim) return;
    Words rows[kLanes];
    UNROLL
    for (int i = 0; i < kLanes; ++i) rows[i] = load_words<Word>(head + offsets[i] + d, dim - d);
    store_columns(rows, to);
}

// Words of the values of one position, or of two; zeros behind `dim`, up to a whole vector.
template <class Element>
INLINE void pack_values(const Element* from, const Element*, int64_t dim, float* to) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
    if (d < dim) store(to + d, (Floats)load_words<float>(from + d, dim - d));
}

#if defined(__AVX512BF16__)
INLINE void pack_values(const uint16_t* first, const uint16_t* second, int64_t dim, Pair* to) {
    constexpr int step = 2 * kLanes;
    int64_t d = 0;
    for (; d + step <= dim; d += step) interleave(first + d, second + d, to + d);
    if (d == dim) return;
    uint16_t tails[2][step] = {};
    std::memcpy(tails[0], first + d, (dim - d) * sizeof(uint16_t));
    std::memcpy(tails[1], second + d, (dim - d) * sizeof(uint16_t));
    interleave(tails[0], tails[1], to + d);
}
#endif

// A chunk's memory. Nothing is cleared: what lies at positions that were not packed is anything.
template <class Word>
struct PackedChunk {
    int64_t dim, padded, depth;  // depth: words of a padded key
    Word *keys, *values;

    static size_t words(int64_t dim) { return 2 * kChunk<Word> * pad<Word>(dim) / kPerWord<Word>; }

    PackedChunk(Word* at, int64_t dim)
        : dim(dim),
          padded(pad<Word>(dim)),
          depth(padded / kPerWord<Word>),
          keys(at),
          values(at + kChunk<Word> * depth) {}

    const Word* key_tile(int position) const { return keys + position * depth; }
    const Word* value_row(int word) const { return values + word * padded; }

    // Packs the vectors of positions that `range`, relative to the chunk's start, touches.
    template <class Element>
    void pack(const Element* head, int64_t half, const int64_t* offsets, Range range, Ahead<Element>& ahead) {
        for (int i = range.begin / kLanes * kLanes; i < range.end; i += kLanes) {
            const int column = i % kTileColumns;
            ahead.fetch(kShareOfVector);
            pack_keys(head, offsets + i, dim, keys + (i - column) * depth + column);
            Word* row = values + i / kPerWord<Word> * padded;
            for (int j = i; j < i + kLanes; j += kPerWord<Word>, row += padded) {
                const Element* first = head + half + offsets[j];
                ahead.fetch(kShareOfRow);
                pack_values(first, head + half + offsets[j + kPerWord<Word> - 1], dim, row);
            }
        }
    }
};

}  // namespace crossdock
