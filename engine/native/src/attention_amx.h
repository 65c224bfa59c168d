// The products of attention by AMX tiles of 16 x 16 float32 sums.
//
// The compiler does not know that these instructions read and write memory, hence the clobbers.
#pragma once

#include "attention_packed.h"

namespace tandem {

#define TANDEM_TILE_LOAD(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define TANDEM_TILE_STORE(tile, to, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
#define TANDEM_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::: "memory")
#define TANDEM_TILE_ADD(sum, left, right) asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::: "memory")

constexpr int TILE_BYTES = 64;  // one row of a tile
constexpr int64_t SCORE_STRIDE = COLUMNS * sizeof(float), PACKED_STRIDE = LINE * sizeof(bf16);

// The shapes of the tiles for as long as this lives.
class Products {
public:
    Products() = default;
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;
    ~Products() {
        if (rows_) asm volatile("tilerelease" ::: "memory");
    }

    // Tiles 4 and 5 get `rows` rows, the others 16.
    void shape(int rows) {
        if (rows == rows_) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } wanted;
        for (int tile = 0; tile < 8; ++tile) {
            wanted.row_bytes[tile] = TILE_BYTES;
            wanted.rows[tile] = static_cast<uint8_t>(tile == 4 || tile == 5 ? rows : 16);
        }
        asm volatile("ldtilecfg (%0)" ::"r"(&wanted) : "memory");
        rows_ = rows;
    }

private:
    int rows_ = 0;
};

static inline void score(const Packed* keys, const Packed* queries, int, int head_dim, float* scores) {
    const int64_t stride = head_dim * static_cast<int64_t>(sizeof(bf16));
    TANDEM_TILE_ZERO(0);
    TANDEM_TILE_ZERO(1);
    for (int place = 0; place < head_dim; place += LINE) {
        TANDEM_TILE_LOAD(3, queries + place * COLUMNS, PACKED_STRIDE);
        TANDEM_TILE_LOAD(2, keys + place, stride);
        TANDEM_TILE_ADD(0, 2, 3);
        TANDEM_TILE_LOAD(6, keys + HALF_TOKENS * head_dim + place, stride);
        TANDEM_TILE_ADD(1, 6, 3);
    }
    TANDEM_TILE_STORE(0, scores, SCORE_STRIDE);
    TANDEM_TILE_STORE(1, scores + HALF_TOKENS * COLUMNS, SCORE_STRIDE);
}

// Two tiles of 16 places at a time.
static inline void mix(const Probability* weights, const Packed* values, int blocks, int, int head_dim, float* sums) {
    const int64_t stride = head_dim * static_cast<int64_t>(sizeof(float));
    constexpr int tile = LANES * BLOCK_TOKENS;
    for (int place = 0; place < head_dim; place += LINE) {
        TANDEM_TILE_LOAD(0, sums + place, stride);
        TANDEM_TILE_LOAD(1, sums + place + LANES, stride);
        for (int block = 0; block < blocks; ++block) {
            const Packed* from = values + (block * head_dim + place) * BLOCK_TOKENS;
            TANDEM_TILE_LOAD(2, weights + block * BLOCK_TOKENS * COLUMNS, PACKED_STRIDE);
            TANDEM_TILE_LOAD(3, from, PACKED_STRIDE);
            TANDEM_TILE_ADD(0, 2, 3);
            TANDEM_TILE_LOAD(6, from + tile, PACKED_STRIDE);
            TANDEM_TILE_ADD(1, 2, 6);
        }
        TANDEM_TILE_STORE(0, sums + place, stride);
        TANDEM_TILE_STORE(1, sums + place + LANES, stride);
    }
}

}  // namespace tandem
