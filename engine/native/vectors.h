// Vectors of float32 as wide as this machine's, and how stored numbers are widened to them.
//
// They are the compiler's (GCC, "Using Vector Instructions through Built-in Functions"): sources are compiled where
// they run.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));

static inline Floats load(const float* from) {
    Floats to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

static inline void store(float* to, Floats from) { std::memcpy(to, &from, sizeof from); }

static inline Floats splat(float value) { return value - Floats{}; }
