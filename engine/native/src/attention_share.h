// How the work of one call is cut into pieces and dealt to parts. Pieces do not depend on each other, so neither the cut nor the
// number of parts shows in a result.
#pragma once

#include "attention_columns.h"

namespace tandem {

constexpr int PIECE_TILES = 32;  // the most tiles that share one packing of keys and values
constexpr int SPAN_BLOCKS = 4;   // blocks that are packed at once

// Work on one sequence: `tiles` tiles of sixteen columns of one kv head from `tile` on, or, for a sequence of one row, all
// columns of `heads` kv heads.
struct Piece {
    int sequence;
    int kv_head;
    int heads;
    int tile;
    int tiles;
};

static inline int group_of(const Geometry& geometry) { return geometry.heads / geometry.kv_heads; }

static inline int tiles_of(const Geometry& geometry, const Sequences& sequences, int sequence) {
    return (sequences.row_count[sequence] * group_of(geometry) + COLUMNS - 1) / COLUMNS;
}

// Kv heads that a sequence of one row takes at once; 0: it is treated as a chunk. With a matrix unit they share a tile's
// columns, else each has a tile.
static inline int heads_at_once(const Geometry& geometry, const Sequences& sequences, int parts) {
#if TANDEM_AMX
    const int fitting = COLUMNS / group_of(geometry);
#else
    const int fitting = group_of(geometry) <= COLUMNS ? PIECE_TILES : 0;
#endif
    const int most = fitting < geometry.kv_heads ? fitting : geometry.kv_heads;
    if (sequences.count >= 2 * parts) return most;
    const int dealt = (geometry.kv_heads + parts - 1) / parts;
    return dealt < most ? dealt : most;
}

// Costs in about 200 cycles.
static inline int64_t tile_cost(const Geometry& geometry, const Sequences& sequences, int sequence, int tile, int tiles) {
    const int rows = sequences.row_count[sequence], row = ((tile + 1) * COLUMNS - 1) / group_of(geometry);
    const int last = sequences.first_position[sequence] + (row < rows ? row : rows - 1);
    return static_cast<int64_t>(last / BLOCK_TOKENS + 1) * (2 + 6 / tiles);
}

// Every smallest piece, in order, with its cost.
template <class Visit>
void each_piece(const Geometry& geometry, const Sequences& sequences, int at_once, Visit visit) {
    for (int sequence = 0; sequence < sequences.count; ++sequence) {
        if (sequences.row_count[sequence] == 1 && at_once > 0) {
            const int64_t blocks = sequences.first_position[sequence] / BLOCK_TOKENS + 1;
            for (int head = 0; head < geometry.kv_heads; head += at_once) {
                const int left = geometry.kv_heads - head, heads = left < at_once ? left : at_once;
                visit(Piece{sequence, head, heads, 0, 1}, blocks * heads * 8);
            }
            continue;
        }
        const int tiles = tiles_of(geometry, sequences, sequence);
        for (int head = 0; head < geometry.kv_heads; ++head)
            for (int tile = 0; tile < tiles; ++tile)
                visit(Piece{sequence, head, 0, tile, 1}, tile_cost(geometry, sequences, sequence, tile, tiles));
    }
}

// The pieces of one part, neighbouring tiles of one head joined.
template <class Work>
void each_share(const Geometry& geometry, const Sequences& sequences, int at_once, int part, int parts, Work work) {
    int64_t total = 0, done = 0;
    each_piece(geometry, sequences, at_once, [&](const Piece&, int64_t cost) { total += cost; });
    Piece open{};
    each_piece(geometry, sequences, at_once, [&](const Piece& piece, int64_t cost) {
        const int64_t twice_middle = 2 * done + cost;
        done += cost;
        if (twice_middle * parts / (2 * total) != part) return;
        const bool joins = piece.heads == 0 && open.tiles > 0 && open.tiles < PIECE_TILES && open.heads == 0 &&
                           open.sequence == piece.sequence && open.kv_head == piece.kv_head;
        if (joins) {
            ++open.tiles;
            return;
        }
        if (open.tiles > 0) work(open);
        open = piece;
    });
    if (open.tiles > 0) work(open);
}

}  // namespace tandem
