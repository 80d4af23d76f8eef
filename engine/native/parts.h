// The parts of a decoder: what callers hand to them, and what one of these files calls of another.
#pragma once

#include <cstdint>

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

enum StoredAs : int32_t { FLOAT32, BFLOAT16, INT8, E4M3_BYTES };

// The tokens of one step. cos, sin [positions, rotary_dim], the first half of sin negated.
struct QKVStep {
    const int64_t *positions, *slots;
    const float *cos, *sin;
    int64_t tokens, heads, kv_heads, head_dim, rotary_dim;
    int32_t product_as, queries_as, pool_as;
};

// One layer. qkv [tokens, heads + 2 * kv_heads, head_dim]; head_norm [heads + kv_heads, head_dim] as qkv is stored, or
// null; factors [heads + 2 * kv_heads], what each head is multiplied by before it is written, or null.
struct QKVLayer {
    const void *qkv, *head_norm;
    const float* factors;
    void *q, *k, *v;  // q [tokens, heads, head_dim]; k, v: the pool's
    float eps;
};

void add_norm_fp32(float* x, const float* delta, const float* weight, float* y, int64_t rows, int64_t cols, float eps,
                   int num_threads);
void add_norm_bf16(uint16_t* x, const uint16_t* delta, const uint16_t* weight, uint16_t* y, int64_t rows, int64_t cols,
                   float eps, int num_threads);
void silu_mul_fp32(const float* both, float* y, int64_t rows, int64_t cols, int num_threads);
void silu_mul_bf16(const uint16_t* both, uint16_t* y, int64_t rows, int64_t cols, int num_threads);
void store_qkv(const QKVStep* step, const QKVLayer* layer, int num_threads);
}
