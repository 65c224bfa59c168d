// The order of a decoder step: the same operations, in the same order, as engine/llama.py composes.
#include "step.h"

#include <algorithm>
#include <utility>

namespace tandem {

void Workspace::fit(const Model& model, const Step& step, int parts) {
    const size_t rows = static_cast<size_t>(step.rows.count);
    auto take = [rows](Memory& memory, int64_t columns) {
        return static_cast<bf16*>(memory.take(rows * static_cast<size_t>(columns) * sizeof(bf16)));
    };
    residual = take(residual_, padded(model.hidden));
    other = take(other_, padded(model.hidden));
    normed = take(normed_, padded(model.hidden));
    qkv = take(qkv_, model.geometry.qkv_columns());
    attended = take(attended_, model.geometry.query_columns());
    middle = take(middle_, padded(model.intermediate));
    scratch_bytes = 0;
    for (int working = step.own_threads; working <= parts; ++working)
        for (const Sequences* sequences : {&step.sequences, &step.wanted})
            scratch_bytes = std::max(scratch_bytes, attend_scratch_bytes(model.geometry, *sequences, working));
    updates.fit(model, step);
    entry.reset();
    scratch = static_cast<char*>(scratch_.take(scratch_bytes * static_cast<size_t>(parts)));
}

namespace {

// A part does not go on: its core is wanted back.
struct Left {};

class Part {
  public:
    Part(const Model& model, const Step& step, Workspace& space, Threads& threads, int part)
        : model_(model), step_(step), space_(space), threads_(threads), part_(part), residual_(space.residual),
          other_(space.other), stride_(padded(model.hidden)), rows_(step.rows.count), adapted_(&step.adapted) {}

    void run() {
        const int last = model_.geometry.layers - 1;
        for (int index = first_layer(); index <= last; ++index) {
            const Layer& layer = model_.layers[index];
            keys_and_values(layer, index);
            if (index == last && step_.wanted.count == 0) return;
            attend(model_.geometry, model_.pool, index, index == last ? step_.wanted : step_.sequences, space_.qkv,
                   space_.attended, space_.scratch + static_cast<size_t>(part_) * space_.scratch_bytes, part_, parts());
            finish(Operation::ATTEND);
            if (index == last) keep_wanted();
            add(layer.output, &AdapterLayer::output, space_.attended, model_.geometry.query_columns());
            finish(Operation::OUT);
            normalise(layer.mlp_norm);
            const float* const* addends = update(&AdapterLayer::gate_up, space_.normed, stride_);
            multiply(layer.gate_up, space_.normed, stride_, Finish::SWIGLU, space_.middle, padded(model_.intermediate), addends);
            finish(Operation::GATE_UP);
            add(layer.down, &AdapterLayer::down, space_.middle, padded(model_.intermediate));
            finish_layer(Operation::DOWN, index + 1);
        }
        normalise(model_.final_norm);
        multiply(model_.head, space_.normed, stride_, Finish::FLOAT, step_.logits, model_.head.columns, nullptr);
        finish(Operation::HEAD);
    }

  private:
    int parts() const { return threads_.parties(); }

    // Who comes in later begins there, with everything as it is between two layers.
    int first_layer() {
        if (space_.entry) {
            products_ = PRODUCTS * *space_.entry;
            return *space_.entry;
        }
        if (part_ == 0) space_.times.begin();
        begin();
        return 0;
    }

    // All parts of an operation are done.
    void finish(Operation operation) {
        meet();
        if (part_ == 0) space_.times.end(operation);
    }

    // The same at the end of a layer, where others may come in.
    void finish_layer(Operation operation, int next) {
        const int before = parts();
        const int more = part_ == 0 && next < model_.geometry.layers ? invited() : 0;
        if (more > 0) threads_.expect(before + more);
        meet();
        if (part_ != 0) return;
        space_.times.end(operation);
        if (more == 0) return;
        space_.entry = next;
        threads_.open(before, before + more);
    }

    // How many more may come in.
    int invited() const {
        if (step_.watch_count == 0 || parts() > step_.own_threads) return 0;
        const int room = threads_.count() - parts();
        if (room == 0 || !threads_.wait_outside(parts(), threads_.count())) return 0;
        const auto rests = [](const uint32_t* count) { return __atomic_load_n(count, __ATOMIC_RELAXED) % 2 == 0; };
        if (std::none_of(step_.watched, step_.watched + step_.watch_count, rests)) return 0;
        return std::clamp(step_.enter(), 0, room);
    }

    // Who may have to wait for its core at each meeting is waited for once more, then no more.
    void meet() {
        if (part_ == 0 && parts() > step_.own_threads && recalled()) threads_.keep(step_.own_threads);
        threads_.meet();
        if (part_ >= parts()) throw Left{};
    }

    bool recalled() const {
        return std::any_of(step_.recalls, step_.recalls + step_.recall_count, [](const Recall& each) { return each.wanted(); });
    }

    void begin() {
        const size_t page_bytes = static_cast<size_t>(model_.pool.page_stride) * sizeof(bf16);
        const Share pages = share_of(step_.fresh_count, part_, parts());
        for (int index = pages.begin; index < pages.end; ++index)
            std::memset(model_.pool.data + step_.fresh_pages[index] * model_.pool.page_stride, 0, page_bytes);
        const Share rows = share_of(rows_, part_, parts());
        const size_t row_bytes = static_cast<size_t>(model_.hidden) * sizeof(bf16);
        for (int row = rows.begin; row < rows.end; ++row)
            std::memcpy(residual_ + row * stride_, model_.embedding + static_cast<int64_t>(step_.token_ids[row]) * model_.hidden,
                        row_bytes);
        finish_layer(Operation::EMBED, 0);
    }

    void keys_and_values(const Layer& layer, int index) {
        normalise(layer.attention_norm);
        layer_ = index;
        const float* const* addends = update(&AdapterLayer::qkv, space_.normed, stride_);
        multiply(layer.qkv, space_.normed, stride_, Finish::ROUND, space_.qkv, model_.geometry.qkv_columns(), addends);
        finish(Operation::QKV);
        rotate_and_store(model_.geometry, model_.pool, index, step_.rows, space_.qkv, model_.rope, layer.head_norms, part_,
                         parts());
        finish(Operation::ROTATE);
        tell(index + 1);
    }

    // The others go on meanwhile.
    void tell(int layers) {
        if (part_ != 0 || !step_.told) return;
        for (int mark = 0; mark < step_.mark_count; ++mark)
            if (step_.marks[mark] == layers) step_.told(layers);
        space_.times.end(Operation::TELL);
    }

    void normalise(const bf16* weight) {
        norm(residual_, stride_, weight, space_.normed, stride_, rows_, model_.hidden, model_.geometry.rms_eps, part_, parts());
        finish(Operation::NORM);
    }

    // What adapters add to this layer's product of x; null when no row has one.
    const float* const* update(const Update AdapterLayer::*update, const bf16* x, int64_t x_stride) {
        if (adapted_->run_count == 0) return nullptr;
        update_rows(*adapted_, layer_, update, x, x_stride, space_.updates, threads_, part_);
        return space_.updates.addends;
    }

    void multiply(const Weight& weight, const bf16* x, int64_t x_stride, Finish finish, void* out, int64_t out_stride,
                  const float* const* addends) {
        Turn& turn = threads_.turn(products_);
        // Behind the next barrier nobody has used that one for two products.
        if (part_ == 0) threads_.turn(products_ + 2).reset();
        ++products_;
        linear(weight, {x, x_stride, rows_, finish, residual_, stride_, out, out_stride, addends}, turn, part_, parts());
    }

    void add(const Weight& weight, const Update AdapterLayer::*added, const bf16* x, int64_t x_stride) {
        const float* const* addends = update(added, x, x_stride);
        multiply(weight, x, x_stride, Finish::ADD, other_, stride_, addends);
        std::swap(residual_, other_);
    }

    // Only the wanted rows from here on, moved to the front. Part 0 alone: they are few, and may lie in one another's way.
    void keep_wanted() {
        rows_ = step_.wanted.count;
        adapted_ = &step_.adapted_wanted;
        const int columns = model_.geometry.query_columns();
        if (part_ == 0) {
            for (int row = 0; row < rows_; ++row) {
                const int64_t from = step_.wanted.first_row[row];
                std::memcpy(space_.normed + row * stride_, residual_ + from * stride_, static_cast<size_t>(stride_) * sizeof(bf16));
                std::memcpy(space_.qkv + static_cast<int64_t>(row) * columns, space_.attended + from * columns,
                            static_cast<size_t>(columns) * sizeof(bf16));
            }
            // Rows have other numbers now, and those that had adapters are others.
            if (step_.adapted.run_count != 0) std::fill(space_.updates.addends, space_.updates.addends + step_.rows.count, nullptr);
            std::memcpy(residual_, space_.normed, static_cast<size_t>(rows_ * stride_) * sizeof(bf16));
            std::memcpy(space_.attended, space_.qkv, static_cast<size_t>(rows_) * static_cast<size_t>(columns) * sizeof(bf16));
        }
        meet();
    }

    const Model& model_;
    const Step& step_;
    Workspace& space_;
    Threads& threads_;
    const int part_;
    bf16* residual_;
    bf16* other_;
    const int64_t stride_;
    int rows_;
    const AdapterRows* adapted_;
    int layer_ = 0;
    int products_ = 0;  // so far

    static constexpr int PRODUCTS = 4;  // of a layer
};

}  // namespace

bool run_step(const Model& model, const Step& step, Workspace& space, Threads& threads, int part) {
    try {
        Part(model, step, space, threads, part).run();
    } catch (const Left&) {
        return false;
    }
    return true;
}

}  // namespace tandem
