// Causal attention of a flat batch over the paged cache, grouped heads, optional window.
//
// A row visits the positions it may see in chunks, cut at absolute positions, and folds each chunk into a
// running softmax. Rows of one sequence and the query heads of one key head share a packed chunk as a tile.
// What a row computes depends on its position alone: the score of a key is a sum in one fixed order, the
// values are added in order of position, and a position that the row may not see changes nothing, bit by bit.
// So one token, a chunk of a prompt and a whole prompt agree exactly.
//
// A cache in bfloat16 is multiplied by the processor's own instruction where there is one: queries and weights
// are rounded to bfloat16, sums and the softmax are float32. Otherwise all arithmetic is float32.
#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "paged_cache.h"
#include "running_softmax.h"
#include "simd.h"
#include "thread_pool.h"

namespace crossdock {
namespace {

constexpr int64_t kTileQueries = 96;  // that share a chunk: enough to pay for packing it
constexpr int64_t kTilesPerThread = 4;  // enough for even shares
constexpr int64_t kStopBytes = 1 << 17;  // of keys and values: two chunks at a time in the second-level cache
constexpr int64_t kGrainScores = 1 << 13;  // of work that is worth waking a thread for

// Consecutive rows of one sequence and consecutive key heads.
struct Tile {
    int64_t sequence, first_row, rows, first_head, heads;
    Range seen;  // positions that some row sees
    int64_t scores() const { return rows * heads * (seen.end - seen.begin); }
};

#if defined(__AVX512BF16__)
template <class Element>
using WordOf = std::conditional_t<std::is_same_v<Element, uint16_t>, Pair, float>;
#else
template <class Element>
using WordOf = float;
#endif

// One thread's memory: a packed chunk, and the queries of a tile as [head][row][group].
template <class Word>
struct TileMemory {
    PackedChunk<Word> chunk;
    Weights<Word>* weights;
    Word* q;
    float *sums, *totals, *greatest;

    static size_t bytes(int64_t queries, int64_t dim) {
        const int64_t per_query = pad<Word>(dim) / kPerWord<Word> + pad<Word>(dim) + kLanes + 1;
        return sizeof(Weights<Word>) + (PackedChunk<Word>::words(dim) + queries * per_query) * sizeof(Word);
    }

    TileMemory(void* at, int64_t queries, int64_t dim)
        : chunk(reinterpret_cast<Word*>(static_cast<Weights<Word>*>(at) + 1), dim),
          weights(static_cast<Weights<Word>*>(at)) {
        q = chunk.keys + PackedChunk<Word>::words(dim);
        sums = reinterpret_cast<float*>(q + queries * chunk.depth);
        totals = sums + queries * chunk.padded;
        greatest = totals + queries * kLanes;
        std::fill(sums, greatest, 0.0f);
        std::fill_n(greatest, queries, -std::numeric_limits<float>::infinity());
    }
};

// One or two vectors of elements, scaled.
INLINE void put_scaled(const float* from, float scale, float* to) { store(to, load(from) * scale); }

#if defined(__AVX512BF16__)
INLINE void put_scaled(const float* from, float scale, Pair* to) {
    store(to, round_pairs(load(from) * scale, load(from + kLanes) * scale));
}
#endif

template <class Word>
void put_query(const float* from, int64_t dim, float scale, Word* to) {
    constexpr int step = kLanes * kPerWord<Word>;
    for (; dim >= step; dim -= step, from += step, to += kLanes) put_scaled(from, scale, to);
    float tail[step] = {};
    std::memcpy(tail, from, dim * sizeof(float));
    if (dim > 0) put_scaled(tail, scale, to);
}

template <class Element>
class Attention {
  public:
    using Word = WordOf<Element>;

    Attention(const Cache<Element>& cache, const Queries& queries)
        : cache_(cache), queries_(queries), group_(queries.heads / cache.kv_heads) {}

    void run(ThreadPool& pool) {
        cut(pool.threads());
        std::atomic<size_t> next{0};
        const auto work = [&](int thread) { compute_tiles(next, pool, thread); };
        int64_t scores = 0;
        for (const Tile& tile : tiles_) scores += tile.scores() * group_;
        if (tiles_.size() == 1 || scores < kGrainScores) {
            work(0);
        } else {
            pool.run(work);
        }
    }

  private:
    // A chunk of a tile, and where its positions are in the cache.
    struct Stop {
        const Tile* tile;
        int chunk;
        Range range;  // that the tile sees, relative to the chunk
        int64_t offsets[kChunk<Word>];
    };

    // Longest first, so that the last ones to be taken are short.
    void cut(int64_t threads) {
        const int64_t rows_max = std::max<int64_t>(1, kTileQueries / group_);
        for (int64_t sequence = 0; sequence < queries_.sequences; ++sequence) {
            const int64_t end = queries_.query_starts[sequence + 1];
            for (int64_t row = queries_.query_starts[sequence]; row < end; row += rows_max) {
                const int64_t rows = std::min(rows_max, end - row);
                const Range seen{seen_by(row).begin, seen_by(row + rows - 1).end};
                const int64_t heads_max = heads_per_tile(rows, threads);
                for (int64_t head = 0; head < cache_.kv_heads; head += heads_max) {
                    const int64_t heads = std::min(heads_max, cache_.kv_heads - head);
                    tiles_.push_back({sequence, row, rows, head, heads, seen});
                }
            }
        }
        std::stable_sort(tiles_.begin(), tiles_.end(),
                         [](const Tile& a, const Tile& b) { return a.scores() > b.scores(); });
    }

    // Key heads that lie side by side are best read together, unless that leaves threads without a share.
    int64_t heads_per_tile(int64_t rows, int64_t threads) const {
        const int64_t head_bytes = 2 * kChunk<Word> * cache_.dim * sizeof(Element);
        int64_t heads = std::min({cache_.kv_heads, kTileQueries / (rows * group_), kStopBytes / head_bytes});
        if (threads > 1) {
            heads = std::min(heads, queries_.sequences * cache_.kv_heads / (threads * kTilesPerThread));
        }
        return std::max<int64_t>(1, heads);
    }

    // Positions that the row may see.
    Range seen_by(int64_t row) const {
        const int position = queries_.positions[row];
        return {queries_.window > 0 ? std::max(0, position - queries_.window + 1) : 0, position + 1};
    }

    // Takes tiles until there are none. What follows is known ahead, so that it can be on its way from memory.
    void compute_tiles(std::atomic<size_t>& next, ThreadPool& pool, int thread) const {
        Stop stops[2];
        Stop *here = &stops[0], *behind = &stops[1];
        for (go_to(take(next), 0, *here); here->tile;) {
            const Tile& tile = *here->tile;
            const int64_t queries = tile.heads * tile.rows * group_;
            const size_t bytes = TileMemory<Word>::bytes(queries, cache_.dim);
            TileMemory<Word> memory(pool.scratch(thread, bytes), queries, cache_.dim);
            put_queries(tile, memory);
            while (here->tile == &tile) {
                const int chunk = here->chunk + kChunk<Word>;
                const bool more = chunk < tile.seen.end;
                go_to(more ? &tile : take(next), more ? chunk : 0, *behind);
                fold_stop(*here, *behind, memory);
                std::swap(here, behind);
            }
            finish(tile, memory);
        }
    }

    const Tile* take(std::atomic<size_t>& next) const {
        const size_t i = next++;
        return i < tiles_.size() ? &tiles_[i] : nullptr;
    }

    // To the tile's first chunk that is not before `position`; without a tile there are no places.
    void go_to(const Tile* tile, int position, Stop& stop) const {
        stop.tile = tile;
        if (!tile) {
            stop.range = {0, 0};
            return;
        }
        stop.chunk = std::max(position, tile->seen.begin) / kChunk<Word> * kChunk<Word>;
        const Range range = intersect(tile->seen, {stop.chunk, stop.chunk + kChunk<Word>});
        const int32_t* table = queries_.block_tables + tile->sequence * queries_.table_stride;
        locate(cache_, table, stop.chunk, kChunk<Word>, range, stop.offsets);
        stop.range = {range.begin - stop.chunk, range.end - stop.chunk};
    }

    // That are asked for while a chunk of one key head is computed.
    static int64_t shares_per_head(int64_t queries) {
        constexpr int count = kChunk<Word>;
        constexpr int packing = count / kPerWord<Word> * kShareOfRow + count / kLanes * kShareOfVector;
        constexpr int folding = (count / kTileColumns + 1) * kShareOfTile;
        return packing + (queries + kTileRows - 1) / kTileRows * folding + queries * kShareOfVector;
    }

    void fold_stop(const Stop& here, const Stop& behind, TileMemory<Word>& memory) const {
        const Tile& tile = *here.tile;
        Ahead<Element> ahead{};
        if (behind.tile) {
            constexpr int64_t bytes = sizeof(Element);
            ahead = {reinterpret_cast<const char*>(cache_.keys + behind.tile->first_head * cache_.dim),
                     cache_.half * bytes,
                     behind.tile->heads * cache_.dim * bytes,
                     behind.offsets + behind.range.begin,
                     behind.offsets + behind.range.end,
                     0,
                     0};
            ahead.spread(tile.heads * shares_per_head(tile.rows * group_));
        }
        for (int64_t head = 0; head < tile.heads; ++head) {
            const Element* keys = cache_.keys + (tile.first_head + head) * cache_.dim;
            memory.chunk.pack(keys, cache_.half, here.offsets, here.range, ahead);
            fold_head(tile, memory, here.chunk, head, ahead);
        }
        ahead.fetch_rest();
    }

    // The tile's queries one after the other: f(index, row, head).
    template <class Body>
    void each_query(const Tile& tile, const Body& body) const {
        int64_t query = 0;
        for (int64_t head = tile.first_head; head < tile.first_head + tile.heads; ++head) {
            for (int64_t row = tile.first_row; row < tile.first_row + tile.rows; ++row) {
                for (int64_t i = 0; i < group_; ++i) body(query++, row, head * group_ + i);
            }
        }
    }

    void put_queries(const Tile& tile, TileMemory<Word>& memory) const {
        each_query(tile, [&](int64_t query, int64_t row, int64_t head) {
            const float* from = queries_.q + row * queries_.q_stride + head * cache_.dim;
            put_query(from, cache_.dim, queries_.scale, memory.q + query * memory.chunk.depth);
        });
    }

    void fold_head(const Tile& tile, TileMemory<Word>& memory, int chunk, int64_t head, Ahead<Element>& ahead) const {
        const int64_t queries = tile.rows * group_;
        for (int64_t first = 0; first < queries; first += kTileRows) {
            const int64_t at = head * queries + first;
            Rows<Word> rows{memory.q + at * memory.chunk.depth, memory.sums + at * memory.chunk.padded,
                            memory.totals + at * kLanes, memory.greatest + at};
            for (int64_t i = first; i < std::min<int64_t>(first + kTileRows, queries); ++i) {
                const Range seen = seen_by(tile.first_row + i / group_);
                rows.add(intersect({seen.begin - chunk, seen.end - chunk}, {0, kChunk<Word>}));
            }
            fold_rows(memory.chunk, rows, *memory.weights, ahead);
        }
    }

    void finish(const Tile& tile, const TileMemory<Word>& memory) const {
        each_query(tile, [&](int64_t query, int64_t row, int64_t head) {
            const float total = sum(load(memory.totals + query * kLanes));
            const float* sums = memory.sums + query * memory.chunk.padded;
            float* to = queries_.out + (row * queries_.heads + head) * cache_.dim;
            for (int64_t d = 0; d < cache_.dim; ++d) to[d] = sums[d] / total;
        });
    }

    const Cache<Element> cache_;
    const Queries queries_;
    const int64_t group_;
    std::vector<Tile> tiles_;
};

}  // namespace
}  // namespace crossdock

#pragma GCC visibility push(default)
extern "C" {

// Whether attention over a cache in bfloat16 rounds queries and weights to bfloat16.
int crossdock_rounds_attention() { return std::is_same_v<crossdock::WordOf<uint16_t>, crossdock::Pair>; }

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
