// A persistent pool of threads that runs one task on all of them, with barriers and shared counters inside a task.
#pragma once

#include <cstddef>
#include <cstdint>

namespace huorn {

struct Counters {
  int64_t weight_bytes;  // bytes of weights that products read, without scales (1/4096 of them)
  int64_t state_bytes;   // bytes of KV cache and delta-rule memory that were read
};

class Pool;

// One thread's view of the running task.
struct alignas(64) Worker {  // counters of two threads never share a cache line
  Pool* pool;
  int32_t index;
  int32_t threads;
  uint8_t* scratch;  // this thread's own, 64-byte aligned, as large as the task asked for
  Counters counters;
};

constexpr int kPhases = 8;

using Task = void (*)(Worker&, const void* context);

// Runs the task on every thread and returns when all have ended; the caller is thread 0. Denormals count as zero inside
// (they stall FMA to 0.3 GB/s). One call at a time per pool.
void pool_run(Pool& pool, Task task, const void* context, size_t scratch_bytes);

// Memory that all threads of the next task may use; valid until the next call. Kept between calls, grown when needed.
uint8_t* pool_shared(Pool& pool, size_t bytes);

// Waits for all threads of the task.
void pool_barrier(Worker& worker);

// The next unit of a phase (0 to kPhases - 1) of the running task: 0, 1, 2, ... over all threads.
int32_t pool_claim(Worker& worker, int32_t phase);

Pool* pool_create(int32_t threads);
void pool_destroy(Pool* pool);
int32_t pool_threads(const Pool& pool);
Counters pool_counters(const Pool& pool);
double pool_seconds(const Pool& pool);  // spent in pool_run so far

}  // namespace huorn
