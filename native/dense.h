// Several weights times the same input, split over the threads by rows: the frame of every block.
#pragma once

// Where the rows of one weight's product go: y[token * stride + row], set or added to.
struct Output {
  const Matrix* weight;
  float* y;
  size_t stride;
  bool add;
};

static inline int row_units(const Matrix& m) { return ceil_div(m.rows, unit_rows(m)); }

struct Dense {
  const float* x;  // f32 [tokens, cols]
  size_t stride;
  const float* norm_scale;  // RMS norm of every row first, with eps; null for none
  float eps;
  int cols, tokens;
  int columns;  // tokens per pass over the weights
  const Output* outputs;
  int count;
};

static inline size_t dense_scratch(int cols, int columns) {
  return 2 * round_up(packed_bytes(cols, columns), 64) + round_up(4 * static_cast<size_t>(cols) * columns, 64) +
         round_up(4 * static_cast<size_t>(kRows) * columns, 64) + product_bytes(columns);
}

// Unit number `unit` of a Dense: all row blocks of all weights for the first columns, then for the next.
struct Unit {
  int chunk;  // of columns
  int output;
  int row;
};
static inline Unit unit_of(const Dense& d, int unit) {
  int blocks = 0;
  for (int i = 0; i < d.count; ++i) blocks += row_units(*d.outputs[i].weight);
  Unit u{unit / blocks, 0, 0};
  int rest = unit % blocks;
  for (;; ++u.output) {
    int own = row_units(*d.outputs[u.output].weight);
    if (rest < own) break;
    rest -= own;
  }
  u.row = rest * unit_rows(*d.outputs[u.output].weight);
  return u;
}
static inline int units_in(const Dense& d) {
  int blocks = 0;
  for (int i = 0; i < d.count; ++i) blocks += row_units(*d.outputs[i].weight);
  return blocks * ceil_div(d.tokens, d.columns);
}

// A thread's way through the units of a phase: runs of up to kRun neighbouring units, so that its stream from RAM goes on from one
// to the next, shorter runs where there are few units. The next unit is always known, to be fetched ahead.
constexpr int kRun = 8;

struct Turns {
  int total, run;
  int at, end;  // the unit at hand, and the end of its run
  int coming;   // the first unit of the next run
};
static inline Turns first_turn(Worker& worker, int phase, int total) {
  int run = larger(1, smaller(kRun, total / (32 * worker.threads)));
  int at = pool_claim(worker, phase) * run;
  return {total, run, at, smaller(at + run, total), pool_claim(worker, phase) * run};
}
static inline int unit_after(const Turns& t) { return t.at + 1 < t.end ? t.at + 1 : t.coming; }
static inline void next_turn(Worker& worker, int phase, Turns& t) {
  if (++t.at < t.end) return;
  t.at = t.coming;
  t.end = smaller(t.at + t.run, t.total);
  if (t.at < t.total) t.coming = pool_claim(worker, phase) * t.run;
}

static inline void put_rows(const float* from, int rows, int count, float* y, size_t stride, bool add_to) {
  for (int c = 0; c < count; ++c, from += kRows, y += stride)
    for (int r = 0; r < rows; r += 16) {
      int some = smaller(16, rows - r);
      Lanes v = load(from + r);
      if (add_to) v = add(load_n(y + r, some), v);
      store_n(y + r, v, some);
    }
}

// Columns of one chunk, packed once for each format that the weights have.
struct Packer {
  uint8_t* room[2];  // for the first weight's format, and for any other
  float* normed;
  int chunk[2];
};

static inline Packed packed_chunk(const Dense& d, int chunk, Format format, Packer& packer) {
  int place = format == d.outputs[0].weight->format ? 0 : 1;
  int first = chunk * d.columns, count = smaller(d.columns, d.tokens - first);
  if (packer.chunk[place] != chunk) {
    const float* x = d.x + d.stride * static_cast<size_t>(first);
    size_t stride = d.stride;
    if (d.norm_scale != nullptr) {
      for (int c = 0; c < count; ++c)
        rms_norm(x + stride * static_cast<size_t>(c), d.norm_scale, d.eps, d.cols, packer.normed + static_cast<size_t>(d.cols) * c);
      x = packer.normed;
      stride = static_cast<size_t>(d.cols);
    }
    pack(x, stride, nullptr, count, d.cols, format, packer.room[place]);
    packer.chunk[place] = chunk;
  }
  return {packer.room[place], d.cols, count, format};
}

static void dense(Worker& worker, int phase, const Dense& d, uint8_t* scratch) {
  size_t packed = round_up(packed_bytes(d.cols, d.columns), 64);
  Packer packer{{scratch, scratch + packed}, reinterpret_cast<float*>(scratch + 2 * packed), {-1, -1}};
  float* out = packer.normed + round_up(static_cast<size_t>(d.cols) * d.columns, 16);
  uint8_t* room = reinterpret_cast<uint8_t*>(out + static_cast<size_t>(kRows) * d.columns);
  for (Turns turn = first_turn(worker, phase, units_in(d)); turn.at < turn.total; next_turn(worker, phase, turn)) {
    Unit u = unit_of(d, turn.at);
    const Output& o = d.outputs[u.output];
    Packed x = packed_chunk(d, u.chunk, o.weight->format, packer);
    Ahead ahead{nullptr, 0};
    if (unit_after(turn) < turn.total) {
      Unit after = unit_of(d, unit_after(turn));
      ahead = block_rows(*d.outputs[after.output].weight, after.row);
    }
    product(worker, *o.weight, u.row, x, room, out, ahead);
    float* y = o.y + o.stride * static_cast<size_t>(u.chunk * d.columns) + u.row;
    put_rows(out, rows_at(*o.weight, u.row), x.count, y, o.stride, o.add);
  }
}
