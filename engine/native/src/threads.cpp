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
    // Before the arrival: the last one to come changes it.
    const int whole = parties();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == whole) {
        arrived_.store(0, std::memory_order_relaxed);
        parties_.store(next_, std::memory_order_relaxed);
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

void Door::open() {
    {
        std::lock_guard<std::mutex> held(mutex_);
        opened_.store(true, std::memory_order_release);
    }
    moved_.notify_one();
}

void Door::wait(int spins) {
    for (int spin = 0; spin < spins; ++spin) {
        if (!waits()) return;
        relax();
    }
    std::unique_lock<std::mutex> held(mutex_);
    moved_.wait(held, [&] { return !waits(); });
}

Threads::Threads(int count) : count_(count), doors_(std::make_unique<Door[]>(static_cast<size_t>(count))) {
    threads_.reserve(static_cast<size_t>(count - 1));
    try {
        for (int part = 1; part < count; ++part) threads_.emplace_back([this, part] { serve(part); });
    } catch (...) {
        end();
        throw;
    }
}

Threads::~Threads() { end(); }

void Threads::end() {
    work_ = nullptr;
    const int begun = static_cast<int>(threads_.size());
    for (int part = 1; part <= begun; ++part) await(part);
    open(1, begun + 1);
    for (std::thread& thread : threads_) thread.join();
}

void Threads::meet() {
    if (parties() > 1 || meeting_.changes()) meeting_.wait(STEP_SPINS);
}

void Threads::run(Work work, void* argument, int least, int most) {
    // Who did the last work may still be on its way back.
    for (int part = 1; part < least; ++part) await(part);
    work_ = work;
    argument_ = argument;
    for (Turn& turn : turns_) turn.reset();
    const int parts = wait_outside(least, most) ? most : least;
    meeting_.begin(parts);
    open(1, parts);
    work(argument, 0);
    meet();
}

bool Threads::wait_outside(int part, int end) const {
    for (; part < end; ++part)
        if (!doors_[static_cast<size_t>(part)].waits()) return false;
    return true;
}

void Threads::open(int part, int end) {
    for (; part < end; ++part) doors_[static_cast<size_t>(part)].open();
}

void Threads::await(int part) const {
    while (!wait_outside(part, part + 1)) std::this_thread::yield();
}

void Threads::serve(int part) {
    Door& door = doors_[static_cast<size_t>(part)];
    for (;;) {
        door.wait(IDLE_SPINS);
        if (!work_) return;
        if (work_(argument_, part)) meet();
        door.close();
    }
}

}  // namespace tandem
