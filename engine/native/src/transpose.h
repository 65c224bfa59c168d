// A matrix of 16 x 16 words of 32 bits, in registers.
#pragma once

#include "simd.h"

namespace tandem {

#if TANDEM_AVX512

// Rows become columns in a matrix of 16 x 16 words of 32 bits.
static inline void transpose(__m512i (&rows)[LANES]) {
    __m512i pairs[LANES], fours[LANES];
    for (int row = 0; row < LANES; row += 2) {
        pairs[row] = _mm512_unpacklo_epi32(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm512_unpackhi_epi32(rows[row], rows[row + 1]);
    }
    for (int row = 0; row < LANES; row += 4) {
        fours[row] = _mm512_unpacklo_epi64(pairs[row], pairs[row + 2]);
        fours[row + 1] = _mm512_unpackhi_epi64(pairs[row], pairs[row + 2]);
        fours[row + 2] = _mm512_unpacklo_epi64(pairs[row + 1], pairs[row + 3]);
        fours[row + 3] = _mm512_unpackhi_epi64(pairs[row + 1], pairs[row + 3]);
    }
    for (int column = 0; column < 4; ++column) {
        __m512i even_low = _mm512_shuffle_i32x4(fours[column], fours[4 + column], 0x88);
        __m512i odd_low = _mm512_shuffle_i32x4(fours[column], fours[4 + column], 0xdd);
        __m512i even_high = _mm512_shuffle_i32x4(fours[8 + column], fours[12 + column], 0x88);
        __m512i odd_high = _mm512_shuffle_i32x4(fours[8 + column], fours[12 + column], 0xdd);
        rows[column] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        rows[4 + column] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        rows[8 + column] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        rows[12 + column] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
}

#endif

}  // namespace tandem
