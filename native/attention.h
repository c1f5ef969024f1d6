// One gated full attention layer: norm, projections, per-head norms, rotary, causal attention over the cache, gate, output.
//
// Softmax runs over blocks of kKeys keys at fixed positions with a running maximum (online softmax), one block after the other,
// so a query's result depends on its own position and what was before it, not on how the prompt was cut.
#pragma once

constexpr int kKeys = 64;

struct AttentionTask {
  const Attention* w;
  Batch batch;
  const KeyValueCache* caches;
  const float* cosine;  // [tokens, rotary_dim / 2]
  const float* sine;
  float* projection;  // [tokens, (2 heads + 2 kv_heads) head_dim]: per head query and gate, keys, values
  float* mixed;       // [tokens, heads head_dim]
};

static inline Lanes load_cached(const void* row, int i, int count, bool f32) {
  if (f32) return load_n(static_cast<const float*>(row) + i, count);
  const uint8_t* p = static_cast<const uint8_t*>(row) + 2 * i;
  if (count >= 16) return load_bf16(p);
  uint8_t some[32] = {};
  memcpy(some, p, 2 * static_cast<size_t>(count));
  return load_bf16(some);
}
static inline void store_cached(void* row, int i, Lanes x, int count, bool f32) {
  if (f32) {
    store_n(static_cast<float*>(row) + i, x, count);
    return;
  }
  uint8_t some[32];
  store_bf16(some, x);
  memcpy(static_cast<uint8_t*>(row) + 2 * i, some, 2 * static_cast<size_t>(smaller(16, count)));
}

// Dimension i < half turns with dimension i + half; those behind 2 half pass.
static inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i += 16) {
    int some = smaller(16, half - i);
    Lanes c = load_n(cosine + i, some), s = load_n(sine + i, some);
    Lanes first = load_n(x + i, some), second = load_n(x + half + i, some);
    store_n(x + i, sub(mul(first, c), mul(second, s)), some);
    store_n(x + half + i, add(mul(second, c), mul(first, s)), some);
  }
}

static inline void* cache_row(const Attention& w, void* base, int position, int head, bool f32) {
  size_t element = (static_cast<size_t>(position) * w.kv_heads + head) * w.head_dim;
  return static_cast<uint8_t*>(base) + element * (f32 ? 4 : 2);
}

// Norms and rotates one token's queries in place, and writes its keys and values to the cache.
static void place_token(const AttentionTask& task, int token, const KeyValueCache& cache, int position, bool f32) {
  const Attention& w = *task.w;
  int dim = w.head_dim, half = w.rotary_dim / 2;
  float* row = task.projection + static_cast<size_t>(token) * 2 * (w.heads + w.kv_heads) * dim;
  const float* cosine = task.cosine + static_cast<size_t>(token) * half;
  const float* sine = task.sine + static_cast<size_t>(token) * half;
  for (int head = 0; head < w.heads; ++head) {
    float* query = row + 2 * head * dim;
    rms_norm(query, w.q_scale, w.eps, dim, query);
    rotate(query, cosine, sine, half);
    if (f32) continue;
    for (int i = 0; i < dim; i += 16) {  // to the operand's precision
      int some = smaller(16, dim - i);
      uint8_t rounded[32];
      store_bf16(rounded, load_n(query + i, some));
      store_n(query + i, load_bf16(rounded), some);
    }
  }
  for (int head = 0; head < w.kv_heads; ++head) {
    float* key = row + (2 * w.heads + head) * dim;
    const float* value = row + (2 * w.heads + w.kv_heads + head) * dim;
    rms_norm(key, w.k_scale, w.eps, dim, key);
    rotate(key, cosine, sine, half);
    void* key_row = cache_row(w, cache.keys, position, head, f32);
    void* value_row = cache_row(w, cache.values, position, head, f32);
    for (int i = 0; i < dim; i += 16) {
      int some = smaller(16, dim - i);
      store_cached(key_row, i, load_n(key + i, some), some, f32);
      store_cached(value_row, i, load_n(value + i, some), some, f32);
    }
  }
}

// Query heads that share one key-value head are handled four at a time; unused places repeat the last.
struct Heads {
  const float* query[4];
  float* total;  // [4, head_dim rounded up to 16]
  float scores[4][kKeys];
  float largest[4], weight[4];
};

static inline void block_scores(const Attention& w, const KeyValueCache& cache, int kv_head, int first, int count, bool f32,
                                Heads& heads) {
  float factor = 1.0f / sqrtf(static_cast<float>(w.head_dim));
  for (int key = 0; key < count; ++key) {
    const void* row = cache_row(w, cache.keys, first + key, kv_head, f32);
    Lanes a = splat(0.0f), b = a, c = a, d = a;
    for (int i = 0; i < w.head_dim; i += 16) {
      int some = smaller(16, w.head_dim - i);
      Lanes k = load_cached(row, i, some, f32);
      a = fma(load_n(heads.query[0] + i, some), k, a);
      b = fma(load_n(heads.query[1] + i, some), k, b);
      c = fma(load_n(heads.query[2] + i, some), k, c);
      d = fma(load_n(heads.query[3] + i, some), k, d);
    }
    heads.scores[0][key] = sum(a) * factor;
    heads.scores[1][key] = sum(b) * factor;
    heads.scores[2][key] = sum(c) * factor;
    heads.scores[3][key] = sum(d) * factor;
  }
}

// Turns scores into weights relative to the running maximum and returns by how much what was summed before shrinks.
static inline float block_weights(float* scores, int count, float& largest, float& weight) {
  float before = largest;
  for (int key = 0; key < count; ++key) largest = scores[key] > largest ? scores[key] : largest;
  for (int key = 0; key < count; key += 16) {
    int some = smaller(16, count - key);
    store_n(scores + key, exponential(sub(load_n(scores + key, some), splat(largest))), some);
  }
  float shrink = expf(before - largest);
  weight *= shrink;
  for (int key = 0; key < count; ++key) weight += scores[key];
  return shrink;
}

static inline void block_values(const Attention& w, const KeyValueCache& cache, int kv_head, int first, int count, bool f32,
                                const float shrink[4], Heads& heads) {
  size_t row = round_up(static_cast<size_t>(w.head_dim), 16);
  for (int i = 0; i < w.head_dim; i += 16) {
    int some = smaller(16, w.head_dim - i);
    Lanes total[4];
    for (int h = 0; h < 4; ++h) total[h] = mul(load(heads.total + row * static_cast<size_t>(h) + i), splat(shrink[h]));
    for (int key = 0; key < count; ++key) {
      Lanes v = load_cached(cache_row(w, cache.values, first + key, kv_head, f32), i, some, f32);
      for (int h = 0; h < 4; ++h) total[h] = fma(splat(heads.scores[h][key]), v, total[h]);
    }
    for (int h = 0; h < 4; ++h) store(heads.total + row * static_cast<size_t>(h) + i, total[h]);
  }
}

static void attend(Worker& worker, const AttentionTask& task, int token, int position, const KeyValueCache& cache, int kv_head,
                   bool f32) {
  const Attention& w = *task.w;
  int group = w.heads / w.kv_heads, dim = w.head_dim;
  const float* projection = task.projection + static_cast<size_t>(token) * 2 * (w.heads + w.kv_heads) * dim;
  size_t row = round_up(static_cast<size_t>(dim), 16);
  for (int begin = 0; begin < group; begin += 4) {
    int some = smaller(4, group - begin);
    Heads heads;
    heads.total = reinterpret_cast<float*>(worker.scratch);
    memset(heads.total, 0, 16 * row);
    for (int h = 0; h < 4; ++h) {
      int head = kv_head * group + begin + smaller(h, some - 1);
      heads.query[h] = projection + 2 * head * dim;
      heads.largest[h] = -INFINITY;
      heads.weight[h] = 0.0f;
    }
    for (int first = 0; first <= position; first += kKeys) {
      int count = smaller(kKeys, position + 1 - first);
      block_scores(w, cache, kv_head, first, count, f32, heads);
      float shrink[4];
      for (int h = 0; h < 4; ++h) shrink[h] = block_weights(heads.scores[h], count, heads.largest[h], heads.weight[h]);
      block_values(w, cache, kv_head, first, count, f32, shrink, heads);
    }
    for (int h = 0; h < some; ++h) {
      int head = kv_head * group + begin + h;
      const float* gate = projection + (2 * head + 1) * dim;
      float* y = task.mixed + (static_cast<size_t>(token) * w.heads + head) * dim;
      Lanes inverse = splat(1.0f / heads.weight[h]);
      for (int i = 0; i < dim; i += 16) {
        int left = smaller(16, dim - i);
        Lanes mixed = mul(load(heads.total + row * static_cast<size_t>(h) + i), inverse);
        store_n(y + i, mul(mixed, sigmoid(load_n(gate + i, left))), left);
      }
    }
  }
  worker.counters.state_bytes += static_cast<int64_t>(position + 1) * dim * (f32 ? 8 : 4);
}

static void attention_task(Worker& worker, const void* context) {
  const AttentionTask& task = *static_cast<const AttentionTask*>(context);
  const Attention& w = *task.w;
  const Batch& batch = task.batch;
  bool f32 = w.q.format == Format::F32;
  variant_begin();
  size_t hidden = static_cast<size_t>(w.hidden), dim = static_cast<size_t>(w.head_dim);
  size_t stride = 2 * static_cast<size_t>(w.heads + w.kv_heads) * dim;
  float* keys = task.projection + 2 * static_cast<size_t>(w.heads) * dim;
  const Output in[] = {{&w.q, task.projection, stride, false},
                       {&w.k, keys, stride, false},
                       {&w.v, keys + static_cast<size_t>(w.kv_heads) * dim, stride, false}};
  dense(worker, 0, {batch.x, hidden, w.norm_scale, w.eps, w.hidden, batch.tokens, batch.columns, in, 3}, worker.scratch);
  pool_barrier(worker);
  for (int token = pool_claim(worker, 1); token < batch.tokens; token = pool_claim(worker, 1)) {
    int sequence = 0, offset = token;
    while (offset >= batch.length[sequence]) offset -= batch.length[sequence++];
    place_token(task, token, task.caches[sequence], task.caches[sequence].position + offset, f32);
  }
  pool_barrier(worker);
  int units = batch.tokens * w.kv_heads;
  for (int unit = pool_claim(worker, 2); unit < units; unit = pool_claim(worker, 2)) {
    int token = unit / w.kv_heads, sequence = 0, offset = token;
    while (offset >= batch.length[sequence]) offset -= batch.length[sequence++];
    const KeyValueCache& cache = task.caches[sequence];
    attend(worker, task, token, cache.position + offset, cache, unit % w.kv_heads, f32);
  }
  pool_barrier(worker);
  size_t width = static_cast<size_t>(w.heads) * dim;
  const Output out[] = {{&w.o, batch.x, hidden, true}};
  dense(worker, 3, {task.mixed, width, nullptr, 0.0f, static_cast<int>(width), batch.tokens, batch.columns, out, 1}, worker.scratch);
  variant_end();
}

static void attention(Pool& pool, const Attention& w, const Batch& batch, const KeyValueCache* caches, const float* cosine,
                      const float* sine) {
  size_t tokens = static_cast<size_t>(batch.tokens), dim = static_cast<size_t>(w.head_dim);
  size_t projection = round_up(tokens * 2 * static_cast<size_t>(w.heads + w.kv_heads) * dim, 16);
  size_t width = static_cast<size_t>(w.heads) * dim;
  float* room = reinterpret_cast<float*>(pool_shared(pool, 4 * (projection + tokens * width)));
  AttentionTask task{&w, batch, caches, cosine, sine, room, room + projection};
  size_t scratch = dense_scratch(larger(w.hidden, static_cast<int>(width)), batch.columns), totals = 16 * round_up(dim, 16);
  pool_run(pool, attention_task, &task, scratch > totals ? scratch : totals);
}
