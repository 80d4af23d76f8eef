// Weights laid out for products: panels of PANEL output channels, one input channel after the other, so that a panel is
// read once and in order. Each kind says how its numbers are widened to float32.
//
// A reader stands at one input channel of one panel. `next` gives that channel's weights and goes on to the one behind
// it, and may ask for what lies further on. Within `run_end(column)` of the column that it was made for, what it holds of scales stays valid.
#pragma once

#include <cstdint>
#include <limits>

#include "vectors.h"

constexpr int PANEL = 2 * WIDTH;
constexpr int AHEAD_BYTES = 1024;  // how far ahead of its use a panel is asked for

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
static inline void ask_ahead(const Number* from) {
    if constexpr (AHEAD) __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD_BYTES);
}

// Kinds without groups: one run over all input channels.
struct Ungrouped {
    static int64_t run_end(const PanelWeight&, int64_t) { return std::numeric_limits<int64_t>::max(); }
};

struct Float32Panels : Ungrouped {
    static constexpr bool CODES = false;
    struct Reader {
        const float* from;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const float*>(w.codes) + (panel * w.num_cols + col) * PANEL) {}
        template <bool AHEAD>
        void next(Floats& low, Floats& high) {
            ask_ahead<AHEAD>(from);
            low = load(from);
            high = load(from + WIDTH);
            from += PANEL;
        }
    };
};

// A bfloat16 is the upper half of the float32 of the same value. The output channels of both vectors take turns, so that
// one load fetches a pair of them.
struct BFloat16Panels : Ungrouped {
    static constexpr bool CODES = false;
    struct Reader {
        const uint16_t* from;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const uint16_t*>(w.codes) + (panel * w.num_cols + col) * PANEL) {}
        template <bool AHEAD>
        void next(Floats& low, Floats& high) {
            ask_ahead<AHEAD>(from);
            const Words both = read<Words>(from);
            low = (Floats)(both << 16);
            high = (Floats)(both & 0xffff0000u);
            from += PANEL;
        }
    };
};

// int8 codes; their scale, one an output channel, is for the whole sum: scales [num_panels * PANEL].
struct Int8Panels : Ungrouped {
    static constexpr bool CODES = true;
    struct Reader {
        const int8_t* from;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const int8_t*>(w.codes) + (panel * w.num_cols + col) * PANEL) {}
        template <bool AHEAD>
        void next(Floats& low, Floats& high) {
            ask_ahead<AHEAD>(from);
            low = Int8::widen(from);
            high = Int8::widen(from + WIDTH);
            from += PANEL;
        }
    };
};

// Codes of 4 bits, (code - zero) * scale. A byte holds an output channel of the first half of the panel in its low bits
// and the one WIDTH further in its high bits. scales, zeros [groups, num_panels * PANEL], a group of `group` input
// channels each.
struct Int4Panels {
    static constexpr bool CODES = true;
    static int64_t run_end(const PanelWeight& w, int64_t col) { return (col / w.group + 1) * w.group; }

    struct Reader {
        const uint8_t* from;
        Floats low_scale, high_scale, low_zero, high_zero;
        Reader() = default;
        Reader(const PanelWeight& w, int64_t panel, int64_t col)
            : from(static_cast<const uint8_t*>(w.codes) + (panel * w.num_cols + col) * WIDTH) {
            const int64_t at = (col / w.group * w.num_panels + panel) * PANEL;
            low_scale = load(w.scales + at);
            high_scale = load(w.scales + at + WIDTH);
            low_zero = __builtin_convertvector((Ints)widened(w.zeros + at), Floats);
            high_zero = __builtin_convertvector((Ints)widened(w.zeros + at + WIDTH), Floats);
        }
        template <bool AHEAD>
        void next(Floats& low, Floats& high) {
            ask_ahead<AHEAD>(from);
            const Words both = widened(from);
            low = (__builtin_convertvector((Ints)(both & 15u), Floats) - low_zero) * low_scale;
            high = (__builtin_convertvector((Ints)(both >> 4), Floats) - high_zero) * high_scale;
            from += WIDTH;
        }
    };
};
