// A team of threads that does the parts of a step. Its count is fixed; part 0 runs in the caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

// Everybody waits until all have come: shortly by spinning, as kernels are short, then asleep.
class Barrier {
  public:
    explicit Barrier(int parties) : parties_(parties) {}
    void wait();

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
    void meet() {
        if (count_ > 1) barrier_.wait();
    }

  private:
    void serve(int part);

    const int count_;
    Work work_ = nullptr;  // null ends the threads
    void* argument_ = nullptr;
    Barrier barrier_;
    std::vector<std::thread> threads_;
};

}  // namespace tandem
