// Sixteen floats in one AVX-512 register.
#pragma once

struct Lanes {
  __m512 v;
};

static inline __mmask16 first_n(int n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Lanes load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_n(n), p)}; }
static inline void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
static inline void store_n(float* p, Lanes x, int n) { _mm512_mask_storeu_ps(p, first_n(n), x.v); }
static inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline float sum(Lanes x) { return _mm512_reduce_add_ps(x.v); }
static inline Lanes nearest(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline Lanes scale2(Lanes x, Lanes n) { return {_mm512_scalef_ps(x.v, n.v)}; }
static inline Lanes load_bf16(const void* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline void store_bf16(void* p, Lanes x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
static inline Lanes load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Whole numbers from -128 to 127.
static inline void store_i8(int8_t* p, Lanes x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// F8 has its own way to BF16 here (expand_f8.h); products on F32 lanes, which ask for this, only meet F32 weights.
static inline Lanes load_f8(const uint8_t*) { return splat(__builtin_nanf("")); }
