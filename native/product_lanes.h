// Variants without BF16 instructions: products of two BF16 numbers are exact in F32.
#pragma once

static inline size_t packed_bytes(int cols, int count) { return lanes_packed_bytes(cols, count); }
static inline size_t product_bytes(int count) { return lanes_product_bytes(count); }
static inline void pack(const float* x, size_t stride, const int* index, int count, int cols, Format format, uint8_t* out) {
  lanes_pack(x, stride, index, count, cols, format, out);
}
static inline void product(Worker& worker, const Matrix& m, int row, const Packed& x, uint8_t* scratch, float* out,
                           const Ahead& ahead) {
  count_read(worker, m, row);
  lanes_product(m, row, x, scratch, out, ahead);
}
static inline void variant_begin() {}
static inline void variant_end() {}
