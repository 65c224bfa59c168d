// Products without a matrix unit. Every output has one chain of float32 sums over the inputs in order, whatever the number
// of rows that are computed side by side.
#if !TANDEM_AMX && !TANDEM_AVX2

#include "claims.h"
#include "linear_finish.h"

namespace tandem {
namespace {

#if TANDEM_AVX512
constexpr int ROWS_AT_ONCE = 8;
#else
constexpr int ROWS_AT_ONCE = 2;
#endif
constexpr int PAIR_ELEMENTS = 2 * LANES;
constexpr int TILE_ELEMENTS = LANES * PAIR_ELEMENTS;
constexpr int PREFETCH_ELEMENTS = 4096;
constexpr int BLOCK_PANELS = 8;  // that are taken at a time

// Two inputs of sixteen outputs as they are multiplied: pairs of bfloat16, or both as floats.
#if TANDEM_BF16
using Pair = __m512bh;

static inline Pair load_pair(const bf16* weights) { return (__m512bh)_mm512_loadu_si512(weights); }

static inline Pair load_pair(const int8_t* weights) {
    const __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights)));
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24), odd = _mm512_srai_epi32(both, 8);
    // The lower half of such a float is zero.
    const __m512i low = _mm512_srli_epi32((__m512i)_mm512_cvtepi32_ps(even), 16);
    return (__m512bh)_mm512_or_si512(low, (__m512i)_mm512_cvtepi32_ps(odd));
}

// sums += x[0] * weights[.., 0] + x[1] * weights[.., 1] for sixteen outputs.
static inline f32x16 add_pair(f32x16 sums, const bf16* x, Pair weights) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, weights, (__m512bh)_mm512_set1_epi32(pair));
}
#else
struct Pair {
    f32x16 even, odd;
};

static inline Pair load_pair(const bf16* weights) {
    u32x16 pairs;
    std::memcpy(&pairs, weights, sizeof pairs);
    return {(f32x16)(pairs << 16), (f32x16)(pairs & 0xffff0000u)};
}

static inline Pair load_pair(const int8_t* weights) {
    typedef int16_t i16x16 __attribute__((vector_size(32)));
    i16x16 narrow;
    std::memcpy(&narrow, weights, sizeof narrow);
    const i32x16 both = __builtin_convertvector(narrow, i32x16);
    const i32x16 even = (i32x16)((u32x16)both << 24) >> 24, odd = both >> 8;
    return {__builtin_convertvector(even, f32x16), __builtin_convertvector(odd, f32x16)};
}

static inline float widen_one(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// sums += x[0] * weights[.., 0] + x[1] * weights[.., 1] for sixteen outputs.
static inline f32x16 add_pair(f32x16 sums, const bf16* x, const Pair& weights) {
    sums = multiply_add(weights.even, splat(widen_one(x[0])), sums);
    return multiply_add(weights.odd, splat(widen_one(x[1])), sums);
}
#endif

// Element: of the panels, bf16 or int8_t.
template <typename Element, int ROWS>
void multiply(const Weight& weight, const Product& product, int panel, int row) {
    f32x16 sums[ROWS][2] = {};
    const Element* weights = weight.panel<Element>(panel);
    const bf16* x = product.x + row * product.x_stride;
    for (int input = 0; input < weight.inputs; input += INPUT_BLOCK, weights += 2 * TILE_ELEMENTS) {
        for (int pair = 0; pair < INPUT_BLOCK / 2; ++pair) {
            const Element* from = weights + pair * PAIR_ELEMENTS;
            __builtin_prefetch(from + PREFETCH_ELEMENTS);
            __builtin_prefetch(from + TILE_ELEMENTS + PREFETCH_ELEMENTS);
            const Pair first = load_pair(from), second = load_pair(from + TILE_ELEMENTS);
            for (int each = 0; each < ROWS; ++each) {
                const bf16* values = x + each * product.x_stride + input + 2 * pair;
                sums[each][0] = add_pair(sums[each][0], values, first);
                sums[each][1] = add_pair(sums[each][1], values, second);
            }
        }
    }
    float halves[2][ROWS][LANES];
    for (int each = 0; each < ROWS; ++each) {
        store(halves[0][each], sums[each][0]);
        store(halves[1][each], sums[each][1]);
    }
    finish_rows(weight, product, panel, row, ROWS, halves[0][0], halves[1][0]);
}

template <typename Element, int ROWS>
void multiply_rest(const Weight& weight, const Product& product, int panel, int row) {
    if constexpr (ROWS > 0) {
        if (product.rows - row == ROWS) return multiply<Element, ROWS>(weight, product, panel, row);
        multiply_rest<Element, ROWS - 1>(weight, product, panel, row);
    }
}

template <typename Element>
void take_panels(const Weight& weight, const Product& product, Share share) {
    for (int panel = share.begin; panel < share.end; ++panel) {
        int row = 0;
        for (; row + ROWS_AT_ONCE <= product.rows; row += ROWS_AT_ONCE)
            multiply<Element, ROWS_AT_ONCE>(weight, product, panel, row);
        multiply_rest<Element, ROWS_AT_ONCE - 1>(weight, product, panel, row);
    }
}

}  // namespace

void linear(const Weight& weight, const Product& product, Turn* turn, int parts) {
    Claims claims(turn, panels_of(weight, product.finish), BLOCK_PANELS, parts);
    for (Share share = claims.next(); share.begin < share.end; share = claims.next())
        (weight.scales ? take_panels<int8_t> : take_panels<bf16>)(weight, product, share);
}

}  // namespace tandem

#endif
