// One gated delta net layer: norm, projections, causal convolution, the delta rule token by token, gated norm, output projection.
//
// Per value head, with the memory S [dk, dv] (Gated Delta Networks, arXiv 2412.06464):
//   S <- a S + k d^T   d = beta (v - a S^T k)   o = S^T q   a = exp(g)
// The same step for one token and for many, so prefill and decode give the same bits.
#pragma once

constexpr int kScanTokens = 32;  // tokens whose q, k and v wait in cache: 48 KB for heads of 128
constexpr int kScanWidth = 32;   // values of a head handled at once: their part of S is 16 KB, half of a level-1 cache

static inline size_t round4(int n) { return round_up(static_cast<size_t>(n), 4); }
static inline int channels_of(const DeltaNet& w) { return 2 * w.key_heads * w.dk + w.value_heads * w.dv; }
static inline int projected(const DeltaNet& w) { return channels_of(w) + w.value_heads * w.dv + 2 * w.value_heads; }

static inline size_t scan_scratch(const DeltaNet& w) {
  size_t row = 2 * round4(w.dk) + 2 * round_up(static_cast<size_t>(w.dv), 16) + 2;
  return 4 * (kScanTokens * row + round4(w.dk) * kScanWidth) + 256;
}

// Input `token` of the convolution; those before the first come from the state.
static inline const float* conv_input(const DeltaNet& w, const LinearState& s, const float* projection, size_t stride, int token) {
  if (token >= 0) return projection + stride * static_cast<size_t>(token);
  return s.conv_in + static_cast<size_t>(w.kernel - 1 + token) * static_cast<size_t>(channels_of(w));
}

// silu(sum over taps), channels first .. first + count - 1 of one token.
static inline void convolve(const DeltaNet& w, const LinearState& s, const float* projection, size_t stride, int token, int first,
                            int count, float* out) {
  size_t channels = static_cast<size_t>(channels_of(w));
  for (int i = 0; i < count; i += 16) {
    int some = smaller(16, count - i);
    Lanes total = splat(0.0f);
    for (int tap = 0; tap < w.kernel; ++tap) {
      const float* input = conv_input(w, s, projection, stride, token - w.kernel + 1 + tap);
      total = fma(load_n(w.taps + channels * static_cast<size_t>(tap) + first + i, some), load_n(input + first + i, some), total);
    }
    store_n(out + i, silu(total), some);
  }
}

// x / sqrt(sum x^2 + 1e-6) * factor; the model was trained with this constant.
static inline void l2_norm(float* x, int n, float factor) {
  scaled(x, factor / sqrtf(square_sum(x, n) + 1e-6f), nullptr, n, x);
}

static inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }
static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// q, k, v, decay and beta of up to kScanTokens tokens of one head.
struct Scan {
  float *q, *k, *v, *out, *decay, *beta, *memory;
  size_t key_row, value_row;
};

static inline Scan carve(const DeltaNet& w, uint8_t* scratch) {
  Scan scan;
  scan.key_row = round4(w.dk);
  scan.value_row = round_up(static_cast<size_t>(w.dv), 16);
  scan.memory = reinterpret_cast<float*>(scratch);
  scan.q = scan.memory + round4(w.dk) * kScanWidth;
  scan.k = scan.q + kScanTokens * scan.key_row;
  scan.v = scan.k + kScanTokens * scan.key_row;
  scan.out = scan.v + kScanTokens * scan.value_row;
  scan.decay = scan.out + kScanTokens * scan.value_row;
  scan.beta = scan.decay + kScanTokens;
  return scan;
}

static inline void scan_inputs(const DeltaNet& w, const LinearState& s, const float* projection, size_t stride, int first, int count,
                               int head, Scan& scan) {
  int key_head = head / (w.value_heads / w.key_heads), keys = w.key_heads * w.dk, channels = channels_of(w);
  for (int t = 0; t < count; ++t) {
    float* q = scan.q + scan.key_row * static_cast<size_t>(t);
    float* k = scan.k + scan.key_row * static_cast<size_t>(t);
    memset(q + w.dk, 0, 4 * (scan.key_row - static_cast<size_t>(w.dk)));
    memset(k + w.dk, 0, 4 * (scan.key_row - static_cast<size_t>(w.dk)));
    convolve(w, s, projection, stride, first + t, key_head * w.dk, w.dk, q);
    convolve(w, s, projection, stride, first + t, keys + key_head * w.dk, w.dk, k);
    convolve(w, s, projection, stride, first + t, 2 * keys + head * w.dv, w.dv, scan.v + scan.value_row * static_cast<size_t>(t));
    l2_norm(q, w.dk, 1.0f / sqrtf(static_cast<float>(w.dk)));
    l2_norm(k, w.dk, 1.0f);
    const float* rest = projection + stride * static_cast<size_t>(first + t) + channels + w.value_heads * w.dv;
    scan.beta[t] = logistic(rest[head]);
    scan.decay[t] = expf(w.negative_rate[head] * softplus(rest[w.value_heads + head] + w.dt_bias[head]));
  }
}

// The recurrence over `count` tokens for values j .. j + 31 of a head, whose memory lies in scan.memory [dk, 32].
static inline void scan_values(Scan& scan, int count, int j) {
  float* memory = scan.memory;
  int keys = static_cast<int>(scan.key_row);
  for (int t = 0; t < count; ++t) {
    const float* q = scan.q + scan.key_row * static_cast<size_t>(t);
    const float* k = scan.k + scan.key_row * static_cast<size_t>(t);
    Lanes lo[4], hi[4];
    for (int i = 0; i < 4; ++i) lo[i] = hi[i] = splat(0.0f);
    for (int row = 0; row < keys; row += 4)
      for (int i = 0; i < 4; ++i) {
        Lanes key = splat(k[row + i]);
        lo[i] = fma(load(memory + (row + i) * kScanWidth), key, lo[i]);
        hi[i] = fma(load(memory + (row + i) * kScanWidth + 16), key, hi[i]);
      }
    Lanes decay = splat(scan.decay[t]), beta = splat(scan.beta[t]), zero = splat(0.0f);
    const float* v = scan.v + scan.value_row * static_cast<size_t>(t) + j;
    bool two = static_cast<size_t>(j) + 16 < scan.value_row;
    Lanes known_lo = add(add(lo[0], lo[1]), add(lo[2], lo[3])), known_hi = add(add(hi[0], hi[1]), add(hi[2], hi[3]));
    Lanes d_lo = mul(beta, sub(load(v), mul(decay, known_lo)));
    Lanes d_hi = two ? mul(beta, sub(load(v + 16), mul(decay, known_hi))) : zero;
    for (int i = 0; i < 4; ++i) lo[i] = hi[i] = zero;
    for (int row = 0; row < keys; row += 4)
      for (int i = 0; i < 4; ++i) {
        float* s = memory + (row + i) * kScanWidth;
        Lanes key = splat(k[row + i]), query = splat(q[row + i]);
        Lanes s_lo = fma(key, d_lo, mul(decay, load(s))), s_hi = fma(key, d_hi, mul(decay, load(s + 16)));
        store(s, s_lo);
        store(s + 16, s_hi);
        lo[i] = fma(query, s_lo, lo[i]);
        hi[i] = fma(query, s_hi, hi[i]);
      }
    float* out = scan.out + scan.value_row * static_cast<size_t>(t) + j;
    store(out, add(add(lo[0], lo[1]), add(lo[2], lo[3])));
    if (two) store(out + 16, add(add(hi[0], hi[1]), add(hi[2], hi[3])));
  }
}

// Part of S between the state [dk, dv] and the working memory [dk, 32].
static inline void take_memory(const DeltaNet& w, const float* state, int j, float* memory) {
  int lo = smaller(16, w.dv - j), hi = larger(0, smaller(16, w.dv - j - 16));
  for (int row = 0; row < w.dk; ++row) {
    const float* s = state + static_cast<size_t>(row) * w.dv + j;
    store(memory + row * kScanWidth, load_n(s, lo));
    store(memory + row * kScanWidth + 16, hi > 0 ? load_n(s + 16, hi) : splat(0.0f));
  }
  for (int row = w.dk; row < static_cast<int>(round4(w.dk)); ++row)
    memset(memory + row * kScanWidth, 0, 4 * kScanWidth);
}
static inline void give_memory(const DeltaNet& w, const float* memory, int j, float* state) {
  int lo = smaller(16, w.dv - j), hi = larger(0, smaller(16, w.dv - j - 16));
  for (int row = 0; row < w.dk; ++row) {
    float* s = state + static_cast<size_t>(row) * w.dv + j;
    store_n(s, load(memory + row * kScanWidth), lo);
    if (hi > 0) store_n(s + 16, load(memory + row * kScanWidth + 16), hi);
  }
}

// One value head of one sequence: mixed [tokens, value_heads dv] gets the gated, normed output of this head.
static void delta_head(Worker& worker, const DeltaNet& w, const LinearState& s, const float* projection, size_t stride, int tokens,
                       int head, float* mixed, uint8_t* scratch) {
  Scan scan = carve(w, scratch);
  size_t memory = static_cast<size_t>(head) * w.dk * w.dv, values = static_cast<size_t>(w.value_heads) * w.dv;
  for (int first = 0; first < tokens; first += kScanTokens) {
    int count = smaller(kScanTokens, tokens - first);
    // Behind the last value of a row stand zeros, which the last lanes read.
    memset(scan.v, 0, 4 * kScanTokens * scan.value_row);
    scan_inputs(w, s, projection, stride, first, count, head, scan);
    const float* before = (first == 0 ? s.memory_in : s.memory_out) + memory;
    for (int j = 0; j < w.dv; j += kScanWidth) {
      take_memory(w, before, j, scan.memory);
      scan_values(scan, count, j);
      give_memory(w, scan.memory, j, s.memory_out + memory);
    }
    for (int t = 0; t < count; ++t) {
      float* out = scan.out + scan.value_row * static_cast<size_t>(t);
      const float* z = projection + stride * static_cast<size_t>(first + t) + channels_of(w) + head * w.dv;
      float* y = mixed + values * static_cast<size_t>(first + t) + head * w.dv;
      rms_norm(out, w.gated_scale, w.eps, w.dv, out);
      for (int i = 0; i < w.dv; i += 16) {
        int some = smaller(16, w.dv - i);
        store_n(y + i, mul(load_n(out + i, some), silu(load_n(z + i, some))), some);
      }
    }
  }
  worker.counters.state_bytes += 4 * static_cast<int64_t>(w.dk) * w.dv;
}

// The last kernel - 1 inputs of the convolution, this head's share of the channels.
static inline void keep_inputs(const DeltaNet& w, const LinearState& s, const float* projection, size_t stride, int tokens, int head) {
  int channels = channels_of(w);
  int begin = static_cast<int>(static_cast<int64_t>(channels) * head / w.value_heads);
  int end = static_cast<int>(static_cast<int64_t>(channels) * (head + 1) / w.value_heads);
  for (int row = 0; row < w.kernel - 1; ++row) {
    const float* input = conv_input(w, s, projection, stride, tokens - w.kernel + 1 + row);
    memcpy(s.conv_out + static_cast<size_t>(row) * channels + begin, input + begin, 4 * static_cast<size_t>(end - begin));
  }
}

struct DeltaNetTask {
  const DeltaNet* w;
  Batch batch;
  const LinearState* states;
  float* projection;  // [tokens, projected]: q k v z b a
  float* mixed;       // [tokens, value_heads dv]
};

static void delta_net_task(Worker& worker, const void* context) {
  const DeltaNetTask& task = *static_cast<const DeltaNetTask*>(context);
  const DeltaNet& w = *task.w;
  const Batch& batch = task.batch;
  variant_begin();
  size_t stride = static_cast<size_t>(projected(w));
  int channels = channels_of(w), values = w.value_heads * w.dv;
  const Output in[] = {{&w.qkv, task.projection, stride, false},
                       {&w.z, task.projection + channels, stride, false},
                       {&w.b, task.projection + channels + values, stride, false},
                       {&w.a, task.projection + channels + values + w.value_heads, stride, false}};
  size_t hidden = static_cast<size_t>(w.hidden);
  dense(worker, 0, {batch.x, hidden, w.norm_scale, w.eps, w.hidden, batch.tokens, batch.columns, in, 4}, worker.scratch);
  pool_barrier(worker);
  int units = batch.sequences * w.value_heads;
  for (int unit = pool_claim(worker, 1); unit < units; unit = pool_claim(worker, 1)) {
    int sequence = unit / w.value_heads, head = unit % w.value_heads;
    size_t first = 0;
    for (int i = 0; i < sequence; ++i) first += static_cast<size_t>(batch.length[i]);
    const float* projection = task.projection + stride * first;
    const LinearState& state = task.states[sequence];
    delta_head(worker, w, state, projection, stride, batch.length[sequence], head,
               task.mixed + static_cast<size_t>(values) * first, worker.scratch);
    keep_inputs(w, state, projection, stride, batch.length[sequence], head);
  }
  pool_barrier(worker);
  const Output out[] = {{&w.out, batch.x, hidden, true}};
  dense(worker, 2, {task.mixed, static_cast<size_t>(values), nullptr, 0.0f, values, batch.tokens, batch.columns, out, 1},
        worker.scratch);
  variant_end();
}

static void delta_net(Pool& pool, const DeltaNet& w, const Batch& batch, const LinearState* states) {
  size_t tokens = static_cast<size_t>(batch.tokens), projection = round_up(tokens * static_cast<size_t>(projected(w)), 16);
  size_t values = static_cast<size_t>(w.value_heads) * w.dv;
  float* room = reinterpret_cast<float*>(pool_shared(pool, 4 * (projection + tokens * values)));
  DeltaNetTask task{&w, batch, states, room, room + projection};
  size_t scratch = dense_scratch(larger(w.hidden, static_cast<int>(values)), batch.columns);
  pool_run(pool, delta_net_task, &task, scratch > scan_scratch(w) ? scratch : scan_scratch(w));
}
