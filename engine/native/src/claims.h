// Who does which panels of a product.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace tandem {

// Blocks of panels for one part. Whoever is free takes the next block: a thread that gets less of its core holds nobody up.
class Claims {
  public:
    // count: of panels. most: panels of a block; several blocks fall on each part.
    Claims(Count& taken, int count, int most, int parts)
        : taken_(taken), count_(count), block_(parts == 1 ? most : std::clamp(count / (parts * BLOCKS), 1, most)) {}

    // Empty when nothing is left.
    Share next() {
        const int64_t begin = static_cast<int64_t>(taken_.take()) * block_;
        if (begin >= count_) return {count_, count_};
        return {static_cast<int>(begin), static_cast<int>(std::min<int64_t>(begin + block_, count_))};
    }

  private:
    static constexpr int BLOCKS = 6;  // of each part, about

    Count& taken_;
    const int count_, block_;
};

}  // namespace tandem
