// The tiles of a weight's panels, block by block: as they lie in memory, or made of int8.
#pragma once

#if TANDEM_AMX

#include <immintrin.h>

#include <cstdint>

#include "amx.h"
#include "kernels.h"

namespace tandem {

constexpr int TILE_ROWS = 16;
constexpr int TILE_ELEMENTS = 512;
constexpr int BLOCK_ELEMENTS = 2 * TILE_ELEMENTS;  // of both halves of a panel
constexpr int LINE_BYTES = 64;
constexpr int64_t STREAM_AHEAD_BYTES = 12 * 1024;

// Where a stream of weights is, so far ahead: behind the end of a block of panels the next one begins.
struct Stream {
    const char* end;   // of the block
    const char* next;  // the block behind it

    const char* ahead(const void* weights) const {
        const char* from = static_cast<const char*>(weights) + STREAM_AHEAD_BYTES;
        return from < end ? from : next + (from - end);
    }
};

// Tiles of bfloat16 where they lie. PREFETCH: they stream from memory.
template <bool PREFETCH>
class StoredTiles {
  public:
    StoredTiles(const bf16* panel, const Stream& stream) : panel_(panel), stream_(stream) {}

    // Both tiles of a block of inputs.
    const bf16* block(int number) const {
        const bf16* weights = panel_ + static_cast<int64_t>(number) * BLOCK_ELEMENTS;
        if constexpr (PREFETCH) {
            const char* ahead = stream_.ahead(weights);
            for (int line = 0; line < BLOCK_ELEMENTS * 2; line += LINE_BYTES) _mm_prefetch(ahead + line, _MM_HINT_T0);
        }
        return weights;
    }

  private:
    const bf16* panel_;
    const Stream& stream_;
};

// The bytes of the bfloat16 that 0 to 127 are. A table lookup takes fewer instructions than going through floats.
struct WholeNumbers {
    alignas(64) uint8_t low[128] = {};
    alignas(64) uint8_t high[128] = {};

    constexpr WholeNumbers() {
        for (int number = 1; number < 128; ++number) {
            int power = 6;
            while (number >> power == 0) --power;
            const int bits = ((127 + power) << 7) | ((number << (7 - power)) & 0x7f);
            low[number] = static_cast<uint8_t>(bits & 0xff);
            high[number] = static_cast<uint8_t>(bits >> 8);
        }
    }
};

inline constexpr WholeNumbers WHOLE_NUMBERS;

// Tiles made of int8, each while the matrix unit works on the one before. They are kept one behind the other in `wide`, or take
// turns in two places of it.
template <bool PREFETCH>
class WidenedTiles {
  public:
    WidenedTiles(const int8_t* panel, int blocks, bf16* wide, bool kept, const Stream& stream)
        : panel_(panel), blocks_(blocks), wide_(wide), mask_(kept ? ~0 : 1), stream_(stream) {
        widen(0);
    }

    const bf16* block(int number) const {
        if (number + 1 < blocks_) widen(number + 1);
        return place(number);
    }

  private:
    bf16* place(int number) const { return wide_ + static_cast<int64_t>(number & mask_) * BLOCK_ELEMENTS; }

    void widen(int number) const {
        const int8_t* from = panel_ + static_cast<int64_t>(number) * BLOCK_ELEMENTS;
        bf16* to = place(number);
        const char* ahead = PREFETCH ? stream_.ahead(from) : nullptr;
        const __m512i low_first = _mm512_load_si512(WHOLE_NUMBERS.low), low_last = _mm512_load_si512(WHOLE_NUMBERS.low + 64);
        const __m512i high_first = _mm512_load_si512(WHOLE_NUMBERS.high), high_last = _mm512_load_si512(WHOLE_NUMBERS.high + 64);
        const __m512i rows = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
        for (int at = 0; at < BLOCK_ELEMENTS; at += LINE_BYTES) {
            if constexpr (PREFETCH) _mm_prefetch(ahead + at, _MM_HINT_T0);
            // What becomes one line lies in the lower halves of the lanes, the next line in the upper ones.
            const __m512i values = _mm512_permutexvar_epi64(rows, _mm512_loadu_si512(from + at)), size = _mm512_abs_epi8(values);
            const __m512i low = _mm512_permutex2var_epi8(low_first, size, low_last);
            const __m512i unsigned_high = _mm512_permutex2var_epi8(high_first, size, high_last);
            const __m512i high = _mm512_ternarylogic_epi64(unsigned_high, values, sign, 0xf8);  // a | (b & c)
            _mm512_store_si512(to + at, _mm512_unpacklo_epi8(low, high));
            _mm512_store_si512(to + at + LINE_BYTES / 2, _mm512_unpackhi_epi8(low, high));
        }
        tile_fence();
    }

    const int8_t* panel_;
    const int blocks_;
    bf16* wide_;
    const int mask_;
    const Stream& stream_;
};

}  // namespace tandem

#endif
