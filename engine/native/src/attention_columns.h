// Online softmax of sixteen columns at a time. A column is one query head of one row; what happens to it is the same
// sequence of operations on its lane whatever the other lanes hold, for decode rows and chunks alike.
//
// Tokens are taken in blocks of 32 that begin at multiples of 32. A block that lies wholly behind a column's row leaves the
// column's lane as it was, bit for bit: its weights are exactly 0 and its factor is exactly 1. So blocks may be skipped.
#pragma once

#include "attention_lanes.h"

namespace tandem {

constexpr int COLUMNS = LANES;
constexpr int BLOCK_TOKENS = 32;
constexpr int HALF_TOKENS = BLOCK_TOKENS / 2;  // never crosses the border of a page
constexpr float HIDDEN = -1e30f;               // the score of a token that a column does not see
constexpr float SLACK = 8.0f;                  // a peak moves only when it is passed by a factor of 2^8: rescaling becomes rare

#if TANDEM_BF16
using Probability = bf16;  // weights of a block: [column][token]
#else
using Probability = float;  // weights of a block: [token][column]
#endif

struct alignas(64) Columns {
    float peak[COLUMNS];     // the exponent (base 2) that weights are relative to
    float total[COLUMNS];    // sum of the weights
    int32_t last[COLUMNS];   // position of the last token that the column sees
    float factor[COLUMNS];   // what the sums have to be multiplied with after weigh() said so
    int32_t least_last;
    int32_t most_last;
    int32_t used;
};

static inline void begin_columns(Columns& columns) {
    store(columns.peak, splat(HIDDEN));
    store(columns.total, splat(0.0f));
    columns.least_last = columns.most_last = columns.last[0];
    for (int column = 1; column < COLUMNS; ++column) {
        if (columns.last[column] < columns.least_last) columns.least_last = columns.last[column];
        if (columns.last[column] > columns.most_last) columns.most_last = columns.last[column];
    }
}

static inline void hide_later(const Columns& columns, float* scores, int first_token) {
    i32x16 last = load(columns.last);
    for (int token = 0; token < BLOCK_TOKENS; ++token) {
        float* row = scores + token * COLUMNS;
        store(row, where_at_most(first_token + token, last, load(row), splat(HIDDEN)));
    }
}

static inline f32x16 highest(const float* scores) {
    f32x16 top[4] = {load(scores), load(scores + COLUMNS), load(scores + 2 * COLUMNS), load(scores + 3 * COLUMNS)};
    for (int token = 4; token < BLOCK_TOKENS; token += 4)
        for (int lane = 0; lane < 4; ++lane) top[lane] = maximum(top[lane], load(scores + (token + lane) * COLUMNS));
    return maximum(maximum(top[0], top[1]), maximum(top[2], top[3]));
}

// Moves the peaks that `best` passes by more than the slack. True: sums so far have to be multiplied with columns.factor.
static inline bool raise_peaks(Columns& columns, f32x16 best) {
    f32x16 peak = load(columns.peak), limit = peak + SLACK;
    if (!any_above(best, limit)) return false;
    f32x16 raised = where_above(best, limit, best, peak);
    f32x16 factor = power_of_two(peak - raised);
    store(columns.peak, raised);
    store(columns.factor, factor);
    store(columns.total, load(columns.total) * factor);
    return true;
}

#if TANDEM_BF16

// Two tokens' weights side by side, the first in the low half. They are not negative: half a step more and cut is rounding.
static inline __m512i pair_weights(f32x16 first, f32x16 second) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)first, half), 16);
    __m512i high = _mm512_add_epi32((__m512i)second, half);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, low, high);
}

template <class Between>
static inline void exponentials(Columns& columns, const float* scores, float scale, Probability* weights, Between between) {
    const f32x16 peak = load(columns.peak), factor = splat(scale);
    f32x16 totals[4] = {};
    __m512i pairs[LANES];
    for (int pair = 0; pair < LANES; ++pair) {
        const float* row = scores + 2 * pair * COLUMNS;
        f32x16 first = power_of_two((f32x16)_mm512_fmsub_ps((__m512)load(row), (__m512)factor, (__m512)peak));
        f32x16 second = power_of_two((f32x16)_mm512_fmsub_ps((__m512)load(row + COLUMNS), (__m512)factor, (__m512)peak));
        totals[2 * pair % 4] += first;
        totals[2 * pair % 4 + 1] += second;
        pairs[pair] = pair_weights(first, second);
        between();
    }
    store(columns.total, load(columns.total) + ((totals[0] + totals[1]) + (totals[2] + totals[3])));
    transpose(pairs);
    for (int column = 0; column < COLUMNS; ++column) _mm512_store_si512(weights + column * BLOCK_TOKENS, pairs[column]);
}

#else

template <class Between>
static inline void exponentials(Columns& columns, const float* scores, float scale, Probability* weights, Between) {
    const f32x16 low = splat(0.0f) - load(columns.peak), factor = splat(scale);
    f32x16 totals[4] = {};
    for (int token = 0; token < BLOCK_TOKENS; token += 4) {
        for (int lane = 0; lane < 4; ++lane) {
            f32x16 weight = power_of_two(multiply_add(load(scores + (token + lane) * COLUMNS), factor, low));
            totals[lane] += weight;
            store(weights + (token + lane) * COLUMNS, weight);
        }
    }
    store(columns.total, load(columns.total) + ((totals[0] + totals[1]) + (totals[2] + totals[3])));
}

#endif

// Scores [token][column] of a block become weights. True: the sums of the blocks before have to be rescaled.
// `between` is called now and then, for work that goes well with arithmetic.
template <class Between>
static inline bool weigh(Columns& columns, float* scores, int first_token, float scale, Probability* weights, Between between) {
    if (first_token + BLOCK_TOKENS - 1 > columns.least_last) hide_later(columns, scores, first_token);
    bool raised = raise_peaks(columns, highest(scores) * scale);
    exponentials(columns, scores, scale, weights, between);
    return raised;
}

static inline void rescale(const Columns& columns, float* sums, int head_dim) {
    for (int column = 0; column < columns.used; ++column) {
        if (columns.factor[column] == 1.0f) continue;
        f32x16 factor = splat(columns.factor[column]);
        float* row = sums + column * head_dim;
        for (int place = 0; place < head_dim; place += LANES) store(row + place, load(row + place) * factor);
    }
}

}  // namespace tandem
