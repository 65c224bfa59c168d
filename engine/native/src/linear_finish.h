// From float32 sums to the result of a product, the same for every instruction set.
#pragma once

#include "simd.h"

namespace tandem {

static inline int panels_of(const Weight& weight, Finish finish) {
    int columns = finish == Finish::SWIGLU ? PANEL / 2 : PANEL;
    return (weight.columns + columns - 1) / columns;
}

// Sixteen results of one row, or the first `count` of them.
template <Finish FINISH, bool PART>
static inline void finish_half(const Product& product, int64_t row, int column, int count, f32x16 sums) {
    if constexpr (FINISH == Finish::FLOAT) {
        float* out = static_cast<float*>(product.out) + row * product.out_stride + column;
        if constexpr (PART)
            std::memcpy(out, &sums, static_cast<size_t>(count) * sizeof(float));
        else
            store(out, sums);
        return;
    }
    if constexpr (FINISH == Finish::ADD) {
        const bf16* residual = product.residual + row * product.residual_stride + column;
        sums = (PART ? load_bf16_part(residual, count) : load_bf16(residual)) + sums;
    }
    bf16* out = static_cast<bf16*>(product.out) + row * product.out_stride + column;
    if constexpr (PART)
        store_bf16_part(out, sums, count);
    else
        store_bf16(out, sums);
}

template <Finish FINISH, bool PART>
static void finish_panel(const Weight& weight, const Product& product, int panel, int row, int rows, const float* first,
                         const float* second) {
    constexpr int COLUMNS = FINISH == Finish::SWIGLU ? LANES : PANEL;
    const int column = panel * COLUMNS;
    const int left = weight.columns - column;
    const int first_count = left < LANES ? left : LANES;
    const int second_count = left - first_count < LANES ? left - first_count : LANES;
    const float* scales = weight.scales ? weight.scales + panel * PANEL : nullptr;
    const float* bias = weight.bias ? weight.bias + panel * PANEL : nullptr;
    for (int each = 0; each < rows; ++each) {
        f32x16 one = load(first + each * LANES), two = load(second + each * LANES);
        if (scales) {
            one = one * load(scales);
            two = two * load(scales + LANES);
        }
        if (bias) {
            one = one + load(bias);
            two = two + load(bias + LANES);
        }
        if (const float* addends = product.addends ? product.addends[row + each] : nullptr) {
            one = one + load(addends + panel * PANEL);
            two = two + load(addends + panel * PANEL + LANES);
        }
        if constexpr (FINISH == Finish::SWIGLU) {
            finish_half<FINISH, PART>(product, row + each, column, first_count, one * sigmoid(one) * two);
        } else {
            finish_half<FINISH, PART>(product, row + each, column, first_count, one);
            if (!PART || second_count > 0) finish_half<FINISH, PART>(product, row + each, column + LANES, second_count, two);
        }
    }
}

template <Finish FINISH>
static void finish_full_or_part(const Weight& weight, const Product& product, int panel, int row, int rows, const float* first,
                                const float* second) {
    constexpr int COLUMNS = FINISH == Finish::SWIGLU ? LANES : PANEL;
    if ((panel + 1) * COLUMNS <= weight.columns) return finish_panel<FINISH, false>(weight, product, panel, row, rows, first, second);
    finish_panel<FINISH, true>(weight, product, panel, row, rows, first, second);
}

// Rows of a panel. first, second: [rows][16], the sums of the panel's halves.
static inline void finish_rows(const Weight& weight, const Product& product, int panel, int row, int rows, const float* first,
                               const float* second) {
    switch (product.finish) {
        case Finish::ROUND: return finish_full_or_part<Finish::ROUND>(weight, product, panel, row, rows, first, second);
        case Finish::ADD: return finish_full_or_part<Finish::ADD>(weight, product, panel, row, rows, first, second);
        case Finish::SWIGLU: return finish_full_or_part<Finish::SWIGLU>(weight, product, panel, row, rows, first, second);
        case Finish::FLOAT: return finish_full_or_part<Finish::FLOAT>(weight, product, panel, row, rows, first, second);
    }
}

}  // namespace tandem
