// Two inputs of sixteen outputs as they lie in a panel, made floats.
#pragma once

#include "simd.h"

namespace tandem {

struct Pair {
    f32x16 even, odd;
};

static inline Pair load_pair(const bf16* weights) {
    u32x16 both;
    std::memcpy(&both, weights, sizeof both);
    return {(f32x16)(both << 16), (f32x16)(both & 0xffff0000u)};
}

static inline Pair load_pair(const int8_t* weights) {
    typedef int16_t i16x16 __attribute__((vector_size(32)));
    i16x16 narrow;
    std::memcpy(&narrow, weights, sizeof narrow);
    const i32x16 both = __builtin_convertvector(narrow, i32x16);
    const i32x16 even = (i32x16)((u32x16)both << 24) >> 24, odd = both >> 8;
    return {__builtin_convertvector(even, f32x16), __builtin_convertvector(odd, f32x16)};
}

}  // namespace tandem
