// Tiles of the matrix unit, with what gcc's intrinsics leave out: they do not say that they read and write memory.
#pragma once

#if TANDEM_AMX

#include <immintrin.h>

#include <cstdint>

namespace tandem {

// The memory image that `ldtilecfg` reads.
struct alignas(64) TileConfig {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Keeps the compiler from moving memory accesses over a tile instruction.
static inline void tile_fence() { asm volatile("" ::: "memory"); }

static inline void load_tile_config(const TileConfig& config) {
    tile_fence();
    _tile_loadconfig(&config);
}

}  // namespace tandem

#endif
