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

// sums += x[0] * weights[.., 0] + x[1] * weights[.., 1] for sixteen outputs.
#if TANDEM_BF16
static inline f32x16 add_pair(f32x16 sums, const bf16* x, const bf16* weights) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_loadu_si512(weights), (__m512bh)_mm512_set1_epi32(pair));
}
#else
static inline float widen_one(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline f32x16 add_pair(f32x16 sums, const bf16* x, const bf16* weights) {
    u32x16 pairs;
    std::memcpy(&pairs, weights, sizeof pairs);
    sums = multiply_add((f32x16)(pairs << 16), splat(widen_one(x[0])), sums);
    return multiply_add((f32x16)(pairs & 0xffff0000u), splat(widen_one(x[1])), sums);
}
#endif

template <int ROWS>
void multiply(const Weight& weight, const Product& product, int panel, int row) {
    f32x16 sums[ROWS][2] = {};
    const bf16* weights = weight.panels + static_cast<int64_t>(panel) * PANEL * weight.inputs;
    const bf16* x = product.x + row * product.x_stride;
    for (int input = 0; input < weight.inputs; input += INPUT_BLOCK, weights += 2 * TILE_ELEMENTS) {
        for (int pair = 0; pair < INPUT_BLOCK / 2; ++pair) {
            const bf16* first = weights + pair * PAIR_ELEMENTS;
            __builtin_prefetch(first + PREFETCH_ELEMENTS);
            __builtin_prefetch(first + TILE_ELEMENTS + PREFETCH_ELEMENTS);
            for (int each = 0; each < ROWS; ++each) {
                const bf16* values = x + each * product.x_stride + input + 2 * pair;
                sums[each][0] = add_pair(sums[each][0], values, first);
                sums[each][1] = add_pair(sums[each][1], values, first + TILE_ELEMENTS);
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

template <int ROWS>
void multiply_rest(const Weight& weight, const Product& product, int panel, int row) {
    if constexpr (ROWS > 0) {
        if (product.rows - row == ROWS) return multiply<ROWS>(weight, product, panel, row);
        multiply_rest<ROWS - 1>(weight, product, panel, row);
    }
}

}  // namespace

void linear(const Weight& weight, const Product& product, Turn* turn, int parts) {
    Claims claims(turn, panels_of(weight, product.finish), BLOCK_PANELS, parts);
    for (Share share = claims.next(); share.begin < share.end; share = claims.next()) {
        for (int panel = share.begin; panel < share.end; ++panel) {
            int row = 0;
            for (; row + ROWS_AT_ONCE <= product.rows; row += ROWS_AT_ONCE) multiply<ROWS_AT_ONCE>(weight, product, panel, row);
            multiply_rest<ROWS_AT_ONCE - 1>(weight, product, panel, row);
        }
    }
}

}  // namespace tandem

#endif
