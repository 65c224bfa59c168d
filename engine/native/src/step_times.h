// Where the time of steps goes, by operation. Always on: one look at the clock at each border between two operations.
#pragma once

#include <atomic>
#include <chrono>

namespace tandem {

// In the order of a step; engine/native/library.py has their names.
enum class Operation : int { EMBED, NORM, QKV, ROTATE, TELL, ATTEND, OUT, GATE_UP, DOWN, HEAD };
constexpr int OPERATIONS = 10;

// Seconds since the start, waits for other threads included. Written by part 0, read by any thread. On cache lines of its own, so
// that part 0 does not take from the others what stands beside it.
class alignas(64) StepTimes {
  public:
    void begin() { border_ = Clock::now(); }

    // What came since the last border was this operation.
    void end(Operation operation) {
        const Clock::time_point now = Clock::now();
        std::atomic<double>& sum = seconds_[static_cast<int>(operation)];
        const std::chrono::duration<double> since = now - border_;
        sum.store(sum.load(std::memory_order_relaxed) + since.count(), std::memory_order_relaxed);
        border_ = now;
    }

    void copy_to(double* seconds) const {
        for (int each = 0; each < OPERATIONS; ++each) seconds[each] = seconds_[each].load(std::memory_order_relaxed);
    }

  private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point border_;
    std::atomic<double> seconds_[OPERATIONS] = {};
};

}  // namespace tandem
