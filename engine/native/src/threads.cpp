#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem {
namespace {

// Between two steps, about 100 us; inside a step, about 10 ms: waking a thread takes longer than shares of a kernel differ.
constexpr int IDLE_SPINS = 2000;
constexpr int STEP_SPINS = 200'000;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

void Barrier::wait(int spins) {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
        arrived_.store(0, std::memory_order_relaxed);
        parties_ = next_;
        if (opens_) opens_->parties_ = opens_->next_ = opens_->whole_;
        {
            std::lock_guard<std::mutex> held(mutex_);
            round_.store(round + 1, std::memory_order_release);
        }
        moved_.notify_all();
        return;
    }
    for (int spin = 0; spin < spins; ++spin) {
        if (round_.load(std::memory_order_acquire) != round) return;
        relax();
    }
    std::unique_lock<std::mutex> held(mutex_);
    moved_.wait(held, [&] { return round_.load(std::memory_order_acquire) != round; });
}

Threads::Threads(int count) : count_(count), meeting_(count), start_(count, &meeting_) {
    threads_.reserve(static_cast<size_t>(count - 1));
    for (int part = 1; part < count; ++part) threads_.emplace_back([this, part] { serve(part); });
}

Threads::~Threads() {
    if (count_ == 1) return;
    work_ = nullptr;
    start_.wait(IDLE_SPINS);
    for (std::thread& thread : threads_) thread.join();
}

void Threads::meet() {
    if (parties() > 1) meeting_.wait(STEP_SPINS);
}

void Threads::run(Work work, void* argument) {
    work_ = work;
    argument_ = argument;
    for (Turn& turn : turns_) turn.reset();
    if (count_ > 1) start_.wait(STEP_SPINS);
    work(argument, 0);
    meet();
}

void Threads::serve(int part) {
    for (;;) {
        start_.wait(IDLE_SPINS);
        if (!work_) return;
        work_(argument_, part);
        if (part < parties()) meet();
    }
}

}  // namespace tandem
