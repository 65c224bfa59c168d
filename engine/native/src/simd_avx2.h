// The sixteen lanes of simd.h as two registers of AVX2. A struct of our own: of 64-byte vectors the compiler makes memory.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace tandem {

constexpr int LANES = 16;

struct f32x16 {
    __m256 low, high;
};

struct i32x16 {
    __m256i low, high;
};

using u16x16 = __m256i;

static inline f32x16 splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline f32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + LANES / 2)}; }

static inline void store(float* to, f32x16 value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + LANES / 2, value.high);
}

static inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
static inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
static inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
static inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
static inline f32x16 operator+(f32x16 a, float b) { return a + splat(b); }
static inline f32x16 operator-(f32x16 a, float b) { return a - splat(b); }
static inline f32x16 operator*(f32x16 a, float b) { return a * splat(b); }
static inline f32x16 operator+(float a, f32x16 b) { return splat(a) + b; }
static inline f32x16 operator/(float a, f32x16 b) { return splat(a) / b; }
static inline f32x16 operator-(f32x16 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.low, sign), _mm256_xor_ps(a.high, sign)};
}
static inline f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// Of two numbers that do not compare, the second.
static inline f32x16 maximum(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
static inline f32x16 minimum(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

static inline f32x16 where_above(f32x16 left, f32x16 right, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(left.low, right.low, _CMP_GT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(left.high, right.high, _CMP_GT_OQ))};
}

static inline bool any_above(f32x16 left, f32x16 right) {
    const __m256 low = _mm256_cmp_ps(left.low, right.low, _CMP_GT_OQ), high = _mm256_cmp_ps(left.high, right.high, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}

static inline i32x16 load(const int32_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + LANES / 2))};
}

static inline f32x16 where_at_most(int32_t left, i32x16 right, f32x16 yes, f32x16 no) {
    const __m256i value = _mm256_set1_epi32(left);
    return {_mm256_blendv_ps(yes.low, no.low, _mm256_castsi256_ps(_mm256_cmpgt_epi32(value, right.low))),
            _mm256_blendv_ps(yes.high, no.high, _mm256_castsi256_ps(_mm256_cmpgt_epi32(value, right.high)))};
}

static inline __m256 widen_half(__m128i value) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(value), 16));
}

static inline f32x16 widen(u16x16 value) {
    return {widen_half(_mm256_castsi256_si128(value)), widen_half(_mm256_extracti128_si256(value, 1))};
}

static inline u16x16 load_u16(const bf16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
static inline void store_u16(bf16* to, u16x16 value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }

// Bits of bfloat16 in words of 32 bits: to nearest, ties to even; a NaN stays one.
static inline __m256i narrow_half(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}

static inline u16x16 narrow(f32x16 value) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow_half(value.low), narrow_half(value.high)), 0xd8);
}

// The exponents of floats, from whole numbers between -127 and 127; -127 makes a 0.
static inline __m256 exponent_half(__m256i whole) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
}

static inline f32x16 power_of_whole(f32x16 whole) {
    return {exponent_half(_mm256_cvttps_epi32(whole.low)), exponent_half(_mm256_cvttps_epi32(whole.high))};
}

// In two steps: 2^128 itself is no float32.
static inline __m256 scale_half(__m256 value, __m256 turns) {
    const __m256i exponent = _mm256_cvttps_epi32(turns), half = _mm256_srai_epi32(exponent, 1);
    return _mm256_mul_ps(_mm256_mul_ps(value, exponent_half(half)), exponent_half(_mm256_sub_epi32(exponent, half)));
}

static inline f32x16 scale_by_power(f32x16 value, f32x16 turns) {
    return {scale_half(value.low, turns.low), scale_half(value.high, turns.high)};
}

}  // namespace tandem
