// Products without a matrix unit. Every output has one chain of float32 sums over the inputs in order, whatever the number
// of rows that are computed side by side.
#if !TANDEM_AMX && !TANDEM_AVX2 && (TANDEM_BF16 || !TANDEM_AVX512)

#include "claims.h"
#include "linear_finish.h"
#if !TANDEM_BF16
#include "pairs.h"
#endif

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
constexpr int WIDE_ELEMENTS = 128 * 1024;  // of one panel, widened: a part of the second-level cache

// Two inputs of sixteen outputs as they are multiplied: pairs of bfloat16, or both as floats.
#if TANDEM_BF16
using Pair = __m512bh;

static inline Pair load_pair(const bf16* weights) { return (__m512bh)_mm512_loadu_si512(weights); }

static inline __m512 floats(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

static inline Pair load_pair(const int8_t* weights) { return _mm512_cvtne2ps_pbh(floats(weights + LANES), floats(weights)); }

static inline void store_pair(bf16* to, Pair pair) { _mm512_storeu_si512(to, (__m512i)pair); }

// sums += x[0] * weights[.., 0] + x[1] * weights[.., 1] for sixteen outputs.
static inline f32x16 add_pair(f32x16 sums, const bf16* x, Pair weights) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, weights, (__m512bh)_mm512_set1_epi32(pair));
}
#else
// The lower half of such a float is zero.
static inline void store_pair(bf16* to, const Pair& pair) {
    const u32x16 both = (u32x16)pair.even >> 16 | (u32x16)pair.odd;
    std::memcpy(to, &both, sizeof both);
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

// Element: of the panel that `weights` is, bf16 or int8_t.
template <typename Element, int ROWS>
void multiply(const Weight& weight, const Element* weights, const Product& product, int panel, int row) {
    f32x16 sums[ROWS][2] = {};
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
void multiply_rest(const Weight& weight, const Element* weights, const Product& product, int panel, int row) {
    if constexpr (ROWS > 0) {
        if (product.rows - row == ROWS) return multiply<Element, ROWS>(weight, weights, product, panel, row);
        multiply_rest<Element, ROWS - 1>(weight, weights, product, panel, row);
    }
}

template <typename Element>
void multiply_all(const Weight& weight, const Element* weights, const Product& product, int panel) {
    int row = 0;
    for (; row + ROWS_AT_ONCE <= product.rows; row += ROWS_AT_ONCE)
        multiply<Element, ROWS_AT_ONCE>(weight, weights, product, panel, row);
    multiply_rest<Element, ROWS_AT_ONCE - 1>(weight, weights, product, panel, row);
}

void take_panels(const Weight& weight, const Product& product, Share share) {
    for (int panel = share.begin; panel < share.end; ++panel)
        multiply_all(weight, weight.panel<bf16>(panel), product, panel);
}

// Rows that are computed in several turns share a panel that was widened once, where it is not too long for that.
void take_small_panels(const Weight& weight, const Product& product, Share share) {
    alignas(64) bf16 wide[WIDE_ELEMENTS];
    const int elements = PANEL * weight.inputs;
    const bool shared = product.rows > ROWS_AT_ONCE && elements <= WIDE_ELEMENTS;
    for (int panel = share.begin; panel < share.end; ++panel) {
        const int8_t* stored = weight.panel<int8_t>(panel);
        if (!shared) {
            multiply_all(weight, stored, product, panel);
            continue;
        }
        for (int at = 0; at < elements; at += PAIR_ELEMENTS) {
            __builtin_prefetch(stored + at + PREFETCH_ELEMENTS);
            store_pair(wide + at, load_pair(stored + at));
        }
        multiply_all(weight, static_cast<const bf16*>(wide), product, panel);
    }
}

}  // namespace

void linear_section(const Weight& weight, const Product& product, Count& taken, int parts) {
    Claims claims(taken, panels_of(weight, product.finish), BLOCK_PANELS, parts);
    for (Share share = claims.next(); share.begin < share.end; share = claims.next())
        (weight.scales ? take_small_panels : take_panels)(weight, product, share);
}

}  // namespace tandem

#endif
