// y = x W^T + bias for few to many rows of float32 x, with W widened from what it is stored in while it is read.
//
// A panel is read once for up to ROWS rows of x. Each sum runs over the input channels in ascending order in one
// accumulator, whatever the number of rows, so a row's result does not depend on the rows beside it, bit for bit.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "panels.h"
#include "threads.h"
#include "vectors.h"

constexpr int ROWS = WIDTH == 16 ? 12 : 6;  // of x at once: their sums fill the registers
constexpr int64_t BLOCK_COLS = 1024, BLOCK_ROWS = 48;  // of x: 192 KiB, to stay in a core's own cache, and of few rows
                                                       // as many columns as would be 24 KiB, for the nearest cache
constexpr int TOGETHER = 4;                            // panels that a single row takes at once
constexpr int CHUNKS = 16;                             // for each thread, so that all are done at about the same time

// One or two rows are done with numbers of 16 bits and more before the memory has the next: then a core reads one panel
// after the other, and what fetches ahead of it by itself does so better than if it is told.
template <typename Kind, int M>
constexpr bool STREAMED = M <= 2 && !Kind::CODES;

// A part of the product: rows of x from `x` on, input channels [col, col_end), panels from `panel` on.
template <typename Kind>
struct Part {
    const PanelWeight& w;
    const float* x;
    float* y;  // of the first of the rows and panels
    int64_t y_row, col, col_end, panel;

    // M rows with P panels that stand one behind the other, added to y, or put there by the first input channels.
    template <int M, int P>
    void tile(int64_t row, int64_t nth) const {
        const float* from = x + row * w.num_cols;
        float* to = y + row * y_row + nth * PANEL;
        // Near the end of these columns the next to be read are the first ones of the panels behind these.
        const int64_t last = col_end - AHEAD_BYTES / Kind::STEP_BYTES * Kind::STEP;
        const int64_t jump = AHEAD_BYTES + (P * Kind::steps(w, w.num_cols) - Kind::steps(w, col_end) +
                                            Kind::steps(w, col)) * Kind::STEP_BYTES;
        for (int64_t begin = col; begin < col_end;) {
            const int64_t end = std::min(col_end, Kind::run_end(w, begin));
            const auto before = [=, this](int m, int v) { return begin ? load(to + m * y_row + v * WIDTH) : Floats{}; };
            typename Kind::Reader readers[P];
            for (int p = 0; p < P; p++) readers[p] = typename Kind::Reader(w, panel + nth + p, begin);
            Floats sum[M][2 * P];
            for (int m = 0; m < M; m++)
                for (int v = 0; v < 2 * P; v++) sum[m][v] = Kind::GROUPED ? Floats{} : before(m, v);
            int64_t k = begin;
            const auto step = [&]() __attribute__((always_inline)) {
                add<M, P>(readers, from + k, Kind::STEP, k < last ? AHEAD_BYTES : jump, sum);
                k += Kind::STEP;
            };
            if constexpr (Kind::STEP == 1) {
#pragma GCC unroll 2  // or as many instructions tell where numbers are as multiply them
                while (k < end) step();
            } else {
#pragma GCC unroll 1  // with more, sums of many rows do not stay in registers
                while (k + Kind::STEP <= end) step();
            }
            if (k < end) add<M, P>(readers, from + k, int(end - k), jump, sum);
            for (int m = 0; m < M; m++)
                for (int v = 0; v < 2 * P; v++) {
                    if constexpr (Kind::GROUPED) {
                        sum[m][v] *= readers[v / 2].scale(v % 2);
                        hold(sum[m][v]);  // rounded here whatever M and P are, not in one with the addition for some
                        sum[m][v] += before(m, v);
                    }
                    store(to + m * y_row + v * WIDTH, sum[m][v]);
                }
            begin = end;
        }
    }

    // `count` input channels, from those of x at `from` on; what lies `ahead` bytes further is asked for.
    template <int M, int P>
    __attribute__((always_inline)) void add(typename Kind::Reader (&readers)[P], const float* from, int count,
                                            int64_t ahead, Floats (&sum)[M][2 * P]) const {
        for (int p = 0; p < P; p++) {
            readers[p].template take<!STREAMED<Kind, M>>(ahead);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                Floats low, high;
                readers[p].channel(i, low, high);
                for (int m = 0; m < M; m++) {
                    const Floats value = splat(from[m * w.num_cols + i]);
                    sum[m][2 * p] += value * low;
                    sum[m][2 * p + 1] += value * high;
                }
            }
        }
    }

    template <int M, int P>
    int64_t tiles(int64_t row, int64_t nth, int64_t panels) const {
        for (; nth + P <= panels; nth += P) tile<M, P>(row, nth);
        return nth;
    }

    // Few rows take several panels at once, so that enough sums are under way to hide each one's latency, unless the
    // memory is slower still.
    template <int M>
    void dispatch(int64_t row, int64_t rows, int64_t panels) const {
        if constexpr (M > 1) {
            if (rows < M) return dispatch<M - 1>(row, rows, panels);
        }
        constexpr int P = STREAMED<Kind, M> ? 1 : M == 1 ? TOGETHER : M <= 3 ? 2 : 1;
        tiles<M, 1>(row, tiles<M, P>(row, 0, panels), panels);
    }
};

// The sums of panels [first, last), all rows, in y [num_rows, y_row].
template <typename Kind>
static void add_panels(const PanelWeight& w, const float* x, int64_t num_rows, float* y, int64_t y_row, int64_t first,
                       int64_t last) {
    int64_t cols = std::max(BLOCK_COLS, BLOCK_COLS * ROWS / std::max<int64_t>(1, num_rows));
    if (Kind::GROUPED) cols = std::max<int64_t>(1, cols / w.group) * w.group;  // groups are not divided
    for (int64_t top = 0; top < num_rows; top += BLOCK_ROWS)
        for (int64_t col = 0; col < w.num_cols; col += cols) {
            const int64_t rows = std::min(BLOCK_ROWS, num_rows - top), col_end = std::min(col + cols, w.num_cols);
            // One panel after the other, each for all of these rows: it is in the nearest cache by then.
            const int64_t step = rows <= ROWS ? last - first : 1;
            for (int64_t panel = first; panel < last; panel += step) {
                const Part<Kind> part{
                    w, x + top * w.num_cols, y + top * y_row + panel * PANEL, y_row, col, col_end, panel};
                for (int64_t row = 0; row < rows;) {
                    const int64_t left = rows - row;
                    const int64_t count = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;
                    part.template dispatch<ROWS>(row, count, step);
                    row += count;
                }
            }
        }
}

// Scales of output channels, and the bias.
template <typename Kind>
static void finish(const PanelWeight& w, float* y, int64_t first, int64_t count) {
    if constexpr (std::is_same_v<Kind, Int8Panels>)
        for (int64_t i = 0; i < count; i++) y[i] *= w.scales[first + i];
    if (w.bias)
        for (int64_t i = 0; i < count; i++) y[i] += w.bias[first + i];
}

// Few rows: each thread goes through the panels in as long stretches as it can, for each begins with a wait for the memory,
// and still all are done at about the same time: every chunk is a thread's share of what is left (guided self-scheduling,
// Polychronopoulos and Kuck 1987).
struct Guided {
    int64_t panels, step, threads;

    int64_t end(int64_t first) const {
        const int64_t share = (panels - first + threads - 1) / threads;
        return std::min(panels, first + (share + step - 1) / step * step);
    }
    int64_t chunks() const {
        int64_t count = 0;
        for (int64_t first = 0; first < panels; first = end(first)) count++;
        return count;
    }
    int64_t begin(int64_t chunk) const {
        int64_t first = 0;
        for (; chunk > 0; chunk--) first = end(first);
        return first;
    }
};

template <typename Kind>
static void product(const float* x, int64_t num_rows, const PanelWeight& w, float* y, int num_threads) {
    const int64_t y_row = w.num_panels * PANEL;
    const auto compute = [&, y_row](int64_t first, int64_t last) {
        const int64_t begin = first * PANEL, count = (last - first) * PANEL;
        add_panels<Kind>(w, x, num_rows, y, y_row, first, last);
        for (int64_t row = 0; row < num_rows; row++) finish<Kind>(w, y + row * y_row + begin, begin, count);
    };
    if (num_rows <= ROWS) {
        const Guided guided{w.num_panels, STREAMED<Kind, 1> ? 2 : TOGETHER, std::max(1, num_threads)};
        return share(guided.chunks(), num_threads, [&](int64_t chunk) {
            const int64_t first = guided.begin(chunk);
            compute(first, guided.end(first));
        });
    }
    // More take one panel after the other.
    const int64_t size = (w.num_panels + num_threads * CHUNKS - 1) / (num_threads * CHUNKS);
    share((w.num_panels + size - 1) / size, num_threads,
          [&](int64_t chunk) { compute(chunk * size, std::min(chunk * size + size, w.num_panels)); });
}

extern "C" {

// Numbers of float32 that are computed with at once: which instructions the compiler was given.
int vector_width() { return WIDTH; }

// How many output channels stand side by side in a panel: what weights are to be laid out for.
int panel_width() { return PANEL; }

// x [num_rows, num_cols]; y [num_rows, num_panels * PANEL]. Both contiguous.
#define LINEAR(NAME, KIND)                                                                                        \
    void linear_##NAME(const float* x, int64_t num_rows, const PanelWeight* w, float* y, int num_threads) { \
        product<KIND>(x, num_rows, *w, y, num_threads);                                                           \
    }

LINEAR(fp32, Float32Panels)
LINEAR(bf16, BFloat16Panels)
LINEAR(int8, Int8Panels)
LINEAR(int4, Int4Panels)
}
