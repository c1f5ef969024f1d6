// The yardsticks: how fast this variant reads memory, and multiplies.
#pragma once

constexpr size_t kReadUnit = 1 << 20;

struct ReadTask {
  const uint8_t* data;
  size_t bytes;
  double* sums;
};

static void read_task(Worker& worker, const void* context) {
  const ReadTask& task = *static_cast<const ReadTask*>(context);
  Lanes total[8];
  for (int i = 0; i < 8; ++i) total[i] = splat(0.0f);
  size_t units = task.bytes / kReadUnit;
  for (size_t unit = static_cast<size_t>(pool_claim(worker, 0)); unit < units; unit = static_cast<size_t>(pool_claim(worker, 0))) {
    const float* p = reinterpret_cast<const float*>(task.data + unit * kReadUnit);
    for (size_t i = 0; i < kReadUnit / 4; i += 128)
      for (int j = 0; j < 8; ++j) total[j] = max(total[j], load(p + i + 16 * j));
  }
  for (int i = 1; i < 8; ++i) total[0] = max(total[0], total[i]);
  task.sums[worker.index] = static_cast<double>(sum(total[0]));
}

static double read_memory(Pool& pool, const uint8_t* data, size_t bytes) {
  double* sums = reinterpret_cast<double*>(pool_shared(pool, sizeof(double) * static_cast<size_t>(pool_threads(pool))));
  ReadTask task{data, bytes, sums};
  pool_run(pool, read_task, &task, 64);
  double total = 0.0;
  for (int i = 0; i < pool_threads(pool); ++i) total += sums[i];
  return total;
}

struct MultiplyTask {
  int rounds;
  double* sums;
};

#if defined(HUORN_AMX)
static void multiply_task(Worker& worker, const void* context) {
  const MultiplyTask& task = *static_cast<const MultiplyTask*>(context);
  variant_begin();
  memset(worker.scratch, 0, 4096);
  configure(16);
  HUORN_TILE_LOAD(4, worker.scratch, 64);
  HUORN_TILE_LOAD(5, worker.scratch, 64);
  HUORN_TILE_LOAD(6, worker.scratch, 64);
  HUORN_TILE_LOAD(7, worker.scratch, 64);
  for (int round = 0; round < task.rounds; ++round) {
    HUORN_TILE_DOT(0, 4, 6);
    HUORN_TILE_DOT(1, 5, 6);
    HUORN_TILE_DOT(2, 4, 7);
    HUORN_TILE_DOT(3, 5, 7);
  }
  variant_end();
  task.sums[worker.index] = 0.0;
}
constexpr double kRoundOperations = 4.0 * 2 * 16 * 16 * 32;
#elif defined(HUORN_AVX512)
static void multiply_task(Worker& worker, const void* context) {
  const MultiplyTask& task = *static_cast<const MultiplyTask*>(context);
  __m512 total[16];
  for (int i = 0; i < 16; ++i) total[i] = _mm512_setzero_ps();
  __m512i ones = _mm512_set1_epi16(0x3f80);
  for (int round = 0; round < task.rounds; ++round)
    for (int i = 0; i < 16; ++i)
      total[i] = _mm512_dpbf16_ps(total[i], reinterpret_cast<__m512bh>(ones), reinterpret_cast<__m512bh>(ones));
  for (int i = 1; i < 16; ++i) total[0] = _mm512_add_ps(total[0], total[i]);
  task.sums[worker.index] = static_cast<double>(_mm512_reduce_add_ps(total[0]));
}
constexpr double kRoundOperations = 16.0 * 2 * 32;
#else
static void multiply_task(Worker& worker, const void* context) {
  const MultiplyTask& task = *static_cast<const MultiplyTask*>(context);
  Lanes total[6];
  for (int i = 0; i < 6; ++i) total[i] = splat(static_cast<float>(worker.index));
  Lanes a = splat(0.999f), b = splat(0.5f);
  for (int round = 0; round < task.rounds; ++round)
    for (int i = 0; i < 6; ++i) total[i] = fma(total[i], a, b);
  for (int i = 1; i < 6; ++i) total[0] = add(total[0], total[i]);
  task.sums[worker.index] = static_cast<double>(sum(total[0]));
}
constexpr double kRoundOperations = 6.0 * 2 * 16;
#endif

static double multiply(Pool& pool, int rounds) {
  double* sums = reinterpret_cast<double*>(pool_shared(pool, sizeof(double) * static_cast<size_t>(pool_threads(pool))));
  MultiplyTask task{rounds, sums};
  pool_run(pool, multiply_task, &task, 4096);
  return kRoundOperations * rounds * pool_threads(pool);
}
