// y = x W^T + bias for few to many rows of float32 x, with W widened from what it is stored in while it is read.
//
// Stored as panels of PANEL output channels, one input channel after the other: a panel is read once, in order,
// for up to ROWS rows of x. Each sum runs over the input channels in ascending order in one accumulator, whatever
// the number of rows, so a row's result does not depend on the rows beside it, bit for bit.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "threads.h"
#include "vectors.h"

constexpr int ROWS = WIDTH == 16 ? 12 : 6;  // of x at once: their sums fill the registers
constexpr int PANEL = 2 * WIDTH;
constexpr int64_t BLOCK_COLS = 1024, BLOCK_ROWS = 48;  // of x: 192 KiB, to stay in a core's own cache
constexpr int AHEAD_BYTES = 1024;                      // how far ahead of its use a panel is asked for
constexpr int TOGETHER = 4;                            // panels that a single row takes at once
constexpr int CHUNKS = 8;                              // for each thread, so that all are done at about the same time

// One input channel of a panel as float32.
static inline void widen(const float* from, Floats& low, Floats& high) {
    low = load(from);
    high = load(from + WIDTH);
}

// A bfloat16 is the upper half of the float32 of the same value. The output channels of both vectors take turns.
static inline void widen(const uint16_t* from, Floats& low, Floats& high) {
    Words both;
    std::memcpy(&both, from, sizeof both);
    low = (Floats)(both << 16);
    high = (Floats)(both & 0xffff0000u);
}

// M rows of x with P panels that stand one behind the other, over `cols` input channels, added to y.
template <int M, int P, typename Weight>
static void tile(const float* x, int64_t x_row, const Weight* w, int64_t panel_size, int64_t cols, float* y,
                 int64_t y_row) {
    Floats sum[M][2 * P];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < 2 * P; v++) sum[m][v] = load(y + m * y_row + v * WIDTH);
    for (int64_t k = 0; k < cols; k++, w += PANEL) {
        Floats wide[2 * P];
        for (int p = 0; p < P; p++) {
            const Weight* from = w + p * panel_size;
            __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD_BYTES);
            widen(from, wide[2 * p], wide[2 * p + 1]);
        }
        for (int m = 0; m < M; m++) {
            const Floats value = splat(x[m * x_row + k]);
            for (int v = 0; v < 2 * P; v++) sum[m][v] += value * wide[v];
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < 2 * P; v++) store(y + m * y_row + v * WIDTH, sum[m][v]);
}

// A part of the product: some rows of x, some input channels, some panels.
template <typename Weight>
struct Part {
    const float* x;
    int64_t x_row;
    const Weight* w;  // the first panel, at the first of the input channels
    int64_t panel_size, cols;
    float* y;
    int64_t y_row;
    int64_t panels;

    template <int M, int P>
    int64_t tiles(int64_t row, int64_t panel) const {
        for (; panel + P <= panels; panel += P)
            tile<M, P>(x + row * x_row, x_row, w + panel * panel_size, panel_size, cols,
                       y + row * y_row + panel * PANEL, y_row);
        return panel;
    }

    // Few rows take several panels at once, so that enough sums are under way to hide each one's latency.
    template <int M>
    void rows(int64_t row) const {
        constexpr int P = M == 1 ? TOGETHER : M <= 3 ? 2 : 1;
        tiles<M, 1>(row, tiles<M, P>(row, 0));
    }

    template <int M>
    void dispatch(int64_t row, int64_t count) const {
        if constexpr (M > 1) {
            if (count < M) return dispatch<M - 1>(row, count);
        }
        rows<M>(row);
    }
};

// y of some panels, all rows.
template <typename Weight>
static void panels_of(const float* x, int64_t num_rows, const Weight* w, int64_t num_cols, float* y, int64_t y_row,
                      int64_t first, int64_t last) {
    const int64_t panel_size = num_cols * PANEL;
    for (int64_t top = 0; top < num_rows; top += BLOCK_ROWS)
        for (int64_t col = 0; col < num_cols; col += BLOCK_COLS) {
            const int64_t rows = std::min(BLOCK_ROWS, num_rows - top), cols = std::min(BLOCK_COLS, num_cols - col);
            // One panel after the other, each for all of these rows: it is in the nearest cache by then.
            const int64_t step = rows <= ROWS ? last - first : 1;
            for (int64_t panel = first; panel < last; panel += step) {
                const Part<Weight> part{x + top * num_cols + col, num_cols, w + panel * panel_size + col * PANEL,
                                        panel_size, cols, y + top * y_row + panel * PANEL, y_row, step};
                for (int64_t row = 0; row < rows;) {
                    const int64_t left = rows - row;
                    const int64_t count = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;
                    part.template dispatch<ROWS>(row, count);
                    row += count;
                }
            }
        }
}

template <typename Weight>
static void product(const float* x, int64_t num_rows, const Weight* w, int64_t num_panels, int64_t num_cols,
                    const float* bias, float* y, int num_threads) {
    const int64_t y_row = num_panels * PANEL;
    const int64_t wanted = (num_panels + num_threads * CHUNKS - 1) / (num_threads * CHUNKS);
    const int64_t size = (wanted + TOGETHER - 1) / TOGETHER * TOGETHER;
    share((num_panels + size - 1) / size, num_threads, [=](int64_t chunk) {
        const int64_t first = chunk * size, last = std::min(first + size, num_panels);
        for (int64_t row = 0; row < num_rows; row++) {
            float* to = y + row * y_row + first * PANEL;
            const size_t bytes = (last - first) * PANEL * sizeof(float);
            if (bias) std::memcpy(to, bias + first * PANEL, bytes);
            else std::memset(to, 0, bytes);
        }
        panels_of(x, num_rows, w, num_cols, y, y_row, first, last);
    });
}

extern "C" {

// How many output channels stand side by side in a panel: what weights are to be laid out for.
int panel_width() { return PANEL; }

// x [num_rows, num_cols]; w [num_panels, num_cols, PANEL]; bias [num_panels * PANEL] or null;
// y [num_rows, num_panels * PANEL]. All contiguous.
void linear_bf16(const float* x, int64_t num_rows, const uint16_t* w, int64_t num_panels, int64_t num_cols,
                 const float* bias, float* y, int num_threads) {
    product(x, num_rows, w, num_panels, num_cols, bias, y, num_threads);
}

void linear_fp32(const float* x, int64_t num_rows, const float* w, int64_t num_panels, int64_t num_cols,
                 const float* bias, float* y, int num_threads) {
    product(x, num_rows, w, num_panels, num_cols, bias, y, num_threads);
}
}
