// A team of threads that does the parts of a step. Part 0 runs in the caller; the last ones may leave before the end, and come back.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace tandem {

// Everybody waits until all have come: for so many turns by spinning, then asleep.
class Barrier {
  public:
    // So many have to come. Nobody is in it.
    void begin(int parties) {
        parties_.store(parties, std::memory_order_relaxed);
        next_ = parties;
    }
    void wait(int spins);

    // Who has to come next. The same for all of them behind a wait, and for who has not to come until others are let in.
    int parties() const { return parties_.load(std::memory_order_relaxed); }

    // Others from the end of the next wait on. By one of those who have to come, before it comes.
    void change(int parties) { next_ = parties; }
    bool changes() const { return next_ != parties(); }

  private:
    std::atomic<int> parties_{1};
    int next_ = 1;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> round_{0};
    std::mutex mutex_;
    std::condition_variable moved_;
};

// Where one thread waits for work.
class Door {
  public:
    // By who gives work, when somebody waits.
    void open();

    // By the thread behind it: until it is opened, for so many turns by spinning, then asleep.
    void wait(int spins);

    // By the same: its work is done.
    void close() { opened_.store(false, std::memory_order_release); }

    // The thread has nothing to do.
    bool waits() const { return !opened_.load(std::memory_order_acquire); }

  private:
    std::atomic<bool> opened_{false};
    std::mutex mutex_;
    std::condition_variable moved_;
};

class Threads {
  public:
    // False: this part has left, and is not waited for at the end.
    using Work = bool (*)(void* argument, int part);

    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }

    // Calls work(argument, part) for the first `least` parts, and for those up to `most` if their threads wait, each in its own
    // thread; returns when all have that did not leave. One caller at a time.
    void run(Work work, void* argument, int least, int most);

    // The rest is for use inside `run`.

    // By all parts that are there: what was written before is seen by all after.
    void meet();

    // Parts from this number on are not there.
    int parties() const { return meeting_.parties(); }

    // By part 0: only the first `parts` go on behind the next meeting.
    void keep(int parts) { meeting_.change(parts); }

    // By part 0: nobody of the parts from this one up to `end` has anything to do, so they can be let in.
    bool wait_outside(int part, int end) const;

    // By part 0: the first `parts` go on behind the next meeting, of whom some wait outside; behind it follows `open`.
    void expect(int parts) { meeting_.change(parts); }

    // By part 0: those from this part on come in, up to `end`. They have to come to the next meeting.
    void open(int part, int end);

    // For kernel `number` of a call of `run`, reset for the first ones.
    Turn& turn(int number) { return turns_[static_cast<size_t>(number) % turns_.size()]; }

  private:
    void serve(int part);
    void await(int part) const;
    void end();

    const int count_;
    Work work_ = nullptr;  // null ends the threads
    void* argument_ = nullptr;
    Barrier meeting_;
    std::unique_ptr<Door[]> doors_;
    std::array<Turn, 4> turns_;
    std::vector<std::thread> threads_;
};

}  // namespace tandem
