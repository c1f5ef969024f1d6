// AMX-BF16: weights in the A tiles (16 rows x 32 inputs), columns in the B tiles, so that each output sums over inputs in the
// order of the tile instruction, the same for 1 and for 16 columns.
#pragma once

#include "product.h"

#include "expand_f8.h"

// Own wrappers: those of GCC 12 do not tell the compiler that memory is read, which lets it drop the stores before them.
#define HUORN_TILE_LOAD(tile, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"(static_cast<size_t>(stride)) : "memory")
#define HUORN_TILE_STORE(tile, base, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"(static_cast<size_t>(stride)) : "memory")
#define HUORN_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define HUORN_TILE_DOT(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

static thread_local int configured_columns = 0;

// Tiles 0 to 3 are sums [16 rows, columns] in F32, 4 and 5 weights, 6 and 7 columns as pairs of inputs.
static inline void configure(int columns) {
  if (configured_columns == columns) return;
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = 16;
    config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 64 : 4 * columns);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
  configured_columns = columns;
}
static inline void variant_begin() { configured_columns = 0; }
static inline void variant_end() {
  if (configured_columns != 0) __asm__ volatile("tilerelease" ::);
  configured_columns = 0;
}

// Columns travel alone, or in groups of 16 of which the last is filled up with zeros.
static inline int column_groups(int count) { return count == 1 ? 1 : ceil_div(count, 16); }
static inline int group_width(int count) { return count == 1 ? 1 : 16; }

static inline size_t packed_bytes(int cols, int count) {
  size_t wide = 2 * round_up(static_cast<size_t>(cols), kBlock) * round_up(static_cast<size_t>(count), 16);
  size_t lanes = lanes_packed_bytes(cols, count);
  // A block of 16 columns as rows of BF16 stands behind the packed ones while it is turned.
  return (wide > lanes ? wide : lanes) + 32 * round_up(static_cast<size_t>(cols), kBlock);
}
static inline size_t product_bytes(int count) {
  size_t tiles = 2 * 1024 * static_cast<size_t>(column_groups(count)) + 4 * 1024 + 8 * 1024;
  size_t lanes = lanes_product_bytes(count);
  return tiles > lanes ? tiles : lanes;
}

// 16 x 16 dwords, rows to columns.
static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// One column: its BF16 row. More: [block of 128 inputs, group of 16 columns, 64 pairs of inputs, 16 columns].
static inline void pack(const float* x, size_t stride, const int* index, int count, int cols, Format format, uint8_t* out) {
  if (format == Format::F32) {
    lanes_pack(x, stride, index, count, cols, format, out);
    return;
  }
  if (count == 1) {
    pack_bf16(x + stride * static_cast<size_t>(index == nullptr ? 0 : index[0]), cols, format, out);
    return;
  }
  int blocks = ceil_div(cols, kBlock), groups = column_groups(count);
  size_t bytes = 2 * static_cast<size_t>(blocks) * kBlock;
  uint8_t* rows = out + bytes * 16 * static_cast<size_t>(groups);
  for (int group = 0; group < groups; ++group) {
    int some = smaller(16, count - 16 * group);
    for (int c = 0; c < some; ++c) {
      int column = 16 * group + c;
      pack_bf16(x + stride * static_cast<size_t>(index == nullptr ? column : index[column]), cols, format,
                rows + bytes * static_cast<size_t>(c));
    }
    for (int block = 0; block < blocks; ++block) {
      uint8_t* tiles = out + 4096 * (static_cast<size_t>(block) * groups + group);
      for (int step = 0; step < 4; ++step) {
        __m512i r[16];
        for (int c = 0; c < 16; ++c)
          r[c] = c < some ? _mm512_loadu_si512(rows + bytes * static_cast<size_t>(c) + 256 * static_cast<size_t>(block) + 64 * step)
                          : _mm512_setzero_si512();
        transpose16(r);
        for (int pair = 0; pair < 16; ++pair) _mm512_storeu_si512(tiles + 1024 * step + 64 * pair, r[pair]);
      }
    }
  }
}

// Where the two A tiles of a block of 128 inputs lie: in the checkpoint's own rows, or expanded.
struct WeightTiles {
  const uint8_t* at[2];
  size_t stride;  // from row to row
  size_t step;    // from 32 inputs to the next
};

// Two tiles of 16 rows times up to two groups of columns over one block; sums to parts [2 groups, 2 tiles, 16, width].
static inline void block_sums(const WeightTiles& w, bool two_tiles, const uint8_t* x, bool two_groups, int steps, int width,
                              float* parts) {
  size_t column_stride = 4 * static_cast<size_t>(width), column_step = 16 * column_stride;
  HUORN_TILE_ZERO(0);
  HUORN_TILE_ZERO(1);
  if (two_groups) {
    HUORN_TILE_ZERO(2);
    HUORN_TILE_ZERO(3);
  }
  for (int step = 0; step < steps; ++step) {
    const uint8_t* columns = x + column_step * static_cast<size_t>(step);
    HUORN_TILE_LOAD(6, columns, column_stride);
    HUORN_TILE_LOAD(4, w.at[0] + w.step * static_cast<size_t>(step), w.stride);
    HUORN_TILE_DOT(0, 4, 6);
    if (two_tiles) {
      HUORN_TILE_LOAD(5, w.at[1] + w.step * static_cast<size_t>(step), w.stride);
      HUORN_TILE_DOT(1, 5, 6);
    }
    if (two_groups) {
      HUORN_TILE_LOAD(7, columns + 4096, column_stride);
      HUORN_TILE_DOT(2, 4, 7);
      if (two_tiles) HUORN_TILE_DOT(3, 5, 7);
    }
  }
  size_t tile = 16 * static_cast<size_t>(width);
  HUORN_TILE_STORE(0, parts, column_stride);
  HUORN_TILE_STORE(1, parts + tile, column_stride);
  if (two_groups) {
    HUORN_TILE_STORE(2, parts + 2 * tile, column_stride);
    HUORN_TILE_STORE(3, parts + 3 * tile, column_stride);
  }
}

// 128 inputs of 16 rows, `apart` rows from each other, as BF16 to room [step, 16 rows, 32]; rows from `end` on are zeros. While a
// row is expanded one line of `coming` is asked for.
static inline void expand_tile(const F8Expander& expander, const Matrix& m, int row, int apart, int end, int block, uint8_t* room,
                               const uint8_t* coming) {
  int k = block * kBlock, count = smaller(kBlock, m.cols - k);
  for (int i = 0; i < 16; ++i) {
    __builtin_prefetch(coming + 64 * i, 0, 2);
    __m512i w[4];
    if (row + apart * i < end) {
      expand128(expander, m, row_at(m, row + apart * i), k, count, w);
    } else {
      for (int j = 0; j < 4; ++j) w[j] = _mm512_setzero_si512();
    }
    for (int j = 0; j < 4; ++j) _mm512_store_si512(room + 1024 * j + 64 * i, w[j]);
  }
}

static inline int steps_of(const Matrix& m, int block) { return 2 * ceil_div(smaller(kBlock, m.cols - block * kBlock), 64); }

// One tile of weights [16, 32 * steps] at `weights` times up to four groups of columns; sums to parts [groups, 16, width].
template <int kGroups>
static inline void tile_sums(const uint8_t* weights, const uint8_t* x, int steps, int width, float* parts) {
  size_t column_stride = 4 * static_cast<size_t>(width), column_step = 16 * column_stride, tile = 16 * static_cast<size_t>(width);
  HUORN_TILE_ZERO(0);
  if (kGroups > 1) HUORN_TILE_ZERO(1);
  if (kGroups > 2) HUORN_TILE_ZERO(2);
  if (kGroups > 3) HUORN_TILE_ZERO(3);
  for (int step = 0; step < steps; ++step, x += column_step) {
    HUORN_TILE_LOAD(4, weights + 1024 * step, 64);
    HUORN_TILE_LOAD(6, x, column_stride);
    HUORN_TILE_DOT(0, 4, 6);
    if (kGroups > 1) {
      HUORN_TILE_LOAD(7, x + 4096, column_stride);
      HUORN_TILE_DOT(1, 4, 7);
    }
    if (kGroups > 2) {
      HUORN_TILE_LOAD(6, x + 8192, column_stride);
      HUORN_TILE_DOT(2, 4, 6);
    }
    if (kGroups > 3) {
      HUORN_TILE_LOAD(7, x + 12288, column_stride);
      HUORN_TILE_DOT(3, 4, 7);
    }
  }
  HUORN_TILE_STORE(0, parts, column_stride);
  if (kGroups > 1) HUORN_TILE_STORE(1, parts + tile, column_stride);
  if (kGroups > 2) HUORN_TILE_STORE(2, parts + 2 * tile, column_stride);
  if (kGroups > 3) HUORN_TILE_STORE(3, parts + 3 * tile, column_stride);
}

// F8 and up to 64 columns: what counts is the stream from RAM. 16 rows at a time, so far apart that each of the 16 pages of 4 KB
// they lie in is read in one ascending sequence, which is what the hardware follows; and one line ahead per row and block, which
// opens the pages of the next unit. One core, one column, GB/s: 12.0 of 12.8 that a plain loop reads; 32 neighbouring rows at a
// time 8.8, with no line ahead 6.4; two lines ahead per row instead of one 10.0 (with 16 columns on two cores 9.3 instead of 11.2);
// 256 or 512 inputs per visit 8.3; a second room to fill while the tiles work on the first is slower than one from level-2 cache
// (21 against 25: loads of tiles wait for stores at the same offset of a page).
constexpr int kNarrow = 64;

template <int kGroups>
static void narrow_product(const Matrix& m, int row, const Packed& x, uint8_t* scratch, float* out, const Ahead& ahead) {
  int rows = rows_at(m, row), blocks = ceil_div(m.cols, kBlock), width = group_width(x.count);
  int apart = rows == unit_rows(m) ? larger(1, smaller(rows / 16, 4096 / larger(1, static_cast<int>(row_bytes(m))))) : 1;
  int sums = kGroups * 16 * width;
  float* parts = reinterpret_cast<float*>(scratch + 4096);  // [groups, 16, width]
  float* totals = parts + kGroups * 256;                    // [groups, 16, width]
  float factor = m.format == Format::F8 ? kF8Factor : 1.0f;
  F8Expander expander = f8_expander();
  const uint8_t* coming = ahead.at;
  for (int pass = 0; pass < ceil_div(rows, 16); ++pass) {
    int first = apart > 1 ? pass / apart * 16 * apart + pass % apart : 16 * pass;
    memset(totals, 0, 4 * static_cast<size_t>(sums));
    for (int block = 0; block < blocks; ++block) {
      expand_tile(expander, m, row + first, apart, row + rows, block, scratch, coming + 1024 * block);
      const uint8_t* columns = x.data + (width == 1 ? 256 : 4096 * kGroups) * static_cast<size_t>(block);
      tile_sums<kGroups>(scratch, columns, steps_of(m, block), width, parts);
      Lanes scale = splat(scale_at(m, row, block) * factor);
      for (int i = 0; i < sums; i += 16) store(totals + i, fma(scale, load(parts + i), load(totals + i)));
    }
    coming += 2048 * blocks;
    for (int i = 0; i < 16; ++i)
      for (int c = 0; c < x.count; ++c)
        out[c * kRows + first + apart * i] = totals[(c / 16 * 16 + i) * width + c % 16];
  }
}

// Any number of columns, and BF16: 32 rows and up to 32 columns per step, four sums for two loads of weights and two of columns.
// Rows of BF16 feed the tiles as they lie in the checkpoint, but for ragged ends.
static void wide_product(const Matrix& m, int row, int rows, const Packed& x, uint8_t* scratch, float* out) {
  int blocks = ceil_div(m.cols, kBlock), groups = column_groups(x.count), width = group_width(x.count);
  int tile = 16 * width;  // floats of one tile of sums
  float* parts = reinterpret_cast<float*>(scratch + 8192);  // [2 groups, 2 tiles, 16, width]
  float* totals = parts + 1024;                             // [groups, 2 tiles, 16, width]
  float factor = m.format == Format::F8 ? kF8Factor : 1.0f;
  F8Expander expander = f8_expander();
  memset(totals, 0, 4 * static_cast<size_t>(groups) * 2 * static_cast<size_t>(tile));
  for (int block = 0; block < blocks; ++block) {
    WeightTiles tiles{{scratch, scratch + 4096}, 64, 1024};
    if (m.format == Format::BF16 && (block + 1) * kBlock <= m.cols && rows % 16 == 0) {
      const uint8_t* first = row_at(m, row) + 2 * static_cast<size_t>(block * kBlock);
      tiles = {{first, first + 16 * row_bytes(m)}, row_bytes(m), 64};
    } else {
      for (int half = 0; half < 2; ++half)
        expand_tile(expander, m, row + 16 * half, 1, row + rows, block, scratch + 4096 * half, m.data);
    }
    Lanes scale = splat(scale_at(m, row, block) * factor);
    const uint8_t* columns = x.data + (width == 1 ? 256 : 4096) * static_cast<size_t>(block) * static_cast<size_t>(groups);
    for (int group = 0; group < groups; group += 2) {
      bool two = group + 1 < groups;
      block_sums(tiles, rows > 16, columns + 4096 * static_cast<size_t>(group), two, steps_of(m, block), width, parts);
      float* total = totals + 2 * tile * group;
      for (int i = 0; i < (two ? 4 : 2) * tile; i += 16) store(total + i, fma(scale, load(parts + i), load(total + i)));
    }
  }
  if (width == 1) {
    store(out, load(totals));
    if (rows > 16) store(out + 16, load(totals + 16));
    return;
  }
  for (int group = 0; group < groups; ++group) {
    int some = smaller(16, x.count - 16 * group);
    for (int half = 0; half < ceil_div(rows, 16); ++half) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(totals + (2 * group + half) * tile + 16 * i);
      transpose16(r);
      for (int c = 0; c < some; ++c) _mm512_storeu_si512(out + (16 * group + c) * kRows + 16 * half, r[c]);
    }
  }
}

static void product(Worker& worker, const Matrix& m, int row, const Packed& x, uint8_t* scratch, float* out, const Ahead& ahead) {
  count_read(worker, m, row);
  if (x.format == Format::F32) {
    lanes_product(m, row, x, scratch, out, ahead);
    return;
  }
  configure(group_width(x.count));
  if (m.format == Format::F8 && x.count <= kNarrow) {
    switch (column_groups(x.count)) {
      case 1: narrow_product<1>(m, row, x, scratch, out, ahead); return;
      case 2: narrow_product<2>(m, row, x, scratch, out, ahead); return;
      case 3: narrow_product<3>(m, row, x, scratch, out, ahead); return;
      default: narrow_product<4>(m, row, x, scratch, out, ahead); return;
    }
  }
  int rows = rows_at(m, row);
  for (int first = 0; first < rows; first += 32) wide_product(m, row + first, smaller(32, rows - first), x, scratch, out + first);
}
