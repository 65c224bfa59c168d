// Products of many rows, cut by rows: each part begins with those that it also norms, so that what it wrote last lies in its own
// caches, and helps the others when it is done. Few rows are cut by panels of the weight alone.
#include <algorithm>

#include "kernels.h"

namespace tandem {
namespace {

constexpr int SECTION_ROWS = 64;  // at least

int sections_of(int rows, int parts) { return std::clamp(std::min(parts, Turn::SECTIONS), 1, std::max(1, rows / SECTION_ROWS)); }

Product rows_of(const Product& product, Share rows) {
    Product cut = product;
    cut.rows = rows.end - rows.begin;
    cut.x += rows.begin * product.x_stride;
    if (product.residual) cut.residual += rows.begin * product.residual_stride;
    if (product.addends) cut.addends += rows.begin;
    const size_t size = product.finish == Finish::FLOAT ? sizeof(float) : sizeof(bf16);
    cut.out = static_cast<char*>(product.out) + static_cast<size_t>(rows.begin * product.out_stride) * size;
    return cut;
}

}  // namespace

void linear(const Weight& weight, const Product& product, Turn& turn, int part, int parts) {
    const int sections = sections_of(product.rows, parts);
    const int each = (parts + sections - 1) / sections;
    for (int turned = 0; turned < sections; ++turned) {
        const int section = (part * sections / parts + turned) % sections;
        linear_section(weight, rows_of(product, share_of(product.rows, section, sections)), turn.of(section), each);
    }
}

}  // namespace tandem
