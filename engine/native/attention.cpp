// Attention over paged keys and values, read where they lie.
//
// A chunk of work is one KV head of some new tokens of one request. All its queries, those tokens times the query heads
// that share the KV head, see each tile of keys and values while it is in a core's nearest cache: widened to float32
// and turned once, so that several queries are multiplied with several keys in registers, or where they lie if the
// queries are few. The softmax is computed as its keys come along: a running
// maximum, and a sum and an output relative to it, that are scaled down when the maximum grows (Milakov and Gimelshein,
// arXiv 1805.02867).
//
// Tiles begin at multiples of TILE positions, and a query's sums run over its keys in ascending order, so that what
// comes out depends neither on the requests beside it nor on how many of its tokens are computed at once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "parts.h"
#include "threads.h"
#include "vectors.h"

constexpr int64_t TILE = 32;       // keys that are seen at once
constexpr int PARTS = TILE / WIDTH;  // vectors of scores of a tile
constexpr int TOGETHER = PARTS < 12 ? 12 / PARTS : 1;  // queries that see a turned tile at once, their scores in registers
constexpr int64_t PAIR = 2 * WIDTH;
constexpr int64_t FEW = 12;          // queries up to which preparing keys beforehand takes more than it saves
constexpr float NEVER = -std::numeric_limits<float>::infinity();
static_assert(TILE % WIDTH == 0, "scores of a tile are whole vectors");

namespace {

struct Scratch {
    std::vector<Floats> queries, outputs, sums, keys, values, turned;  // vectors, so that none lies across two lines
    std::vector<float> maxima;
    int64_t places[TILE];
    float weights[TOGETHER][TILE];
};

// One for each thread. Not inlined, or the compiler looks it up again and again where its address is needed.
__attribute__((noinline)) Scratch& own_scratch() {
    static thread_local Scratch own;
    return own;
}

struct Range {
    int64_t first, last;
};

// How keys and values are read: where they lie in the pool, which needs PAIRED, or widened to float32 beforehand, keys
// turned for many queries.
enum Reading { IN_PLACE, WIDENED, TURNED };

// PAIRED: a head is whole pairs of vectors, and its numbers are in the order of `Stored::first` and `second` while they
// are computed with. Neither this nor the reading makes a difference to what comes out.
template <typename Query, typename Stored, bool PAIRED, Reading READING>
class Chunk {
    static_assert(PAIRED || READING != IN_PLACE);
    using Number = typename Stored::Stored;
    using Wide = std::conditional_t<READING == IN_PLACE, Stored, Float32>;  // what is multiplied with
    using WideNumber = typename Wide::Stored;

  public:
    Chunk(const AttentionItems& items, const AttentionLayer& layer, int64_t chunk)
        : scratch(own_scratch()),
          layer(layer),
          item(chunk / layer.kv_heads),
          kv_head(chunk % layer.kv_heads),
          group(layer.heads / layer.kv_heads),
          count(items.counts[item]),
          first(items.firsts[item]),
          position(items.positions[item]),
          table(items.tables + items.rows[item] * items.table_width),
          block_size(items.block_size),
          padded((layer.head_dim + PAIR - 1) / PAIR * PAIR) {}

    void compute() {
        const int64_t end = position + count, oldest = seen(0).first;
        fetch({oldest, std::min(oldest / TILE * TILE + TILE, end)});
        take_queries();
        for (int64_t at = oldest / TILE * TILE; at < end; at += TILE) {
            const Range tile{std::max(at, oldest), std::min(at + TILE, end)};
            fetch({at + TILE, std::min(at + 2 * TILE, end)});
            take_keys(at, tile);
            for (int64_t query = 0; query < count * group;) query += add_tile(query, at, tile);
        }
        give_outputs();
    }

  private:
    // Positions that a new token of the chunk sees.
    Range seen(int64_t token) const {
        const int64_t last = position + token + 1;
        return {layer.window ? std::max<int64_t>(0, last - layer.window) : 0, last};
    }

    // Those of a tile that begins at `at` that a query sees, as distances from `at`; none if the first is the last.
    Range seen_of_tile(int64_t query, int64_t at, Range tile) const {
        const Range keys = seen(query / group);
        const int64_t begin = std::max(keys.first, tile.first);
        return {begin - at, std::max(begin, std::min(keys.last, tile.last)) - at};
    }

    void take_queries() {
        const float scale = layer.scale * (layer.k_scales ? layer.k_scales[kv_head] : 1.0f);
        const size_t size = count * group * padded / WIDTH;
        scratch.queries.assign(size, Floats{});
        scratch.outputs.assign(size, Floats{});
        scratch.maxima.assign(count * group, NEVER);
        scratch.sums.assign(count * group, Floats{});
        const auto* q = static_cast<const typename Query::Stored*>(layer.q);
        for (int64_t token = 0; token < count; token++)
            for (int64_t head = 0; head < group; head++) {
                const auto* from = q + (first + token) * layer.q_row + (kv_head * group + head) * layer.head_dim;
                float* to = query_of(token * group + head);
                if constexpr (PAIRED) {
                    for (int64_t d = 0; d < padded; d += PAIR) {
                        store(to + d, Query::first(from + d) * scale);
                        store(to + d + WIDTH, Query::second(from + d) * scale);
                    }
                } else {
                    widen_row<Query>(from, to, layer.head_dim);
                    for (int64_t i = 0; i < layer.head_dim; i++) to[i] *= scale;
                }
            }
    }

    // Calls each(position, where its key or value begins in the pool).
    template <typename Each>
    void each_place(Range positions, const Each& each) const {
        for (int64_t i = positions.first; i < positions.last;) {
            const int64_t block = i / block_size, end = std::min(positions.last, (block + 1) * block_size);
            int64_t slot = table[block] * block_size + i - block * block_size;
            for (; i < end; i++, slot++) each(i, (slot * layer.kv_heads + kv_head) * layer.head_dim);
        }
    }

    // Ask for keys and values before they are needed. They lie too far apart for a core to foresee it.
    void fetch(Range positions) const {
        constexpr int64_t LINE = 64 / sizeof(Number);
        const auto *k = static_cast<const Number*>(layer.k), *v = static_cast<const Number*>(layer.v);
        each_place(positions, [&](int64_t, int64_t at) {
            for (int64_t i = 0; i < layer.head_dim; i += LINE) {
                __builtin_prefetch(k + at + i);
                __builtin_prefetch(v + at + i);
            }
        });
    }

    // Where the keys and values at the positions of `tile` are, each by its distance from `at`. Those that are not in
    // the tile stand in for each other: what comes of them is not used.
    void take_keys(int64_t at, Range tile) {
        int64_t* places = scratch.places;
        if constexpr (READING == IN_PLACE) {
            keys = static_cast<const WideNumber*>(layer.k);
            values = static_cast<const WideNumber*>(layer.v);
            each_place(tile, [&](int64_t i, int64_t place) { places[i - at] = place; });
            std::fill(places, places + (tile.first - at), places[tile.first - at]);
            std::fill(places + (tile.last - at), places + TILE, places[tile.first - at]);
        } else {
            for (int64_t i = 0; i < TILE; i++) places[i] = i * padded;
            keys = widen(layer.k, scratch.keys, at, tile);
            values = widen(layer.v, scratch.values, at, tile);
            if constexpr (READING == TURNED) turn_keys();
        }
    }

    const float* widen(const void* pool, std::vector<Floats>& held, int64_t at, Range tile) const {
        held.resize(TILE * padded / WIDTH);
        float* to = reinterpret_cast<float*>(held.data());
        const auto* stored = static_cast<const Number*>(pool);
        each_place(tile, [&](int64_t i, int64_t place) {
            const Number* from = stored + place;
            float* row = to + (i - at) * padded;
            if constexpr (PAIRED) {
                for (int64_t d = 0; d < padded; d += PAIR) {
                    store(row + d, Stored::first(from + d));
                    store(row + d + WIDTH, Stored::second(from + d));
                }
            } else {
                widen_row<Stored>(from, row, layer.head_dim);
                std::fill(row + layer.head_dim, row + padded, 0.0f);
            }
        });
        return to;
    }

    // From [TILE, padded] to [padded, TILE].
    void turn_keys() const {
        scratch.turned.resize(TILE * padded / WIDTH);
        float* to = turned();
        for (int64_t key = 0; key < TILE; key += WIDTH)
            for (int64_t d = 0; d < padded; d += WIDTH) {
                Floats square[WIDTH];
                for (int i = 0; i < WIDTH; i++) square[i] = load(keys + (key + i) * padded + d);
                transpose(square);
                for (int i = 0; i < WIDTH; i++) store(to + (d + i) * TILE + key, square[i]);
            }
    }

    // A query, or several that see the same of it, see a tile that begins at `at`. Returns how many.
    int64_t add_tile(int64_t query, int64_t at, Range tile) {
        const Range here = seen_of_tile(query, at, tile);
        int64_t same = 1;
        if constexpr (READING == TURNED)
            for (; same < TOGETHER && query + same < count * group; same++) {
                const Range other = seen_of_tile(query + same, at, tile);
                if (other.first != here.first || other.last != here.last) break;
            }
        if (here.first < here.last) {
            if constexpr (READING == TURNED) add_turned<TOGETHER>(query, same, here);
            else add_keys(query, here);
        }
        return same;
    }

    // A query sees keys of the tile.
    void add_keys(int64_t query, Range here) {
        const int begin = int(here.first) / WIDTH, end = int(here.last - 1) / WIDTH + 1;
        Floats scores[PARTS];
        for (int p = begin; p < end; p++) {
            scores[p] = score(query, p);
            if (p * WIDTH < here.first || (p + 1) * WIDTH > here.last) scores[p] = hide(scores[p], p * WIDTH, here);
        }
        const float kept = weigh(query, scores, begin, end, scratch.weights[0]);
        add_values<1, 4>(query, 0, &kept, here);
    }

    // `queries` from `query` on, at most M, see keys of the turned tile.
    template <int M>
    void add_turned(int64_t query, int64_t queries, Range here) {
        if constexpr (M > 1) {
            if (queries < M) return add_turned<M - 1>(query, queries, here);
        }
        Floats scores[M][PARTS];
        float kept[M];
        add_up<M, 1>(query, 0, scores);
        for (int m = 0; m < M; m++) {
            if (here.first > 0 || here.last < TILE)
                for (int p = 0; p < PARTS; p++) scores[m][p] = hide(scores[m][p], p * WIDTH, here);
            kept[m] = weigh(query + m, scores[m], 0, PARTS, scratch.weights[m]);
        }
        add_values<M, M == 1 ? 4 : M <= 3 ? 2 : 1>(query, 0, kept, here);
    }

    // The scores that M queries from `query` on have of the turned tile, in the order in which `score` adds up: what is
    // a lane there, every WIDTH-th product, is a sum of its own here.
    template <int M, int STEP>
    void add_up(int64_t query, int lane, Floats (&sums)[M][PARTS]) const {
        if constexpr (STEP == WIDTH) {
            const float *q = query_of(query), *key = turned();
            Floats own[M][PARTS] = {};
            for (int64_t d = lane; d < padded; d += WIDTH) {
                Floats number[M];
                for (int m = 0; m < M; m++) number[m] = splat(q[m * padded + d]);
                for (int p = 0; p < PARTS; p++) {
                    Floats of_keys = load(key + d * TILE + p * WIDTH);
                    hold(of_keys);
                    for (int m = 0; m < M; m++) own[m][p] += number[m] * of_keys;
                }
            }
            std::memcpy(sums, own, sizeof own);
        } else {
            Floats others[M][PARTS];
            add_up<M, 2 * STEP>(query, lane, sums);
            add_up<M, 2 * STEP>(query, lane + STEP, others);
            for (int m = 0; m < M; m++)
                for (int p = 0; p < PARTS; p++) sums[m][p] += others[m][p];
        }
    }

    // From a query's scores of parts [begin, end) of a tile to the weights of its values. Returns what the sum and the
    // output of before are to be multiplied by.
    float weigh(int64_t query, const Floats* scores, int begin, int end, float* to) {
        Floats highest = splat(NEVER);
        for (int p = begin; p < end; p++) highest = scores[p] > highest ? scores[p] : highest;
        const float before = scratch.maxima[query];
        const Floats known = splat(before), found = lane_max(highest), now = found > known ? found : known;
        Floats total = {};
        for (int p = begin; p < end; p++) {
            const Floats weights = exponential(scores[p] - now);
            store(to + p * WIDTH, weights);
            total += weights;
        }
        const float kept = before == now[0] ? 1.0f : exponential(known - now)[0];
        scratch.maxima[query] = now[0];
        scratch.sums[query] = scratch.sums[query] * kept + total;
        return kept;
    }

    float* turned() const { return reinterpret_cast<float*>(scratch.turned.data()); }
    float* query_of(int64_t query) const { return reinterpret_cast<float*>(scratch.queries.data()) + query * padded; }
    float* output_of(int64_t query) const { return reinterpret_cast<float*>(scratch.outputs.data()) + query * padded; }

    // A query's scores of the keys in one part of a tile.
    Floats score(int64_t query, int part) const {
        const float* q = query_of(query);
        const int64_t* places = scratch.places + part * WIDTH;
        Floats even[WIDTH / 2] = {}, odd[WIDTH / 2] = {};
        for (int64_t d = 0; d < padded; d += PAIR) {
            const Floats first = load(q + d), second = load(q + d + WIDTH);
            for (int j = 0; j < WIDTH / 2; j++) {
                const WideNumber *a = keys + places[2 * j] + d, *b = keys + places[2 * j + 1] + d;
                even[j] += first * Wide::first(a);
                odd[j] += first * Wide::first(b);
                even[j] += second * Wide::second(a);
                odd[j] += second * Wide::second(b);
            }
        }
        return lane_sums(lane_pairs(even), lane_pairs(odd));
    }

    // Lanes that are not `here` of scores from the tile's key `first` on: their weight will be 0.
    static Floats hide(Floats scores, int first, Range here) {
        Ints at;
        for (int i = 0; i < WIDTH; i++) at[i] = i;
        return (at >= int32_t(here.first) - first) & (at < int32_t(here.last) - first) ? scores : splat(NEVER);
    }

    // Add the values of a tile's keys, by their weights, to what M queries from `query` on have of those before.
    template <int M, int PAIRS>
    void add_values(int64_t query, int64_t from, const float* kept, Range here) const {
        const int64_t* places = scratch.places;
        for (; from + PAIRS * PAIR <= padded; from += PAIRS * PAIR) {
            Floats sums[M][2 * PAIRS];
            for (int m = 0; m < M; m++)
                for (int v = 0; v < 2 * PAIRS; v++)
                    sums[m][v] = load(output_of(query + m) + from + v * WIDTH) * kept[m];
            for (int64_t i = here.first; i < here.last; i++) {
                const WideNumber* value = values + places[i] + from;
                Floats weight[M];
                for (int m = 0; m < M; m++) weight[m] = splat(scratch.weights[m][i]);
                for (int p = 0; p < PAIRS; p++) {  // one vector after the other: more have no room in registers
                    Floats first = Wide::first(value + p * PAIR);
                    hold(first);
                    for (int m = 0; m < M; m++) sums[m][2 * p] += weight[m] * first;
                    Floats second = Wide::second(value + p * PAIR);
                    hold(second);
                    for (int m = 0; m < M; m++) sums[m][2 * p + 1] += weight[m] * second;
                }
            }
            for (int m = 0; m < M; m++)
                for (int v = 0; v < 2 * PAIRS; v++) store(output_of(query + m) + from + v * WIDTH, sums[m][v]);
        }
        if constexpr (PAIRS > 1) add_values<M, PAIRS / 2>(query, from, kept, here);
    }

    void give_outputs() const {
        const float scale = layer.v_scales ? layer.v_scales[kv_head] : 1.0f;
        auto* out = static_cast<typename Query::Stored*>(layer.out);
        for (int64_t query = 0; query < count * group; query++) {
            const float* from = output_of(query);
            const float factor = scale / lane_sum(scratch.sums[query]);
            const int64_t token = first + query / group, head = kv_head * group + query % group;
            auto* to = out + (token * layer.heads + head) * layer.head_dim;
            if constexpr (PAIRED) {
                for (int64_t d = 0; d < padded; d += PAIR)
                    Query::join(load(from + d) * factor, load(from + d + WIDTH) * factor, to + d);
            } else {
                for (int64_t i = 0; i < layer.head_dim; i++) to[i] = Query::narrow(from[i] * factor);
            }
        }
    }

    Scratch& scratch;
    const AttentionLayer& layer;
    const int64_t item, kv_head, group, count, first, position;
    const int64_t* table;
    const int64_t block_size, padded;
    const WideNumber *keys = nullptr, *values = nullptr;
};

template <typename Query, typename Stored>
void attention(const AttentionItems& items, const AttentionLayer& layer, int num_threads) {
    share(items.num_items * layer.kv_heads, num_threads, [&](int64_t chunk) {
        const bool few = items.counts[chunk / layer.kv_heads] * (layer.heads / layer.kv_heads) <= FEW;
        if constexpr (std::is_same_v<Query, Stored>) {
            if (layer.head_dim % PAIR == 0) {
                if (few) return Chunk<Query, Stored, true, IN_PLACE>(items, layer, chunk).compute();
                return Chunk<Query, Stored, true, TURNED>(items, layer, chunk).compute();
            }
        }
        if (few) return Chunk<Query, Stored, false, WIDENED>(items, layer, chunk).compute();
        Chunk<Query, Stored, false, TURNED>(items, layer, chunk).compute();
    });
}

}  // namespace

extern "C" {

#define ATTENTION(NAME, QUERY, STORED)                                                                   \
    void attention_##NAME(const AttentionItems* items, const AttentionLayer* layer, int num_threads) { \
        attention<QUERY, STORED>(*items, *layer, num_threads);                                           \
    }

ATTENTION(fp32_fp32, Float32, Float32)
ATTENTION(fp32_int8, Float32, Int8)
ATTENTION(fp32_e4m3, Float32, E4M3)
ATTENTION(bf16_bf16, BFloat16, BFloat16)
ATTENTION(bf16_int8, BFloat16, Int8)
ATTENTION(bf16_e4m3, BFloat16, E4M3)
}
