#include <cmath>

#include "simd.h"

namespace tandem {

void norm(const bf16* x, int64_t x_stride, const bf16* weight, bf16* out, int64_t out_stride, int rows, int columns, float eps,
          int part, int parts) {
    Share share = share_of(rows, part, parts);
    for (int row = share.begin; row < share.end; ++row) {
        const bf16* from = x + row * x_stride;
        bf16* to = out + row * out_stride;
        f32x16 squares = {};
        int column = 0;
        for (; column + LANES <= columns; column += LANES) {
            f32x16 value = load_bf16(from + column);
            squares = multiply_add(value, value, squares);
        }
        const int rest = columns - column;
        if (rest > 0) {
            f32x16 value = load_bf16_part(from + column, rest);
            squares = multiply_add(value, value, squares);
        }
        const float scale = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(columns) + eps);
        for (column = 0; column + LANES <= columns; column += LANES)
            store_bf16(to + column, load_bf16(from + column) * scale * load_bf16(weight + column));
        if (rest > 0) {
            f32x16 value = load_bf16_part(from + column, rest) * scale * load_bf16_part(weight + column, rest);
            store_bf16_part(to + column, value, rest);
        }
    }
}

}  // namespace tandem
