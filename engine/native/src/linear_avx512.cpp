// Products with AVX-512 that has no dot products of bfloat16. Every output has one chain of fused float32 sums over the inputs
// in order, whatever the number of rows. Both sides become floats before they meet: x once for many panels, in the order in
// which it is multiplied, and the weights once for all rows of a block, by the first group of them.
#if TANDEM_AVX512 && !TANDEM_BF16

#include <algorithm>

#include "claims.h"
#include "linear_finish.h"
#include "pairs.h"
#include "transpose.h"

namespace tandem {
namespace {

constexpr int ROWS_AT_ONCE = 12;  // two registers of sums each, which leaves eight
constexpr int GROUPS = 11;        // of rows that share weights made floats; more rows are cut by rows first, see sections.cpp
constexpr int BLOCK_ROWS = GROUPS * ROWS_AT_ONCE;
constexpr int BLOCK_PANELS = 12;             // that are taken at a time
constexpr int BLOCK_INPUTS = 192;            // of one panel as floats: half of the first-level cache
constexpr int PACKED_ELEMENTS = 192 * 1024;  // of x as floats: a part of the second-level cache
constexpr int PAIR_ELEMENTS = 2 * LANES;
constexpr int TILE_ELEMENTS = LANES * PAIR_ELEMENTS;
constexpr int FAR_ELEMENTS = 16 * 1024;      // fetched into the second-level cache so far ahead
constexpr int NEAR_ELEMENTS = 1024;          // and from there into the first-level cache

// Two inputs of a panel as floats, each of both halves.
struct Inputs {
    f32x16 even[2], odd[2];
};

// Where the weights of two inputs lie in a panel, those of the second half TILE_ELEMENTS behind.
static inline int place_of(int input) { return input / INPUT_BLOCK * (2 * TILE_ELEMENTS) + input % INPUT_BLOCK * LANES; }

// Weights that come next, fetched into the second-level cache a little with each input, so that memory is asked for as much at
// any time as at another: what a core asks for beyond what it can wait for is dropped or holds it up.
struct Behind {
    const char* begin;
    int step;  // bytes for each input

    void ask(int input) const { __builtin_prefetch(begin + input * step, 0, 2); }
};

// Weights as they lie in memory. KEEP: they are also written down as floats, and what lies behind is fetched; otherwise what lies
// FAR_ELEMENTS behind.
template <typename Element, bool KEEP>
struct Stored {
    const Element* panel;
    float* wide;
    Behind behind;

    Inputs load_pairs(int input) const {
        const Element* from = panel + place_of(input);
        __builtin_prefetch(from + NEAR_ELEMENTS);
        __builtin_prefetch(from + TILE_ELEMENTS + NEAR_ELEMENTS);
        if constexpr (KEEP) {
            behind.ask(input);
        } else {
            __builtin_prefetch(from + FAR_ELEMENTS, 0, 2);
            __builtin_prefetch(from + TILE_ELEMENTS + FAR_ELEMENTS, 0, 2);
        }
        const Pair first = load_pair(from), second = load_pair(from + TILE_ELEMENTS);
        if constexpr (KEEP) {
            float* to = wide + input * PANEL;
            store(to, first.even);
            store(to + LANES, second.even);
            store(to + PANEL, first.odd);
            store(to + PANEL + LANES, second.odd);
        }
        return {{first.even, second.even}, {first.odd, second.odd}};
    }
};

// Weights that were made floats, [input][32].
struct Wide {
    const float* wide;
    Behind behind;

    Inputs load_pairs(int input) const {
        behind.ask(input);
        const float* from = wide + input * PANEL;
        return {{load(from), load(from + LANES)}, {load(from + PANEL), load(from + PANEL + LANES)}};
    }
};

// sums[row][16] += x[input][row] * weights, for both halves of a panel. inputs: at least two.
template <int ROWS, class Weights>
void multiply(const Weights weights, const float* x, int inputs, float* first_half, float* second_half) {
    f32x16 first[ROWS], second[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        first[row] = load(first_half + row * LANES);
        second[row] = load(second_half + row * LANES);
    }
    int input = 0;
    do {
        const Inputs two = weights.load_pairs(input);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const f32x16 value = splat(x[row]);
            first[row] = multiply_add(two.even[0], value, first[row]);
            second[row] = multiply_add(two.even[1], value, second[row]);
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const f32x16 value = splat(x[ROWS + row]);
            first[row] = multiply_add(two.odd[0], value, first[row]);
            second[row] = multiply_add(two.odd[1], value, second[row]);
        }
        x += 2 * ROWS;
        input += 2;
    } while (input < inputs);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        store(first_half + row * LANES, first[row]);
        store(second_half + row * LANES, second[row]);
    }
}

template <int ROWS, class Weights>
void multiply_group(int rows, const Weights weights, const float* x, int inputs, float* first_half, float* second_half) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return multiply<ROWS>(weights, x, inputs, first_half, second_half);
        multiply_group<ROWS - 1>(rows, weights, x, inputs, first_half, second_half);
    }
}

// x [rows][inputs] becomes floats [input][row]. At most sixteen rows, `stride` apart.
void pack(const bf16* x, int64_t stride, int rows, int inputs, float* out) {
    const __mmask16 used = static_cast<__mmask16>((1u << rows) - 1);
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    for (int input = 0; input < inputs; input += INPUT_BLOCK) {
        __m512i lines[LANES];
        for (int row = 0; row < LANES; ++row)
            lines[row] = row < rows ? _mm512_loadu_si512(x + row * stride + input) : _mm512_setzero_si512();
        transpose(lines);
        for (int pair = 0; pair < LANES; ++pair, out += 2 * rows) {
            _mm512_mask_storeu_epi32(out, used, _mm512_slli_epi32(lines[pair], 16));
            _mm512_mask_storeu_epi32(out + rows, used, _mm512_and_si512(lines[pair], high));
        }
    }
}

// A product by one part. Element: of the panels, bf16 or int8_t.
template <typename Element>
class Linear {
  public:
    Linear(const Weight& weight, const Product& product)
        : weight_(weight), product_(product), groups_((product.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE) {}

    // All rows for some panels.
    void take_panels(Share panels) {
        const int blocks = (groups_ + GROUPS - 1) / GROUPS;
        for (int block = 0; block < blocks; ++block) take_block(panels, share_of(groups_, block, blocks));
    }

  private:
    Share rows_of(int group) const { return share_of(product_.rows, group, groups_); }

    void take_block(Share panels, Share groups) {
        const int row = rows_of(groups.begin).begin, rows = rows_of(groups.end - 1).end - row;
        const int panel_sums = rows * PANEL;
        std::memset(sums_, 0, static_cast<size_t>((panels.end - panels.begin) * panel_sums) * sizeof(float));
        const int lines = weight_.inputs / INPUT_BLOCK, most = PACKED_ELEMENTS / rows / INPUT_BLOCK;
        const int slabs = (lines + most - 1) / most;
        for (int slab = 0; slab < slabs; ++slab) {
            const Share part = share_of(lines, slab, slabs);
            const Share inputs = {part.begin * INPUT_BLOCK, part.end * INPUT_BLOCK};
            pack_rows(groups, inputs);
            for (int panel = panels.begin; panel < panels.end; ++panel)
                multiply_panel(panel, groups, inputs, sums_ + (panel - panels.begin) * panel_sums);
        }
        for (int panel = panels.begin; panel < panels.end; ++panel) {
            const float* sums = sums_ + (panel - panels.begin) * panel_sums;
            finish_rows(weight_, product_, panel, row, rows, sums, sums + rows * LANES);
        }
    }

    // [group][input][row]. Panels that come later find them packed, unless the rows are too many.
    void pack_rows(Share groups, Share inputs) {
        if (packed_group_ == groups.begin && packed_input_ == inputs.begin) return;
        packed_group_ = groups.begin, packed_input_ = inputs.begin;
        float* out = packed_;
        for (int group = groups.begin; group < groups.end; ++group) {
            const Share rows = rows_of(group);
            const int count = rows.end - rows.begin;
            const bf16* from = product_.x + rows.begin * product_.x_stride + inputs.begin;
            pack(from, product_.x_stride, count, inputs.end - inputs.begin, out);
            out += count * (inputs.end - inputs.begin);
        }
    }

    // sums: [half panel][row][16]
    void multiply_panel(int panel, Share groups, Share inputs, float* sums) {
        const int row = rows_of(groups.begin).begin, rows = rows_of(groups.end - 1).end - row;
        const int group_count = groups.end - groups.begin;
        const int all = inputs.end - inputs.begin, step = group_count == 1 ? all : BLOCK_INPUTS;
        const Element* weights = weight_.panel<Element>(panel) + static_cast<int64_t>(inputs.begin) * PANEL;
        Behind behind{nullptr, (PANEL * static_cast<int>(sizeof(Element)) + group_count - 1) / group_count};
        for (int input = 0; input < all; input += step, weights += BLOCK_INPUTS * PANEL) {
            const int count = std::min(step, all - input);
            behind.begin = reinterpret_cast<const char*>(weights + count * PANEL);
            for (int group = groups.begin; group < groups.end; ++group, behind.begin += count * behind.step) {
                const Share own = rows_of(group);
                const int size = own.end - own.begin, place = own.begin - row;
                const float* x = packed_ + place * all + input * size;
                float *first = sums + place * LANES, *second = first + rows * LANES;
                if (group_count == 1)
                    multiply_group<ROWS_AT_ONCE>(size, Stored<Element, false>{weights, nullptr, behind}, x, count, first, second);
                else if (group == groups.begin)
                    multiply_group<ROWS_AT_ONCE>(size, Stored<Element, true>{weights, wide_, behind}, x, count, first, second);
                else
                    multiply_group<ROWS_AT_ONCE>(size, Wide{wide_, behind}, x, count, first, second);
            }
        }
    }

    const Weight& weight_;
    const Product& product_;
    const int groups_;
    int packed_group_ = -1, packed_input_ = -1;
    alignas(64) float packed_[PACKED_ELEMENTS];
    alignas(64) float sums_[BLOCK_PANELS * PANEL * BLOCK_ROWS];
    alignas(64) float wide_[BLOCK_INPUTS * PANEL];
};

template <typename Element>
void run(const Weight& weight, const Product& product, Count& taken, int parts) {
    Claims claims(taken, panels_of(weight, product.finish), BLOCK_PANELS, parts);
    Linear<Element> linear(weight, product);
    for (Share share = claims.next(); share.begin < share.end; share = claims.next()) linear.take_panels(share);
}

}  // namespace

void linear_section(const Weight& weight, const Product& product, Count& taken, int parts) {
    if (product.rows == 0) return;
    (weight.scales ? run<int8_t> : run<bf16>)(weight, product, taken, parts);
}

}  // namespace tandem

#endif
