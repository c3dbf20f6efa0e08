// Causal attention of a flat batch over the paged cache, grouped heads, optional window.
//
// A row visits the positions it may see in chunks of kChunk, cut at absolute positions, and folds each chunk
// into a running softmax (Milakov & Gimelshein 2018; Dao et al. 2022). Rows of one sequence and the query
// heads of one key head share a chunk's loads as a tile. What a row computes depends on its position alone:
// the score of a key is a sum in one fixed order, the values are added in order of position, and a position
// that the row may not see changes nothing, bit by bit. So one token, a chunk of a prompt and a whole prompt
// agree exactly.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "attention.h"
#include "simd.h"
#include "thread_pool.h"

namespace crossdock {
namespace {

constexpr int kChunk = 64;
constexpr int kTileQueries = 24;  // query rows that share a chunk's keys and values in the first-level cache

// Positions of the next chunk that are asked for with each group of scores: 64 are spread over the 3 x 4
// groups of three query heads. All at once would wait for the memory just as the loads do.
constexpr int kPrefetch = 6;

static_assert(kChunk % kLanes == 0 && kTileQueries % kTileRows == 0, "tiles divide evenly");

struct Range {
    int begin, end;
    bool empty() const { return begin >= end; }
};

Range intersect(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// Consecutive rows of one sequence, for one key head.
struct Tile {
    int64_t sequence, first_row, rows, kv_head;
};

// The tile's memory. Query rows are [rows][group]; vectors of `padded` floats are zero behind `dim`.
struct TileMemory {
    int64_t queries, padded;
    float *q, *acc, *scores, *greatest, *totals, *keys, *values;

    static size_t floats(int64_t queries, int64_t padded) {
        return queries * (2 * padded + kChunk + kLanes + kLanes) + 2 * kChunk * padded;
    }

    TileMemory(float* at, int64_t queries, int64_t padded) : queries(queries), padded(padded) {
        const auto take = [&at](int64_t count) { return (at += count) - count; };
        keys = take(kChunk * padded);
        values = take(kChunk * padded);
        q = take(queries * padded);
        acc = take(queries * padded);
        scores = take(queries * kChunk);
        totals = take(queries * kLanes);
        greatest = take(queries * kLanes);
    }
};

// Bit `Bit` of the lane picks a or b; a lane's neighbour across that bit is added to it.
template <int Bit>
INLINE Floats fold(Floats a, Floats b) {
#if defined(__clang__)
    Floats result;
    for (int i = 0; i < kLanes; ++i) result[i] = (i & Bit) ? b[i] + b[i ^ Bit] : a[i] + a[i ^ Bit];
    return result;
#else
    const Ints from_b = (iota() & Bit) != 0 ? Ints{} + kLanes : Ints{};
    return __builtin_shuffle(a, b, iota() | from_b) + __builtin_shuffle(a, b, (iota() ^ Bit) | from_b);
#endif
}

template <int Bit>
INLINE void fold_all(Floats (&parts)[kLanes]) {
    UNROLL
    for (int i = 0; i < kLanes; i += 2 * Bit) parts[i] = fold<Bit>(parts[i], parts[i + Bit]);
}

// Lane i of the result is the sum over parts[i].
INLINE Floats sums(Floats (&parts)[kLanes]) {
    fold_all<1>(parts);
    fold_all<2>(parts);
    if constexpr (kLanes > 4) fold_all<4>(parts);
    if constexpr (kLanes > 8) fold_all<8>(parts);
    return parts[0];
}

// Scores of kLanes consecutive keys against one query.
INLINE Floats score(const float* q, const float* keys, int64_t padded) {
    Floats parts[kLanes];
    UNROLL
    for (int key = 0; key < kLanes; ++key) parts[key] = Floats{};
    for (int64_t d = 0; d < padded; d += kLanes) {
        const Floats part = load(q + d);
        UNROLL
        for (int key = 0; key < kLanes; ++key)
            parts[key] = fma(part, load(keys + key * padded + d), parts[key]);
    }
    return sums(parts);
}

template <class Element>
void gather_row(const Element* from, int64_t dim, int64_t padded, float* to) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
    if (d == padded) return;
    Element tail[kLanes] = {};
    std::memcpy(tail, from + d, (dim - d) * sizeof(Element));
    store(to + d, load(tail));
}

// Copies keys or values of the positions in `range`, which lies in the chunk that starts at `chunk`.
template <class Element>
void gather(const Cache<Element>& cache, const Element* head, const int32_t* table, int chunk, Range range,
            int64_t padded, float* out) {
    const int64_t token_stride = cache.kv_heads * cache.dim;
    const int block_size = static_cast<int>(cache.block_size);
    for (int position = range.begin; position < range.end;) {
        const int block = position / block_size;
        const int end = std::min((block + 1) * block_size, range.end);
        const Element* from =
            head + table[block] * cache.block_stride + (position - block * block_size) * token_stride;
        for (; position < end; ++position, from += token_stride) {
            gather_row(from, cache.dim, padded, out + (position - chunk) * padded);
        }
    }
}

// Asks for the cache lines of the positions in `range` before they are needed.
template <class Element>
INLINE void prefetch(const Cache<Element>& cache, const Element* head, const int32_t* table, Range range) {
    const int64_t token_stride = cache.kv_heads * cache.dim;
    const int block_size = static_cast<int>(cache.block_size);
    for (int position = range.begin; position < range.end; ++position) {
        const int block = position / block_size;
        const Element* from =
            head + table[block] * cache.block_stride + (position - block * block_size) * token_stride;
        for (int64_t d = 0; d < cache.dim; d += 64 / static_cast<int64_t>(sizeof(Element))) {
            __builtin_prefetch(from + d, 0, 2);
            __builtin_prefetch(from + cache.half + d, 0, 2);
        }
    }
}

// All bits of a lane are set where first + lane lies in the range.
INLINE Ints lanes_in(Range range, int first) {
    const Ints index = iota() + first;
    return (index >= range.begin) & (index < range.end);
}

// Turns a query's scores of a chunk into weights, and moves its running softmax on. `seen` is relative to the
// chunk's start.
void soften(TileMemory& memory, int64_t query, Range groups, Range seen) {
    float* scores = memory.scores + query * kChunk;
    const Floats nothing = splat(-std::numeric_limits<float>::infinity());
    Floats highest = load(memory.greatest + query * kLanes);
    const Floats before = highest;
    for (int j = groups.begin; j < groups.end; j += kLanes) {
        const Floats score = lanes_in(seen, j) ? load(scores + j) : nothing;
        store(scores + j, score);
        highest = score > highest ? score : highest;
    }
    highest = splat(greatest(highest));
    const Floats fade = exp(before - highest);
    Floats total = load(memory.totals + query * kLanes) * fade;
    for (int j = groups.begin; j < groups.end; j += kLanes) {
        const Floats weight = lanes_in(seen, j) ? exp(load(scores + j) - highest) : Floats{};
        store(scores + j, weight);
        total += weight;
    }
    store(memory.greatest + query * kLanes, highest);
    store(memory.totals + query * kLanes, total);
    float* acc = memory.acc + query * memory.padded;
    for (int64_t d = 0; d < memory.padded; d += kLanes) store(acc + d, load(acc + d) * fade);
}

template <int Rows, int Vectors>
void weigh_tile(TileMemory& memory, int64_t query, int64_t d, Range range) {
    float* to = memory.acc + query * memory.padded + d;
    Floats acc[Rows][Vectors];
    UNROLL
    for (int r = 0; r < Rows; ++r) {
        UNROLL
        for (int v = 0; v < Vectors; ++v) acc[r][v] = load(to + r * memory.padded + v * kLanes);
    }
    accumulate(acc, memory.scores + query * kChunk + range.begin, kChunk,
               memory.values + range.begin * memory.padded + d, memory.padded, range.end - range.begin);
    UNROLL
    for (int r = 0; r < Rows; ++r) {
        UNROLL
        for (int v = 0; v < Vectors; ++v) store(to + r * memory.padded + v * kLanes, acc[r][v]);
    }
}

// Adds the weighted values in `range`, relative to the chunk, to Rows queries.
template <int Rows>
void weigh(TileMemory& memory, int64_t query, Range range) {
    if (range.empty()) return;
    int64_t d = 0;
    for (; d + kTileColumns <= memory.padded; d += kTileColumns) {
        weigh_tile<Rows, kTileVectors>(memory, query, d, range);
    }
    for (; d < memory.padded; d += kLanes) weigh_tile<Rows, 1>(memory, query, d, range);
}

void weigh_all(TileMemory& memory, Range range) {
    static constexpr void (*kernels[kTileRows])(TileMemory&, int64_t, Range) = {weigh<1>, weigh<2>, weigh<3>,
                                                                                weigh<4>, weigh<5>, weigh<6>};
    for (int64_t query = 0; query < memory.queries; query += kTileRows) {
        kernels[std::min<int64_t>(kTileRows, memory.queries - query) - 1](memory, query, range);
    }
}

template <class Element>
class Attention {
  public:
    Attention(const Cache<Element>& cache, const Queries& queries)
        : cache_(cache),
          queries_(queries),
          group_(queries.heads / cache.kv_heads),
          padded_((cache.dim + kLanes - 1) / kLanes * kLanes) {}

    void run(ThreadPool& pool) {
        const std::vector<Tile> tiles = cut();
        std::atomic<size_t> next{0};
        const auto take_tiles = [&](int thread) {
            for (size_t i; (i = next++) < tiles.size();) compute(tiles[i], pool, thread);
        };
        if (tiles.size() == 1) {
            take_tiles(0);
        } else {
            pool.run(take_tiles);
        }
    }

  private:
    std::vector<Tile> cut() const {
        const int64_t rows_per_tile = std::max<int64_t>(1, kTileQueries / group_);
        std::vector<Tile> tiles;
        for (int64_t sequence = 0; sequence < queries_.sequences; ++sequence) {
            const int64_t end = queries_.query_starts[sequence + 1];
            for (int64_t row = queries_.query_starts[sequence]; row < end; row += rows_per_tile) {
                for (int64_t head = 0; head < cache_.kv_heads; ++head) {
                    tiles.push_back({sequence, row, std::min(rows_per_tile, end - row), head});
                }
            }
        }
        return tiles;
    }

    // Positions that the row may see.
    Range seen(int64_t row) const {
        const int position = queries_.positions[row];
        return {queries_.window > 0 ? std::max(0, position - queries_.window + 1) : 0, position + 1};
    }

    void compute(const Tile& tile, ThreadPool& pool, int thread) const {
        const int64_t queries = tile.rows * group_;
        const size_t bytes = TileMemory::floats(queries, padded_) * sizeof(float);
        TileMemory memory(static_cast<float*>(pool.scratch(thread, bytes)), queries, padded_);
        begin(tile, memory);
        const Range first = seen(tile.first_row);
        const Range last = seen(tile.first_row + tile.rows - 1);
        for (int chunk = first.begin / kChunk * kChunk; chunk < last.end; chunk += kChunk) {
            fold_chunk(tile, memory, chunk,
                       {std::max(chunk, first.begin), std::min(chunk + kChunk, last.end)},
                       {chunk + kChunk, std::min(chunk + 2 * kChunk, last.end)});
        }
        finish(tile, memory);
    }

    void begin(const Tile& tile, TileMemory& memory) const {
        std::fill_n(memory.q, memory.queries * padded_, 0.0f);
        std::fill_n(memory.acc, memory.queries * padded_, 0.0f);
        std::fill_n(memory.totals, memory.queries * kLanes, 0.0f);
        std::fill_n(memory.greatest, memory.queries * kLanes, -std::numeric_limits<float>::infinity());
        for (int64_t query = 0; query < memory.queries; ++query) {
            const int64_t row = tile.first_row + query / group_;
            const int64_t head = tile.kv_head * group_ + query % group_;
            const float* from = queries_.q + row * queries_.q_stride + head * cache_.dim;
            for (int64_t d = 0; d < cache_.dim; ++d) memory.q[query * padded_ + d] = from[d] * queries_.scale;
        }
    }

    // `range`: the chunk's positions that some row of the tile sees; `next`: those of the chunk behind it.
    void fold_chunk(const Tile& tile, TileMemory& memory, int chunk, Range range, Range next) const {
        const int32_t* table = queries_.block_tables + tile.sequence * queries_.table_stride;
        const Element* keys = cache_.keys + tile.kv_head * cache_.dim;
        gather(cache_, keys, table, chunk, range, padded_, memory.keys);
        gather(cache_, keys + cache_.half, table, chunk, range, padded_, memory.values);
        const Range groups{(range.begin - chunk) / kLanes * kLanes,
                           (range.end - chunk + kLanes - 1) / kLanes * kLanes};
        Range common{0, kChunk};
        for (int64_t query = 0; query < memory.queries; ++query) {
            const Range mine = in_chunk(tile, query, chunk);
            common = intersect(common, mine);
            if (mine.empty()) continue;
            const float* q = memory.q + query * padded_;
            for (int j = groups.begin; j < groups.end; j += kLanes) {
                const int end = std::min(next.end, next.begin + kPrefetch);
                prefetch(cache_, keys, table, {next.begin, end});
                next.begin = end;
                store(memory.scores + query * kChunk + j, score(q, memory.keys + j * padded_, padded_));
            }
            soften(memory, query, groups, mine);
        }
        weigh_ragged(tile, memory, chunk, common);
    }

    // Positions that all rows see are added together; the few before and behind them row by row, in order.
    void weigh_ragged(const Tile& tile, TileMemory& memory, int chunk, Range common) const {
        if (common.empty()) common = {kChunk, kChunk};
        for (int64_t query = 0; query < memory.queries; ++query) {
            weigh<1>(memory, query, intersect(in_chunk(tile, query, chunk), {0, common.begin}));
        }
        if (common.empty()) return;
        weigh_all(memory, common);
        for (int64_t query = 0; query < memory.queries; ++query) {
            weigh<1>(memory, query, intersect(in_chunk(tile, query, chunk), {common.end, kChunk}));
        }
    }

    // What a query sees of the chunk, relative to its start.
    Range in_chunk(const Tile& tile, int64_t query, int chunk) const {
        const Range all = seen(tile.first_row + query / group_);
        return intersect({all.begin - chunk, all.end - chunk}, {0, kChunk});
    }

    void finish(const Tile& tile, const TileMemory& memory) const {
        for (int64_t query = 0; query < memory.queries; ++query) {
            const int64_t row = tile.first_row + query / group_;
            const int64_t head = tile.kv_head * group_ + query % group_;
            float* to = queries_.out + (row * queries_.heads + head) * cache_.dim;
            const float total = sum(load(memory.totals + query * kLanes));
            for (int64_t d = 0; d < cache_.dim; ++d) to[d] = memory.acc[query * padded_ + d] / total;
        }
    }

    const Cache<Element> cache_;
    const Queries queries_;
    const int64_t group_, padded_;
};

}  // namespace
}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

void crossdock_attention_f32(void* pool, const crossdock::Cache<float>* cache,
                             const crossdock::Queries* queries) {
    crossdock::Attention<float>(*cache, *queries).run(*static_cast<crossdock::ThreadPool*>(pool));
}

void crossdock_attention_bf16(void* pool, const crossdock::Cache<uint16_t>* cache,
                              const crossdock::Queries* queries) {
    crossdock::Attention<uint16_t>(*cache, *queries).run(*static_cast<crossdock::ThreadPool*>(pool));
}
}
#pragma GCC visibility pop
