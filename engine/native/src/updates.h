// What adapters add to the products of a step: small products of the rows that have one, before the product itself.
#pragma once

#include <deque>

#include "memory.h"
#include "model.h"
#include "threads.h"

namespace tandem {

// Kept between steps: the memory of the rows that have adapters. Nothing is taken for a step without such rows.
class UpdateSpace {
  public:
    // Throws std::bad_alloc.
    void fit(const Model& model, const Step& step);

    bf16* rows = nullptr;        // [adapted rows, row_stride]: the inputs, rows of one adapter behind one another
    bf16* inner = nullptr;       // [adapted rows, inner_stride]: down * x
    float* sums = nullptr;       // [adapted rows, sum_stride]: up * (down * x)
    const float** addends = nullptr;  // [packed rows], see Product
    int64_t row_stride = 0, inner_stride = 0, sum_stride = 0;
    std::deque<Turn> turns;  // two for each run

  private:
    Memory rows_, inner_, sums_, addends_;
};

// One product's updates by one part; all parts call it, and meet in it. `update` says which of a layer's; x: the product's
// inputs, x_stride apart. Afterwards space.addends are the product's.
//
// A row's addends depend on that row alone: they are products as all others, of bfloat16 with float32 sums.
void update_rows(const AdapterRows& adapted, int layer, const Update AdapterLayer::*update, const bf16* x, int64_t x_stride,
                 UpdateSpace& space, Threads& threads, int part);

}  // namespace tandem
