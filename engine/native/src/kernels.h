// What the kernels of one instruction set offer to the rest of the library.
//
// The whole library is compiled once for each instruction set (see build.py), with these macros set to 0 or 1:
// TANDEM_AMX (AMX-bf16 tiles), TANDEM_BF16 (AVX-512 bf16 dot products), TANDEM_AVX512 (F, BW, VL, DQ), TANDEM_AVX2 (with
// FMA and without AVX-512).
//
// bfloat16 values travel as uint16_t; sums are float32. A kernel does the share `part` of `parts` of its work; a barrier
// lies between two kernels. A row's result must not depend on the other rows, on `parts`, or on how a prompt was cut.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tandem {

using bf16 = uint16_t;

// Strides count elements. The order of the pool is [page, layer, token, (key, value), kv head, head_dim].
struct Pool {
    bf16* data;
    int64_t page_stride;
    int64_t layer_stride;
    int64_t token_stride;
};

struct Geometry {
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t page_tokens;
    int32_t layers;
    float rms_eps;

    int32_t query_columns() const { return heads * head_dim; }
    int32_t qkv_columns() const { return (heads + 2 * kv_heads) * head_dim; }
};

// The packed rows of a step: where each one stands and where its keys and values go.
struct Rows {
    int32_t count;
    const int32_t* positions;
    const int32_t* write_pages;
    const int32_t* write_offsets;
};

// The sequences of a step. Sequence s has the packed rows first_row[s] .. + row_count[s], the first one at
// first_position[s]; its page table begins at pages[table_start[s]] and covers its last row.
struct Sequences {
    int32_t count;
    const int32_t* first_row;
    const int32_t* row_count;
    const int32_t* first_position;
    const int32_t* table_start;
    const int32_t* pages;
};

// What becomes of the float32 sums of a product.
enum class Finish : int32_t {
    ROUND = 0,   // to bfloat16
    ADD = 1,     // the residual is added, then rounded once
    SWIGLU = 2,  // silu(gate) * up, rounded once; half as many columns come out
    FLOAT = 3,   // float32 as they are
};

constexpr int PANEL = 32;        // outputs in a panel
constexpr int INPUT_BLOCK = 32;  // inputs in a tile

// A weight [outputs, inputs] in panels of 32 outputs: [panel][inputs / 32][half panel][input pair][16 outputs][2 inputs], so
// that a half panel of 32 inputs is one tile of the matrix unit and a row of it one vector. Inputs and outputs are padded
// with zeros. For SWIGLU the first half of a panel holds gates, the second half the ups of the same columns.
//
// Panels of bfloat16; with scales they are int8, in the same order, and an output's sum is multiplied with its scale. Every
// int8 is a bfloat16 as it is, so the sums are made as of other weights.
struct Weight {
    const void* panels;
    const float* scales;  // one number for each padded output, in the order of the panels; or null
    const float* bias;    // the same
    int32_t inputs;       // padded to a multiple of 32
    int32_t columns;      // of the result

    // Where a panel begins. Element: bf16, or int8_t where there are scales.
    template <typename Element>
    const Element* panel(int64_t index) const {
        return static_cast<const Element*>(panels) + index * PANEL * inputs;
    }
};

// x: [rows, inputs], rows x_stride elements apart; what pads its rows must be zero.
struct Product {
    const bf16* x;
    int64_t x_stride;
    int32_t rows;
    Finish finish;
    const bf16* residual;  // [rows, columns], residual_stride apart; may not be `out`
    int64_t residual_stride;
    void* out;  // [rows, columns] of bfloat16 or float32, out_stride elements apart
    int64_t out_stride;
    // For each row null, or what is added to its sums before they are finished: float32 in the order of the panels' outputs, whole
    // panels; or null for all rows.
    const float* const* addends;
};

// Counts the blocks of one kernel that were taken.
class Count {
  public:
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void reset() { next_.store(0, std::memory_order_relaxed); }

  private:
    alignas(64) std::atomic<int> next_{0};
};

// What the parts of one kernel have taken, of each section of its rows.
class Turn {
  public:
    static constexpr int SECTIONS = 8;

    Count& of(int section) { return counts_[section]; }
    void reset() {
        for (Count& count : counts_) count.reset();
    }

  private:
    Count counts_[SECTIONS];
};

// out = finish(x * weight^T * scales + bias + addends). turn: reset, and the same for all parts.
void linear(const Weight& weight, const Product& product, Turn& turn, int part, int parts);

// The same for one section of the rows and so many parts, by the instructions at hand. taken: the same for all of them.
void linear_section(const Weight& weight, const Product& product, Count& taken, int parts);

// x / sqrt(mean(x^2) + eps) * weight for each row of `columns`.
void norm(const bf16* x, int64_t x_stride, const bf16* weight, bf16* out, int64_t out_stride, int rows, int columns, float eps,
          int part, int parts);

// The share of `count` things that a part does: begin <= thing < end.
struct Share {
    int begin;
    int end;
};

static inline Share share_of(int count, int part, int parts) {
    return {static_cast<int>(static_cast<int64_t>(count) * part / parts),
            static_cast<int>(static_cast<int64_t>(count) * (part + 1) / parts)};
}

// Head norms (or null), rotary embedding of queries and keys in place, keys and values into the pool.
// qkv: [rows, qkv_columns] contiguous. rope: [positions, head_dim], cosines then sines.
// head_norms: [heads + kv_heads, head_dim].
void rotate_and_store(const Geometry& geometry, const Pool& pool, int layer, const Rows& rows, bf16* qkv, const float* rope,
                      const float* head_norms, int part, int parts);

// Bytes of scratch that one part of `attend` needs, a multiple of 64; the scratch is aligned to 64 bytes.
size_t attend_scratch_bytes(const Geometry& geometry, const Sequences& sequences, int parts);

// Attention of the rotated rows over the pages. out: [rows, query_columns] contiguous. Rows outside every sequence stay as
// they are.
void attend(const Geometry& geometry, const Pool& pool, int layer, const Sequences& sequences, const bf16* qkv, bf16* out,
            void* scratch, int part, int parts);

}  // namespace tandem
