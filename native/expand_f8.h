// E4M3 codes to BF16 times 2^-8, exactly: kF8Factor gives the 2^8 back with the block's scale.
//
// A normal number is moved into place with two shifts, and 2^-8 makes room for an OR instead of an addition. Denormals (codes 0
// to 7) and NaN take a byte table, which is exact for all: left as BF16 denormals they would be lost, since vdpbf16ps and AMX
// flush them. NaN is refused when weights land (has_nan_code); here it is NaN only beside a denormal. One code in 8,000 of a matrix scaled to its largest weight is a denormal. From level-2 cache, one core: shifts 40
// GB/s of codes, tables alone 27 (vpermi2b takes two cycles).
#pragma once

// Computed by the compiler: code that fills it at start-up would run on CPUs without AVX-512 too.
struct E4m3Bytes {
  alignas(64) uint8_t low[128] = {};
  alignas(64) uint8_t high[128] = {};
  constexpr E4m3Bytes() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      uint32_t half = 0;  // BF16: 8 bits of exponent, biased by 127, and 7 of mantissa
      if (code == 127) {
        half = 0x7fff;
      } else if (exponent > 0) {
        half = static_cast<uint32_t>(exponent + 112) << 7 | static_cast<uint32_t>(mantissa) << 4;
      } else if (mantissa > 0) {  // mantissa * 2^-17 = 1.f * 2^(top - 17)
        int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        half = static_cast<uint32_t>(top - 17 + 127) << 7 | (static_cast<uint32_t>(mantissa) << (7 - top) & 0x7f);
      }
      low[code] = static_cast<uint8_t>(half);
      high[code] = static_cast<uint8_t>(half >> 8);
    }
  }
};
static constexpr E4m3Bytes e4m3_bytes;

constexpr float kF8Factor = 256.0f;

// Constants in registers.
struct F8Expander {
  __m512i magnitude, exponent, normal, sign, even_byte;
};
static inline F8Expander f8_expander() {
  return {_mm512_set1_epi16(static_cast<int16_t>(0x87f0)), _mm512_set1_epi16(112 << 7), _mm512_set1_epi8(0x78),
          _mm512_set1_epi8(static_cast<char>(0x80)), _mm512_set1_epi16(0xff)};
}

// 64 codes to weights 0, 2, 4 .. 62 and 1, 3 .. 63: the natural order would take shuffles.
static inline void expand64_normal(const F8Expander& e, __m512i codes, __m512i& even, __m512i& odd) {
  __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 4), high = _mm512_srai_epi16(codes, 4);
  even = _mm512_ternarylogic_epi32(low, e.magnitude, e.exponent, 0xea);  // (low & magnitude) | exponent
  odd = _mm512_ternarylogic_epi32(high, e.magnitude, e.exponent, 0xea);
}
static inline void expand64_any(const F8Expander& e, __m512i codes, __m512i& even, __m512i& odd) {
  __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_bytes.low), codes, _mm512_load_si512(e4m3_bytes.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_bytes.high), codes, _mm512_load_si512(e4m3_bytes.high + 64));
  high = _mm512_ternarylogic_epi32(high, codes, e.sign, 0xf8);                           // high | (codes & sign)
  even = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, e.even_byte, 0xf8);  // high << 8 | (low & 0xff)
  odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, e.even_byte, 0xf4);   // low >> 8 | (high & ~0xff)
}

// 128 codes of a row from k on, zeros behind `count`.
static inline void load_codes(const uint8_t* p, int count, __m512i& first, __m512i& second) {
  __mmask64 one = count >= 64 ? ~0ull : (1ull << count) - 1;
  __mmask64 two = count >= 128 ? ~0ull : count > 64 ? (1ull << (count - 64)) - 1 : 0;
  first = _mm512_maskz_loadu_epi8(one, p);
  second = _mm512_maskz_loadu_epi8(two, p + 64);
}

// 128 weights of a row from k on as four registers of BF16, zeros behind `count`: F8 evens and odds of each 64, BF16 as they are.
//
// The branch pays where denormals are as rare as in trained weights (one code in 15,000 of seedling's, 1 % of blocks): from RAM,
// one core, 14.5 of 15.3 GB/s, tables alone 12.5; with one code in 400 it is 10 to tables' 12. Dead ends, in GB/s at one in 400
// from level-2 cache: redoing rows after a tile 13.6, a branch-free XOR through vpermw 15.7, tables 18.
static inline void expand128(const F8Expander& e, const Matrix& m, const uint8_t* row, int k, int count, __m512i out[4]) {
  if (m.format == Format::F8) {
    __m512i first, second;
    load_codes(row + k, count, first, second);
    uint8_t all_normal = _kortestz_mask64_u8(_mm512_testn_epi8_mask(first, e.normal), _mm512_testn_epi8_mask(second, e.normal));
    if (__builtin_expect(all_normal != 0, 1)) {
      expand64_normal(e, first, out[0], out[1]);
      expand64_normal(e, second, out[2], out[3]);
    } else {
      expand64_any(e, first, out[0], out[1]);
      expand64_any(e, second, out[2], out[3]);
    }
    return;
  }
  const uint8_t* p = row + 2 * static_cast<size_t>(k);
  for (int i = 0; i < 4; ++i) {
    int left = count - 32 * i;
    __mmask32 mask = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    out[i] = _mm512_maskz_loadu_epi16(mask, p + 64 * i);
  }
}

// 32 numbers as BF16, zeros behind `count`.
static inline __m512i round32(const float* x, int count) {
  __m512 first = load_n(x, larger(0, smaller(16, count))).v;
  __m512 second = count > 16 ? load_n(x + 16, smaller(16, count - 16)).v : _mm512_setzero_ps();
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}

// A column as BF16 in the order of weights of this format, zeros behind K; out holds K rounded up to 128.
static inline void pack_bf16(const float* x, int cols, Format format, uint8_t* out) {
  alignas(64) uint16_t index[32];
  for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(2 * i);
  __m512i even = _mm512_load_si512(index), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  for (int k = 0; k < static_cast<int>(round_up(static_cast<size_t>(cols), kBlock)); k += 64) {
    __m512i first = round32(x + k, cols - k), second = round32(x + k + 32, cols - k - 32);
    bool split = format == Format::F8;
    _mm512_storeu_si512(out + 2 * k, split ? _mm512_permutex2var_epi16(first, even, second) : first);
    _mm512_storeu_si512(out + 2 * k + 64, split ? _mm512_permutex2var_epi16(first, odd, second) : second);
  }
}
