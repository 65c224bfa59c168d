#include "updates.h"

#include <algorithm>
#include <cstring>

namespace tandem {

namespace {

constexpr const Update AdapterLayer::*UPDATES[] = {&AdapterLayer::qkv, &AdapterLayer::output, &AdapterLayer::gate_up,
                                                   &AdapterLayer::down};

int64_t whole_panels(int32_t columns) { return (static_cast<int64_t>(columns) + PANEL - 1) / PANEL * PANEL; }

}  // namespace

void UpdateSpace::fit(const Model& model, const Step& step) {
    const AdapterRows& adapted = step.adapted;
    if (adapted.run_count == 0) return;
    row_stride = inner_stride = sum_stride = 0;
    for (int run = 0; run < adapted.run_count; ++run)
        for (int layer = 0; layer < model.geometry.layers; ++layer)
            for (const Update AdapterLayer::*update : UPDATES) {
                const Update& one = adapted.runs[run].layers[layer].*update;
                if (!one.is_there()) continue;
                row_stride = std::max<int64_t>(row_stride, one.down.inputs);
                inner_stride = std::max(inner_stride, whole_panels(one.down.columns));
                sum_stride = std::max(sum_stride, whole_panels(one.up.columns));
            }
    const size_t count = static_cast<size_t>(adapted.count);
    rows = static_cast<bf16*>(rows_.take(count * static_cast<size_t>(row_stride) * sizeof(bf16)));
    inner = static_cast<bf16*>(inner_.take(count * static_cast<size_t>(inner_stride) * sizeof(bf16)));
    sums = static_cast<float*>(sums_.take(count * static_cast<size_t>(sum_stride) * sizeof(float)));
    const size_t all = static_cast<size_t>(step.rows.count);
    addends = static_cast<const float**>(addends_.take(all * sizeof(const float*)));
    std::fill(addends, addends + all, nullptr);
    while (turns.size() < 2 * static_cast<size_t>(adapted.run_count)) turns.emplace_back();
}

void update_rows(const AdapterRows& adapted, int layer, const Update AdapterLayer::*update, const bf16* x, int64_t x_stride,
                 UpdateSpace& space, Threads& threads, int part) {
    const int parts = threads.parties();
    // Nobody uses the turns here: all have left the products of the last call.
    if (part == 0)
        for (Turn& turn : space.turns) turn.reset();
    for (int number = 0; number < adapted.run_count; ++number) {
        const AdapterRun& run = adapted.runs[number];
        const Update& one = run.layers[layer].*update;
        const Share share = share_of(run.end - run.begin, part, parts);
        for (int at = run.begin + share.begin; at < run.begin + share.end; ++at) {
            const int row = adapted.rows[at];
            space.addends[row] = one.is_there() ? space.sums + at * space.sum_stride : nullptr;
            if (one.is_there())
                std::memcpy(space.rows + at * space.row_stride, x + row * x_stride,
                            static_cast<size_t>(one.down.inputs) * sizeof(bf16));
        }
    }
    threads.meet();
    for (const bool ups : {false, true}) {
        for (int number = 0; number < adapted.run_count; ++number) {
            const AdapterRun& run = adapted.runs[number];
            const Update& one = run.layers[layer].*update;
            if (!one.is_there()) continue;
            const int count = run.end - run.begin;
            bf16* inner = space.inner + run.begin * space.inner_stride;
            Turn& turn = space.turns[static_cast<size_t>(2 * number + ups)];
            if (ups)
                linear(one.up,
                       {inner, space.inner_stride, count, Finish::FLOAT, nullptr, 0, space.sums + run.begin * space.sum_stride,
                        space.sum_stride, nullptr},
                       turn, part, parts);
            else
                linear(one.down,
                       {space.rows + run.begin * space.row_stride, space.row_stride, count, Finish::ROUND, nullptr, 0, inner,
                        space.inner_stride, nullptr},
                       turn, part, parts);
        }
        threads.meet();
    }
}

}  // namespace tandem
