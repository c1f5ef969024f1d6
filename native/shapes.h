// What the kernels work on: plain data, shared by every translation unit.
//
// No functions here: a translation unit compiled for AVX-512 must not lend its copy of an inline function to one that runs on
// every CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace huorn {

enum class Format : int32_t { F8 = 0, BF16 = 1, F32 = 2 };

constexpr int kBlock = 128;  // columns, and rows, of a weight that share one scale
constexpr int kRows = 128;   // most rows of a weight per product call, and the stride of its output

// A weight [rows, cols], row-major, at any address. scale is f32 [ceil(rows / 128), ceil(cols / 128)] or null (all 1).
struct Matrix {
  const uint8_t* data;
  const float* scale;
  int32_t rows;
  int32_t cols;
  Format format;
};

// A BF16 weight [rows, cols] once more as INT8 codes with one scale per row (coded_rows.h). For every x of norm up to `largest_x`:
// |scale * (codes . x) - (weight . x)| <= spread * |x| in each row, both as the kernels compute them; above it nothing is known.
struct CodedRows {
  const int8_t* codes;
  const float* scale;   // [rows]
  const float* spread;  // [rows]
  int32_t rows;
  int32_t cols;
  float largest_x;
};

// Weights [rows, cols] of several heads, one after the other, as INT8 codes with one F32 scale for each 128 columns of a row; cols
// is a multiple of 128.
struct GroupedCodes {
  const int8_t* codes;
  const float* scale;  // [heads, rows, cols / 128]
  const float* bias;   // [heads, rows]
  int32_t rows;
  int32_t cols;
};

// A bank of expert predictors, one head per MoE layer (predictor_bank.h): in [width, features], out [groups * experts + hidden,
// width], router [experts, hidden], with features and hidden rounded up to 128: the first is known by the call.
struct PredictorBank {
  GroupedCodes in, out, router;
  const float* a;  // [heads, groups]: probability = sigmoid(a * score + b)
  const float* b;
  int32_t hidden, experts, groups;
};

// Blocks of inputs of a head, numbered as huorn/predictor/native_features.py does.
enum class FeatureBlock : int32_t { Hidden, Window, Prior, Position, Logits, Previous, Difference, Own, Tokens };

// What heads of a bank see (predictor_features.h).
struct HeadFeatures {
  const int32_t* heads;      // the layer of each head
  const int32_t* blocks;     // FeatureBlock, in order
  const int32_t* no_logits;  // [layers]: 1 where router logits count as zeros
  int32_t head_count, block_count, hidden, experts, top_k, table_width;
  int32_t inputs;            // of a head, all blocks together
};

// What is known of one token when it has been decoded and the next id is chosen.
struct DecodedToken {
  const float* hidden;      // [layers, hidden], what routers read
  const float* logits;      // [layers, experts]
  const int32_t* routed;    // [layers, top_k]
  const int32_t* previous;  // of the token before; null for none
  const float* prior;       // [heads, experts]
  const uint8_t* token;     // BF16 rows [table_width] of both ids
  const uint8_t* next_token;
  float position;
};

// One expert: gate and up [inter, hidden], down [hidden, inter], all of one format.
struct Expert {
  const uint8_t* gate;
  const uint8_t* up;
  const uint8_t* down;
  const float* gate_scale;
  const float* up_scale;
  const float* down_scale;
};

struct DeltaNet {
  Matrix qkv, z, b, a, out;
  const float* norm_scale;     // [hidden]: the norm before the layer
  const float* taps;           // [kernel, 2 key_heads dk + value_heads dv], oldest first
  const float* negative_rate;  // [value_heads] -exp(A_log)
  const float* dt_bias;        // [value_heads]
  const float* gated_scale;    // [dv]
  float eps;
  int32_t hidden, key_heads, value_heads, dk, dv, kernel;
};

struct Attention {
  Matrix q, k, v, o;        // q per head: head_dim rows of query, then head_dim of gate
  const float* norm_scale;  // [hidden]
  const float* q_scale;     // [head_dim]
  const float* k_scale;     // [head_dim]
  float eps;
  int32_t hidden, heads, kv_heads, head_dim, rotary_dim;
};

struct Router {
  Matrix router, shared_gate;
  const float* norm_scale;  // [hidden]
  float eps;
  int32_t hidden, experts, top_k;
};

// Experts of one layer; the shared one has its own width. Formats may differ between routed and shared.
struct ExpertLayer {
  const Expert* experts;  // by expert id
  Format format;
  int32_t hidden, inter;
  Matrix shared_gate, shared_up, shared_down;
};

// Chunk of a plan: `count` pairs from `first` on, all of one expert.
struct Chunk {
  int32_t expert, first, count;
};

// T tokens of S sequences, one after the other in x; sequence s has length[s] of them.
struct Batch {
  float* x;  // f32 [T, hidden], the residual stream, updated in place
  int32_t tokens;
  int32_t sequences;
  const int32_t* length;
  int32_t columns;  // tokens per pass over a weight
};

struct LinearState {  // per sequence: before (read) and after (written), never the same memory
  const float* conv_in;  // f32 [kernel - 1, channels]
  float* conv_out;
  const float* memory_in;  // f32 [value_heads, dk, dv]
  float* memory_out;
};

struct KeyValueCache {  // per sequence: [context, kv_heads, head_dim], BF16 or F32 like the operands
  void* keys;
  void* values;
  int32_t position;  // rows already there
};

}  // namespace huorn
