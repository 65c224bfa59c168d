// Queries, keys and values in the order in which the products read them, and the way back to the output rows.
//
// With bf16 products, two values that are multiplied and added at once lie side by side: features of a query, tokens of a
// value. Interleaving the values of two tokens leaves the 32 places of a line in another order (all the first halves of
// groups of 8, then all the second halves); the sums keep that order until they are written.
#pragma once

#include "attention_columns.h"

namespace tandem {

#if TANDEM_BF16
using Packed = bf16;
#else
using Packed = float;
#endif

constexpr int LINE = 32;  // head_dim is a multiple of it

// The cached rows of one sequence in one layer.
struct Cache {
    const Pool* pool;
    const int32_t* pages;
    int32_t page_tokens;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t layer;

    const bf16* token(int position) const {
        int64_t page = pages[position / page_tokens];
        return pool->data + page * pool->page_stride + layer * pool->layer_stride + position % page_tokens * pool->token_stride;
    }
    const bf16* key(int position, int kv_head) const { return token(position) + kv_head * head_dim; }
    const bf16* value(int position, int kv_head) const { return token(position) + (kv_heads + kv_head) * head_dim; }
};

#if TANDEM_BF16

// rows: a query head for each column, or null. out: [head_dim / 2][column] of pairs.
static inline void pack_queries(const bf16* const* rows, int head_dim, Packed* out) {
    for (int place = 0; place < head_dim; place += LINE) {
        __m512i lines[COLUMNS];
        for (int column = 0; column < COLUMNS; ++column)
            lines[column] = rows[column] ? _mm512_loadu_si512(rows[column] + place) : _mm512_setzero_si512();
        transpose(lines);
        for (int pair = 0; pair < LANES; ++pair) _mm512_store_si512(out + (place / 2 + pair) * LINE, lines[pair]);
    }
}

// Two tokens' values of 32 places, interleaved: the lower halves of groups of 8 into `low`, the others into `high`.
static inline void pack_line(__m512i first, __m512i second, Packed* low, Packed* high) {
    _mm512_store_si512(low, _mm512_unpacklo_epi16(first, second));
    _mm512_store_si512(high, _mm512_unpackhi_epi16(first, second));
}

// `tokens` rows of 32 with `stride`; the rows behind are zero. out: [head_dim / 16][pair of tokens][16] of pairs.
template <class Between>
static inline void pack_values(const bf16* rows, int64_t stride, int tokens, int head_dim, Packed* out, Between between) {
    const __m512i zero = _mm512_setzero_si512();
    for (int token = 0; token < HALF_TOKENS; token += 2) {
        const bf16* row = rows + token * stride;
        for (int place = 0; place < head_dim; place += LINE) {
            __m512i first = token < tokens ? _mm512_loadu_si512(row + place) : zero;
            __m512i second = token + 1 < tokens ? _mm512_loadu_si512(row + stride + place) : zero;
            Packed* to = out + place * BLOCK_TOKENS + token / 2 * LINE;
            pack_line(first, second, to, to + LANES * BLOCK_TOKENS);
            between();
        }
    }
}

static inline void pack_keys(const bf16* rows, int64_t stride, int tokens, int head_dim, Packed* out) {
    for (int token = 0; token < HALF_TOKENS; ++token) {
        for (int place = 0; place < head_dim; place += LINE) {
            __m512i line = token < tokens ? _mm512_loadu_si512(rows + token * stride + place) : _mm512_setzero_si512();
            _mm512_store_si512(out + token * head_dim + place, line);
        }
    }
}

// Where the pairs of the second half of a block begin, in a block of pack_values.
constexpr int SECOND_HALF_VALUES = HALF_TOKENS / 2 * LINE;

static inline void write_row(const float* sums, float total, int head_dim, bf16* out) {
    const f32x16 share = splat(1.0f / total);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int place = 0; place < head_dim; place += LINE) {
        f32x16 low = load(sums + place) * share, high = load(sums + place + LANES) * share;
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        _mm512_storeu_si512(out + place, _mm512_permutexvar_epi64(order, both));
    }
}

#else

static inline void pack_queries(const bf16* const* rows, int head_dim, Packed* out) {
    for (int column = 0; column < COLUMNS; ++column)
        for (int place = 0; place < head_dim; ++place) {
            uint32_t bits = rows[column] ? static_cast<uint32_t>(rows[column][place]) << 16 : 0;
            std::memcpy(out + place * COLUMNS + column, &bits, sizeof bits);
        }
}

static inline void pack_rows(const bf16* rows, int64_t stride, int tokens, int head_dim, Packed* out) {
    for (int token = 0; token < HALF_TOKENS; ++token)
        for (int place = 0; place < head_dim; place += LANES)
            store(out + token * head_dim + place, token < tokens ? load_bf16(rows + token * stride + place) : splat(0.0f));
}

template <class Between>
static inline void pack_values(const bf16* rows, int64_t stride, int tokens, int head_dim, Packed* out, Between) {
    pack_rows(rows, stride, tokens, head_dim, out);
}

static inline void pack_keys(const bf16* rows, int64_t stride, int tokens, int head_dim, Packed* out) {
    pack_rows(rows, stride, tokens, head_dim, out);
}

static inline void write_row(const float* sums, float total, int head_dim, bf16* out) {
    const f32x16 share = splat(1.0f / total);
    for (int place = 0; place < head_dim; place += LANES) store_bf16(out + place, load(sums + place) * share);
}

#endif

// Keys and values of one block of one kv head; tokens from `end` on are zero, and their pages are not touched.
static inline void pack_block(const Cache& cache, int kv_head, int first_token, int end, Packed* keys, Packed* values) {
    const int head_dim = cache.head_dim;
    for (int half = 0; half < 2; ++half) {
        int first = first_token + half * HALF_TOKENS;
        int tokens = end - first < 0 ? 0 : end - first;
        const bf16* key = tokens ? cache.key(first, kv_head) : nullptr;
        const bf16* value = tokens ? cache.value(first, kv_head) : nullptr;
        pack_keys(key, cache.pool->token_stride, tokens, head_dim, keys + half * HALF_TOKENS * head_dim);
#if TANDEM_BF16
        Packed* to = values + half * SECOND_HALF_VALUES;
#else
        Packed* to = values + half * HALF_TOKENS * head_dim;
#endif
        pack_values(value, cache.pool->token_stride, tokens, head_dim, to, [] {});
    }
}

}  // namespace tandem
