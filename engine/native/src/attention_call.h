// What the pieces of one call of attend() have in common: arguments, and scratch memory cut into tables.
#pragma once

#include "attention_products.h"
#include "attention_share.h"

namespace tandem {

struct Call {
    const Geometry& geometry;
    const Pool& pool;
    const Sequences& sequences;
    const bf16* qkv;
    bf16* out;
    int layer;
    float scale;  // of scores, to exponents of 2

    Cache cache(int sequence) const {
        return {&pool,           sequences.pages + sequences.table_start[sequence], geometry.page_tokens, geometry.kv_heads,
                geometry.head_dim, layer};
    }
    const bf16* query(int row, int head) const {
        return qkv + static_cast<int64_t>(row) * geometry.qkv_columns() + head * geometry.head_dim;
    }
    bf16* result(int row, int head) const {
        return out + static_cast<int64_t>(row) * geometry.query_columns() + head * geometry.head_dim;
    }
};

struct ScratchSizes {
    int tiles;   // of sums and columns
    int slots;   // of packed queries
    int blocks;  // of packed values
};

static inline ScratchSizes scratch_sizes(const Geometry& geometry, const Sequences& sequences, int parts) {
    int tiles = 1;
    for (int sequence = 0; sequence < sequences.count; ++sequence) {
        const int needed = tiles_of(geometry, sequences, sequence);
        if (needed > tiles) tiles = needed;
    }
    if (tiles > PIECE_TILES) tiles = PIECE_TILES;
    const int heads = heads_at_once(geometry, sequences, parts);
#if !TANDEM_AMX
    if (heads > tiles) tiles = heads;
#endif
    return {tiles, tiles > heads ? tiles : heads, SPAN_BLOCKS > heads ? SPAN_BLOCKS : heads};
}

// Lays tables into scratch memory one after the other; every one is a multiple of 64 bytes long.
class Scratch {
public:
    Scratch(void* memory, const ScratchSizes& sizes, int head_dim) : next_(static_cast<char*>(memory)) {
        take(columns, sizes.tiles);
        take(queries, sizes.slots * COLUMNS * head_dim);
        take(sums, sizes.tiles * COLUMNS * head_dim);
        take(keys, SPAN_BLOCKS * BLOCK_TOKENS * head_dim);
        take(values, sizes.blocks * BLOCK_TOKENS * head_dim);
        take(weights, SPAN_BLOCKS * BLOCK_TOKENS * COLUMNS);
        take(scores, 2 * BLOCK_TOKENS * COLUMNS);
    }
    size_t bytes() const { return static_cast<size_t>(next_ - static_cast<char*>(nullptr)); }

    Columns* columns;
    Packed* queries;
    float* sums;
    Packed* keys;
    Packed* values;
    Probability* weights;
    float* scores;

private:
    template <class T>
    void take(T*& table, int count) {
        table = reinterpret_cast<T*>(next_);
        next_ += static_cast<size_t>(count) * sizeof(T);
    }
    char* next_;
};

}  // namespace tandem
