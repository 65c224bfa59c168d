// Fetching cached rows before they are needed.
#pragma once

#include "attention_call.h"

namespace tandem {

// Asks for the rows of sixteen tokens ahead of their use, a few lines at a time between other work, so that memory is never
// idle and never asked for more at once than a core can wait for.
class Ahead {
public:
    Ahead(const Cache& cache, const Piece& piece, int first_token, int end) {
        if (first_token >= end) return;
        const int width = piece.heads * cache.head_dim, apart = cache.kv_heads * cache.head_dim;
        next_ = reinterpret_cast<const char*>(cache.key(first_token, piece.kv_head));
        const bool joined = width == apart && cache.pool->token_stride == 2 * width;
        const int line_runs = 2 * HALF_TOKENS;
        run_ = joined ? line_runs * width / LINE : width / LINE;
        runs_ = joined ? 1 : line_runs;
        left_ = run_;
        gap_[0] = (apart - width) * static_cast<int64_t>(sizeof(bf16));
        gap_[1] = (cache.pool->token_stride - apart - width) * static_cast<int64_t>(sizeof(bf16));
    }
    void ask(int lines) {
        if (lines < left_) {
            for (int line = 0; line < lines; ++line) __builtin_prefetch(next_ + line * LINE_BYTES, 0, 2);
            next_ += lines * LINE_BYTES;
            left_ -= lines;
            return;
        }
        for (; lines > 0 && runs_ > 0; --lines) {
            __builtin_prefetch(next_, 0, 2);
            next_ += LINE_BYTES;
            if (--left_ > 0) continue;
            next_ += gap_[runs_ % 2];
            left_ = --runs_ > 0 ? run_ : 0;
        }
    }

private:
    static constexpr int LINE_BYTES = LINE * sizeof(bf16);

    const char* next_ = nullptr;
    int64_t gap_[2] = {};
    int run_ = 0, runs_ = 0, left_ = 0;
};

// A block to be fetched.
struct Place {
    Cache cache;
    int token;
    int end;
};

// Where the work most likely goes on behind this sequence; nowhere when the piece is not a whole row.
static inline Place behind(const Call& call, const Piece& piece) {
    const Sequences& sequences = call.sequences;
    const int next = piece.sequence + 1;
    const bool goes_on = next < sequences.count && sequences.row_count[next] == 1 && piece.heads == call.geometry.kv_heads;
    return goes_on ? Place{call.cache(next), 0, sequences.first_position[next] + 1} : Place{call.cache(piece.sequence), 0, 0};
}

}  // namespace tandem
