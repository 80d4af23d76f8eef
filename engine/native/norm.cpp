// The residual addition and the root-mean-square norm behind it (arXiv 1910.07467), each row read once.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parts.h"
#include "threads.h"
#include "vectors.h"

constexpr int64_t CHUNK_NUMBERS = 1 << 14;  // of x; fewer are not worth a second thread

template <typename Kind>
static void add_norm(typename Kind::Stored* x, const typename Kind::Stored* delta, const typename Kind::Stored* weight,
                     typename Kind::Stored* y, int64_t rows, int64_t cols, float eps, int num_threads) {
    const int64_t size = std::max<int64_t>(1, CHUNK_NUMBERS / cols);
    share((rows + size - 1) / size, num_threads, [=](int64_t chunk) {
        static thread_local std::vector<float> held;
        held.resize(3 * cols);
        float *sum = held.data(), *other = sum + cols, *weights = other + cols;
        widen_row<Kind>(weight, weights, cols);
        for (int64_t row = chunk * size; row < std::min(rows, (chunk + 1) * size); row++) {
            auto* at = x + row * cols;
            widen_row<Kind>(at, sum, cols);
            if (delta) {
                widen_row<Kind>(delta + row * cols, other, cols);
                for (int64_t i = 0; i < cols; i++) sum[i] += other[i];
                narrow_row<Kind>(sum, at, cols);
                widen_row<Kind>(at, sum, cols);  // the norm is of what x holds now
            }
            Floats squares[2] = {};
            int64_t i = 0;
            for (; i + 2 * WIDTH <= cols; i += 2 * WIDTH)
                for (int v = 0; v < 2; v++) {
                    const Floats part = load(sum + i + v * WIDTH);
                    squares[v] += part * part;
                }
            float total = lane_sum(squares[0] + squares[1]);
            for (; i < cols; i++) total += sum[i] * sum[i];
            const float factor = 1.0f / std::sqrt(total / float(cols) + eps);
            for (i = 0; i < cols; i++) sum[i] *= factor * weights[i];
            narrow_row<Kind>(sum, y + row * cols, cols);
        }
    });
}

extern "C" {

// x [rows, cols] += delta, which may be null; y [rows, cols] is the norm of the sum times weight [cols].
void add_norm_fp32(float* x, const float* delta, const float* weight, float* y, int64_t rows, int64_t cols, float eps,
                   int num_threads) {
    add_norm<Float32>(x, delta, weight, y, rows, cols, eps, num_threads);
}

void add_norm_bf16(uint16_t* x, const uint16_t* delta, const uint16_t* weight, uint16_t* y, int64_t rows, int64_t cols,
                   float eps, int num_threads) {
    add_norm<BFloat16>(x, delta, weight, y, rows, cols, eps, num_threads);
}
}
