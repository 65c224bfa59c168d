// Sixteen float32 lanes, and the few operations on them that the kernels share. With AVX-512 and AVX2 they are their
// instructions, else the compiler's vectors; the order of operations is the same for every caller, which batch invariance
// rests on.
#pragma once

#include <cstdint>
#include <cstring>

#if TANDEM_AVX512
#include <immintrin.h>
#endif

#include "kernels.h"

#if TANDEM_AVX2
#include "simd_avx2.h"
#endif

namespace tandem {

#if !TANDEM_AVX2

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 splat(float value) { return value - f32x16{}; }  // 0 is not added: that turns -0 to 0, at a cost

static inline f32x16 load(const float* from) {
    f32x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(float* to, f32x16 value) { std::memcpy(to, &value, sizeof value); }

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if TANDEM_AVX512
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// Of two numbers that do not compare, the second.
static inline f32x16 maximum(f32x16 a, f32x16 b) {
#if TANDEM_AVX512
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline f32x16 minimum(f32x16 a, f32x16 b) {
#if TANDEM_AVX512
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

static inline f32x16 widen(u16x16 value) { return (f32x16)(__builtin_convertvector(value, u32x16) << 16); }

static inline u16x16 load_u16(const bf16* from) {
    u16x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

static inline void store_u16(bf16* to, u16x16 value) { std::memcpy(to, &value, sizeof value); }

// To nearest, ties to even; a NaN stays one.
static inline u16x16 narrow(f32x16 value) {
#if TANDEM_BF16
    return (u16x16)_mm512_cvtneps_pbh((__m512)value);
#else
    u32x16 bits = (u32x16)value;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 quiet = (bits >> 16) | 0x40u;
    u32x16 is_nan = (u32x16)(value != value);
    return __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), u16x16);
#endif
}

// 2^turns * value, for a whole number of turns between -150 and 150.
static inline f32x16 scale_by_power(f32x16 value, f32x16 turns) {
#if TANDEM_AVX512
    return (f32x16)_mm512_scalef_ps((__m512)value, (__m512)turns);
#else
    i32x16 exponent = __builtin_convertvector(turns, i32x16);
    i32x16 half = exponent >> 1;  // in two steps: 2^128 itself is no float32
    return value * (f32x16)((half + 127) << 23) * (f32x16)((exponent - half + 127) << 23);
#endif
}

#endif  // !TANDEM_AVX2

static inline f32x16 load_bf16(const bf16* from) { return widen(load_u16(from)); }

static inline void store_bf16(bf16* to, f32x16 value) { store_u16(to, narrow(value)); }

// Only the first `count` of sixteen lanes, for the last columns of a row; the other lanes are zero.
static inline f32x16 load_bf16_part(const bf16* from, int count) {
    u16x16 value = {};
    std::memcpy(&value, from, static_cast<size_t>(count) * sizeof(bf16));
    return widen(value);
}

static inline void store_bf16_part(bf16* to, f32x16 value, int count) {
    u16x16 narrowed = narrow(value);
    std::memcpy(to, &narrowed, static_cast<size_t>(count) * sizeof(bf16));
}

// The sum of the lanes, by halves: always the same order.
static inline float sum_lanes(f32x16 value) {
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// e to the power of each lane, to about 1 ulp: 0 far below, infinity far above, a NaN for a NaN.
static inline f32x16 exponential(f32x16 value) {
    f32x16 inside = minimum(splat(104.0f), maximum(splat(-104.0f), value));
    f32x16 shifted = multiply_add(inside, splat(1.44269504f), splat(12582912.0f));  // adding 1.5 * 2^23 rounds
    f32x16 turns = shifted - splat(12582912.0f);
    f32x16 rest = multiply_add(turns, splat(-0.693359375f), inside);
    rest = multiply_add(turns, splat(2.12194440e-4f), rest);
    f32x16 sum = splat(1.9875691500e-4f);
    sum = multiply_add(sum, rest, splat(1.3981999507e-3f));
    sum = multiply_add(sum, rest, splat(8.3334519073e-3f));
    sum = multiply_add(sum, rest, splat(4.1665795894e-2f));
    sum = multiply_add(sum, rest, splat(1.6666665459e-1f));
    sum = multiply_add(sum, rest, splat(5.0000001201e-1f));
    sum = multiply_add(sum, rest * rest, rest) + 1.0f;
    return scale_by_power(sum, turns);
}

// 1 / (1 + e^-value)
static inline f32x16 sigmoid(f32x16 value) {
#if TANDEM_AVX512
    // An estimate of the quotient and one step of Newton's: a division takes four times as long. The bound keeps it finite.
    f32x16 divisor = 1.0f + exponential(minimum(splat(87.0f), -value));
    f32x16 estimate = (f32x16)_mm512_rcp14_ps((__m512)divisor);
    return estimate * multiply_add(-divisor, estimate, splat(2.0f));
#else
    return 1.0f / (1.0f + exponential(-value));
#endif
}

}  // namespace tandem
