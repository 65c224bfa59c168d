// The C functions that Python calls. Nothing is thrown over this border: 0 is success.
#include <algorithm>
#include <atomic>
#include <exception>

#include "read.h"
#include "step.h"

#if TANDEM_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define TANDEM_API extern "C" __attribute__((visibility("default")))

namespace tandem {
namespace {

constexpr int32_t FAILED = 1;

// Threads and the memory that steps work in.
struct Engine {
    explicit Engine(int threads_count) : threads(threads_count) {}
    Threads threads;
    Workspace space;
    Memory scratch;  // of single attentions
};

// Runs `work(part, parts)` in all threads.
template <typename Work>
void run_parts(Threads& threads, Work work) {
    struct Call {
        Work& work;
        int parts;
    } call{work, threads.count()};
    threads.run(
        [](void* argument, int part) {
            Call& self = *static_cast<Call*>(argument);
            self.work(part, self.parts);
            return true;
        },
        &call, call.parts, call.parts);
}

bool permit_tiles() {
#if TANDEM_AMX
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return true;
#endif
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Asks the system for what the instructions need; comes before everything else.
TANDEM_API int32_t tandem_native_init() { return permit_tiles() ? 0 : FAILED; }

// Null when the threads cannot be had.
TANDEM_API Engine* tandem_engine_create(int32_t threads) {
    try {
        return new Engine(threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

TANDEM_API void tandem_engine_destroy(Engine* engine) { delete engine; }

TANDEM_API void tandem_linear(Engine* engine, const Weight* weight, const Product* product) {
    Turn turn;
    run_parts(engine->threads, [&](int part, int parts) { linear(*weight, *product, turn, part, parts); });
}

TANDEM_API void tandem_norm(Engine* engine, const bf16* x, int64_t x_stride, const bf16* weight, bf16* out, int64_t out_stride,
                            int32_t rows, int32_t columns, float eps) {
    run_parts(engine->threads, [&](int part, int parts) {
        norm(x, x_stride, weight, out, out_stride, rows, columns, eps, part, parts);
    });
}

TANDEM_API void tandem_rotate(Engine* engine, const Geometry* geometry, const Pool* pool, int32_t layer, const Rows* rows,
                              bf16* qkv, const float* rope, const float* head_norms) {
    run_parts(engine->threads, [&](int part, int parts) {
        rotate_and_store(*geometry, *pool, layer, *rows, qkv, rope, head_norms, part, parts);
    });
}

TANDEM_API int32_t tandem_attention(Engine* engine, const Geometry* geometry, const Pool* pool, int32_t layer,
                                    const Sequences* sequences, const bf16* qkv, bf16* out) {
    const size_t bytes = attend_scratch_bytes(*geometry, *sequences, engine->threads.count());
    char* scratch;
    try {
        scratch = static_cast<char*>(engine->scratch.take(bytes * static_cast<size_t>(engine->threads.count())));
    } catch (const std::bad_alloc&) {
        return FAILED;
    }
    run_parts(engine->threads, [&](int part, int parts) {
        attend(*geometry, *pool, layer, *sequences, qkv, out, scratch + static_cast<size_t>(part) * bytes, part, parts);
    });
    return 0;
}

TANDEM_API int32_t tandem_step(Engine* engine, const Model* model, const Step* step) {
    try {
        engine->space.fit(*model, *step, engine->threads.count());
    } catch (const std::bad_alloc&) {
        return FAILED;
    }
    struct Call {
        const Model& model;
        const Step& step;
        Engine& engine;
    } call{*model, *step, *engine};
    engine->threads.run(
        [](void* argument, int part) {
            const Call& self = *static_cast<Call*>(argument);
            return run_step(self.model, self.step, self.engine.space, self.engine.threads, part);
        },
        &call, step->own_threads, std::min(step->begin_threads, engine->threads.count()));
    return 0;
}

// Seconds of all steps so far by operation, OPERATIONS numbers. May be called while a step runs.
TANDEM_API void tandem_step_seconds(const Engine* engine, double* seconds) { engine->space.times.copy_to(seconds); }

// A sum of the words of `count` ranges of memory, each read once: what a step that only read them would take.
TANDEM_API uint64_t tandem_read(Engine* engine, const Bytes* ranges, int32_t count) {
    std::atomic<uint64_t> sum{0};
    run_parts(engine->threads, [&](int part, int parts) {
        uint64_t own = 0;
        for (int32_t each = 0; each < count; ++each) own += read(ranges[each], part, parts);
        sum += own;
    });
    return sum;
}

// Single parts, for tests of how work is shared out.
TANDEM_API void tandem_rotate_and_store(const Geometry* geometry, const Pool* pool, int32_t layer, const Rows* rows, bf16* qkv,
                                        const float* rope, const float* head_norms, int32_t part, int32_t parts) {
    rotate_and_store(*geometry, *pool, layer, *rows, qkv, rope, head_norms, part, parts);
}

TANDEM_API uint64_t tandem_attend_scratch_bytes(const Geometry* geometry, const Sequences* sequences, int32_t parts) {
    return attend_scratch_bytes(*geometry, *sequences, parts);
}

TANDEM_API void tandem_attend(const Geometry* geometry, const Pool* pool, int32_t layer, const Sequences* sequences,
                              const bf16* qkv, bf16* out, void* scratch, int32_t part, int32_t parts) {
    attend(*geometry, *pool, layer, *sequences, qkv, out, scratch, part, parts);
}
