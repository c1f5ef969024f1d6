// AVX-512 with BF16 and VBMI: vdpbf16ps, pairs of inputs in 16 lanes.
#pragma once

#include "product.h"

#include "expand_f8.h"

static inline size_t packed_bytes(int cols, int count) { return lanes_packed_bytes(cols, count); }
static inline size_t product_bytes(int count) { return lanes_product_bytes(count); }

// BF16 rows [count, K rounded up to 128].
static inline void pack(const float* x, size_t stride, const int* index, int count, int cols, Format format, uint8_t* out) {
  if (format == Format::F32) {
    lanes_pack(x, stride, index, count, cols, format, out);
    return;
  }
  size_t bytes = 2 * round_up(static_cast<size_t>(cols), kBlock);
  for (int c = 0; c < count; ++c)
    pack_bf16(x + stride * static_cast<size_t>(index == nullptr ? c : index[c]), cols, format,
              out + bytes * static_cast<size_t>(c));
}

static inline Lanes dot128(const __m512i w[4], const __m512i x[4]) {
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < 4; ++i)
    total = _mm512_dpbf16_ps(total, reinterpret_cast<__m512bh>(w[i]), reinterpret_cast<__m512bh>(x[i]));
  return {total};
}

static void product(Worker& worker, const Matrix& m, int row, const Packed& x, uint8_t* scratch, float* out, const Ahead& ahead) {
  count_read(worker, m, row);
  if (x.format == Format::F32) {
    lanes_product(m, row, x, scratch, out, ahead);
    return;
  }
  F8Expander expander = f8_expander();
  int rows = rows_at(m, row), blocks = ceil_div(m.cols, kBlock), groups = ceil_div(rows, 4);
  size_t padded = 2 * static_cast<size_t>(blocks) * kBlock;
  float* totals = reinterpret_cast<float*>(scratch);  // [count, 4, 16]
  for (int group = 0; group < groups; ++group) {
    int first = row + 4 * group, some = smaller(4, rows - 4 * group);
    memset(totals, 0, 4 * 64 * static_cast<size_t>(x.count));
    for (int block = 0; block < blocks; ++block) {
      int k = block * kBlock, count = smaller(kBlock, m.cols - k);
      __m512i w[4][4];
      for (int i = 0; i < 4; ++i) expand128(expander, m, row_at(m, first + smaller(i, some - 1)), k, count, w[i]);
      Lanes scale = splat(scale_at(m, row, block) * (m.format == Format::F8 ? kF8Factor : 1.0f));
      const uint8_t* column = x.data + 2 * static_cast<size_t>(k);
      float* total = totals;
      for (int c = 0; c < x.count; ++c, column += padded, total += 64) {
        __m512i v[4];
        for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(column + 64 * i);
        for (int i = 0; i < 4; ++i) store(total + 16 * i, fma(scale, dot128(w[i], v), load(total + 16 * i)));
      }
      fetch_share(ahead, group * blocks + block, groups * blocks);
    }
    for (int c = 0; c < x.count; ++c)
      for (int i = 0; i < some; ++i) out[c * kRows + 4 * group + i] = sum(load(totals + c * 64 + 16 * i));
  }
}
static inline void variant_begin() {}
static inline void variant_end() {}
