// The kernels of one variant (instruction set) behind function pointers.
#pragma once

#include "pool.h"
#include "shapes.h"

namespace huorn {

struct Kernels {
  const char* name;
  // y [tokens, rows] = norm(x) [tokens, cols] times each weight's rows; norm_scale null for no norm.
  void (*linear)(Pool&, const Matrix&, const float* norm_scale, float eps, const float* x, int tokens, int columns, float* y);
  void (*delta_net)(Pool&, const DeltaNet&, const Batch&, const LinearState*);
  void (*attention)(Pool&, const Attention&, const Batch&, const KeyValueCache*, const float* cosine, const float* sine);
  void (*route)(Pool&, const Router&, const Batch&, float* logits, float* normed, int32_t* ids, float* weights, float* gate);
  void (*run_plan)(Pool&, const ExpertLayer&, const float* normed, int tokens, int top_k, const int32_t* pairs, int pair_count,
                   const Chunk* chunks, int chunk_count, bool with_shared, int columns, float* pair_out, float* shared_out);
  void (*combine)(Pool&, float* x, const float* pair_out, const float* weights, const float* shared_out, const float* gate,
                  int tokens, int top_k, int hidden);
  void (*embed)(const uint8_t* table, Format format, int hidden, const int64_t* ids, int tokens, float* x);
  // BF16 [rows, cols] to codes, scale and spread of a CodedRows; false when a weight is NaN or infinite.
  bool (*code_rows)(Pool&, const uint8_t* weight, int rows, int cols, int8_t* codes, float* scale, float* spread);
  // Where linear of the weight behind the codes must lie for norm(x) [tokens, cols]: lower and upper [tokens, rows].
  void (*bound_rows)(Pool&, const CodedRows&, const float* norm_scale, float eps, const float* x, int tokens, float* lower,
                     float* upper);
  // Scores and probabilities [heads, groups, experts] of the bank's heads from number `first` on, for x bf16 [heads, features] and
  // base bf16 [heads, hidden]. work f32 [heads, width], [heads, groups * experts], [heads, hidden rounded up to 128] is left with
  // what the passes hand over: trunk, corrections, forecast.
  void (*score_heads)(Pool&, const PredictorBank&, int first, int heads, const uint8_t* x, int features, const uint8_t* base,
                      float* work, float* scores, float* probabilities);
  // Inputs bf16 [heads, inputs] and base bf16 [heads, hidden] of all heads for score_heads.
  void (*head_features)(Pool&, const HeadFeatures&, const DecodedToken&, uint8_t* x, uint8_t* base);
  double (*read_memory)(Pool&, const uint8_t* data, size_t bytes);  // a checksum, so that no load can be left out
  double (*multiply)(Pool&, int rounds);                            // matmul operations done per thread, on registers or tiles
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels amx_kernels;
#endif

}  // namespace huorn
