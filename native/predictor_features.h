// What a head of an expert predictor sees of a decoded token: blocks of inputs one after the other, as reference_scorer.py's
// `assemble` lays them out, to the bit. Hidden states, logits and averages are rounded to F16 first, then all to BF16.
#pragma once

// The nearest number that F16 has, ties to even, infinity from 65520 on.
static inline float nearest_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits & 0x80000000u, size = bits ^ sign;
  uint32_t rounded = (size + 0xFFFu + ((size >> 13) & 1u)) & ~0x1FFFu;
  if (rounded >= 0x47800000u) rounded = size > 0x7F800000u ? size : 0x7F800000u;
  float small;
  memcpy(&small, &size, 4);
  small = (small + 0.5f) - 0.5f;  // below 2^-14 numbers of F16 are 2^-24 apart, as those of F32 from 0.5 on
  uint32_t tiny;
  memcpy(&tiny, &small, 4);
  uint32_t result = sign | (size < 0x38800000u ? tiny : rounded);
  memcpy(&x, &result, 4);
  return x;
}

static inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static void half_row(uint16_t* out, const float* x, int n) {
  for (int i = 0; i < n; ++i) out[i] = bf16_bits(nearest_f16(x[i]));
}

static void difference_row(uint16_t* out, const float* x, const float* y, int n) {
  for (int i = 0; i < n; ++i) out[i] = bf16_bits(nearest_f16(nearest_f16(x[i]) - nearest_f16(y[i])));
}

constexpr uint16_t kOneBf16 = 0x3F80;

// One of `experts` inputs for each expert: 1 where ids has it. Zeros without ids.
static void hot_row(uint16_t* out, const int32_t* ids, int top_k, int experts) {
  memset(out, 0, 2 * static_cast<size_t>(experts));
  if (ids == nullptr) return;
  for (int rank = 0; rank < top_k; ++rank)
    if (ids[rank] >= 0) out[ids[rank]] = kOneBf16;
}

struct FeatureTask {
  const HeadFeatures* what;
  const DecodedToken* seen;
  uint16_t* x;     // [heads, inputs]
  uint16_t* base;  // [heads, hidden]
};

// Inputs of one head; returns where the next block would begin.
static uint16_t* head_inputs(const HeadFeatures& what, const DecodedToken& seen, int head, uint16_t* x) {
  const int layer = what.heads[head], experts = what.experts, hidden = what.hidden, top_k = what.top_k;
  auto state = [&](int at) { return seen.hidden + static_cast<size_t>(hidden) * static_cast<size_t>(at); };
  auto ids = [&](const int32_t* of, int at) {
    return of == nullptr || at < 0 ? nullptr : of + static_cast<size_t>(top_k) * static_cast<size_t>(at);
  };
  for (int block = 0; block < what.block_count; ++block) {
    switch (static_cast<FeatureBlock>(what.blocks[block])) {
      case FeatureBlock::Hidden:
        half_row(x, state(layer), hidden);
        x += hidden;
        break;
      case FeatureBlock::Window:
        for (int back = 1; back <= 3; ++back, x += experts) hot_row(x, ids(seen.routed, layer - back), top_k, experts);
        break;
      case FeatureBlock::Prior:
        half_row(x, seen.prior + static_cast<size_t>(experts) * static_cast<size_t>(head), experts);
        x += experts;
        break;
      case FeatureBlock::Position:
        *x++ = bf16_bits(seen.position);
        break;
      case FeatureBlock::Logits:
        for (int back = 1; back <= 3; ++back, x += experts) {
          int at = layer - back;
          if (at < 0 || what.no_logits[at] != 0)
            memset(x, 0, 2 * static_cast<size_t>(experts));
          else
            half_row(x, seen.logits + static_cast<size_t>(experts) * static_cast<size_t>(at), experts);
        }
        break;
      case FeatureBlock::Previous:
        for (int back = 1; back <= 5; ++back, x += experts) hot_row(x, ids(seen.previous, layer - back), top_k, experts);
        break;
      case FeatureBlock::Difference:
        if (layer == 0)
          memset(x, 0, 2 * static_cast<size_t>(hidden));
        else
          difference_row(x, state(layer), state(layer - 1), hidden);
        x += hidden;
        break;
      case FeatureBlock::Own:
        hot_row(x, ids(seen.routed, layer), top_k, experts);
        x += experts;
        break;
      case FeatureBlock::Tokens:
        if (what.table_width == 0) break;
        memcpy(x, seen.token, 2 * static_cast<size_t>(what.table_width));
        x += what.table_width;
        memcpy(x, seen.next_token, 2 * static_cast<size_t>(what.table_width));
        x += what.table_width;
        break;
    }
  }
  return x;
}

static void feature_task(Worker& worker, const void* context) {
  const FeatureTask& task = *static_cast<const FeatureTask*>(context);
  const HeadFeatures& what = *task.what;
  for (int head = pool_claim(worker, 0); head < what.head_count; head = pool_claim(worker, 0)) {
    size_t number = static_cast<size_t>(head), hidden = static_cast<size_t>(what.hidden);
    head_inputs(what, *task.seen, head, task.x + static_cast<size_t>(what.inputs) * number);
    if (hidden != 0) half_row(task.base + hidden * number, task.seen->hidden + hidden * static_cast<size_t>(what.heads[head]), what.hidden);
  }
}

static void head_features(Pool& pool, const HeadFeatures& what, const DecodedToken& seen, uint8_t* x, uint8_t* base) {
  FeatureTask task{&what, &seen, reinterpret_cast<uint16_t*>(x), reinterpret_cast<uint16_t*>(base)};
  pool_run(pool, feature_task, &task, 0);
}
