// The MoE block: the router's choice, a plan of routed pairs on their experts beside the shared expert, and their sum.
#pragma once

// ---- routing ----

struct RouterTask {
  const Router* w;
  Batch batch;
  float* logits;  // [tokens, experts]
  float* normed;  // [tokens, hidden]: what the experts get
  int32_t* ids;   // [tokens, top_k] by falling logit
  float* weights; // [tokens, top_k]
  float* gate;    // [tokens]: sigmoid of the shared expert's gate
};

// The top_k largest logits by falling value, ties by lower id, and their softmax: the softmax over all experts renormalised to
// the chosen ones, in which the sum over all cancels.
static void choose(const float* logits, int experts, int top_k, int32_t* ids, float* weights) {
  int count = 0;
  for (int expert = 0; expert < experts; ++expert) {
    float value = logits[expert];
    if (count == top_k && !(value > weights[count - 1])) continue;
    int place = count < top_k ? count++ : top_k - 1;
    for (; place > 0 && value > weights[place - 1]; --place) {
      weights[place] = weights[place - 1];
      ids[place] = ids[place - 1];
    }
    weights[place] = value;
    ids[place] = expert;
  }
  float largest = weights[0], total = 0.0f;
  for (int rank = 0; rank < top_k; ++rank) {
    weights[rank] = expf(weights[rank] - largest);
    total += weights[rank];
  }
  for (int rank = 0; rank < top_k; ++rank) weights[rank] /= total;
}

static void route_task(Worker& worker, const void* context) {
  const RouterTask& task = *static_cast<const RouterTask*>(context);
  const Router& w = *task.w;
  const Batch& batch = task.batch;
  variant_begin();
  size_t hidden = static_cast<size_t>(w.hidden);
  const Output out[] = {{&w.router, task.logits, static_cast<size_t>(w.experts), false}, {&w.shared_gate, task.gate, 1, false}};
  dense(worker, 0, {batch.x, hidden, w.norm_scale, w.eps, w.hidden, batch.tokens, batch.columns, out, 2}, worker.scratch);
  for (int token = pool_claim(worker, 1); token < batch.tokens; token = pool_claim(worker, 1)) {
    size_t row = hidden * static_cast<size_t>(token);
    rms_norm(batch.x + row, w.norm_scale, w.eps, w.hidden, task.normed + row);
  }
  pool_barrier(worker);
  for (int token = pool_claim(worker, 2); token < batch.tokens; token = pool_claim(worker, 2)) {
    size_t row = static_cast<size_t>(token);
    choose(task.logits + row * static_cast<size_t>(w.experts), w.experts, w.top_k, task.ids + row * static_cast<size_t>(w.top_k),
           task.weights + row * static_cast<size_t>(w.top_k));
    task.gate[token] = logistic(task.gate[token]);
  }
  variant_end();
}

static void route(Pool& pool, const Router& w, const Batch& batch, float* logits, float* normed, int32_t* ids, float* weights,
                  float* gate) {
  RouterTask task{&w, batch, logits, normed, ids, weights, gate};
  pool_run(pool, route_task, &task, dense_scratch(w.hidden, batch.columns));
}

// ---- experts ----

struct ExpertTask {
  const ExpertLayer* w;
  const float* normed;   // [tokens, hidden]
  const int32_t* pairs;  // token * top_k + rank, in the order of the plan
  const Chunk* chunks;
  int chunk_count;
  int pair_count, tokens, top_k;
  int shared_chunks, columns;  // of the shared expert over all tokens; 0 when this call leaves it out
  float* pair_out;             // [tokens * top_k, hidden]
  float* shared_out;           // [tokens, hidden]
  float* inner;                // [pairs, inter] then [tokens, shared inter]: silu(gate) * up
};

// A chunk's weights and where its columns come from and go to.
struct Bucket {
  Matrix gate, up, down;
  const int32_t* pairs;  // null: the shared expert's tokens first .. first + count - 1
  int first, count;
  float* inner;
};

static inline Bucket bucket_of(const ExpertTask& task, int chunk) {
  const ExpertLayer& w = *task.w;
  if (chunk < task.chunk_count) {
    const Chunk& c = task.chunks[chunk];
    const Expert& e = w.experts[c.expert];
    return {{e.gate, e.gate_scale, w.inter, w.hidden, w.format}, {e.up, e.up_scale, w.inter, w.hidden, w.format},
            {e.down, e.down_scale, w.hidden, w.inter, w.format}, task.pairs + c.first, c.first, c.count,
            task.inner + static_cast<size_t>(c.first) * w.inter};
  }
  int first = (chunk - task.chunk_count) * task.columns, inter = w.shared_gate.rows;
  float* inner = task.inner + static_cast<size_t>(task.pair_count) * w.inter + static_cast<size_t>(first) * inter;
  return {w.shared_gate, w.shared_up, w.shared_down, nullptr, first, smaller(task.columns, task.tokens - first), inner};
}

// The units of a phase: row units of gate (and of up beside it) or of down, chunk after chunk, the shared expert's last.
struct ExpertUnits {
  int chunks, routed, routed_rows, shared, shared_rows;
  int total;
};
static inline ExpertUnits units_of(const ExpertTask& task, const Matrix& routed, const Matrix& shared) {
  ExpertUnits u{task.chunk_count, row_units(routed), unit_rows(routed), row_units(shared), unit_rows(shared), 0};
  u.total = u.chunks * u.routed + task.shared_chunks * u.shared;
  return u;
}
static inline Unit expert_unit(const ExpertUnits& u, int unit) {
  int in_plan = u.chunks * u.routed;
  if (unit < in_plan) return {unit / u.routed, 0, unit % u.routed * u.routed_rows};
  return {u.chunks + (unit - in_plan) / u.shared, 0, (unit - in_plan) % u.shared * u.shared_rows};
}

static void gate_and_up(Worker& worker, const ExpertTask& task, uint8_t* scratch, int most) {
  const ExpertLayer& w = *task.w;
  uint8_t* packed = scratch;
  float* gate = reinterpret_cast<float*>(packed + round_up(packed_bytes(w.hidden, most), 64));
  float* up = gate + static_cast<size_t>(kRows) * most;
  uint8_t* room = reinterpret_cast<uint8_t*>(up + static_cast<size_t>(kRows) * most);
  int* tokens = reinterpret_cast<int*>(room + round_up(product_bytes(most), 64));
  ExpertUnits units = units_of(task, {nullptr, nullptr, w.inter, w.hidden, w.format}, w.shared_gate);
  int ready = -1;
  for (Turns turn = first_turn(worker, 0, units.total); turn.at < turn.total; next_turn(worker, 0, turn)) {
    Unit u = expert_unit(units, turn.at);
    Bucket b = bucket_of(task, u.chunk);
    if (ready != u.chunk) {
      for (int i = 0; i < b.count; ++i) tokens[i] = b.pairs != nullptr ? b.pairs[i] / task.top_k : b.first + i;
      pack(task.normed, static_cast<size_t>(w.hidden), tokens, b.count, w.hidden, b.gate.format, packed);
      ready = u.chunk;
    }
    Ahead ahead_gate{nullptr, 0}, ahead_up{nullptr, 0};
    if (unit_after(turn) < turn.total) {
      Unit after = expert_unit(units, unit_after(turn));
      Bucket coming = bucket_of(task, after.chunk);
      ahead_gate = block_rows(coming.gate, after.row);
      ahead_up = block_rows(coming.up, after.row);
    }
    Packed x{packed, w.hidden, b.count, b.gate.format};
    product(worker, b.gate, u.row, x, room, gate, ahead_gate);
    product(worker, b.up, u.row, x, room, up, ahead_up);
    int rows = rows_at(b.gate, u.row);
    for (int c = 0; c < b.count; ++c)
      for (int r = 0; r < rows; r += 16)
        store_n(b.inner + static_cast<size_t>(c) * b.gate.rows + u.row + r,
                mul(silu(load(gate + c * kRows + r)), load(up + c * kRows + r)), smaller(16, rows - r));
  }
}

static void down(Worker& worker, const ExpertTask& task, uint8_t* scratch, int most) {
  const ExpertLayer& w = *task.w;
  int widest = larger(w.inter, w.shared_gate.rows);
  uint8_t* packed = scratch;
  float* out = reinterpret_cast<float*>(packed + round_up(packed_bytes(widest, most), 64));
  uint8_t* room = reinterpret_cast<uint8_t*>(out + static_cast<size_t>(kRows) * most);
  ExpertUnits units = units_of(task, {nullptr, nullptr, w.hidden, w.inter, w.format}, w.shared_down);
  int ready = -1;
  for (Turns turn = first_turn(worker, 1, units.total); turn.at < turn.total; next_turn(worker, 1, turn)) {
    Unit u = expert_unit(units, turn.at);
    Bucket b = bucket_of(task, u.chunk);
    if (ready != u.chunk) {
      pack(b.inner, static_cast<size_t>(b.down.cols), nullptr, b.count, b.down.cols, b.down.format, packed);
      ready = u.chunk;
    }
    Ahead ahead{nullptr, 0};
    if (unit_after(turn) < turn.total) {
      Unit after = expert_unit(units, unit_after(turn));
      ahead = block_rows(bucket_of(task, after.chunk).down, after.row);
    }
    product(worker, b.down, u.row, Packed{packed, b.down.cols, b.count, b.down.format}, room, out, ahead);
    size_t hidden = static_cast<size_t>(w.hidden);
    for (int c = 0; c < b.count; ++c) {
      float* y = b.pairs != nullptr ? task.pair_out + hidden * static_cast<size_t>(b.pairs[c])
                                    : task.shared_out + hidden * static_cast<size_t>(b.first + c);
      put_rows(out + c * kRows, rows_at(b.down, u.row), 1, y + u.row, 0, false);
    }
  }
}

static void experts_task(Worker& worker, const void* context) {
  const ExpertTask& task = *static_cast<const ExpertTask*>(context);
  variant_begin();
  int most = task.shared_chunks > 0 ? smaller(task.columns, task.tokens) : 1;
  for (int i = 0; i < task.chunk_count; ++i) most = larger(most, task.chunks[i].count);
  gate_and_up(worker, task, worker.scratch, most);
  pool_barrier(worker);
  down(worker, task, worker.scratch, most);
  variant_end();
}

static void run_plan(Pool& pool, const ExpertLayer& w, const float* normed, int tokens, int top_k, const int32_t* pairs,
                     int pair_count, const Chunk* chunks, int chunk_count, bool with_shared, int columns, float* pair_out,
                     float* shared_out) {
  size_t inner = static_cast<size_t>(pair_count) * w.inter + static_cast<size_t>(tokens) * w.shared_gate.rows;
  float* room = reinterpret_cast<float*>(pool_shared(pool, 4 * inner));
  ExpertTask task{&w, normed, pairs, chunks, chunk_count, pair_count, tokens, top_k, with_shared ? ceil_div(tokens, columns) : 0,
                  columns, pair_out, shared_out, room};
  int most = smaller(columns, tokens);
  for (int i = 0; i < chunk_count; ++i) most = larger(most, chunks[i].count);
  int widest = larger(w.hidden, larger(w.inter, w.shared_gate.rows));
  size_t scratch = round_up(packed_bytes(widest, most), 64) + 8 * static_cast<size_t>(kRows) * most +
                   round_up(product_bytes(most), 64) + 4 * static_cast<size_t>(most);
  pool_run(pool, experts_task, &task, scratch);
}

// ---- the sum ----

struct CombineTask {
  float* x;               // [tokens, hidden], added to
  const float* pair_out;  // [tokens * top_k, hidden]
  const float* weights;   // [tokens, top_k]
  const float* shared_out;
  const float* gate;
  int tokens, top_k, hidden;
};

// x += sum over ranks of weight * output, in rank order, then the gated shared expert: nothing of the plan can show in it.
static void combine_task(Worker& worker, const void* context) {
  const CombineTask& task = *static_cast<const CombineTask*>(context);
  size_t hidden = static_cast<size_t>(task.hidden);
  for (int token = pool_claim(worker, 0); token < task.tokens; token = pool_claim(worker, 0)) {
    const float* weight = task.weights + static_cast<size_t>(token) * task.top_k;
    const float* out = task.pair_out + hidden * static_cast<size_t>(token) * task.top_k;
    const float* shared = task.shared_out + hidden * static_cast<size_t>(token);
    float* x = task.x + hidden * static_cast<size_t>(token);
    for (int i = 0; i < task.hidden; i += 16) {
      int some = smaller(16, task.hidden - i);
      Lanes total = mul(splat(weight[0]), load_n(out + i, some));
      for (int rank = 1; rank < task.top_k; ++rank)
        total = fma(splat(weight[rank]), load_n(out + hidden * static_cast<size_t>(rank) + i, some), total);
      total = fma(splat(task.gate[token]), load_n(shared + i, some), total);
      store_n(x + i, add(load_n(x + i, some), total), some);
    }
  }
}

static void combine(Pool& pool, float* x, const float* pair_out, const float* weights, const float* shared_out, const float* gate,
                    int tokens, int top_k, int hidden) {
  CombineTask task{x, pair_out, weights, shared_out, gate, tokens, top_k, hidden};
  pool_run(pool, combine_task, &task, 0);
}
