// From the product of queries, keys and values to what attention reads: the norm of each head, the rotation by position
// (arXiv 2104.09864), and the write to the pool.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parts.h"
#include "threads.h"
#include "vectors.h"

constexpr int64_t CHUNK_NUMBERS = 1 << 13;  // of the product; fewer are not worth a second thread

static void take(int32_t kind, const void* from, int64_t at, float* to, int64_t size) {
    if (kind == FLOAT32) widen_row<Float32>(static_cast<const float*>(from) + at, to, size);
    else widen_row<BFloat16>(static_cast<const uint16_t*>(from) + at, to, size);
}

static void give(int32_t kind, const float* from, void* to, int64_t at, int64_t size) {
    switch (kind) {
        case FLOAT32: return narrow_row<Float32>(from, static_cast<float*>(to) + at, size);
        case BFLOAT16: return narrow_row<BFloat16>(from, static_cast<uint16_t*>(to) + at, size);
        case INT8: return narrow_row<Int8>(from, static_cast<int8_t*>(to) + at, size);
        default: return narrow_row<E4M3>(from, static_cast<int8_t*>(to) + at, size);
    }
}

static void normalize(float* x, const float* weight, int64_t size, float eps) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(squares / float(size) + eps);
    for (int64_t i = 0; i < size; i++) x[i] *= factor * weight[i];
}

// Element i turns together with element i + rotary_dim / 2; those from rotary_dim on stay as they are.
static void rotate(float* x, const float* cos, const float* sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

static void store_token(const QKVStep& step, const QKVLayer& layer, int64_t token, float* x, float* weight) {
    const int64_t dim = step.head_dim, rotated = step.heads + step.kv_heads, all = rotated + step.kv_heads;
    const float* cos = step.cos + step.positions[token] * step.rotary_dim;
    const float* sin = step.sin + step.positions[token] * step.rotary_dim;
    for (int64_t head = 0; head < all; head++) {
        take(step.product_as, layer.qkv, (token * all + head) * dim, x, dim);
        if (head < rotated) {
            if (layer.head_norm) {
                take(step.product_as, layer.head_norm, head * dim, weight, dim);
                normalize(x, weight, dim, layer.eps);
            }
            rotate(x, cos, sin, step.rotary_dim);
        }
        if (layer.factors)
            for (int64_t i = 0; i < dim; i++) x[i] *= layer.factors[head];
        if (head < step.heads) {
            give(step.queries_as, x, layer.q, (token * step.heads + head) * dim, dim);
        } else {
            void* pool = head < rotated ? layer.k : layer.v;
            const int64_t kv_head = (head - step.heads) % step.kv_heads;
            give(step.pool_as, x, pool, (step.slots[token] * step.kv_heads + kv_head) * dim, dim);
        }
    }
}

extern "C" {

void store_qkv(const QKVStep* step, const QKVLayer* layer, int num_threads) {
    const int64_t numbers = (step->heads + 2 * step->kv_heads) * step->head_dim;
    const int64_t size = std::max<int64_t>(1, CHUNK_NUMBERS / numbers);
    share((step->tokens + size - 1) / size, num_threads, [=](int64_t chunk) {
        static thread_local std::vector<float> held;
        held.resize(2 * step->head_dim);
        for (int64_t token = chunk * size; token < std::min(step->tokens, (chunk + 1) * size); token++)
            store_token(*step, *layer, token, held.data(), held.data() + step->head_dim);
    });
}
}
