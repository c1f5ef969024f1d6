#include "pool.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace huorn {
namespace {

// How long a thread spins before it sleeps: longer than Python needs between two calls (10 to 50 us), far shorter than a time
// slice, so a waiting thread does not take the core from whoever else computes. Waking a sleeping one takes 50 to 100 us. By the
// clock, not by a count: a pause takes 140 cycles on one CPU and 10 on the next.
constexpr auto kSpin = std::chrono::microseconds(100);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Waits until value differs from `old`: spins a little, then sleeps.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// Denormals are zero while a task runs; the caller's own setting comes back afterwards.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Memory that only grows, 64-byte aligned.
class Block {
 public:
  ~Block() { std::free(data_); }
  uint8_t* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      size_t rounded = (bytes + 63) / 64 * 64;
      data_ = static_cast<uint8_t*>(std::aligned_alloc(64, rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
    }
    return data_;
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

class Pool {
 public:
  explicit Pool(int32_t threads) : threads_(threads), scratch_(threads), workers_(threads) {
    for (int32_t i = 0; i < threads; ++i) workers_[i] = Worker{this, i, threads, nullptr, {0, 0}};
    for (int32_t i = 1; i < threads; ++i) others_.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    ending_ = true;
    started_.fetch_add(1, std::memory_order_release);
    started_.notify_all();
    for (auto& thread : others_) thread.join();
  }

  void run(Task task, const void* context, size_t scratch_bytes) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    auto begin = std::chrono::steady_clock::now();
    for (int32_t i = 0; i < threads_; ++i) workers_[i].scratch = scratch_[i].at_least(scratch_bytes);
    for (auto& phase : phases_) phase.next.store(0, std::memory_order_relaxed);
    task_ = task;
    context_ = context;
    if (threads_ > 1) {
      started_.fetch_add(1, std::memory_order_release);
      started_.notify_all();
    }
    {
      FlushDenormals flush;
      task(workers_[0], context);
    }
    barrier();  // nobody may still use what the caller owns
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  void barrier() {
    if (threads_ == 1) return;
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
    } else {
      wait_while(round_, round);
    }
  }

  int32_t claim(int32_t phase) { return phases_[phase].next.fetch_add(1, std::memory_order_relaxed); }
  uint8_t* shared(size_t bytes) { return shared_.at_least(bytes); }
  int32_t threads() const { return threads_; }
  double seconds() const { return seconds_; }

  Counters counters() const {
    Counters sum{0, 0};
    for (const auto& worker : workers_) {
      sum.weight_bytes += worker.counters.weight_bytes;
      sum.state_bytes += worker.counters.state_bytes;
    }
    return sum;
  }

 private:
  void serve(int32_t index) {
    uint32_t seen = 0;
    while (true) {
      wait_while(started_, seen);
      ++seen;
      if (ending_) return;
      FlushDenormals flush;
      task_(workers_[index], context_);
      barrier();
    }
  }

  struct alignas(64) Phase {
    std::atomic<int32_t> next{0};
  };

  const int32_t threads_;
  std::vector<Block> scratch_;
  std::vector<Worker> workers_;
  Block shared_;
  Phase phases_[kPhases];
  alignas(64) std::atomic<uint32_t> started_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int32_t> arrived_{0};
  Task task_ = nullptr;
  const void* context_ = nullptr;
  bool ending_ = false;
  double seconds_ = 0.0;
  std::mutex mutex_;
  std::vector<std::thread> others_;
};

void pool_run(Pool& pool, Task task, const void* context, size_t scratch_bytes) {
  pool.run(task, context, scratch_bytes);
}
uint8_t* pool_shared(Pool& pool, size_t bytes) { return pool.shared(bytes); }
void pool_barrier(Worker& worker) { worker.pool->barrier(); }
int32_t pool_claim(Worker& worker, int32_t phase) { return worker.pool->claim(phase); }
Pool* pool_create(int32_t threads) { return new Pool(threads); }
void pool_destroy(Pool* pool) { delete pool; }
int32_t pool_threads(const Pool& pool) { return pool.threads(); }
Counters pool_counters(const Pool& pool) { return pool.counters(); }
double pool_seconds(const Pool& pool) { return pool.seconds(); }

}  // namespace huorn
