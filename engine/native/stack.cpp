// All layers of a decoder for the tokens of one step, and the head behind them, in one call.
//
// The parts are those that can be called one by one, in the same order and with the same numbers, so that what comes out
// is the same bit for bit. What is saved is all that stands between them: for a single token, whose layers take a few
// hundred microseconds each, a caller's way from part to part takes a quarter of the time, most of it because the weights
// drive out of the caches whatever it needs.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "panels.h"
#include "parts.h"
#include "threads.h"
#include "vectors.h"

constexpr int64_t CHUNK_NUMBERS = 1 << 14;  // that are only copied; fewer are not worth a second thread
constexpr int64_t LINE = 64;

extern "C" {

// A linear layer: y = x' W^T + bias, x' being the input channels `order` of x times `input_scales`. Null: without.
struct Product {
    void (*multiply)(const float* x, int64_t rows, const PanelWeight* weight, float* y, int num_threads);
    const PanelWeight* weight;
    const int64_t* order;
    const float *input_scales, *bias;
    int64_t out;  // output channels, without those that fill up the last panel
};

struct StackLayer {
    Product qkv, out, gate_up, down;
    const void *input_norm, *post_norm, *head_norm;  // as activations are stored
};

// What one layer has in the pool, as in `AttentionLayer` and `QKVLayer`.
struct StackPool {
    void *k, *v;
    const float *k_scales, *v_scales, *factors;
};

struct Stack {
    const StackLayer* layers;
    const void* norm;
    int64_t num_layers, hidden, intermediate;
    int32_t activations_as;  // FLOAT32 or BFLOAT16
    float eps;
    Product head;
};

// One step. x [tokens, hidden] is overwritten. logits [num_logits, head.out] of the tokens `logit_rows`, null: of all.
// finite [tokens]: whether all numbers of a token are. scratch: `stack_scratch` bytes. seconds [4], or null: what was
// spent on other things, attention, linear layers and head is added to them.
struct StackStep {
    const QKVStep* qkv;
    const AttentionItems* items;
    void (*attend)(const AttentionItems* items, const AttentionLayer* layer, int num_threads);
    const StackPool* pools;   // [num_layers]
    const int64_t* windows;   // [num_layers]
    void* x;
    const int64_t* logit_rows;
    int64_t num_logits;
    float* logits;
    uint8_t* finite;
    void* scratch;
    double* seconds;
};
}

namespace {

enum PassPart { OTHER, ATTENTION, LINEAR, HEAD };

// Adds up what lies between two calls, if anybody wants to know.
class Clock {
  public:
    explicit Clock(double* seconds) : seconds(seconds) {
        if (seconds) last = std::chrono::steady_clock::now();
    }
    void tell(PassPart part) {
        if (!seconds) return;
        const auto now = std::chrono::steady_clock::now();
        seconds[part] += std::chrono::duration<double>(now - last).count();
        last = now;
    }

  private:
    double* seconds;
    std::chrono::steady_clock::time_point last;
};

// Hands out memory, one piece behind the other.
class Pieces {
  public:
    explicit Pieces(void* from) : from(static_cast<char*>(from)) {}
    template <typename Number>
    Number* take(int64_t count) {
        Number* piece = from ? reinterpret_cast<Number*>(from + taken) : nullptr;
        taken += (count * int64_t(sizeof(Number)) + LINE - 1) / LINE * LINE;
        return piece;
    }
    int64_t taken = 0;

  private:
    char* from;
};

void add_norm(float* x, const float* delta, const float* weight, float* y, int64_t rows, int64_t cols, float eps, int n) {
    add_norm_fp32(x, delta, weight, y, rows, cols, eps, n);
}
void add_norm(uint16_t* x, const uint16_t* delta, const uint16_t* weight, uint16_t* y, int64_t rows, int64_t cols,
              float eps, int n) {
    add_norm_bf16(x, delta, weight, y, rows, cols, eps, n);
}
void silu_mul(const float* both, float* y, int64_t rows, int64_t cols, int n) { silu_mul_fp32(both, y, rows, cols, n); }
void silu_mul(const uint16_t* both, uint16_t* y, int64_t rows, int64_t cols, int n) {
    silu_mul_bf16(both, y, rows, cols, n);
}

// Act: how activations are stored, Query: queries and what attention makes of them.
template <typename Act, typename Query>
class Pass {
    using Number = typename Act::Stored;
    using QueryNumber = typename Query::Stored;

  public:
    Pass(const Stack& stack, const StackStep& step, int num_threads)
        : stack(stack), step(step), heads(*step.qkv), num_threads(num_threads), tokens(heads.tokens) {
        const int64_t all = (heads.heads + 2 * heads.kv_heads) * heads.head_dim, own = heads.heads * heads.head_dim;
        const int64_t widest_in = std::max({stack.hidden, stack.intermediate, own});
        const int64_t widest = std::max({all, stack.hidden, 2 * stack.intermediate}) + PANEL;
        const int64_t head_width = stack.head.weight->num_panels * PANEL;
        const int64_t head_sums = head_width == stack.head.out ? 0 : step.num_logits * head_width;
        Pieces pieces(step.scratch);
        normed = pieces.take<Number>(tokens * stack.hidden);
        delta = pieces.take<Number>(tokens * stack.hidden);
        qkv = pieces.take<Number>(tokens * all);
        both = pieces.take<Number>(tokens * 2 * stack.intermediate);
        gated = pieces.take<Number>(tokens * stack.intermediate);
        queries = pieces.take<QueryNumber>(tokens * own);
        attended = pieces.take<QueryNumber>(tokens * own);
        wide = pieces.take<float>(tokens * widest_in);
        sums = pieces.take<float>(std::max(tokens * widest, head_sums));
        scratch_bytes = pieces.taken;
    }

    void run() {
        Clock clock(step.seconds);
        Number* x = static_cast<Number*>(step.x);
        const Number* added = nullptr;
        for (int64_t i = 0; i < stack.num_layers; i++) {
            const StackLayer& layer = stack.layers[i];
            norm(x, added, layer.input_norm, tokens);
            clock.tell(OTHER);
            multiply<Act, Act>(layer.qkv, normed, tokens, qkv);
            clock.tell(LINEAR);
            attend(i);
            clock.tell(ATTENTION);
            multiply<Query, Act>(layer.out, attended, tokens, delta);
            clock.tell(LINEAR);
            norm(x, delta, layer.post_norm, tokens);
            clock.tell(OTHER);
            multiply<Act, Act>(layer.gate_up, normed, tokens, both);
            silu_mul(both, gated, tokens, stack.intermediate, num_threads);
            multiply<Act, Act>(layer.down, gated, tokens, delta);
            clock.tell(LINEAR);
            added = delta;
        }
        if (added) add(x);
        find_finite(x);
        multiply<Act, Float32>(stack.head, final_norm(x), step.num_logits, step.logits);
        clock.tell(HEAD);
    }

    int64_t scratch_bytes;

  private:
    // Calls each(row) for rows of `cols` numbers each.
    template <typename Each>
    void each_row(int64_t rows, int64_t cols, const Each& each) const {
        const int64_t size = std::max<int64_t>(1, CHUNK_NUMBERS / std::max<int64_t>(1, cols));
        share((rows + size - 1) / size, num_threads, [&, size, rows](int64_t chunk) {
            for (int64_t row = chunk * size; row < std::min(rows, (chunk + 1) * size); row++) each(row);
        });
    }

    void norm(Number* x, const Number* added, const void* weight, int64_t rows) const {
        add_norm(x, added, static_cast<const Number*>(weight), normed, rows, stack.hidden, stack.eps, num_threads);
    }

    // x [rows, in] stored as From -> y [rows, out] stored as To.
    template <typename From, typename To>
    void multiply(const Product& product, const typename From::Stored* x, int64_t rows, typename To::Stored* y) const {
        if (!rows) return;
        const int64_t out = product.out, width = product.weight->num_panels * PANEL;
        const float* input;
        if constexpr (std::is_same_v<From, Float32>) input = x;
        if (!std::is_same_v<From, Float32> || product.order || product.input_scales) {
            widen<From>(product, x, rows);
            input = wide;
        }
        float* result = sums;
        if constexpr (std::is_same_v<To, Float32>)
            if (width == out) result = y;
        product.multiply(input, rows, product.weight, result, num_threads);
        if (static_cast<void*>(result) == y && !product.bias) return;
        each_row(rows, out, [&, out, width](int64_t row) {
            float* from = result + row * width;
            if (product.bias)
                for (int64_t i = 0; i < out; i++) from[i] += product.bias[i];
            if (static_cast<void*>(result) != y) narrow_row<To>(from, y + row * out, out);
        });
    }

    template <typename From>
    void widen(const Product& product, const typename From::Stored* x, int64_t rows) const {
        const int64_t cols = product.weight->num_cols;
        each_row(rows, cols, [&, cols](int64_t row) {
            const auto* from = x + row * cols;
            float* to = wide + row * cols;
            if (product.order)
                for (int64_t i = 0; i < cols; i++) to[i] = From::one(from[product.order[i]]);
            else widen_row<From>(from, to, cols);
            if (product.input_scales)
                for (int64_t i = 0; i < cols; i++) to[i] *= product.input_scales[i];
        });
    }

    // From queries, keys and values of layer i, in the order of the product, to what attention makes of them.
    void attend(int64_t i) const {
        const StackPool& pool = step.pools[i];
        const QKVLayer stored{qkv, stack.layers[i].head_norm, pool.factors, queries, pool.k, pool.v, stack.eps};
        store_qkv(step.qkv, &stored, num_threads);
        const AttentionLayer layer{queries,        pool.k,          pool.v,         attended,
                                   pool.k_scales,  pool.v_scales,   heads.heads * heads.head_dim,
                                   heads.heads,    heads.kv_heads,  heads.head_dim, step.windows[i],
                                   float(std::pow(double(heads.head_dim), -0.5))};
        step.attend(step.items, &layer, num_threads);
    }

    void add(Number* x) const {
        each_row(tokens, stack.hidden, [&](int64_t row) {
            for (int64_t i = row * stack.hidden; i < (row + 1) * stack.hidden; i++)
                x[i] = Act::narrow(Act::one(x[i]) + Act::one(delta[i]));
        });
    }

    void find_finite(const Number* x) const {
        each_row(tokens, stack.hidden, [&](int64_t row) {
            bool finite = true;
            for (int64_t i = row * stack.hidden; i < (row + 1) * stack.hidden; i++)
                finite &= std::isfinite(Act::one(x[i]));
            step.finite[row] = finite;
        });
    }

    // Of the tokens whose logits are wanted.
    const Number* final_norm(Number* x) const {
        Number* from = x;
        if (step.logit_rows) {
            from = delta;
            for (int64_t i = 0; i < step.num_logits; i++)
                std::copy_n(x + step.logit_rows[i] * stack.hidden, stack.hidden, from + i * stack.hidden);
        }
        norm(from, nullptr, stack.norm, step.num_logits);
        return normed;
    }

    const Stack& stack;
    const StackStep& step;
    const QKVStep& heads;
    const int num_threads;
    const int64_t tokens;
    Number *normed, *delta, *qkv, *both, *gated;
    QueryNumber *queries, *attended;
    float *wide, *sums;
};

template <typename Call>
void with_pass(const Stack& stack, const StackStep& step, int num_threads, const Call& call) {
    const bool wide_queries = step.qkv->queries_as == FLOAT32;
    if (stack.activations_as == FLOAT32) {
        if (wide_queries) call(Pass<Float32, Float32>(stack, step, num_threads));
        else call(Pass<Float32, BFloat16>(stack, step, num_threads));
    } else {
        if (wide_queries) call(Pass<BFloat16, Float32>(stack, step, num_threads));
        else call(Pass<BFloat16, BFloat16>(stack, step, num_threads));
    }
}

}  // namespace

extern "C" {

// Bytes of memory that a step works in.
int64_t stack_scratch(const Stack* stack, const StackStep* step) {
    int64_t bytes = 0;
    with_pass(*stack, *step, 1, [&](auto&& pass) { bytes = pass.scratch_bytes; });
    return bytes;
}

void stack_run(const Stack* stack, const StackStep* step, int num_threads) {
    with_pass(*stack, *step, num_threads, [](auto&& pass) { pass.run(); });
}
}
