// Attention over paged keys and values, read where they lie.
//
// A chunk of work is one KV head of some new tokens of one request. All its queries, those tokens times the query heads
// that share the KV head, see each tile of keys and values once it was widened to float32, in a core's nearest cache.
// The softmax is computed as its keys come along: a running maximum, and a sum and an output relative to it, that are
// scaled down when the maximum grows (Milakov and Gimelshein, arXiv 1805.02867).
//
// Tiles begin at multiples of TILE positions, and a query's sums run over its keys in ascending order, so that what
// comes out depends neither on the requests beside it nor on how many of its tokens are computed at once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

constexpr int64_t TILE = 32;        // keys that are widened at once
constexpr int MAX_VECTORS = 8;      // of an output that are held in registers
constexpr float NEVER = -std::numeric_limits<float>::infinity();
static_assert(TILE % WIDTH == 0, "scores of a tile are whole vectors");

extern "C" {

// Indices of one step. Item i is `counts[i]` new tokens, tokens [firsts[i], firsts[i] + counts[i]) of the step, of which
// the first stands at `positions[i]` of a request whose blocks are the row `rows[i]` of `tables`.
struct AttentionItems {
    int64_t num_items;
    const int64_t *firsts, *counts, *positions, *rows, *tables;
    int64_t table_width, block_size;
};

// One layer. q [tokens, heads, head_dim] with q_row numbers from token to token, out [tokens, heads, head_dim]. k, v:
// [slots, kv_heads, head_dim], stored numbers, which stand for themselves times their head's scale, if there is one.
struct AttentionLayer {
    const void *q, *k, *v;
    void* out;
    const float *k_scales, *v_scales;  // [kv_heads] or null
    int64_t q_row, heads, kv_heads, head_dim;
    int64_t window;  // how many keys a token sees, its own included; 0: all
    float scale;     // of the scores
};
}

namespace {

struct Scratch {
    std::vector<float> queries, outputs, maxima, sums, keys, values;
    float weights[TILE];
};

// One for each thread. Not inlined, or the compiler looks it up again and again where its address is needed.
__attribute__((noinline)) Scratch& own_scratch() {
    static thread_local Scratch own;
    return own;
}

struct Range {
    int64_t first, last;
};

template <typename Query, typename Stored>
class Chunk {
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
          padded((layer.head_dim + WIDTH - 1) / WIDTH * WIDTH) {}

    void compute() {
        const int64_t end = position + count, oldest = seen(0).first;
        fetch({oldest, std::min(oldest / TILE * TILE + TILE, end)});
        take_queries();
        for (int64_t at = oldest / TILE * TILE; at < end; at += TILE) {
            const Range tile{std::max(at, oldest), std::min(at + TILE, end)};
            fetch({at + TILE, std::min(at + 2 * TILE, end)});
            widen(layer.k, scratch.keys, at, tile);
            widen(layer.v, scratch.values, at, tile);
            for (int64_t token = 0; token < count; token++) {
                const Range keys = seen(token);
                const Range here{std::max(keys.first, tile.first) - at, std::min(keys.last, tile.last) - at};
                if (here.first >= here.last) continue;
                for (int64_t head = 0; head < group; head++) add_tile(token * group + head, here);
            }
        }
        give_outputs();
    }

  private:
    // Positions that a new token of the chunk sees.
    Range seen(int64_t token) const {
        const int64_t last = position + token + 1;
        return {layer.window ? std::max<int64_t>(0, last - layer.window) : 0, last};
    }

    void take_queries() {
        const float scale = layer.scale * (layer.k_scales ? layer.k_scales[kv_head] : 1.0f);
        const size_t size = count * group * padded;
        scratch.queries.assign(size, 0.0f);
        scratch.outputs.assign(size, 0.0f);
        scratch.maxima.assign(count * group, NEVER);
        scratch.sums.assign(count * group, 0.0f);
        scratch.keys.assign(TILE * padded, 0.0f);
        scratch.values.assign(TILE * padded, 0.0f);
        const auto* q = static_cast<const typename Query::Stored*>(layer.q);
        for (int64_t token = 0; token < count; token++)
            for (int64_t head = 0; head < group; head++) {
                float* to = &scratch.queries[(token * group + head) * padded];
                widen_row<Query>(q + (first + token) * layer.q_row + (kv_head * group + head) * layer.head_dim, to,
                                 layer.head_dim);
                for (int64_t i = 0; i < layer.head_dim; i++) to[i] *= scale;
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
        constexpr int64_t LINE = 64 / sizeof(typename Stored::Stored);
        const auto *k = static_cast<const typename Stored::Stored*>(layer.k),
                   *v = static_cast<const typename Stored::Stored*>(layer.v);
        each_place(positions, [&](int64_t, int64_t at) {
            for (int64_t i = 0; i < layer.head_dim; i += LINE) {
                __builtin_prefetch(k + at + i);
                __builtin_prefetch(v + at + i);
            }
        });
    }

    // Keys or values at the positions of `tile`, each at its distance from `at`.
    void widen(const void* pool, std::vector<float>& to, int64_t at, Range tile) const {
        const auto* stored = static_cast<const typename Stored::Stored*>(pool);
        float* wide = to.data();
        each_place(tile, [&](int64_t i, int64_t place) {
            widen_row<Stored>(stored + place, wide + (i - at) * padded, layer.head_dim);
        });
    }

    // Lanes of a tile's part from `first` on that are not `here`: their weight will be 0.
    static Floats hide(Floats scores, int first, Range here) {
        Ints at;
        for (int i = 0; i < WIDTH; i++) at[i] = first + i;
        return (at >= int32_t(here.first)) & (at < int32_t(here.last)) ? scores : splat(NEVER);
    }

    void add_tile(int64_t query, Range here) {
        constexpr int PARTS = TILE / WIDTH;
        const float *q = &scratch.queries[query * padded], *keys = scratch.keys.data();
        const int64_t size = padded;
        Floats scores[PARTS], highest = splat(NEVER);
        for (int p = 0; p < PARTS; p++) {
            Floats sums[WIDTH] = {};
            const float* key = keys + p * WIDTH * size;
            for (int64_t d = 0; d < size; d += WIDTH) {
                const Floats part = load(q + d);
                for (int j = 0; j < WIDTH; j++) sums[j] += part * load(key + j * size + d);
            }
            scores[p] = hide(lane_sums(sums), p * WIDTH, here);
            highest = scores[p] > highest ? scores[p] : highest;
        }
        const float before = scratch.maxima[query], now = std::max(before, lane_max(highest));
        Floats total = {};
        for (int p = 0; p < PARTS; p++) {
            const Floats weights = exponential(scores[p] - now);
            store(scratch.weights + p * WIDTH, weights);
            total += weights;
        }
        const float kept = before == now ? 1.0f : std::exp(before - now);
        scratch.maxima[query] = now;
        scratch.sums[query] = scratch.sums[query] * kept + lane_sum(total);
        add_values<MAX_VECTORS>(&scratch.outputs[query * padded], 0, kept, here);
    }

    template <int VECTORS>
    void add_values(float* output, int64_t from, float kept, Range here) {
        const float *weights = scratch.weights, *values = scratch.values.data();
        const int64_t size = padded;
        for (; from + VECTORS * WIDTH <= padded; from += VECTORS * WIDTH) {
            Floats sums[VECTORS];
            for (int v = 0; v < VECTORS; v++) sums[v] = load(output + from + v * WIDTH) * kept;
            for (int64_t i = here.first; i < here.last; i++) {
                const Floats weight = splat(weights[i]);
                const float* value = values + i * size + from;
                for (int v = 0; v < VECTORS; v++) sums[v] += weight * load(value + v * WIDTH);
            }
            for (int v = 0; v < VECTORS; v++) store(output + from + v * WIDTH, sums[v]);
        }
        if constexpr (VECTORS > 1) add_values<VECTORS / 2>(output, from, kept, here);
    }

    void give_outputs() const {
        const float scale = layer.v_scales ? layer.v_scales[kv_head] : 1.0f;
        auto* out = static_cast<typename Query::Stored*>(layer.out);
        for (int64_t query = 0; query < count * group; query++) {
            const float* from = &scratch.outputs[query * padded];
            const float factor = scale / scratch.sums[query];
            const int64_t token = first + query / group, head = kv_head * group + query % group;
            auto* to = out + (token * layer.heads + head) * layer.head_dim;
            for (int64_t i = 0; i < layer.head_dim; i++) to[i] = Query::narrow(from[i] * factor);
        }
    }

    Scratch& scratch;
    const AttentionLayer& layer;
    const int64_t item, kv_head, group, count, first, position;
    const int64_t* table;
    const int64_t block_size, padded;
};

template <typename Query, typename Stored>
void attention(const AttentionItems& items, const AttentionLayer& layer, int num_threads) {
    share(items.num_items * layer.kv_heads, num_threads,
          [&](int64_t chunk) { Chunk<Query, Stored>(items, layer, chunk).compute(); });
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
