// What stands between the two products of a gated feed-forward layer (SwiGLU, arXiv 2002.05202).

#include <algorithm>

#include "parts.h"
#include "threads.h"
#include "vectors.h"

constexpr int64_t CHUNK_NUMBERS = 1 << 13;  // of the result; fewer are not worth a second thread

static inline Floats silu(Floats x) {
    const Floats negated = -x;
    const Floats bounded = negated > splat(88.0f) ? splat(88.0f) : negated;  // where e^-x is still a finite number
    return x / (exponential(bounded) + 1.0f);
}

template <typename Kind>
static void silu_mul_row(const typename Kind::Stored* gate, const typename Kind::Stored* up, typename Kind::Stored* y,
                         int64_t size) {
    float product[WIDTH];
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        store(product, silu(Kind::widen(gate + i)) * Kind::widen(up + i));
        narrow_row<Kind>(product, y + i, WIDTH);
    }
    for (; i < size; i++) y[i] = Kind::narrow(silu(splat(Kind::one(gate[i])))[0] * Kind::one(up[i]));
}

template <typename Kind>
static void silu_mul(const typename Kind::Stored* both, typename Kind::Stored* y, int64_t rows, int64_t cols,
                     int num_threads) {
    const int64_t total = rows * cols;
    share((total + CHUNK_NUMBERS - 1) / CHUNK_NUMBERS, num_threads, [=](int64_t chunk) {
        const int64_t end = std::min(total, (chunk + 1) * CHUNK_NUMBERS);
        for (int64_t i = chunk * CHUNK_NUMBERS; i < end;) {
            const int64_t row = i / cols, col = i % cols, count = std::min(cols - col, end - i);
            const auto* gate = both + row * 2 * cols + col;
            silu_mul_row<Kind>(gate, gate + cols, y + i, count);
            i += count;
        }
    });
}

extern "C" {

// both [rows, 2 * cols]: y [rows, cols] = silu of the first half of each row times the second.
void silu_mul_fp32(const float* both, float* y, int64_t rows, int64_t cols, int num_threads) {
    silu_mul<Float32>(both, y, rows, cols, num_threads);
}

void silu_mul_bf16(const uint16_t* both, uint16_t* y, int64_t rows, int64_t cols, int num_threads) {
    silu_mul<BFloat16>(both, y, rows, cols, num_threads);
}
}
