// Memory that kernels work in: aligned to cache lines, kept between steps, grown to the largest step.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

namespace tandem {

class Memory {
  public:
    Memory() = default;
    ~Memory() { std::free(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    // At least `bytes`, zeroed when they are new. Throws std::bad_alloc; what was there before stays.
    void* take(size_t bytes) {
        if (bytes <= bytes_) return data_;
        const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        void* grown = std::aligned_alloc(ALIGNMENT, rounded);
        if (!grown) throw std::bad_alloc();
        std::memset(grown, 0, rounded);
        std::free(data_);
        data_ = grown;
        bytes_ = rounded;
        return data_;
    }

  private:
    static constexpr size_t ALIGNMENT = 4096;
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace tandem
