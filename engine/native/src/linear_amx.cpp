// Products on the matrix unit. Sums stay in tiles from the first input to the last, so that every output has one chain of
// float32 sums, whatever the number of rows.
#if TANDEM_AMX

#include <algorithm>
#include <type_traits>

#include "claims.h"
#include "linear_finish.h"
#include "panels_amx.h"

namespace tandem {
namespace {

// Weights that stay in the second-level cache while all rows pass by, and those that come next beside them.
constexpr int64_t BLOCK_BYTES = 256 * 1024;
constexpr int64_t BLOCK_OF_PANELS = BLOCK_BYTES / static_cast<int64_t>(sizeof(bf16));  // elements
constexpr int HALF_SUMS = TILE_ROWS * LANES;
constexpr int GROUP_SUMS = 2 * HALF_SUMS;

// Tiles 0 to 3 are sums (two groups of rows, two halves of a panel), 4 and 5 rows of x, 6 and 7 the weights.
void configure(int tile_rows) {
    TileConfig config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        config.row_bytes[tile] = LINE_BYTES;
        config.rows[tile] = static_cast<uint8_t>(tile < 6 ? tile_rows : TILE_ROWS);
    }
    load_tile_config(config);
}

// What comes behind a block of weights, fetched into the second-level cache bit by bit while the block is used: the next block,
// or the weight that lies behind this one (see engine/native/arena.py). Fetching from where nothing lies does nothing.
class Ahead {
  public:
    // bytes: of what comes next, over so many steps.
    void begin(const char* from, int64_t bytes, int64_t steps) {
        at_ = from;
        end_ = at_ + bytes;
        step_bytes_ = (bytes / steps + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    }
    void step() {
        if (at_ >= end_) return;
        for (int64_t line = 0; line < step_bytes_; line += LINE_BYTES) _mm_prefetch(at_ + line, _MM_HINT_T1);
        at_ += step_bytes_;
    }

  private:
    const char* at_ = nullptr;
    const char* end_ = nullptr;
    int64_t step_bytes_ = 0;
};

// Rows in groups of one size, the last ones overlapping when the size does not divide their number: a row that is computed
// twice gives the same result twice.
struct Groups {
    int rows;   // in a group
    int count;  // of groups
    int total;  // rows of all

    explicit Groups(int total_rows) : total(total_rows) {
        count = (total + TILE_ROWS - 1) / TILE_ROWS;
        rows = (total + count - 1) / count;
    }
    int begin(int group) const { return std::min(group * rows, total - rows); }
};

// The sums of the panel before, which become results while the matrix unit works on the next one.
template <Finish FINISH>
class Finisher {
  public:
    // rows: in a group.
    Finisher(const Weight& weight, const Product& product, int rows) : weight_(weight), product_(product), rows_(rows) {
        const int steps = weight.inputs / INPUT_BLOCK;
        step_ = (2 * rows + steps - 1) / steps;
    }

    // Where the sums of a panel go, [group][half][row][16]; then they are due.
    float* sums() { return sums_[turn_]; }
    void due(int panel, int first_row, int second_row, int groups) {
        all();
        panel_ = panel, row_[0] = first_row, row_[1] = second_row;
        done_ = 0, due_ = groups * rows_;
        from_ = sums_[turn_];
        turn_ ^= 1;
    }
    void step() { upto(std::min(done_ + step_, due_)); }
    void all() { upto(due_); }

  private:
    void upto(int end) {
        for (; done_ < end; ++done_) {
            const int group = done_ >= rows_, row = done_ - group * rows_;
            const float* first = from_ + group * GROUP_SUMS + row * LANES;
            finish_full_or_part<FINISH>(weight_, product_, panel_, row_[group] + row, 1, first, first + HALF_SUMS);
        }
    }

    const Weight& weight_;
    const Product& product_;
    const int rows_;
    int step_, panel_ = 0, row_[2] = {}, done_ = 0, due_ = 0, turn_ = 0;
    const float* from_ = nullptr;
    alignas(64) float sums_[2][2 * GROUP_SUMS];
};

// The sums of one panel for one or two groups of rows, written to sums[group][half][row][16]. `between` is called between the
// inputs, for work that other units do meanwhile. The weights pass through the first-level cache, which the rows of x nearly
// fill, as what is not read again soon: else they drive the rows out.
template <bool TWO, class Tiles, class Between>
static inline void multiply(const Tiles& tiles, const bf16* first, const bf16* second, int64_t x_stride, int blocks, float* sums,
                            Between between) {
    const int64_t stride = x_stride * static_cast<int64_t>(sizeof(bf16));
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int block = 0; block < blocks; ++block) {
        const bf16* weights = tiles.block(block);
        _tile_loadd(4, first + block * INPUT_BLOCK, stride);
        _tile_stream_loadd(6, weights, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, weights + TILE_ELEMENTS, LINE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, second + block * INPUT_BLOCK, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        between();
    }
    _tile_stored(0, sums, LINE_BYTES);
    _tile_stored(1, sums + HALF_SUMS, LINE_BYTES);
    if constexpr (TWO) {
        _tile_stored(2, sums + GROUP_SUMS, LINE_BYTES);
        _tile_stored(3, sums + GROUP_SUMS + HALF_SUMS, LINE_BYTES);
    }
    tile_fence();
}

// A block of panels that was widened, for the rows that come later.
template <typename Element>
struct Wide {};

template <>
struct Wide<int8_t> {
    alignas(64) bf16 elements[BLOCK_OF_PANELS];
};

// A product by one part: blocks of panels, and for each all rows. Element: of the panels, bf16 or int8_t.
template <Finish FINISH, typename Element>
class Linear {
  public:
    Linear(const Weight& weight, const Product& product)
        : weight_(weight), product_(product), groups_(product.rows), finisher_(weight, product, groups_.rows),
          panel_elements_(static_cast<int64_t>(PANEL) * weight.inputs), steps_(weight.inputs / INPUT_BLOCK),
          kept_(groups_.count > 2 && panel_elements_ <= BLOCK_OF_PANELS) {}

    void run(Count& taken, int parts) {
        const int count = panels_of(weight_, FINISH);
        const int64_t panel_bytes = panel_elements_ * static_cast<int64_t>(sizeof(Element));
        Claims claims(taken, count, static_cast<int>(std::max<int64_t>(1, BLOCK_OF_PANELS / panel_elements_)), parts);
        const int64_t pairs = (groups_.count + 1) / 2;
        configure(groups_.rows);
        // The next block is taken early: it is fetched while this one is used. Behind the last one lies the next weight.
        for (Share block = claims.next(), next; block.begin < count; block = next) {
            next = claims.next();
            stream_ = {reinterpret_cast<const char*>(weight_.panel<Element>(block.end)),
                       reinterpret_cast<const char*>(weight_.panel<Element>(next.begin))};
            const int panels = block.end - block.begin;
            // With one pair of groups the weights stream as they are used.
            if (pairs > 1) ahead_.begin(stream_.next, panels * panel_bytes, panels * steps_ * pairs);
            take_block(block);
        }
        finisher_.all();
        _tile_release();
    }

  private:
    // The first rows fetch the weights, the others find them in the cache.
    void take_block(Share panels) {
        for (int group = 0; group < groups_.count; group += 2) {
            const bool two = group + 1 < groups_.count;
            if (group == 0)
                two ? take_panels<true, true>(group, panels) : take_panels<false, true>(group, panels);
            else
                two ? take_panels<true, false>(group, panels) : take_panels<false, false>(group, panels);
        }
    }

    // All panels of a block for one group of rows or two. FIRST: of the rows that use them.
    template <bool TWO, bool FIRST>
    void take_panels(int group, Share panels) {
        const int row = groups_.begin(group), next = TWO ? groups_.begin(group + 1) : row;
        for (int panel = panels.begin; panel < panels.end; ++panel) {
            const Element* stored = weight_.panel<Element>(panel);
            if constexpr (std::is_same_v<Element, bf16>) {
                multiply_rows<TWO>(StoredTiles<FIRST>(stored, stream_), row, next);
            } else {
                bf16* wide = wide_.elements + (kept_ ? (panel - panels.begin) * panel_elements_ : 0);
                if (FIRST || !kept_)
                    multiply_rows<TWO>(WidenedTiles<FIRST>(stored, steps_, wide, kept_, stream_), row, next);
                else
                    multiply_rows<TWO>(StoredTiles<false>(wide, stream_), row, next);
            }
            finisher_.due(panel, row, next, TWO ? 2 : 1);
        }
    }

    // A panel for one group of rows or two, from the rows `row` and `next` on.
    template <bool TWO, class Tiles>
    void multiply_rows(const Tiles& tiles, int row, int next) {
        const bf16* first = product_.x + row * product_.x_stride;
        const bf16* second = product_.x + next * product_.x_stride;
        multiply<TWO>(tiles, first, second, product_.x_stride, steps_, finisher_.sums(), [this] {
            finisher_.step();
            ahead_.step();
        });
    }

    const Weight& weight_;
    const Product& product_;
    const Groups groups_;
    Finisher<FINISH> finisher_;
    Stream stream_ = {};
    Ahead ahead_;
    const int64_t panel_elements_;
    const int steps_;
    const bool kept_;  // panels that were widened
    Wide<Element> wide_;
};

template <Finish FINISH>
void run(const Weight& weight, const Product& product, Count& taken, int parts) {
    if (weight.scales) return Linear<FINISH, int8_t>(weight, product).run(taken, parts);
    Linear<FINISH, bf16>(weight, product).run(taken, parts);
}

}  // namespace

void linear_section(const Weight& weight, const Product& product, Count& taken, int parts) {
    if (product.rows == 0) return;
    switch (product.finish) {
        case Finish::ROUND: return run<Finish::ROUND>(weight, product, taken, parts);
        case Finish::ADD: return run<Finish::ADD>(weight, product, taken, parts);
        case Finish::SWIGLU: return run<Finish::SWIGLU>(weight, product, taken, parts);
        case Finish::FLOAT: return run<Finish::FLOAT>(weight, product, taken, parts);
    }
}

}  // namespace tandem

#endif
