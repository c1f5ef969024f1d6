// A large weight as INT8 codes, and what they say about products with the weight itself: the first of two passes over lm_head.
//
// For one row let w be the weight (BF16), c = scale * codes, r = w - c, and x the column as the full product sees it (BF16). The sums
// of both products round: each of their terms goes through at most n + 32 roundings whatever the order of summation, so with
// g = (n + 32) u / (1 - (n + 32) u), u = 2^-24, n inputs (Higham, Accuracy and Stability of Numerical Algorithms, 3.1),
//
//   |fl(c . x) - fl(w . x)| <= |r . x| + g (sum |c_i x_i| + sum |w_i x_i|) <= |x| (|r| + g (|c| + |w|)) = |x| spread,
//
// by Cauchy and Schwarz. Denormals count as zero on the way, which adds: of weights |x| sqrt(n) 2^-126, in the spread; of columns, and
// of sums times their scale, at most spread * 2^-100 since spread >= g |w|, in the norm of x; of products and sums themselves
// (4 n + 16) 2^-126, in kFloor.
#pragma once

constexpr double kUnit = 1.0 / (1 << 24);
constexpr double kTiny = 0x1p-126;  // the smallest normal number

static inline double rounding_bound(int n) { return (n + 32) * kUnit / (1.0 - (n + 32) * kUnit); }

static inline Lanes magnitude(Lanes x) { return max(x, sub(splat(0.0f), x)); }

// ---- making the codes ----

constexpr float kLeastScale = 0x1p-100f;  // rows below become zeros: everything is spread

struct CodeTask {
  const uint8_t* weight;
  int rows, cols;
  int8_t* codes;
  float* scale;
  float* spread;
  int* damaged;  // [threads]
};

static inline Lanes weights_at(const uint8_t* row, int i, int some) {
  uint8_t half[32] = {};
  memcpy(half, row + 2 * i, 2 * static_cast<size_t>(some));
  return load_bf16(half);
}

// False when a weight is NaN or infinite.
static bool code_row(const uint8_t* w, int cols, int8_t* codes, float* scale, float* spread) {
  Lanes largest = splat(0.0f), check = splat(0.0f);
  for (int i = 0; i < cols; i += 16) {
    Lanes v = weights_at(w, i, smaller(16, cols - i));
    largest = max(largest, magnitude(v));
    check = fma(v, splat(0.0f), check);
  }
  if (!(sum(check) == 0.0f)) return false;
  float each[16], most = 0.0f;
  store(each, largest);
  for (int i = 0; i < 16; ++i) most = each[i] > most ? each[i] : most;
  double root = sqrt(static_cast<double>(cols)), bound = rounding_bound(cols), lost = 4.0 * root * kTiny;
  if (most < kLeastScale) {
    memset(codes, 0, static_cast<size_t>(cols));
    *scale = 0.0f;
    *spread = static_cast<float>((static_cast<double>(most) * root * (1.0 + bound) + lost) * (1.0 + 16 * kUnit));
    return true;
  }
  *scale = most / 127.0f;
  // In units of the scale: t of the weight, q of the code, and their difference, which is exact.
  Lanes inverse = splat(1.0f / *scale), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  Lanes of_t = splat(0.0f), of_q = of_t, of_rest = of_t;
  for (int i = 0; i < cols; i += 16) {
    int some = smaller(16, cols - i);
    Lanes t = mul(weights_at(w, i, some), inverse), q = sub(add(t, magic), magic), rest = sub(t, q);
    of_t = fma(t, t, of_t);
    of_q = fma(q, q, of_q);
    of_rest = fma(rest, rest, of_rest);
    if (some == 16) {
      store_i8(codes + i, q);
    } else {
      int8_t tail[16];
      store_i8(tail, q);
      memcpy(codes + i, tail, static_cast<size_t>(some));
    }
  }
  // Sums of squares are right within a factor of 1 + bound; t is within 3 u of what it stands for.
  double t = sqrt(static_cast<double>(sum(of_t))), q = sqrt(static_cast<double>(sum(of_q)));
  double rest = sqrt(static_cast<double>(sum(of_rest))) * (1.0 + bound) + 4 * kUnit * t;
  double wide = static_cast<double>(*scale) * (rest + bound * (t + q) * (1.0 + 2 * bound)) + lost;
  *spread = static_cast<float>(wide * (1.0 + 16 * kUnit));
  return true;
}

constexpr int kCodedAtOnce = 32;

static void code_task(Worker& worker, const void* context) {
  const CodeTask& task = *static_cast<const CodeTask*>(context);
  size_t cols = static_cast<size_t>(task.cols);
  int damaged = 0;
  for (int first = pool_claim(worker, 0) * kCodedAtOnce; first < task.rows; first = pool_claim(worker, 0) * kCodedAtOnce)
    for (int row = first; row < smaller(first + kCodedAtOnce, task.rows); ++row) {
      size_t at = static_cast<size_t>(row);
      if (!code_row(task.weight + 2 * cols * at, task.cols, task.codes + cols * at, task.scale + at, task.spread + at)) damaged = 1;
    }
  task.damaged[worker.index] = damaged;
}

static bool code_rows(Pool& pool, const uint8_t* weight, int rows, int cols, int8_t* codes, float* scale, float* spread) {
  int threads = pool_threads(pool), damaged = 0;
  int* found = reinterpret_cast<int*>(pool_shared(pool, sizeof(int) * static_cast<size_t>(threads)));
  CodeTask task{weight, rows, cols, codes, scale, spread, found};
  pool_run(pool, code_task, &task, 64);
  for (int i = 0; i < threads; ++i) damaged += found[i];
  return damaged == 0;
}

// ---- bounds from the codes ----

struct BoundTask {
  const CodedRows* w;
  const float* norm_scale;
  float eps;
  const float* x;  // f32 [tokens, cols]
  int tokens;
  float* lower;  // [tokens, rows]
  float* upper;
};

// One row times N columns, four running sums of 16 each (with two the chain of FMAs is what limits: 22 GB/s from level-2 cache). What
// lies at `coming` is asked for line by line, as the row itself is read: in one go per row it would wait for the lines before it.
template <int N>
static inline void code_dots(const int8_t* w, const float* x, size_t stride, int cols, const uint8_t* coming, float* out) {
  Lanes total[N][4];
  for (int c = 0; c < N; ++c)
    for (int j = 0; j < 4; ++j) total[c][j] = splat(0.0f);
  int i = 0;
  for (; i + 64 <= cols; i += 64) {
    __builtin_prefetch(coming + i, 0, 2);
    for (int j = 0; j < 4; ++j) {
      Lanes codes = load_i8(w + i + 16 * j);
      for (int c = 0; c < N; ++c) total[c][j] = fma(codes, load(x + stride * static_cast<size_t>(c) + i + 16 * j), total[c][j]);
    }
  }
  for (; i < cols; i += 16) {
    int8_t tail[16] = {};
    memcpy(tail, w + i, static_cast<size_t>(smaller(16, cols - i)));
    for (int c = 0; c < N; ++c) total[c][0] = fma(load_i8(tail), load(x + stride * static_cast<size_t>(c) + i), total[c][0]);
  }
  for (int c = 0; c < N; ++c) out[c * kRows] = sum(add(add(total[c][0], total[c][1]), add(total[c][2], total[c][3])));
}

// Columns [tokens, K rounded up to 128] as the full product sees them, and the most that their norms can be.
static void bound_columns(const BoundTask& task, float* columns, float* reach) {
  int cols = task.w->cols, padded = static_cast<int>(round_up(static_cast<size_t>(cols), kBlock));
  for (int c = 0; c < task.tokens; ++c, columns += padded) {
    const float* x = task.x + static_cast<size_t>(cols) * static_cast<size_t>(c);
    if (task.norm_scale != nullptr) {
      rms_norm(x, task.norm_scale, task.eps, cols, columns);
    } else {
      memcpy(columns, x, 4 * static_cast<size_t>(cols));
    }
    memset(columns + cols, 0, 4 * static_cast<size_t>(padded - cols));
    round_to_bf16(columns, padded);
    double square = 0.0;
    for (int i = 0; i < cols; ++i) square += static_cast<double>(columns[i]) * static_cast<double>(columns[i]);
    double norm = sqrt(square);
    bool known = norm <= static_cast<double>(task.w->largest_x);  // not for NaN
    reach[c] = known ? static_cast<float>((norm + 0x1p-100) * (1.0 + 0x1p-20)) : __builtin_inff();
  }
}

static void bound_task(Worker& worker, const void* context) {
  const BoundTask& task = *static_cast<const BoundTask*>(context);
  const CodedRows& w = *task.w;
  Matrix m{reinterpret_cast<const uint8_t*>(w.codes), nullptr, w.rows, w.cols, Format::F8};  // one byte each, in the same units
  size_t padded = round_up(static_cast<size_t>(w.cols), kBlock), tokens = static_cast<size_t>(task.tokens);
  float* columns = reinterpret_cast<float*>(worker.scratch);
  float* reach = columns + padded * tokens;
  float* out = reach + round_up(tokens, 16);  // [tokens, kRows]
  bound_columns(task, columns, reach);
  const Lanes floor = splat(static_cast<float>((4.0 * w.cols + 16) * kTiny));
  for (Turns turn = first_turn(worker, 0, row_units(m)); turn.at < turn.total; next_turn(worker, 0, turn)) {
    int row = turn.at * unit_rows(m), rows = rows_at(m, row);
    const uint8_t* next = row_at(m, unit_after(turn) < turn.total ? unit_after(turn) * unit_rows(m) : row);
    worker.counters.weight_bytes += static_cast<int64_t>(rows) * (w.cols + 8);
    for (int c = 0; c < task.tokens; c += 4) {
      const int8_t* codes = w.codes + static_cast<size_t>(w.cols) * static_cast<size_t>(row);
      const float* x = columns + padded * static_cast<size_t>(c);
      const uint8_t* coming = next;
      for (int r = 0; r < rows; ++r, codes += w.cols, coming += w.cols) {
        float* to = out + c * kRows + r;
        switch (smaller(4, task.tokens - c)) {
          case 1: code_dots<1>(codes, x, padded, w.cols, coming, to); break;
          case 2: code_dots<2>(codes, x, padded, w.cols, coming, to); break;
          case 3: code_dots<3>(codes, x, padded, w.cols, coming, to); break;
          default: code_dots<4>(codes, x, padded, w.cols, coming, to); break;
        }
      }
    }
    for (int c = 0; c < task.tokens; ++c)
      for (int r = 0; r < rows; r += 16) {
        int some = smaller(16, rows - r);
        Lanes score = mul(load(out + c * kRows + r), load_n(w.scale + row + r, some));
        // 2^-20 in reach and 2^-22 here are far more than the roundings of these lines.
        Lanes width = fma(splat(reach[c]), load_n(w.spread + row + r, some), fma(magnitude(score), splat(0x1p-22f), floor));
        size_t at = static_cast<size_t>(w.rows) * static_cast<size_t>(c) + static_cast<size_t>(row + r);
        store_n(task.lower + at, sub(score, width), some);
        store_n(task.upper + at, add(score, width), some);
      }
  }
}

static void bound_rows(Pool& pool, const CodedRows& w, const float* norm_scale, float eps, const float* x, int tokens, float* lower,
                       float* upper) {
  size_t padded = round_up(static_cast<size_t>(w.cols), kBlock), count = static_cast<size_t>(tokens);
  BoundTask task{&w, norm_scale, eps, x, tokens, lower, upper};
  pool_run(pool, bound_task, &task, 4 * (padded * count + round_up(count, 16) + kRows * count));
}
