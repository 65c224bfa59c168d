// Vector steps that only attention needs, on the sixteen lanes of simd.h.
#pragma once

#include "transpose.h"

namespace tandem {

#if !TANDEM_AVX2

static inline i32x16 load(const int32_t* from) {
    i32x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Lanes of `yes` where `left` <= `right`, else of `no`.
static inline f32x16 where_at_most(int32_t left, i32x16 right, f32x16 yes, f32x16 no) {
#if TANDEM_AVX512
    return (f32x16)_mm512_mask_mov_ps((__m512)no, _mm512_cmple_epi32_mask(_mm512_set1_epi32(left), (__m512i)right), (__m512)yes);
#else
    return (i32x16{} + left) <= right ? yes : no;
#endif
}

// Lanes of `yes` where `left` > `right`, else of `no`.
static inline f32x16 where_above(f32x16 left, f32x16 right, f32x16 yes, f32x16 no) { return left > right ? yes : no; }

static inline bool any_above(f32x16 left, f32x16 right) {
#if TANDEM_AVX512
    return _mm512_cmp_ps_mask((__m512)left, (__m512)right, _CMP_GT_OQ) != 0;
#else
    i32x16 above = left > right;
    int32_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= above[lane];
    return found != 0;
#endif
}

// 2 to the power of whole numbers between -127 and 127; -127 makes a 0.
static inline f32x16 power_of_whole(f32x16 whole) { return (f32x16)((__builtin_convertvector(whole, i32x16) + 127) << 23); }

#endif  // !TANDEM_AVX2

// 2 to the power of each lane, to 2.1 ulp for results that are normal numbers; exactly 0 far below. Lanes are finite, at most
// 126. The polynomials are minimax fits of degree 5 to 2^x with constant 1, on [0, 1] and on [-0.5, 0.5], for the error in ulp.
static inline f32x16 power_of_two(f32x16 value) {
#if TANDEM_AVX512
    f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    f32x16 sum = splat(0.0018852974753826857f);
    sum = multiply_add(sum, rest, splat(0.008973378688097f));
    sum = multiply_add(sum, rest, splat(0.05583592504262924f));
    sum = multiply_add(sum, rest, splat(0.24015280604362488f));
    sum = multiply_add(sum, rest, splat(0.6931524872779846f));
    sum = multiply_add(sum, rest, splat(1.0f));
    return (f32x16)_mm512_scalef_ps((__m512)sum, (__m512)value);  // takes the floor of the exponent itself
#else
    f32x16 whole = (value + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 leaves no bits behind the point
    f32x16 rest = value - whole;
    f32x16 sum = splat(0.0013225707225501537f);
    sum = multiply_add(sum, rest, splat(0.009671762585639954f));
    sum = multiply_add(sum, rest, splat(0.05550891533493996f));
    sum = multiply_add(sum, rest, splat(0.24022236466407776f));
    sum = multiply_add(sum, rest, splat(0.693146824836731f));
    sum = multiply_add(sum, rest, splat(1.0f));
    whole = maximum(whole, splat(-127.0f));  // the exponent field 0: a factor of 0
    return sum * power_of_whole(whole);
#endif
}

}  // namespace tandem
