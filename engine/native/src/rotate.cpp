#include "simd.h"

namespace tandem {

namespace {

constexpr int AHEAD_ROWS = 4;
constexpr int CACHE_LINE = 32;  // elements in a cache line

// Root mean square norm of one head, in place. weight: [head_dim].
void normalise(float* head, const float* weight, int head_dim, float eps) {
    f32x16 squares = splat(0.0f);
    for (int place = 0; place < head_dim; place += LANES) {
        f32x16 value = load(head + place);
        squares = multiply_add(value, value, squares);
    }
    float share = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(head_dim) + eps);
    for (int place = 0; place < head_dim; place += LANES)
        store(head + place, load(head + place) * splat(share) * load(weight + place));
}

// Places i and i + head_dim / 2 of a head turn together. angles: cosines, then sines.
void rotate(bf16* head, const float* angles, const float* norm, int head_dim, float eps) {
    alignas(64) float wide[256];
    const int half = head_dim / 2;
    for (int place = 0; place < head_dim; place += LANES) store(wide + place, load_bf16(head + place));
    if (norm) normalise(wide, norm, head_dim, eps);
    for (int place = 0; place < half; place += LANES) {
        f32x16 cosine = load(angles + place), sine = load(angles + half + place);
        f32x16 first = load(wide + place), second = load(wide + half + place);
        store_bf16(head + place, multiply_add(first, cosine, splat(0.0f) - second * sine));
        store_bf16(head + half + place, multiply_add(second, cosine, first * sine));
    }
}

bf16* cached_row(const Pool& pool, int layer, const Rows& rows, int64_t row) {
    return pool.data + rows.write_pages[row] * pool.page_stride + layer * pool.layer_stride +
           rows.write_offsets[row] * pool.token_stride;
}

}  // namespace

// The unit of work is one head of one row: query heads, key heads, then value heads.
void rotate_and_store(const Geometry& geometry, const Pool& pool, int layer, const Rows& rows, bf16* qkv, const float* rope,
                      const float* head_norms, int part, int parts) {
    const int head_dim = geometry.head_dim, turned = geometry.heads + geometry.kv_heads;
    const int row_heads = turned + geometry.kv_heads;
    const int64_t units = static_cast<int64_t>(rows.count) * row_heads;
    const size_t head_bytes = static_cast<size_t>(head_dim) * sizeof(bf16);
    for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; ++unit) {
        const int64_t row = unit / row_heads;
        const int place = static_cast<int>(unit % row_heads);
        if (row + AHEAD_ROWS < rows.count) {  // the line of the pool that a row behind this one will write
            const bf16* later = cached_row(pool, layer, rows, row + AHEAD_ROWS);
            for (int line = place; line < pool.token_stride / CACHE_LINE; line += row_heads)
                __builtin_prefetch(later + line * CACHE_LINE, 1);
        }
        bf16* head = qkv + row * geometry.qkv_columns() + place * head_dim;
        if (place < turned) {
            const float* angles = rope + static_cast<int64_t>(rows.positions[row]) * head_dim;
            rotate(head, angles, head_norms ? head_norms + place * head_dim : nullptr, head_dim, geometry.rms_eps);
        }
        if (place < geometry.heads) continue;
        std::memcpy(cached_row(pool, layer, rows, row) + (place - geometry.heads) * head_dim, head, head_bytes);
    }
}

}  // namespace tandem
