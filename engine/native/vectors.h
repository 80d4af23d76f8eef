// Vectors of float32 as wide as this machine's, and how stored numbers are widened to them.
//
// They are the compiler's (GCC, "Using Vector Instructions through Built-in Functions"): sources are compiled where
// they run.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(WIDTH)));
typedef uint8_t WordBytes __attribute__((vector_size(WIDTH * 4)));

template <typename Vector>
static inline Vector read(const void* from) {
    Vector to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

// WIDTH bytes as 32-bit numbers. Of a general conversion GCC 12 makes some forty instructions, a byte at a time.
static inline Ints widened(const int8_t* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return __builtin_convertvector(read<Bytes>(from), Ints);
#endif
}

static inline Words widened(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return __builtin_convertvector(read<UnsignedBytes>(from), Words);
#endif
}

// Byte `i` of each word, the lowest being byte 0, as its highest one, with zeros below: 2^24 times the signed byte.
static inline Ints raised(Words words, int i) {
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
    Words from;  // of each byte the place in its 128 bits, or 0x80: a zero
    for (int lane = 0; lane < WIDTH; lane++) from[lane] = uint32_t(lane % 4 * 4 + i) << 24 | 0x808080u;
#if defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8((__m512i)words, (__m512i)from);
#else
    return (Ints)_mm256_shuffle_epi8((__m256i)words, (__m256i)from);
#endif
#else
    return (Ints)(words << (24 - 8 * i) & 0xff000000u);
#endif
}

static inline Floats load(const float* from) { return read<Floats>(from); }

static inline void store(float* to, Floats from) { std::memcpy(to, &from, sizeof from); }

static inline Floats splat(float value) { return value - Floats{}; }

// Has a value that is used several times read into a register once: compilers take it from memory at each use, and in
// loops that do little but multiply there are then more reads than a core can do.
static inline void hold(Floats& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    (void)value;
#endif
}

// How numbers are stored. Each reads WIDTH of them, or one, as float32. Those that say so also read 2 * WIDTH as two
// vectors, in an order of their own that costs nothing, and write two such vectors back.
struct Float32 {
    using Stored = float;
    static Floats first(const float* from) { return load(from); }
    static Floats second(const float* from) { return load(from + WIDTH); }
    static void join(Floats first, Floats second, float* to) {
        store(to, first);
        store(to + WIDTH, second);
    }
    static Floats widen(const float* from) { return load(from); }
    static float one(float stored) { return stored; }
    static float narrow(float value) { return value; }
};

// The upper half of the float32 of the same value.
struct BFloat16 {
    using Stored = uint16_t;
    // Of each pair of neighbours the one at the lower address is the lower half of a word.
    static Floats first(const uint16_t* from) { return (Floats)(read<Words>(from) << 16); }
    static Floats second(const uint16_t* from) { return (Floats)(read<Words>(from) & 0xffff0000u); }
    static Words rounded(Floats value) {  // as `narrow` does, in the upper half
        const Words bits = (Words)value, even = bits + 0x7fffu + (bits >> 16 & 1u);
        return value == value ? even : bits | 0x400000u;
    }
    static void join(Floats first, Floats second, uint16_t* to) {
        const Words words = rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
        std::memcpy(to, &words, sizeof words);
    }
    static Floats widen(const uint16_t* from) {
        return (Floats)(__builtin_convertvector(read<Halves>(from), Words) << 16);
    }
    static float one(uint16_t stored) {
        const uint32_t bits = uint32_t(stored) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    // To nearest, ties to even; NaN stays NaN.
    static uint16_t narrow(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        if (value != value) return uint16_t(bits >> 16 | 0x40);
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

struct Int8 {
    using Stored = int8_t;
    static Floats widen(const int8_t* from) { return __builtin_convertvector(widened(from), Floats); }
    static float one(int8_t stored) { return stored; }
    // To nearest, ties to even; what is out of range becomes the largest, NaN becomes 0.
    static int8_t narrow(float value) {
        const float bounded = value > 127 ? 127 : value < -127 ? -127 : value;
        return bounded == bounded ? int8_t(std::nearbyint(bounded)) : int8_t(0);
    }
};

// Its bits in the places of a float32's are the value divided by 2^120, for the exponents' biases are 7 and 127. The
// two codes of NaN, which nothing writes, are read as numbers.
struct E4M3 {
    using Stored = int8_t;
    static constexpr float GAIN = 0x1p120f;
    static constexpr uint32_t MASK = 0x87f00000u;  // sign, and seven bits of exponent and mantissa
    static Floats widen(const int8_t* from) {
        const Words bits = (Words)widened(from);
        return (Floats)(bits << 20 & MASK) * GAIN;
    }
    static float one(int8_t stored) {
        const uint32_t bits = uint32_t(int32_t(stored)) << 20 & MASK;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value * GAIN;
    }
    // To nearest, ties to even; what is out of range becomes the largest, NaN stays NaN.
    static int8_t narrow(float value) {
        if (value != value) return 0x7f;
        const float bounded = value > 448 ? 448 : value < -448 ? -448 : value;
        const float size = std::fabs(bounded);
        uint32_t code;
        if (size < 0x1p-6f) {
            code = uint32_t(std::nearbyint(size * 0x1p9f));  // below the normal numbers all are multiples of 2^-9
        } else {
            uint32_t bits;
            std::memcpy(&bits, &size, sizeof bits);
            bits += 0x7ffff + (bits >> 20 & 1);
            code = (bits >> 20) - ((127 - 7) << 3);
        }
        return int8_t(code | (std::signbit(value) ? 0x80 : 0));
    }
};

template <typename Kind>
static inline void widen_row(const typename Kind::Stored* from, float* to, int64_t size) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) store(to + i, Kind::widen(from + i));
    for (; i < size; i++) to[i] = Kind::one(from[i]);
}

template <typename Kind>
static inline void narrow_row(const float* from, typename Kind::Stored* to, int64_t size) {
    for (int64_t i = 0; i < size; i++) to[i] = Kind::narrow(from[i]);
}

// Lane `lane` of a step that adds up lanes of vectors: segments of `size` lanes hold half a segment of the first
// vector and half a one of the second, the lower halves or the upper ones.
static constexpr int lane_of(int lane, int size, bool upper) {
    const int segment = lane / size * size, place = lane % size, half = size / 2;
    return (place < half ? segment + place : WIDTH + segment + place - half) + (upper ? half : 0);
}

template <int SIZE, int... LANE>
static inline Floats halved(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(a, b, lane_of(LANE, SIZE, false)...) +
           __builtin_shufflevector(a, b, lane_of(LANE, SIZE, true)...);
}

// The first steps towards the sums over the lanes of WIDTH vectors, for every second one of them, `vectors`: what is left
// to do is `halved<2>` of the result for those with even numbers and of the one for those with odd numbers. That has the
// sum of vector i in lane i. Overwrites them.
template <int SIZE = WIDTH>
static inline Floats lane_pairs(Floats* vectors) {
    if constexpr (SIZE == 2) {
        return vectors[0];
    } else {
        for (int i = 0; i < SIZE / 4; i++)
            vectors[i] = halved<SIZE>(vectors[i], vectors[i + SIZE / 4], std::make_integer_sequence<int, WIDTH>());
        return lane_pairs<SIZE / 2>(vectors);
    }
}

static inline Floats lane_sums(Floats even, Floats odd) {
    return halved<2>(even, odd, std::make_integer_sequence<int, WIDTH>());
}

// Lane j of vector i becomes lane i of vector j, of WIDTH vectors.
template <int SIZE, int... LANE>
static inline void swap_halves(Floats& a, Floats& b, std::integer_sequence<int, LANE...>) {
    const Floats lower = __builtin_shufflevector(a, b, lane_of(LANE, SIZE, false)...);
    b = __builtin_shufflevector(a, b, lane_of(LANE, SIZE, true)...);
    a = lower;
}

template <int SIZE = WIDTH>
static inline void transpose(Floats* vectors) {
    for (int i = 0; i < WIDTH; i++)
        if (i % SIZE < SIZE / 2)
            swap_halves<SIZE>(vectors[i], vectors[i + SIZE / 2], std::make_integer_sequence<int, WIDTH>());
    if constexpr (SIZE > 2) transpose<SIZE / 2>(vectors);
}

static inline float lane_sum(Floats values) {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += values[i];
    return sum;
}

template <int STEP, int... LANE>
static inline Floats moved(Floats values, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(values, values, (LANE ^ STEP)...);
}

// The largest lane, in all lanes.
template <int STEP = WIDTH / 2>
static inline Floats lane_max(Floats values) {
    const Floats other = moved<STEP>(values, std::make_integer_sequence<int, WIDTH>());
    const Floats higher = values > other ? values : other;
    if constexpr (STEP == 1) return higher;
    else return lane_max<STEP / 2>(higher);
}

// e^x for x up to 88, 0 below -87; within 2 units in the last place.
//
// x = n ln 2 + r with |r| <= ln(2) / 2, and e^r by its series: the first term left out is below 6e-9.
static inline Floats exponential(Floats x) {
    const Floats turns = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    const Floats whole = turns - 12582912.0f;
    const Floats rest = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;  // ln 2 in two parts, the first short
    Floats sum = splat(1.0f / 5040);
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const Words exponent = ((Words)turns - 0x4b400000u + 127u) << 23;
    const Floats power = sum * (Floats)exponent;
    return x < splat(-87.0f) ? Floats{} : power;
}
