// A whole model and a whole step of it, as Python describes them (engine/native/library.py has the same structs).
#pragma once

#include "kernels.h"

namespace tandem {

struct Layer {
    const bf16* attention_norm;
    const float* head_norms;  // or null
    const bf16* mlp_norm;
    Weight qkv;
    Weight output;
    Weight gate_up;
    Weight down;
};

// An adapter's update of a product: up * (down * x), with the adapter's scale in `up`; its outputs are whole panels, in the order
// of the weight's. Without an update both have no panels.
struct Update {
    Weight down;
    Weight up;

    bool is_there() const { return down.panels != nullptr; }
};

// What an adapter changes in one layer.
struct AdapterLayer {
    Update qkv;
    Update output;
    Update gate_up;
    Update down;
};

// The rows of one adapter: those from `begin` to `end` of AdapterRows.
struct AdapterRun {
    const AdapterLayer* layers;
    int32_t begin;
    int32_t end;
};

// Rows that have adapters, those of one adapter behind one another.
struct AdapterRows {
    int32_t run_count;
    const AdapterRun* runs;
    int32_t count;
    const int32_t* rows;  // their numbers among the packed rows, or among the wanted ones
};

struct Model {
    Geometry geometry;
    int32_t hidden;
    int32_t intermediate;
    Pool pool;
    const float* rope;
    const bf16* embedding;  // [vocabulary, hidden]
    const Layer* layers;
    const bf16* final_norm;
    Weight head;
};

// An owner of lent cores wants them back when its count is not the one seen any more. It lies in memory shared with the owner.
struct Recall {
    const uint32_t* count;
    uint32_t seen;

    bool wanted() const { return __atomic_load_n(count, __ATOMIC_RELAXED) != seen; }
};

// The packed rows of a step and what is wanted of them. The last layer attends for the wanted rows only, each a sequence of
// its own.
struct Step {
    Rows rows;
    const int32_t* token_ids;
    Sequences sequences;
    Sequences wanted;  // first_row: the wanted rows, in the order of the logits
    int32_t fresh_count;
    const int32_t* fresh_pages;
    float* logits;  // [wanted.count, vocabulary]
    // Called by part 0 with n when the keys and values of the first n layers are written, for each n of marks; or null.
    void (*told)(int32_t layers);
    int32_t mark_count;
    const int32_t* marks;
    // Parts that it begins with. Looked at between operations: once a core is wanted back, only the first own_threads go on.
    int32_t begin_threads;
    int32_t own_threads;
    int32_t recall_count;
    const Recall* recalls;
    // Looked at between layers when there are only own_threads parts: while one of these counts is even, its owner has nothing to
    // do. `enter` is then called by part 0; it says how many more parts may come in, and changes `recalls` before. Or null.
    int32_t watch_count;
    const uint32_t* const* watched;
    int32_t (*enter)();
    AdapterRows adapted;
    AdapterRows adapted_wanted;
};

}  // namespace tandem
