// Products with AVX2. Every output has one chain of fused float32 sums over the inputs in order, whatever the number of rows:
// few rows widen the weights as they meet them, more rows share weights that were widened once.
#if TANDEM_AVX2

#include <algorithm>

#include "claims.h"
#include "linear_finish.h"

namespace tandem {
namespace {

constexpr int ROWS_AT_ONCE = 6;   // two registers of sums each, which leaves four
constexpr int FEW_ROWS = 2;       // so many do not pay for widening
constexpr int ROW_GROUP = 192;    // rows whose sums are kept while a panel passes by
constexpr int WIDE_INPUTS = 128;  // of one panel, widened: half of the first-level cache
constexpr int PAIR_ELEMENTS = 2 * LANES;
constexpr int TILE_ELEMENTS = LANES * PAIR_ELEMENTS;
constexpr int AHEAD_ELEMENTS = 4096;
constexpr int BLOCK_PANELS = 8;  // that are taken at a time

// Of two neighbouring values, in every lane.
static inline __m256i pair_of(const bf16* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return _mm256_set1_epi32(both);
}

static inline __m256 first_of(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }

static inline __m256 second_of(__m256i pair) {
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

// Two inputs of eight outputs as floats.
struct Pair {
    __m256 even, odd;
};

static inline Pair load_pair(const bf16* from) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {first_of(both), second_of(both)};
}

static inline Pair load_pair(const int8_t* from) {
    const __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 8))};
}

// Element: of the panels, bf16 or int8_t.

// The sums of a whole panel, from the weights as they are. sums: [half panel][row][16], row_sums rows apart.
template <int ROWS, typename Element>
void multiply_narrow(const Element* weights, const bf16* x, int64_t x_stride, int inputs, float* first_half, float* second_half) {
    __m256 sums[ROWS][4];
    for (auto& row : sums)
        for (__m256& each : row) each = _mm256_setzero_ps();
    for (int input = 0; input < inputs; input += INPUT_BLOCK, weights += 2 * TILE_ELEMENTS) {
        for (int pair = 0; pair < INPUT_BLOCK / 2; ++pair) {
            const Element* from = weights + pair * PAIR_ELEMENTS;
            __builtin_prefetch(from + AHEAD_ELEMENTS);
            __builtin_prefetch(from + TILE_ELEMENTS + AHEAD_ELEMENTS);
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                const Pair both = load_pair(from + part / 2 * TILE_ELEMENTS + part % 2 * LANES);
#pragma GCC unroll 2
                for (int row = 0; row < ROWS; ++row) {
                    const __m256i values = pair_of(x + row * x_stride + input + 2 * pair);
                    sums[row][part] = _mm256_fmadd_ps(both.even, first_of(values), sums[row][part]);
                    sums[row][part] = _mm256_fmadd_ps(both.odd, second_of(values), sums[row][part]);
                }
            }
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        store(first_half + row * LANES, {sums[row][0], sums[row][1]});
        store(second_half + row * LANES, {sums[row][2], sums[row][3]});
    }
}

// `inputs` inputs of a half panel as floats, [input][16].
template <typename Element>
void widen_half_panel(const Element* weights, int inputs, float* wide) {
    for (int input = 0; input < inputs; input += INPUT_BLOCK, weights += 2 * TILE_ELEMENTS)
        for (int pair = 0; pair < INPUT_BLOCK / 2; ++pair, wide += 2 * LANES) {
            const Element* from = weights + pair * PAIR_ELEMENTS;
            __builtin_prefetch(from + AHEAD_ELEMENTS);
            const Pair low = load_pair(from), high = load_pair(from + LANES);
            store(wide, {low.even, high.even});
            store(wide + LANES, {low.odd, high.odd});
        }
}

// sums [row][16] += x [row][inputs] * wide [inputs][16]
template <int ROWS>
void multiply_wide(const float* wide, const bf16* x, int64_t x_stride, int inputs, float* sums) {
    __m256 low[ROWS], high[ROWS];
    for (int row = 0; row < ROWS; ++row) {
        low[row] = _mm256_loadu_ps(sums + row * LANES);
        high[row] = _mm256_loadu_ps(sums + row * LANES + LANES / 2);
    }
    for (int input = 0; input < inputs; input += 2, wide += 2 * LANES) {
        f32x16 even = load(wide), odd = load(wide + LANES);
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            const __m256 value = first_of(pair_of(x + row * x_stride + input));
            low[row] = _mm256_fmadd_ps(even.low, value, low[row]);
            high[row] = _mm256_fmadd_ps(even.high, value, high[row]);
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            const __m256 value = second_of(pair_of(x + row * x_stride + input));
            low[row] = _mm256_fmadd_ps(odd.low, value, low[row]);
            high[row] = _mm256_fmadd_ps(odd.high, value, high[row]);
        }
    }
    for (int row = 0; row < ROWS; ++row) store(sums + row * LANES, {low[row], high[row]});
}

template <int ROWS>
void multiply_wide_rest(const float* wide, const bf16* x, int64_t x_stride, int inputs, int rows, float* sums) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return multiply_wide<ROWS>(wide, x, x_stride, inputs, sums);
        multiply_wide_rest<ROWS - 1>(wide, x, x_stride, inputs, rows, sums);
    }
}

// Rows in shares of nearly one size, since a lone row takes as long as two.
void multiply_rows(const float* wide, const bf16* x, int64_t x_stride, int inputs, int rows, float* sums) {
    const int shares = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int each = 0; each < shares; ++each) {
        const Share share = share_of(rows, each, shares);
        multiply_wide_rest<ROWS_AT_ONCE>(wide, x + share.begin * x_stride, x_stride, inputs, share.end - share.begin,
                                         sums + share.begin * LANES);
    }
}

template <typename Element>
void multiply_group(const Weight& weight, const Product& product, int panel, int row, int rows) {
    alignas(64) float wide[WIDE_INPUTS * LANES];
    alignas(64) float sums[2][ROW_GROUP * LANES];
    const Element* weights = weight.panel<Element>(panel);
    const bf16* x = product.x + row * product.x_stride;
    std::memset(sums[0], 0, static_cast<size_t>(rows) * LANES * sizeof(float));
    std::memset(sums[1], 0, static_cast<size_t>(rows) * LANES * sizeof(float));
    for (int input = 0; input < weight.inputs; input += WIDE_INPUTS) {
        const int inputs = std::min(WIDE_INPUTS, weight.inputs - input);
        for (int half = 0; half < 2; ++half) {
            widen_half_panel(weights + static_cast<int64_t>(input) * PANEL + half * TILE_ELEMENTS, inputs, wide);
            multiply_rows(wide, x + input, product.x_stride, inputs, rows, sums[half]);
        }
    }
    finish_rows(weight, product, panel, row, rows, sums[0], sums[1]);
}

template <int ROWS, typename Element>
void multiply_few(const Weight& weight, const Product& product, int panel) {
    float halves[2][ROWS * LANES];
    multiply_narrow<ROWS>(weight.panel<Element>(panel), product.x, product.x_stride, weight.inputs, halves[0], halves[1]);
    finish_rows(weight, product, panel, 0, ROWS, halves[0], halves[1]);
}

template <typename Element>
void take_panels(const Weight& weight, const Product& product, Share share) {
    static_assert(FEW_ROWS == 2, "one function for each");
    if (product.rows <= FEW_ROWS) {
        for (int panel = share.begin; panel < share.end; ++panel)
            (product.rows == 1 ? multiply_few<1, Element> : multiply_few<2, Element>)(weight, product, panel);
        return;
    }
    const int groups = (product.rows + ROW_GROUP - 1) / ROW_GROUP;
    for (int group = 0; group < groups; ++group) {
        const Share rows = share_of(product.rows, group, groups);
        for (int panel = share.begin; panel < share.end; ++panel)
            multiply_group<Element>(weight, product, panel, rows.begin, rows.end - rows.begin);
    }
}

}  // namespace

void linear_section(const Weight& weight, const Product& product, Count& taken, int parts) {
    if (product.rows == 0) return;
    Claims claims(taken, panels_of(weight, product.finish), BLOCK_PANELS, parts);
    for (Share share = claims.next(); share.begin < share.end; share = claims.next())
        (weight.scales ? take_panels<int8_t> : take_panels<bf16>)(weight, product, share);
}

}  // namespace tandem

#endif
