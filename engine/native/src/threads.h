// A team of threads that does the parts of a step. Its count is fixed; part 0 runs in the caller.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace tandem {

// Everybody waits until all have come: for so many turns by spinning, then asleep.
class Barrier {
  public:
    explicit Barrier(int parties) : parties_(parties) {}
    void wait(int spins);

  private:
    const int parties_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> round_{0};
    std::mutex mutex_;
    std::condition_variable moved_;
};

class Threads {
  public:
    using Work = void (*)(void* argument, int part);

    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }

    // Calls work(argument, part) for each part in its own thread; returns when all have. One caller at a time.
    void run(Work work, void* argument);

    // For use inside `run`, by all parts: what was written before is seen by all after.
    void meet();

    // For kernel `number` of a call of `run`, reset for the first ones.
    Turn& turn(int number) { return turns_[static_cast<size_t>(number) % turns_.size()]; }

  private:
    void serve(int part);

    const int count_;
    Work work_ = nullptr;  // null ends the threads
    void* argument_ = nullptr;
    Barrier barrier_;
    std::array<Turn, 4> turns_;
    std::vector<std::thread> threads_;
};

}  // namespace tandem
