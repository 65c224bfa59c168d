// Attention of a sequence with one row by AMX: several kv heads share the sixteen columns of a tile.
//
// The queries stand in a block diagonal: in the lines of one kv head, the columns of the others are zero. Scores of all
// heads come out of one pair of tiles, and a column's score is what it would be alone, since it only gains zeros.
#pragma once

#include "attention_ahead.h"
#include "attention_call.h"

namespace tandem {

// Scores of a block of tokens, keys read where they lie. Tokens of the second half are left out when it begins at `end`.
static inline void score_row(const Cache& cache, const Piece& piece, int first_token, int end, const Packed* queries,
                             float* scores, Ahead& ahead) {
    const int64_t stride = cache.pool->token_stride * static_cast<int64_t>(sizeof(bf16));
    const int width = piece.heads * cache.head_dim;
    const bool both = first_token + HALF_TOKENS < end;
    const bf16* first = cache.key(first_token, piece.kv_head);
    const bf16* second = both ? cache.key(first_token + HALF_TOKENS, piece.kv_head) : first;
    TANDEM_TILE_ZERO(0);
    TANDEM_TILE_ZERO(1);
    for (int place = 0; place < width; place += LINE) {
        TANDEM_TILE_LOAD(3, queries + place * COLUMNS, PACKED_STRIDE);
        TANDEM_TILE_LOAD(2, first + place, stride);
        TANDEM_TILE_ADD(0, 2, 3);
        TANDEM_TILE_LOAD(6, second + place, stride);
        TANDEM_TILE_ADD(1, 6, 3);
        ahead.ask(8);
    }
    TANDEM_TILE_STORE(0, scores, SCORE_STRIDE);
    TANDEM_TILE_STORE(1, scores + HALF_TOKENS * COLUMNS, SCORE_STRIDE);
}

// Tiles 4 and 5 have as many rows as a group has heads.
static inline void mix_row(const Piece& piece, int group, int head_dim, const Probability* weights, const Packed* values,
                           float* sums, Ahead& ahead) {
    const int64_t stride = head_dim * static_cast<int64_t>(sizeof(float));
    for (int head = 0; head < piece.heads; ++head) {
        TANDEM_TILE_LOAD(5, weights + head * group * BLOCK_TOKENS, PACKED_STRIDE);
        float* to = sums + head * group * head_dim;
        for (int place = 0; place < head_dim; place += LANES) {
            TANDEM_TILE_LOAD(4, to + place, stride);
            TANDEM_TILE_LOAD(6, values + (head * head_dim + place) * BLOCK_TOKENS, PACKED_STRIDE);
            TANDEM_TILE_ADD(4, 5, 6);
            TANDEM_TILE_STORE(4, to + place, stride);
            ahead.ask(8);
        }
    }
}

static inline void begin_row(const Call& call, const Piece& piece, Columns& columns, Packed* queries, float* sums) {
    const int group = group_of(call.geometry), head_dim = call.geometry.head_dim;
    const int row = call.sequences.first_row[piece.sequence];
    columns.used = piece.heads * group;
    for (int& last : columns.last) last = call.sequences.first_position[piece.sequence];
    begin_columns(columns);
    for (int head = 0; head < piece.heads; ++head) {
        const bf16* rows[COLUMNS] = {};
        for (int member = 0; member < group; ++member)
            rows[head * group + member] = call.query(row, (piece.kv_head + head) * group + member);
        pack_queries(rows, head_dim, queries + head * head_dim * COLUMNS);
    }
    std::memset(sums, 0, sizeof(float) * COLUMNS * static_cast<size_t>(head_dim));
}

static inline void pack_row_values(const Cache& cache, const Piece& piece, int first_token, int end, Packed* values,
                                   Ahead& ahead) {
    for (int half = 0; half < 2; ++half) {
        const int first = first_token + half * HALF_TOKENS, tokens = end - first < 0 ? 0 : end - first;
        const bf16* rows = tokens ? cache.value(first, piece.kv_head) : nullptr;
        pack_values(rows, cache.pool->token_stride, tokens, piece.heads * cache.head_dim, values + half * SECOND_HALF_VALUES,
                    [&] { ahead.ask(2); });
    }
}

static inline void attend_row(const Call& call, const Scratch& scratch, const Piece& piece) {
    const int group = group_of(call.geometry), head_dim = call.geometry.head_dim;
    const Cache cache = call.cache(piece.sequence);
    Columns& columns = scratch.columns[0];
    begin_row(call, piece, columns, scratch.queries, scratch.sums);
    const Place next = behind(call, piece);
    const int end = columns.most_last + 1, step = piece.heads * head_dim / LINE / 2;
    for (int first = 0; first < end; first += BLOCK_TOKENS) {
        const Place then = first + BLOCK_TOKENS < end ? Place{cache, first + BLOCK_TOKENS, end} : next;
        Ahead ahead(then.cache, piece, then.token, then.end), further(then.cache, piece, then.token + HALF_TOKENS, then.end);
        score_row(cache, piece, first, end, scratch.queries, scratch.scores, further);
        pack_row_values(cache, piece, first, end, scratch.values, ahead);
        const bool raised = weigh(columns, scratch.scores, first, call.scale, scratch.weights, [&] { further.ask(step); });
        if (raised) rescale(columns, scratch.sums, head_dim);
        mix_row(piece, group, head_dim, scratch.weights, scratch.values, scratch.sums, further);
    }
    const int row = call.sequences.first_row[piece.sequence];
    for (int column = 0; column < columns.used; ++column)
        write_row(scratch.sums + column * head_dim, columns.total[column], head_dim,
                  call.result(row, piece.kv_head * group + column));
}

}  // namespace tandem
