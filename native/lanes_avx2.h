// Sixteen floats in two AVX2 registers.
#pragma once

struct Lanes {
  __m256 lo, hi;
};

static inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline __m256i first_n(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Lanes load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_n(n)), n > 8 ? _mm256_maskload_ps(p + 8, first_n(n - 8)) : _mm256_setzero_ps()};
}
static inline void store(float* p, Lanes x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
static inline void store_n(float* p, Lanes x, int n) {
  _mm256_maskstore_ps(p, first_n(n), x.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, first_n(n - 8), x.hi);
}
static inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline float sum(Lanes x) {
  __m256 eight = _mm256_add_ps(x.lo, x.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline Lanes nearest(Lanes x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
static inline __m256 power2(__m256 n) {
  __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// x * 2^n for whole n whose result is a normal number.
static inline Lanes scale2(Lanes x, Lanes n) {
  return {_mm256_mul_ps(x.lo, power2(n.lo)), _mm256_mul_ps(x.hi, power2(n.hi))};
}
static inline __m256 widen_bf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline Lanes load_bf16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
// The upper halves, to the nearest BF16, ties to even; NaN stays NaN. In 32-bit lanes.
static inline __m256i round_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff), nan);
}
static inline void store_bf16(void* p, Lanes x) {
  __m256i packed = _mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline __m256 widen_i8(__m128i eight) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)); }
static inline Lanes load_i8(const int8_t* p) {
  __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {widen_i8(codes), widen_i8(_mm_srli_si128(codes, 8))};
}
// Whole numbers from -128 to 127.
static inline void store_i8(int8_t* p, Lanes x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
// E4M3 shifted by 7 is an FP16 number of 2^-8 times the value, denormals included; F16C expands it exactly.
static inline __m256 widen_f8(__m128i codes) {
  __m128i wide = _mm_cvtepu8_epi16(codes);
  __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
  __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign), _mm_and_si128(nan, _mm_set1_epi16(0x7fff)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
static inline Lanes load_f8(const uint8_t* p) {
  __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {widen_f8(codes), widen_f8(_mm_srli_si128(codes, 8))};
}
