// The two products of attention for one block of tokens and sixteen columns: scores = keys x queries, and
// sums += weights x values. Every element of a result is one chain of additions in the order of features or tokens.
#pragma once

#include "attention_packed.h"

#if TANDEM_AMX
#include "attention_amx.h"
#else

namespace tandem {

// As many lanes as the CPU has in one register, and as many sums as stay in registers.
#if TANDEM_AVX512
typedef f32x16 Part;
constexpr int SCORE_ROWS = 16, SCORE_PARTS = 1, MIX_COLUMNS = 4, MIX_LINES = 4;
#elif TANDEM_AVX2
typedef float Part __attribute__((vector_size(32)));
constexpr int SCORE_ROWS = 8, SCORE_PARTS = 1, MIX_COLUMNS = 2, MIX_LINES = 4;
#else
typedef float Part __attribute__((vector_size(16)));
constexpr int SCORE_ROWS = 4, SCORE_PARTS = 2, MIX_COLUMNS = 2, MIX_LINES = 4;
#endif
constexpr int PART_LANES = sizeof(Part) / sizeof(float);
static_assert(LINE % (MIX_LINES * PART_LANES) == 0 || TANDEM_AVX512, "a line is a whole number of steps of mix");

static inline Part add_product(Part left, Part right, Part sum) {
#if TANDEM_AVX512
    return multiply_add(left, right, sum);
#elif TANDEM_AVX2
    return (Part)_mm256_fmadd_ps((__m256)left, (__m256)right, (__m256)sum);
#else
    return left * right + sum;
#endif
}

struct Products {
    void shape(int) {}
};

#if TANDEM_BF16

static inline __m512i pair_of(const bf16* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof both);
    return _mm512_set1_epi32(both);
}

static inline f32x16 add_products(f32x16 sum, __m512i left, __m512i right) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

static inline void score_rows(const Packed* keys, const Packed* queries, int, int head_dim, float* scores) {
    f32x16 sums[SCORE_ROWS] = {};
    for (int place = 0; place < head_dim; place += 2) {
        __m512i query = _mm512_load_si512(queries + place * COLUMNS);
#pragma GCC unroll 16
        for (int row = 0; row < SCORE_ROWS; ++row)
            sums[row] = add_products(sums[row], query, pair_of(keys + row * head_dim + place));
    }
    for (int row = 0; row < SCORE_ROWS; ++row) store(scores + row * COLUMNS, sums[row]);
}

// MIX_COLUMNS columns and MIX_LINES lines of 16 places.
static inline void mix_part(const Probability* weights, const Packed* values, int head_dim, float* sums, int lines) {
    f32x16 parts[MIX_COLUMNS][MIX_LINES];
    for (int column = 0; column < MIX_COLUMNS; ++column)
        for (int line = 0; line < lines; ++line) parts[column][line] = load(sums + column * head_dim + line * LANES);
    for (int pair = 0; pair < LANES; ++pair)
        for (int line = 0; line < lines; ++line) {
            __m512i value = _mm512_load_si512(values + (line * LANES + pair) * LINE);
#pragma GCC unroll 4
            for (int column = 0; column < MIX_COLUMNS; ++column)
                parts[column][line] =
                    add_products(parts[column][line], value, pair_of(weights + column * BLOCK_TOKENS + 2 * pair));
        }
    for (int column = 0; column < MIX_COLUMNS; ++column)
        for (int line = 0; line < lines; ++line) store(sums + column * head_dim + line * LANES, parts[column][line]);
}

constexpr int COLUMN_WEIGHTS = BLOCK_TOKENS, LINE_VALUES = BLOCK_TOKENS * LANES;

#else

static inline Part load_part(const float* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
}

static inline Part spread(float value) { return value - Part{}; }

static inline void store_part(float* to, Part part) { std::memcpy(to, &part, sizeof part); }

// SCORE_ROWS tokens and SCORE_PARTS parts of the columns.
static inline void score_part(const Packed* keys, const Packed* queries, int head_dim, float* scores) {
    Part sums[SCORE_ROWS][SCORE_PARTS] = {};
    for (int place = 0; place < head_dim; ++place) {
        Part query[SCORE_PARTS];
        for (int part = 0; part < SCORE_PARTS; ++part) query[part] = load_part(queries + place * COLUMNS + part * PART_LANES);
#pragma GCC unroll 16
        for (int row = 0; row < SCORE_ROWS; ++row) {
            const Part key = spread(keys[row * head_dim + place]);
            for (int part = 0; part < SCORE_PARTS; ++part) sums[row][part] = add_product(key, query[part], sums[row][part]);
        }
    }
    for (int row = 0; row < SCORE_ROWS; ++row)
        for (int part = 0; part < SCORE_PARTS; ++part) store_part(scores + row * COLUMNS + part * PART_LANES, sums[row][part]);
}

// Columns behind the used ones get zeros.
static inline void score_rows(const Packed* keys, const Packed* queries, int used, int head_dim, float* scores) {
    constexpr int step = SCORE_PARTS * PART_LANES;
    int column = 0;
    for (; column < used; column += step) score_part(keys, queries + column, head_dim, scores + column);
    if (column == COLUMNS) return;
    for (int row = 0; row < SCORE_ROWS; ++row)
        std::memset(scores + row * COLUMNS + column, 0, static_cast<size_t>(COLUMNS - column) * sizeof(float));
}

static inline void mix_part(const Probability* weights, const Packed* values, int head_dim, float* sums, int lines) {
    Part parts[MIX_COLUMNS][MIX_LINES];
    for (int column = 0; column < MIX_COLUMNS; ++column)
        for (int line = 0; line < lines; ++line) parts[column][line] = load_part(sums + column * head_dim + line * PART_LANES);
    for (int token = 0; token < BLOCK_TOKENS; ++token)
        for (int line = 0; line < lines; ++line) {
            const Part value = load_part(values + token * head_dim + line * PART_LANES);
#pragma GCC unroll 4
            for (int column = 0; column < MIX_COLUMNS; ++column)
                parts[column][line] =
                    add_product(spread(weights[token * COLUMNS + column]), value, parts[column][line]);
        }
    for (int column = 0; column < MIX_COLUMNS; ++column)
        for (int line = 0; line < lines; ++line) store_part(sums + column * head_dim + line * PART_LANES, parts[column][line]);
}

constexpr int COLUMN_WEIGHTS = 1, LINE_VALUES = PART_LANES;

#endif

static inline void score(const Packed* keys, const Packed* queries, int used, int head_dim, float* scores) {
    for (int row = 0; row < BLOCK_TOKENS; row += SCORE_ROWS)
        score_rows(keys + row * head_dim, queries, used, head_dim, scores + row * COLUMNS);
}

// `blocks` blocks one after the other.
static inline void mix(const Probability* weights, const Packed* values, int blocks, int used, int head_dim, float* sums) {
    constexpr int step = MIX_LINES * PART_LANES;
    for (int block = 0; block < blocks; ++block) {
        for (int column = 0; column < used; column += MIX_COLUMNS)
            for (int place = 0; place < head_dim; place += step) {
                const Packed* from = values + place / PART_LANES * LINE_VALUES;
                float* to = sums + column * head_dim + place;
                const Probability* share = weights + column * COLUMN_WEIGHTS;
                if (place + step <= head_dim)
                    mix_part(share, from, head_dim, to, MIX_LINES);
                else
                    mix_part(share, from, head_dim, to, MIX_LINES / 2);
            }
        weights += BLOCK_TOKENS * COLUMNS;
        values += BLOCK_TOKENS * head_dim;
    }
}

}  // namespace tandem

#endif
