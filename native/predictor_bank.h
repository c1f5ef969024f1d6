// Scores of a bank of expert predictors for one token: every head in one call, three products each, weights as INT8 codes.
//
// A head with inputs x and the hidden state h that its forecast is added to (both BF16):
//
//   u = bf16(silu(bf16(w_in x + b_in)))          the trunk
//   d = bf16(w_out[:G E] u + b_out[:G E])        a correction per group of outputs and expert
//   f = bf16(h + bf16(w_out[G E:] u + b_out[G E:]))   the forecast hidden state
//   z = d + bf16(w_router f + b_router)          in F32, the same router for each group; p = sigmoid(a z + b)
//
// A product is the F32 sum over blocks of 128 inputs of scale * (codes . x), its bias added before the rounding to BF16. Code times
// input is exact (7 + 8 bits). Every other step rounds once: a term goes through at most 4 additions inside its block, the product
// with the scale (one more rounding only where there is no FMA), one addition per block, 4 across lanes, and the bias. So with
// n = K / 128 + 10 and g = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), what is rounded
// to BF16 is within g (sum |scale code x| + |bias|) of the exact sum, whatever the variant; denormals count as zero on the way.
#pragma once

struct ScoreTask {
  const PredictorBank* bank;
  int first, heads;        // which of the bank's; everything below starts at head `first`
  const uint8_t* x;        // bf16 [heads, features]
  int features;
  const uint8_t* base;     // bf16 [heads, hidden]
  float* trunk;            // u [heads, width]
  float* correction;       // d [heads, groups * experts]
  float* forecast;         // f [heads, hidden rounded up to 128], zeros behind
  float* scores;           // z [heads, groups, experts]
  float* probabilities;    // p, the same shape
};

// Neighbouring rows times x [cols], blocks of 128. The next unit's codes and scales are asked for line by line, as in code_dots. One
// row at a time leaves the core waiting for x and its own sums: 11.4 GB/s a core where two reach 13.0 and a plain loop 15.5.
template <int N>
static inline void grouped_dots(const int8_t* w, const float* scale, const float* x, int cols, const int8_t* coming,
                                const float* coming_scale, float* out) {
  const size_t stride = static_cast<size_t>(cols), blocks = stride / kBlock;
  Lanes total[N];
  for (int r = 0; r < N; ++r) total[r] = splat(0.0f);
  for (size_t block = 0; block < blocks; ++block, w += kBlock, x += kBlock, coming += kBlock) {
    Lanes part[N][2];
    for (int r = 0; r < N; ++r) {
      __builtin_prefetch(coming + stride * static_cast<size_t>(r), 0, 2);
      __builtin_prefetch(coming + stride * static_cast<size_t>(r) + 64, 0, 2);
      if (block % 16 == 0) __builtin_prefetch(coming_scale + blocks * static_cast<size_t>(r) + block, 0, 2);
    }
    for (int j = 0; j < 8; ++j) {
      Lanes column = load(x + 16 * j);
      for (int r = 0; r < N; ++r) {
        Lanes codes = load_i8(w + stride * static_cast<size_t>(r) + 16 * j);
        part[r][j % 2] = j < 2 ? mul(codes, column) : fma(codes, column, part[r][j % 2]);
      }
    }
    for (int r = 0; r < N; ++r)
      total[r] = fma(splat(scale[blocks * static_cast<size_t>(r) + block]), add(part[r][0], part[r][1]), total[r]);
  }
  for (int r = 0; r < N; ++r) out[r] = sum(total[r]);
}

// ---- rows of all heads as units of work ----

// About 64 KB of neighbouring rows of one head.
static inline int grouped_unit(const GroupedCodes& m) { return smaller(smaller(kRows, m.rows), larger(4, (64 << 10) / m.cols)); }
static inline int grouped_units(const GroupedCodes& m) { return ceil_div(m.rows, grouped_unit(m)); }

struct GroupedRows {
  int head, row, rows;
  const int8_t* codes;
  const float* scale;
  const float* bias;
};
static inline GroupedRows grouped_rows(const GroupedCodes& m, int first, int unit) {
  int per_head = grouped_units(m), head = unit / per_head, row = unit % per_head * grouped_unit(m);
  size_t at = static_cast<size_t>(first + head) * static_cast<size_t>(m.rows) + static_cast<size_t>(row);
  return {head,
          row,
          smaller(grouped_unit(m), m.rows - row),
          m.codes + at * static_cast<size_t>(m.cols),
          m.scale + at * static_cast<size_t>(m.cols / kBlock),
          m.bias + at};
}

// out [rows, up to a multiple of 16] = bf16(rows times x + bias), as F32.
static void grouped_product(Worker& worker, const GroupedCodes& m, const GroupedRows& at, const float* x, const GroupedRows& coming,
                            float* out) {
  size_t cols = static_cast<size_t>(m.cols), blocks = cols / kBlock;
  // Short rows four at a time: with one block each, a row's sum across lanes takes as long as its products.
  int together = m.cols <= 2 * kBlock ? 4 : 2;
  for (int r = 0; r < at.rows; r += together) {
    size_t to = static_cast<size_t>(r), then = static_cast<size_t>(r + together <= coming.rows ? r : 0);
    const int8_t *codes = at.codes + to * cols, *next = coming.codes + then * cols;
    const float *scale = at.scale + to * blocks, *next_scale = coming.scale + then * blocks;
    int left = smaller(together, at.rows - r);
    if (left == 4) {
      grouped_dots<4>(codes, scale, x, m.cols, next, next_scale, out + r);
      continue;
    }
    if (left >= 2) grouped_dots<2>(codes, scale, x, m.cols, next, next_scale, out + r);
    if (left % 2 != 0) {
      size_t last = static_cast<size_t>(left - 1);
      grouped_dots<1>(codes + last * cols, scale + last * blocks, x, m.cols, next, next_scale, out + r + left - 1);
    }
  }
  for (int r = 0; r < at.rows; ++r) out[r] += at.bias[r];
  int padded = static_cast<int>(round_up(static_cast<size_t>(at.rows), 16));
  for (int r = at.rows; r < padded; ++r) out[r] = 0.0f;
  round_to_bf16(out, padded);
  worker.counters.weight_bytes += static_cast<int64_t>(at.rows) * (m.cols + 4 * static_cast<int64_t>(blocks));
}

static inline Lanes bf16_of(Lanes x) {
  uint16_t half[16];
  store_bf16(half, x);
  return load_bf16(half);
}

// ---- the three passes ----

// A pass gives each unit of rows of `m` to use(rows, bf16 products); input(head) is what the head's rows are multiplied with.
template <typename Input, typename Use>
static inline void score_pass(Worker& worker, const ScoreTask& task, int phase, const GroupedCodes& m, float* out, Input input,
                              Use use) {
  for (Turns turn = first_turn(worker, phase, grouped_units(m) * task.heads); turn.at < turn.total; next_turn(worker, phase, turn)) {
    GroupedRows at = grouped_rows(m, task.first, turn.at);
    GroupedRows coming = unit_after(turn) < turn.total ? grouped_rows(m, task.first, unit_after(turn)) : at;
    grouped_product(worker, m, at, input(at.head), coming, out);
    use(at);
  }
}

static void score_trunk(Worker& worker, const ScoreTask& task, float* out, float* columns) {
  const PredictorBank& bank = *task.bank;
  int ready = -1;
  auto input = [&](int head) -> const float* {
    if (head != ready) {
      const uint8_t* x = task.x + 2 * static_cast<size_t>(task.features) * static_cast<size_t>(head);
      int i = 0;
      for (; i + 16 <= task.features; i += 16) store(columns + i, load_bf16(x + 2 * i));
      if (i < task.features) store(columns + i, weights_at(x, i, task.features - i));
      for (i = static_cast<int>(round_up(static_cast<size_t>(task.features), 16)); i < bank.in.cols; i += 16)
        store(columns + i, splat(0.0f));
      ready = head;
    }
    return columns;
  };
  score_pass(worker, task, 0, bank.in, out, input, [&](const GroupedRows& at) {
    float* u = task.trunk + static_cast<size_t>(bank.in.rows) * static_cast<size_t>(at.head) + at.row;
    for (int r = 0; r < at.rows; r += 16) store_n(u + r, bf16_of(silu(load(out + r))), smaller(16, at.rows - r));
  });
}

static void score_outputs(Worker& worker, const ScoreTask& task, float* out) {
  const PredictorBank& bank = *task.bank;
  int corrections = bank.groups * bank.experts, padded = bank.router.cols;
  auto input = [&](int head) { return task.trunk + static_cast<size_t>(bank.out.cols) * static_cast<size_t>(head); };
  score_pass(worker, task, 1, bank.out, out, input, [&](const GroupedRows& at) {
    size_t head = static_cast<size_t>(at.head);
    float* d = task.correction + static_cast<size_t>(corrections) * head;
    float* f = task.forecast + static_cast<size_t>(padded) * head;
    const uint8_t* base = task.base + 2 * static_cast<size_t>(bank.hidden) * head;
    int own = larger(0, smaller(at.rows, corrections - at.row));  // rows of d; the others are rows of f
    for (int r = 0; r < own; r += 16) store_n(d + at.row + r, load(out + r), smaller(16, own - r));
    for (int r = own; r < at.rows; r += 16) {
      int some = smaller(16, at.rows - r), i = at.row + r - corrections;
      store_n(f + i, bf16_of(add(weights_at(base, i, some), load(out + r))), some);
    }
    if (at.row + at.rows == bank.out.rows) memset(f + bank.hidden, 0, 4 * static_cast<size_t>(padded - bank.hidden));
  });
}

static void score_experts(Worker& worker, const ScoreTask& task, float* out) {
  const PredictorBank& bank = *task.bank;
  auto input = [&](int head) { return task.forecast + static_cast<size_t>(bank.router.cols) * static_cast<size_t>(head); };
  score_pass(worker, task, 2, bank.router, out, input, [&](const GroupedRows& at) {
    for (int g = 0; g < bank.groups; ++g) {
      size_t group = static_cast<size_t>(at.head) * static_cast<size_t>(bank.groups) + static_cast<size_t>(g);
      size_t to = group * static_cast<size_t>(bank.experts) + static_cast<size_t>(at.row);
      size_t calibration = static_cast<size_t>(task.first) * static_cast<size_t>(bank.groups) + group;
      Lanes a = splat(bank.a[calibration]), b = splat(bank.b[calibration]);
      for (int r = 0; r < at.rows; r += 16) {
        int some = smaller(16, at.rows - r);
        Lanes z = add(load_n(task.correction + to + r, some), load(out + r));
        store_n(task.scores + to + r, z, some);
        store_n(task.probabilities + to + r, sigmoid(add(mul(a, z), b)), some);
      }
    }
  });
}

static void score_task(Worker& worker, const void* context) {
  const ScoreTask& task = *static_cast<const ScoreTask*>(context);
  float* out = reinterpret_cast<float*>(worker.scratch);  // [kRows], and room to read 16 from any of them
  float* columns = out + kRows + 16;
  memset(out, 0, 4 * (kRows + 16));
  score_trunk(worker, task, out, columns);
  pool_barrier(worker);
  score_outputs(worker, task, out);
  pool_barrier(worker);
  score_experts(worker, task, out);
}

static void score_heads(Pool& pool, const PredictorBank& bank, int first, int heads, const uint8_t* x, int features,
                        const uint8_t* base, float* work, float* scores, float* probabilities) {
  size_t count = static_cast<size_t>(heads);
  float* correction = work + count * static_cast<size_t>(bank.in.rows);
  float* forecast = correction + count * static_cast<size_t>(bank.groups) * static_cast<size_t>(bank.experts);
  ScoreTask task{&bank, first, heads, x, features, base, work, correction, forecast, scores, probabilities};
  pool_run(pool, score_task, &task, 4 * (kRows + 16 + static_cast<size_t>(bank.in.cols)));
}
