// Products on the matrix unit. Sums stay in tiles from the first input to the last, so that every output has one chain of
// float32 sums, whatever the number of rows.
#if TANDEM_AMX

#include <algorithm>

#include "amx.h"
#include "linear_finish.h"

namespace tandem {
namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_ELEMENTS = 512;
constexpr int TILE_BYTES = 1024;
constexpr int LINE_BYTES = 64;
// Weights that stay in the second-level cache while all rows pass by.
constexpr int64_t BLOCK_BYTES = 512 * 1024;
constexpr int64_t STREAM_AHEAD_BYTES = 12 * 1024;

// Tiles 0 to 3 are sums (two groups of rows, two halves of a panel), 4 and 5 rows of x, 6 and 7 the weights.
void configure(int tile_rows) {
    TileConfig config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        config.row_bytes[tile] = LINE_BYTES;
        config.rows[tile] = static_cast<uint8_t>(tile < 6 ? tile_rows : TILE_ROWS);
    }
    load_tile_config(config);
}

static inline void prefetch_block(const char* from) {
    for (int line = 0; line < 2 * TILE_BYTES; line += LINE_BYTES) _mm_prefetch(from + line, _MM_HINT_T0);
}

// The sums of one panel for one or two groups of rows, written to sums[group][half][row][16].
template <bool TWO, bool PREFETCH>
void multiply(const bf16* weights, const bf16* first, const bf16* second, int64_t x_stride, int blocks, float* sums) {
    const int64_t stride = x_stride * static_cast<int64_t>(sizeof(bf16));
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int block = 0; block < blocks; ++block) {
        if constexpr (PREFETCH) prefetch_block(reinterpret_cast<const char*>(weights) + STREAM_AHEAD_BYTES);
        _tile_loadd(4, first + block * INPUT_BLOCK, stride);
        _tile_loadd(6, weights, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_ELEMENTS, LINE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, second + block * INPUT_BLOCK, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        weights += 2 * TILE_ELEMENTS;
    }
    _tile_stored(0, sums, LINE_BYTES);
    _tile_stored(1, sums + 256, LINE_BYTES);
    if constexpr (TWO) {
        _tile_stored(2, sums + 512, LINE_BYTES);
        _tile_stored(3, sums + 768, LINE_BYTES);
    }
    tile_fence();
}

// Rows in groups of one size, the last ones overlapping when the size does not divide their number: a row that is computed
// twice gives the same result twice.
struct Groups {
    int rows;   // in a group
    int count;  // of groups
    int total;  // rows of all

    explicit Groups(int total_rows) : total(total_rows) {
        count = (total + TILE_ROWS - 1) / TILE_ROWS;
        rows = (total + count - 1) / count;
    }
    int begin(int group) const { return std::min(group * rows, total - rows); }
};

// All panels of a block for one group of rows or two.
template <bool TWO, bool PREFETCH>
void multiply_panels(const Weight& weight, const Product& product, const Groups& groups, int group, Share panels) {
    alignas(64) float sums[1024];
    const int64_t panel_elements = static_cast<int64_t>(PANEL) * weight.inputs;
    const int row = groups.begin(group), next = TWO ? groups.begin(group + 1) : row;
    const bf16* first = product.x + row * product.x_stride;
    const bf16* second = product.x + next * product.x_stride;
    for (int panel = panels.begin; panel < panels.end; ++panel) {
        multiply<TWO, PREFETCH>(weight.panels + panel * panel_elements, first, second, product.x_stride,
                                weight.inputs / INPUT_BLOCK, sums);
        finish_rows(weight, product, panel, row, groups.rows, sums, sums + 256);
        if constexpr (TWO) finish_rows(weight, product, panel, next, groups.rows, sums + 512, sums + 768);
    }
}

// The first rows fetch the weights, the others find them in the cache.
void multiply_block(const Weight& weight, const Product& product, const Groups& groups, Share panels) {
    for (int group = 0; group < groups.count; group += 2) {
        const bool two = group + 1 < groups.count;
        if (group == 0)
            (two ? multiply_panels<true, true> : multiply_panels<false, true>)(weight, product, groups, group, panels);
        else
            (two ? multiply_panels<true, false> : multiply_panels<false, false>)(weight, product, groups, group, panels);
    }
}

}  // namespace

void linear(const Weight& weight, const Product& product, int part, int parts) {
    if (product.rows == 0) return;
    const Share share = share_of(panels_of(weight, product.finish), part, parts);
    const Groups groups(product.rows);
    const int64_t panel_bytes = static_cast<int64_t>(PANEL) * weight.inputs * static_cast<int64_t>(sizeof(bf16));
    const int block = static_cast<int>(std::max<int64_t>(1, BLOCK_BYTES / panel_bytes));
    configure(groups.rows);
    for (int begin = share.begin; begin < share.end; begin += block)
        multiply_block(weight, product, groups, {begin, std::min(begin + block, share.end)});
    _tile_release();
}

}  // namespace tandem

#endif
