// Paged attention. One algorithm serves single rows and chunks: blocks of 32 tokens at multiples of 32, in order, and for each
// block scores, weights relative to a running peak, and weighted sums, every column for itself. See attention_columns.h.
#include "attention_ahead.h"
#include "attention_call.h"

#if TANDEM_AMX
#include "attention_row_amx.h"
#elif TANDEM_AVX512 && !TANDEM_BF16
#include "attention_row_avx512.h"
#endif

namespace tandem {

namespace {

// The columns of one tile: (row, head of the group), heads first.
void begin_tile(const Call& call, const Piece& piece, int tile, Columns& columns, Packed* queries, float* sums) {
    const int group = group_of(call.geometry), head_dim = call.geometry.head_dim;
    const int all = call.sequences.row_count[piece.sequence] * group, first = tile * COLUMNS;
    const bf16* rows[COLUMNS] = {};
    columns.used = all - first < COLUMNS ? all - first : COLUMNS;
    for (int column = 0; column < COLUMNS; ++column) {
        const int place = first + (column < columns.used ? column : columns.used - 1);
        columns.last[column] = call.sequences.first_position[piece.sequence] + place / group;
        const int row = call.sequences.first_row[piece.sequence] + place / group;
        if (column < columns.used) rows[column] = call.query(row, piece.kv_head * group + place % group);
    }
    begin_columns(columns);
    pack_queries(rows, head_dim, queries);
    std::memset(sums, 0, sizeof(float) * COLUMNS * static_cast<size_t>(head_dim));
}

void end_tile(const Call& call, const Piece& piece, int tile, const Columns& columns, const float* sums) {
    const int group = group_of(call.geometry), head_dim = call.geometry.head_dim;
    for (int column = 0; column < columns.used; ++column) {
        const int place = tile * COLUMNS + column;
        const int row = call.sequences.first_row[piece.sequence] + place / group;
        bf16* to = call.result(row, piece.kv_head * group + place % group);
        write_row(sums + column * head_dim, columns.total[column], head_dim, to);
    }
}

// One tile meets the packed blocks that begin at `first_token`.
void take_blocks(const Call& call, const Scratch& scratch, int first_token, int blocks, Columns& columns, const Packed* queries,
                 float* sums) {
    const int head_dim = call.geometry.head_dim, block_size = BLOCK_TOKENS * head_dim;
    int mixed = 0, block = 0;
    auto mix_pending = [&] {
        mix(scratch.weights + mixed * BLOCK_TOKENS * COLUMNS, scratch.values + mixed * block_size, block - mixed, columns.used,
            head_dim, sums);
        mixed = block;
    };
    auto score_block = [&](int which) {
        score(scratch.keys + which * block_size, queries, columns.used, head_dim, scratch.scores + which % 2 * BLOCK_TOKENS * COLUMNS);
    };
    const int seen = (columns.most_last - first_token) / BLOCK_TOKENS + 1, end = seen < blocks ? seen : blocks;
    if (columns.most_last < first_token) return;
    score_block(0);
    for (; block < end; ++block) {
        if (block + 1 < end) score_block(block + 1);  // the matrix unit works while the weights of this block are made
        float* scores = scratch.scores + block % 2 * BLOCK_TOKENS * COLUMNS;
        Probability* weights = scratch.weights + block * BLOCK_TOKENS * COLUMNS;
        if (weigh(columns, scores, first_token + block * BLOCK_TOKENS, call.scale, weights, [] {})) {
            mix_pending();
            rescale(columns, sums, head_dim);
        }
    }
    mix_pending();
}

void attend_tiles(const Call& call, const Scratch& scratch, const Piece& piece) {
    const int head_dim = call.geometry.head_dim, tile_size = COLUMNS * head_dim;
    for (int tile = 0; tile < piece.tiles; ++tile)
        begin_tile(call, piece, piece.tile + tile, scratch.columns[tile], scratch.queries + tile * tile_size,
                   scratch.sums + tile * tile_size);
    const Cache cache = call.cache(piece.sequence);
    const int end = scratch.columns[piece.tiles - 1].most_last + 1;
    for (int first = 0; first < end; first += SPAN_BLOCKS * BLOCK_TOKENS) {
        const int left = (end - first + BLOCK_TOKENS - 1) / BLOCK_TOKENS, blocks = left < SPAN_BLOCKS ? left : SPAN_BLOCKS;
        for (int block = 0; block < blocks; ++block) {
            const int place = block * BLOCK_TOKENS * head_dim;
            pack_block(cache, piece.kv_head, first + block * BLOCK_TOKENS, end, scratch.keys + place, scratch.values + place);
        }
        for (int tile = 0; tile < piece.tiles; ++tile)
            take_blocks(call, scratch, first, blocks, scratch.columns[tile], scratch.queries + tile * tile_size,
                        scratch.sums + tile * tile_size);
    }
    for (int tile = 0; tile < piece.tiles; ++tile)
        end_tile(call, piece, piece.tile + tile, scratch.columns[tile], scratch.sums + tile * tile_size);
}

#if !TANDEM_AMX && (TANDEM_BF16 || !TANDEM_AVX512)

// A sequence with one row, a tile for each kv head: blocks pass once, in the order in which memory has them.
void attend_row(const Call& call, const Scratch& scratch, const Piece& piece) {
    const int head_dim = call.geometry.head_dim, tile_size = COLUMNS * head_dim;
    auto alone = [&](int head) { return Piece{piece.sequence, piece.kv_head + head, 1, 0, 1}; };
    for (int head = 0; head < piece.heads; ++head)
        begin_tile(call, alone(head), 0, scratch.columns[head], scratch.queries + head * tile_size,
                   scratch.sums + head * tile_size);
    const Cache cache = call.cache(piece.sequence);
    const Place next = behind(call, piece);
    const int end = scratch.columns[0].most_last + 1;
    for (int first = 0; first < end; first += BLOCK_TOKENS) {
        const Place then = first + BLOCK_TOKENS < end ? Place{cache, first + BLOCK_TOKENS, end} : next;
        Ahead ahead(then.cache, piece, then.token, then.end), further(then.cache, piece, then.token + HALF_TOKENS, then.end);
        const int lines = 2 * HALF_TOKENS * head_dim / LINE;
        for (int head = 0; head < piece.heads; ++head) {
            ahead.ask(lines);
            pack_block(cache, piece.kv_head + head, first, end, scratch.keys, scratch.values);
            further.ask(lines);
            take_blocks(call, scratch, first, 1, scratch.columns[head], scratch.queries + head * tile_size,
                        scratch.sums + head * tile_size);
        }
    }
    for (int head = 0; head < piece.heads; ++head)
        end_tile(call, alone(head), 0, scratch.columns[head], scratch.sums + head * tile_size);
}

#endif

}  // namespace

size_t attend_scratch_bytes(const Geometry& geometry, const Sequences& sequences, int parts) {
    return Scratch(nullptr, scratch_sizes(geometry, sequences, parts), geometry.head_dim).bytes();
}

void attend(const Geometry& geometry, const Pool& pool, int layer, const Sequences& sequences, const bf16* qkv, bf16* out,
            void* memory, int part, int parts) {
    const float scale = static_cast<float>(1.4426950408889634 / __builtin_sqrt(geometry.head_dim));
    const Call call{geometry, pool, sequences, qkv, out, layer, scale};
    const Scratch scratch(memory, scratch_sizes(geometry, sequences, parts), geometry.head_dim);
    Products products;
    each_share(geometry, sequences, heads_at_once(geometry, sequences, parts), part, parts, [&](const Piece& piece) {
        products.shape(piece.heads > 0 ? group_of(geometry) : COLUMNS);
        if (piece.heads > 0) return attend_row(call, scratch, piece);
        attend_tiles(call, scratch, piece);
    });
}

}  // namespace tandem
