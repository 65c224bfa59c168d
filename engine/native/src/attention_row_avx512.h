// Attention of a sequence with one row by AVX-512 that has no dot products of bfloat16. Its few columns would leave most lanes
// of a tile empty. So lanes are tokens for scores and weights, and places for sums; keys and values are read where they lie. What
// happens to a number is the same as in a tile, in the same order, so the bits are the same too.
#pragma once

#include <algorithm>

#include "attention_ahead.h"
#include "attention_call.h"

namespace tandem {

constexpr int COLUMNS_AT_ONCE = 4;

// The next block, both halves side by side: the core itself fetches further in two pages of memory at once than in one.
struct Next {
    Ahead halves[2];
    int turn = 0;

    void ask_one() { halves[turn ^= 1].ask(1); }
    void ask_both(int lines) {
        halves[0].ask(lines);
        halves[1].ask(lines);
    }
};

// Two neighbouring places of bfloat16 in each lane.
static inline f32x16 first_places(__m512i pairs) { return (f32x16)_mm512_slli_epi32(pairs, 16); }

static inline f32x16 second_places(__m512i pairs) {
    return (f32x16)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u)));
}

// The rows of one head in a block: so many in each half. Where none are there, `first` is a row that is.
struct HalfRows {
    const bf16* first;
    int tokens;
};

struct BlockRows {
    HalfRows halves[2];
    int64_t stride;
};

// Rows of one head that are needed soon, fetched into the first-level cache, a line of each half at a time: the core may have
// dropped what Next asked for.
class Soon {
  public:
    // Those that lie `offset` elements behind the given ones.
    Soon(const BlockRows& rows, int64_t offset, int head_dim)
        : low_(rows.halves[0].first + offset), high_(rows.halves[1].first + offset), gap_(rows.stride - head_dim),
          lines_(head_dim / LINE), left_(lines_) {}

    void ask() {
        if (rows_ == 0) return;
        __builtin_prefetch(low_);
        __builtin_prefetch(high_);
        int64_t step = LINE;
        if (--left_ == 0) step += gap_, left_ = lines_, --rows_;
        low_ += step, high_ += step;
    }

  private:
    const bf16 *low_, *high_;
    int64_t gap_;
    int lines_, left_, rows_ = HALF_TOKENS;
};

// What is fetched while a block is worked on.
struct Fetched {
    Next& next;
    Soon soon;
};

static inline BlockRows keys_of(const Cache& cache, int head, int first, int end) {
    const auto there = [end](int token) { return std::clamp(end - token, 0, HALF_TOKENS); };
    const int second = first + HALF_TOKENS;
    const HalfRows low = {cache.key(first, head), there(first)};
    const HalfRows high = {there(second) > 0 ? cache.key(second, head) : low.first, there(second)};
    return {{low, high}, cache.pool->token_stride};
}

// Keys in lanes of tokens: [pair of places][32 tokens]. Tokens that are not there repeat the last one: their scores are hidden.
static inline void turn_keys(const BlockRows& keys, int head_dim, __m512i* turned, Next& next) {
    for (int half = 0; half < 2; ++half)
        for (int place = 0; place < head_dim; place += LINE) {
            const bf16* row = keys.halves[half].first + place;
            __m512i lines[LANES];
            for (int lane = 0; lane < LANES; ++lane) {
                lines[lane] = _mm512_loadu_si512(row);
                if (lane + 1 < keys.halves[half].tokens) row += keys.stride;
            }
            transpose(lines);
            for (int pair = 0; pair < LANES; ++pair) turned[place + 2 * pair + half] = lines[pair];
            next.ask_both(4);
        }
}

// scores: [column][32 tokens], queries: [place][COLUMNS_AT_ONCE].
template <int USED>
static inline void score_columns(const __m512i* turned, const float* queries, int head_dim, float* scores, Fetched& fetched) {
    f32x16 sums[USED][2] = {};
    for (int place = 0; place < head_dim; place += 2, queries += 2 * COLUMNS_AT_ONCE) {
        const __m512i low = turned[place], high = turned[place + 1];
#pragma GCC unroll 4
        for (int column = 0; column < USED; ++column) {
            const f32x16 query = splat(queries[column]);
            sums[column][0] = multiply_add(first_places(low), query, sums[column][0]);
            sums[column][1] = multiply_add(first_places(high), query, sums[column][1]);
        }
#pragma GCC unroll 4
        for (int column = 0; column < USED; ++column) {
            const f32x16 query = splat(queries[COLUMNS_AT_ONCE + column]);
            sums[column][0] = multiply_add(second_places(low), query, sums[column][0]);
            sums[column][1] = multiply_add(second_places(high), query, sums[column][1]);
        }
        fetched.next.ask_one();
        fetched.soon.ask();
    }
#pragma GCC unroll 4
    for (int column = 0; column < USED; ++column) {
        store(scores + column * BLOCK_TOKENS, sums[column][0]);
        store(scores + column * BLOCK_TOKENS + LANES, sums[column][1]);
    }
}

// The sum of a block's weights in the order of exponentials(): by fours of tokens.
static inline float total_of(f32x16 first, f32x16 second) {
    __m128 fours = _mm512_castps512_ps128((__m512)first);
    fours = _mm_add_ps(fours, _mm512_extractf32x4_ps((__m512)first, 1));
    fours = _mm_add_ps(fours, _mm512_extractf32x4_ps((__m512)first, 2));
    fours = _mm_add_ps(fours, _mm512_extractf32x4_ps((__m512)first, 3));
    fours = _mm_add_ps(fours, _mm512_castps512_ps128((__m512)second));
    fours = _mm_add_ps(fours, _mm512_extractf32x4_ps((__m512)second, 1));
    fours = _mm_add_ps(fours, _mm512_extractf32x4_ps((__m512)second, 2));
    fours = _mm_add_ps(fours, _mm512_extractf32x4_ps((__m512)second, 3));
    const __m128 twos = _mm_add_ps(fours, _mm_movehdup_ps(fours));
    return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehl_ps(twos, twos)));
}

// Scores of a block become weights, both [column][32 tokens]. True: the sums of the blocks before have to be rescaled.
static inline bool weigh_row(Columns& columns, const float* scores, int tokens, float scale, float* weights) {
    const uint32_t there = tokens < BLOCK_TOKENS ? (1u << tokens) - 1 : ~0u;
    bool raised = false;
    for (int column = 0; column < columns.used; ++column, scores += BLOCK_TOKENS, weights += BLOCK_TOKENS) {
        const __m512 hidden = _mm512_set1_ps(HIDDEN);
        const f32x16 first = (f32x16)_mm512_mask_loadu_ps(hidden, static_cast<__mmask16>(there), scores);
        const f32x16 second = (f32x16)_mm512_mask_loadu_ps(hidden, static_cast<__mmask16>(there >> LANES), scores + LANES);
        const float best = _mm512_reduce_max_ps((__m512)maximum(first, second)) * scale, before = columns.peak[column];
        columns.factor[column] = 1.0f;
        if (best > before + SLACK) {
            columns.peak[column] = best;
            columns.factor[column] = power_of_two(splat(before - best))[0];
            columns.total[column] *= columns.factor[column];
            raised = true;
        }
        const f32x16 low = splat(0.0f - columns.peak[column]), factor = splat(scale);
        const f32x16 first_weights = power_of_two(multiply_add(first, factor, low));
        const f32x16 second_weights = power_of_two(multiply_add(second, factor, low));
        store(weights, first_weights);
        store(weights + LANES, second_weights);
        columns.total[column] += total_of(first_weights, second_weights);
    }
    return raised;
}

// sums[column] += weights[column][token] * values[token], for LINES lines: the even places of a line, then the odd ones.
template <int USED, int LINES>
static inline void mix_columns(const BlockRows& values, const float* weights, int place, int head_dim, float* sums,
                               Fetched& fetched) {
    constexpr int PARTS = 2 * LINES;
    f32x16 parts[USED][PARTS];
#pragma GCC unroll 4
    for (int column = 0; column < USED; ++column)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; ++part) parts[column][part] = load(sums + column * head_dim + place + part * LANES);
    for (const HalfRows& half : values.halves) {
        const bf16* from = half.first + place;
        for (int token = 0; token < half.tokens; ++token, ++weights, from += values.stride) {
            f32x16 value[PARTS];
#pragma GCC unroll 2
            for (int line = 0; line < LINES; ++line) {
                const __m512i pairs = _mm512_loadu_si512(from + line * LINE);
                value[2 * line] = first_places(pairs);
                value[2 * line + 1] = second_places(pairs);
            }
#pragma GCC unroll 4
            for (int column = 0; column < USED; ++column) {
                const f32x16 weight = splat(weights[column * BLOCK_TOKENS]);
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; ++part)
                    parts[column][part] = multiply_add(weight, value[part], parts[column][part]);
            }
            fetched.next.ask_both(1);
            fetched.soon.ask();
        }
    }
#pragma GCC unroll 4
    for (int column = 0; column < USED; ++column)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; ++part) store(sums + column * head_dim + place + part * LANES, parts[column][part]);
}

// A block of one kv head, for up to COLUMNS_AT_ONCE columns.
template <int USED>
static inline void score_all(int used, const __m512i* turned, const float* queries, int head_dim, float* scores, Fetched& fetched) {
    if constexpr (USED > 0) {
        if (used == USED) return score_columns<USED>(turned, queries, head_dim, scores, fetched);
        score_all<USED - 1>(used, turned, queries, head_dim, scores, fetched);
    }
}

template <int USED>
static inline void mix_all(int used, const BlockRows& values, const float* weights, int head_dim, float* sums, Fetched& fetched) {
    if constexpr (USED > 0) {
        if (used != USED) return mix_all<USED - 1>(used, values, weights, head_dim, sums, fetched);
        int place = 0;
        for (; place + 2 * LINE <= head_dim; place += 2 * LINE)
            mix_columns<USED, 2>(values, weights, place, head_dim, sums, fetched);
        if (place < head_dim) mix_columns<USED, 1>(values, weights, place, head_dim, sums, fetched);
    }
}

static inline void begin_row(const Call& call, const Piece& piece, int head, Columns& columns, float* queries, float* sums) {
    const int group = group_of(call.geometry), head_dim = call.geometry.head_dim;
    for (int member = 0; member < group; ++member) {
        const bf16* row = call.query(call.sequences.first_row[piece.sequence], (piece.kv_head + head) * group + member);
        float* to = queries + member / COLUMNS_AT_ONCE * COLUMNS_AT_ONCE * head_dim + member % COLUMNS_AT_ONCE;
        for (int place = 0; place < head_dim; place += LANES) {
            float wide[LANES];
            store(wide, load_bf16(row + place));
            for (int lane = 0; lane < LANES; ++lane) to[(place + lane) * COLUMNS_AT_ONCE] = wide[lane];
        }
    }
    columns.used = group;
    for (int& last : columns.last) last = call.sequences.first_position[piece.sequence];
    begin_columns(columns);
    std::memset(sums, 0, sizeof(float) * static_cast<size_t>(group * head_dim));
}

static inline void end_row(const Call& call, const Piece& piece, int head, const Columns& columns, const float* sums) {
    const int group = group_of(call.geometry), head_dim = call.geometry.head_dim;
    for (int member = 0; member < group; ++member, sums += head_dim) {
        bf16* to = call.result(call.sequences.first_row[piece.sequence], (piece.kv_head + head) * group + member);
        const f32x16 share = splat(1.0f / columns.total[member]);
        for (int place = 0; place < head_dim; place += LINE) {
            const u32x16 even = __builtin_convertvector(narrow(load(sums + place) * share), u32x16);
            const u32x16 odd = __builtin_convertvector(narrow(load(sums + place + LANES) * share), u32x16);
            _mm512_storeu_si512(to + place, (__m512i)(even | odd << 16));
        }
    }
}

static inline void take_block(const Call& call, const Scratch& scratch, const Cache& cache, int kv_head, int first, int end,
                              Columns& columns, const float* queries, float* sums, Next& next) {
    const int head_dim = call.geometry.head_dim;
    BlockRows rows = keys_of(cache, kv_head, first, end);
    __m512i* turned = reinterpret_cast<__m512i*>(scratch.keys);
    turn_keys(rows, head_dim, turned, next);
    const int64_t apart = cache.kv_heads * head_dim;  // values lie behind the keys
    Fetched values{next, Soon(rows, apart, head_dim)}, keys{next, Soon(rows, head_dim, head_dim)};  // those of the next head
    for (int column = 0; column < columns.used; column += COLUMNS_AT_ONCE) {
        const int used = columns.used - column < COLUMNS_AT_ONCE ? columns.used - column : COLUMNS_AT_ONCE;
        score_all<COLUMNS_AT_ONCE>(used, turned, queries + column * head_dim, head_dim, scratch.scores + column * BLOCK_TOKENS,
                                   values);
    }
    if (weigh_row(columns, scratch.scores, end - first, call.scale, scratch.weights)) rescale(columns, sums, head_dim);
    for (HalfRows& half : rows.halves) half.first += apart;
    for (int column = 0; column < columns.used; column += COLUMNS_AT_ONCE) {
        const int used = columns.used - column < COLUMNS_AT_ONCE ? columns.used - column : COLUMNS_AT_ONCE;
        mix_all<COLUMNS_AT_ONCE>(used, rows, scratch.weights + column * BLOCK_TOKENS, head_dim, sums + column * head_dim, keys);
    }
}

// Blocks pass once, in the order in which memory has them.
static inline void attend_row(const Call& call, const Scratch& scratch, const Piece& piece) {
    const int head_dim = call.geometry.head_dim, tile_size = COLUMNS * head_dim;
    for (int head = 0; head < piece.heads; ++head)
        begin_row(call, piece, head, scratch.columns[head], scratch.queries + head * tile_size,
                  scratch.sums + head * tile_size);
    const Cache cache = call.cache(piece.sequence);
    const Place other = behind(call, piece);
    const int end = scratch.columns[0].most_last + 1;
    for (int first = 0; first < end; first += BLOCK_TOKENS) {
        const Place then = first + BLOCK_TOKENS < end ? Place{cache, first + BLOCK_TOKENS, end} : other;
        Next next{{Ahead(then.cache, piece, then.token, then.end),
                   Ahead(then.cache, piece, then.token + HALF_TOKENS, then.end)}};
        for (int head = 0; head < piece.heads; ++head)
            take_block(call, scratch, cache, piece.kv_head + head, first, end, scratch.columns[head],
                       scratch.queries + head * tile_size, scratch.sums + head * tile_size, next);
    }
    for (int head = 0; head < piece.heads; ++head)
        end_row(call, piece, head, scratch.columns[head], scratch.sums + head * tile_size);
}

}  // namespace tandem
