#pragma once

#include <optional>

#include "memory.h"
#include "model.h"
#include "step_times.h"
#include "threads.h"
#include "updates.h"

namespace tandem {

// What is kept between steps: the memory of their rows, and where their time went.
class Workspace {
  public:
    // Takes the memory for a step of at most so many parts. Throws std::bad_alloc.
    void fit(const Model& model, const Step& step, int parts);

    // [rows, stride]; the columns that pad a row to a multiple of 32 stay zero.
    bf16* residual = nullptr;
    bf16* other = nullptr;
    bf16* normed = nullptr;
    bf16* qkv = nullptr;
    bf16* attended = nullptr;
    bf16* middle = nullptr;
    char* scratch = nullptr;
    size_t scratch_bytes = 0;  // of one part

    StepTimes times;
    UpdateSpace updates;
    // The layer at which parts came in that were not there from the begin.
    std::optional<int> entry;

  private:
    Memory residual_, other_, normed_, qkv_, attended_, middle_, scratch_;
};

// The columns of a row with what pads them.
static inline int64_t padded(int32_t columns) { return (columns + INPUT_BLOCK - 1) / INPUT_BLOCK * INPUT_BLOCK; }

// One part of a step: embedding, all layers, logits. False: it left before the end.
bool run_step(const Model& model, const Step& step, Workspace& space, Threads& threads, int part);

}  // namespace tandem
