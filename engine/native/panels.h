// Weights laid out for products: panels of PANEL output channels, one input channel after the other, so that a panel is
// read once and in order. Each kind says how its numbers are widened to float32.
//
// A reader stands at one input channel of one panel. `take` reads that channel and those behind it, STEP in all, goes on
// to the next ones, and may ask for what lies so many bytes ahead; `channel` gives the weights of the i-th of them. It
// serves the input channels up to `run_end` of the one that it was made for. Of GROUPED kinds these are a group, and what
// is multiplied with its weights is still to be multiplied by `scale`, of the lower half of the panel and of the upper.
#pragma once

#include <cstdint>
#include <limits>

#include "vectors.h"

constexpr int PANEL = 2 * WIDTH;
constexpr int64_t AHEAD_BYTES = 1024;  // how far ahead of its use a panel is asked for

extern "C" {

// codes [num_panels, num_cols, PANEL] of the kind, scales and zeros as the kind says or null, bias [num_panels * PANEL]
// or null.
struct PanelWeight {
    const void* codes;
    const float* scales;
    const uint8_t* zeros;
    const float* bias;
    int64_t num_panels, num_cols, group;
};
}

template <bool AHEAD, typename Number>
static inline void ask_ahead(const Number* from, int64_t bytes) {
    if constexpr (AHEAD) __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes);
}

// Kinds without groups: one run over all input channels, one after the other.
template <typename Stored>
struct Ungrouped {
    static constexpr bool GROUPED = false;
    static constexpr int STEP = 1;
    static constexpr int64_t STEP_BYTES = PANEL * sizeof(Stored);
    static int64_t steps(const PanelWeight&, int64_t col) { return col; }
    static int64_t run_end(const PanelWeight&, int64_t) { return std::numeric_limits<int64_t>::max(); }
};

struct Float32Panels : Ungrouped<float> {
    static constexpr bool CODES = false;
    struct Reader {
        const float* from;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const float*>(w.codes) + (panel * w.num_cols + col) * PANEL) {}
        template <bool AHEAD>
        void take(int64_t ahead) {
            ask_ahead<AHEAD>(from, ahead);
            from += PANEL;
        }
        void channel(int, Floats& low, Floats& high) const {
            low = load(from - PANEL);
            high = load(from - WIDTH);
        }
    };
};

// A bfloat16 is the upper half of the float32 of the same value. The output channels of both vectors take turns, so that
// one load fetches a pair of them.
struct BFloat16Panels : Ungrouped<uint16_t> {
    static constexpr bool CODES = false;
    struct Reader {
        const uint16_t* from;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const uint16_t*>(w.codes) + (panel * w.num_cols + col) * PANEL) {}
        template <bool AHEAD>
        void take(int64_t ahead) {
            ask_ahead<AHEAD>(from, ahead);
            from += PANEL;
        }
        void channel(int, Floats& low, Floats& high) const {
            const Words both = read<Words>(from - PANEL);
            low = (Floats)(both << 16);
            high = (Floats)(both & 0xffff0000u);
        }
    };
};

// int8 codes; their scale, one an output channel, is for the whole sum: scales [num_panels * PANEL].
struct Int8Panels : Ungrouped<int8_t> {
    static constexpr bool CODES = true;
    struct Reader {
        const int8_t* from;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const int8_t*>(w.codes) + (panel * w.num_cols + col) * PANEL) {}
        template <bool AHEAD>
        void take(int64_t ahead) {
            ask_ahead<AHEAD>(from, ahead);
            from += PANEL;
        }
        void channel(int, Floats& low, Floats& high) const {
            low = Int8::widen(from - PANEL);
            high = Int8::widen(from - WIDTH);
        }
    };
};

// Codes of 4 bits, (code - zero) * scale. Four input channels lie together: of each output channel of the lower half of
// the panel a word of four bytes, the first input channel in the lowest one; a byte holds that output channel in its low
// bits and the one WIDTH further in its high bits. Each group begins with a word of its own: codes
// [num_panels, steps(num_cols), WIDTH]. scales, zeros [groups, num_panels * PANEL], a group of `group` input channels each.
//
// Zeros are taken off 32 codes at once. The difference is widened as 2^24 times what it is, which is exact, and the scale
// makes up for it.
struct Int4Panels {
    static constexpr bool CODES = true, GROUPED = true;
    static constexpr int STEP = 4;
    static constexpr int64_t STEP_BYTES = WIDTH * sizeof(uint32_t);
    static int64_t run_end(const PanelWeight& w, int64_t col) { return (col / w.group + 1) * w.group; }

    // How many words an output channel has before input channel `col`, the beginning of a group or the end.
    static int64_t steps(const PanelWeight& w, int64_t col) {
        return col / w.group * ((w.group + STEP - 1) / STEP) + (col % w.group + STEP - 1) / STEP;
    }

    struct Reader {
        const uint32_t* from;
        const float* scales;
        Words low_zeros, high_zeros, low, high;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const uint32_t*>(w.codes) + (panel * steps(w, w.num_cols) + steps(w, col)) * WIDTH),
              scales(w.scales + (col / w.group * w.num_panels + panel) * PANEL) {
            const uint8_t* zeros = w.zeros + (scales - w.scales);
            low_zeros = widened(zeros) * 0x01010101u;
            high_zeros = widened(zeros + WIDTH) * 0x01010101u;
        }
        static Words difference(Words a, Words b) { return (Words)((WordBytes)a - (WordBytes)b); }
        template <bool AHEAD>
        void take(int64_t ahead) {
            ask_ahead<AHEAD>(from, ahead);
            const Words both = read<Words>(from);
            low = difference(both & 0x0f0f0f0fu, low_zeros);
            high = difference(both >> 4 & 0x0f0f0f0fu, high_zeros);
            from += WIDTH;
        }
        void channel(int i, Floats& to_low, Floats& to_high) const {
            to_low = __builtin_convertvector(raised(low, i), Floats);
            to_high = __builtin_convertvector(raised(high, i), Floats);
        }
        Floats scale(int half) const { return load(scales + half * WIDTH) * 0x1p-24f; }
    };
};
