// Memory read once and nothing done with it: the limit that a step is measured against (bench/engine.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tandem {

struct Bytes {
    const char* data;
    uint64_t size;
};

// The sum of the 8-byte words in a part's share; the last bytes of the whole, fewer than a block, are left out.
static inline uint64_t read(const Bytes& bytes, int part, int parts) {
    typedef uint64_t Vector __attribute__((vector_size(64)));
    constexpr int LANES = 8;  // so many sums that none waits for another
    constexpr uint64_t BLOCK = LANES * sizeof(Vector);
    const uint64_t blocks = bytes.size / BLOCK;
    const uint64_t end = blocks * static_cast<uint64_t>(part + 1) / static_cast<uint64_t>(parts);
    Vector sums[LANES] = {};
    for (uint64_t block = blocks * static_cast<uint64_t>(part) / static_cast<uint64_t>(parts); block < end; ++block)
        for (int lane = 0; lane < LANES; ++lane) {
            Vector value;
            std::memcpy(&value, bytes.data + block * BLOCK + static_cast<uint64_t>(lane) * sizeof(Vector), sizeof(Vector));
            sums[lane] += value;
        }
    uint64_t sum = 0;
    for (const Vector& each : sums)
        for (size_t word = 0; word < sizeof(Vector) / sizeof(uint64_t); ++word) sum += each[word];
    return sum;
}

}  // namespace tandem
