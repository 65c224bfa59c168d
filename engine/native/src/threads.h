// A team of threads that does the parts of a step. Part 0 runs in the caller; the last ones may leave before the end.
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
    // opens: one that is whole again behind this one; nobody may be in it then. Or null.
    explicit Barrier(int parties, Barrier* opens = nullptr) : whole_(parties), parties_(parties), next_(parties), opens_(opens) {}
    void wait(int spins);

    // Who has to come next. The same for all of them behind a wait, and for who has not to come until this is opened again.
    int parties() const { return parties_; }

    // Fewer from the end of the next wait on. By one of those who have to come, before it comes.
    void leave(int parties) { next_ = parties; }

  private:
    const int whole_;
    int parties_, next_;
    Barrier* const opens_;
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

    // Calls work(argument, part) for each part in its own thread; returns when all have that did not leave. One caller at a time.
    void run(Work work, void* argument);

    // The rest is for use inside `run`.

    // By all parts that are left: what was written before is seen by all after.
    void meet();

    // Parts from this number on have left: they return at once.
    int parties() const { return meeting_.parties(); }

    // By part 0: only the first `parts` go on behind the next meeting.
    void keep(int parts) { meeting_.leave(parts); }

    // For kernel `number` of a call of `run`, reset for the first ones.
    Turn& turn(int number) { return turns_[static_cast<size_t>(number) % turns_.size()]; }

  private:
    void serve(int part);

    const int count_;
    Work work_ = nullptr;  // null ends the threads
    void* argument_ = nullptr;
    Barrier meeting_;
    Barrier start_;
    std::array<Turn, 4> turns_;
    std::vector<std::thread> threads_;
};

}  // namespace tandem
