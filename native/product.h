// Products of some rows of a weight with n columns (activations of n tokens): what all variants share.
//
// Every output element has one order of summation, whatever n is: within each block of 128 inputs in the order of the variant,
// then block after block times its scale, all in F32. So a token's numbers do not depend on which tokens came along.
#pragma once

// Columns ready to be multiplied with weights of one format, in the layout of the variant: F32 as they are for F32 weights,
// rounded to BF16 for BF16 and F8.
struct Packed {
  const uint8_t* data;
  int cols;   // inputs K
  int count;  // columns n
  Format format;
};

// Memory that will be read next by this thread: asked for while the current product runs, in the order of addresses, so that
// RAM sees one sequential stream however the tiles of the current product lie.
struct Ahead {
  const uint8_t* at;
  size_t bytes;
};

static inline size_t element_bytes(Format format) { return format == Format::F8 ? 1 : format == Format::BF16 ? 2 : 4; }
static inline size_t row_bytes(const Matrix& m) { return element_bytes(m.format) * static_cast<size_t>(m.cols); }
static inline const uint8_t* row_at(const Matrix& m, int row) { return m.data + row_bytes(m) * static_cast<size_t>(row); }
// Rows of one product: the unit of work of a thread. 32 rows of 2048 codes are 64 KB; where a page of 4 KB holds more than two
// rows, as many as 16 pages hold. 32, 64 or 128, so that a unit never crosses the 128 rows that share a scale.
static inline int unit_rows(const Matrix& m) {
  int rows = 16 * (4096 / larger(1, static_cast<int>(row_bytes(m))));
  return rows >= 128 ? 128 : rows >= 64 ? 64 : 32;
}
static inline int rows_at(const Matrix& m, int row) { return smaller(unit_rows(m), m.rows - row); }
static inline float scale_at(const Matrix& m, int row, int block) {
  if (m.scale == nullptr) return 1.0f;
  return m.scale[static_cast<size_t>(row / kBlock) * ceil_div(m.cols, kBlock) + block];
}
static inline Ahead block_rows(const Matrix& m, int row) {
  return {row_at(m, row), row_bytes(m) * static_cast<size_t>(rows_at(m, row))};
}

// Asks for share `step` of `steps` of what comes next.
static inline void fetch_share(const Ahead& ahead, int step, int steps) {
  size_t lines = (ahead.bytes + 63) / 64;
  size_t begin = lines * static_cast<size_t>(step) / static_cast<size_t>(steps);
  size_t end = lines * static_cast<size_t>(step + 1) / static_cast<size_t>(steps);
  for (size_t line = begin; line < end; ++line) __builtin_prefetch(ahead.at + 64 * line, 0, 2);
}

static inline void count_read(Worker& worker, const Matrix& m, int row) {
  size_t rows = static_cast<size_t>(rows_at(m, row));
  worker.counters.weight_bytes += static_cast<int64_t>(rows * row_bytes(m));
}

// ---- F32 lanes: operands F32, or BF16 values held as F32 ----

static inline size_t lanes_packed_bytes(int cols, int count) {
  return 4 * round_up(static_cast<size_t>(cols), kBlock) * static_cast<size_t>(count);
}

static inline void round_to_bf16(float* x, int n) {
  for (int i = 0; i < n; i += 16) {
    uint16_t half[16];
    store_bf16(half, load(x + i));
    store(x + i, load_bf16(half));
  }
}

// Columns as F32 rows [count, K rounded up to 128], zeros behind K.
static inline void lanes_pack(const float* x, size_t stride, const int* index, int count, int cols, Format format, uint8_t* out) {
  int padded = static_cast<int>(round_up(static_cast<size_t>(cols), kBlock));
  float* y = reinterpret_cast<float*>(out);
  for (int c = 0; c < count; ++c, y += padded) {
    const float* row = x + stride * static_cast<size_t>(index == nullptr ? c : index[c]);
    memcpy(y, row, 4 * static_cast<size_t>(cols));
    memset(y + cols, 0, 4 * static_cast<size_t>(padded - cols));
    if (format != Format::F32) round_to_bf16(y, padded);
  }
}

// Weights k .. k + count - 1 of a row as F32, zeros up to a multiple of 16.
static inline void expand_row(const Matrix& m, int row, int k, int count, float* out) {
  const uint8_t* p = row_at(m, row) + element_bytes(m.format) * static_cast<size_t>(k);
  uint8_t tail[64];
  for (int i = 0; i < count; i += 16) {
    const uint8_t* q = p + element_bytes(m.format) * static_cast<size_t>(i);
    if (count - i < 16) {
      memset(tail, 0, sizeof tail);
      memcpy(tail, q, element_bytes(m.format) * static_cast<size_t>(count - i));
      q = tail;
    }
    Lanes w;
    if (m.format == Format::F8) {
      w = load_f8(q);
    } else if (m.format == Format::BF16) {
      w = load_bf16(q);
    } else {
      memcpy(&w, q, sizeof w);
    }
    store(out + i, w);
  }
}

static inline size_t lanes_product_bytes(int count) { return 4 * 64 * static_cast<size_t>(count) + 4 * 4 * kBlock; }

// out [count, kRows]: the unit of rows from `row` on times every column.
static void lanes_product(const Matrix& m, int row, const Packed& x, uint8_t* scratch, float* out, const Ahead& ahead) {
  int rows = rows_at(m, row), blocks = ceil_div(m.cols, kBlock), groups = ceil_div(rows, 4);
  size_t padded = static_cast<size_t>(blocks) * kBlock;
  float* weights = reinterpret_cast<float*>(scratch);  // [4, 128]
  float* totals = weights + 4 * kBlock;                // [count, 4, 16]
  for (int group = 0; group < groups; ++group) {
    int first = 4 * group, some = smaller(4, rows - first);
    memset(totals, 0, 4 * 64 * static_cast<size_t>(x.count));
    for (int block = 0; block < blocks; ++block) {
      int k = block * kBlock, count = smaller(kBlock, m.cols - k);
      for (int i = 0; i < some; ++i) expand_row(m, row + first + i, k, count, weights + i * kBlock);
      Lanes scale = splat(scale_at(m, row, block));
      const float* column = reinterpret_cast<const float*>(x.data) + k;
      float* total = totals;
      for (int c = 0; c < x.count; ++c, column += padded, total += 64) {
        Lanes a = splat(0.0f), b = a, d = a, e = a;
        for (int i = 0; i < count; i += 16) {
          Lanes v = load(column + i);
          a = fma(load(weights + i), v, a);
          b = fma(load(weights + kBlock + i), v, b);
          d = fma(load(weights + 2 * kBlock + i), v, d);
          e = fma(load(weights + 3 * kBlock + i), v, e);
        }
        store(total, fma(scale, a, load(total)));
        store(total + 16, fma(scale, b, load(total + 16)));
        store(total + 32, fma(scale, d, load(total + 32)));
        store(total + 48, fma(scale, e, load(total + 48)));
      }
      fetch_share(ahead, group * blocks + block, groups * blocks);
    }
    for (int c = 0; c < x.count; ++c)
      for (int i = 0; i < some; ++i) out[c * kRows + first + i] = sum(load(totals + c * 64 + 16 * i));
  }
}
