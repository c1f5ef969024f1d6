// Sixteen floats, in plain C++.
#pragma once

struct Lanes {
  float at[16];
};

#define HUORN_EACH for (int i = 0; i < 16; ++i)

static inline Lanes splat(float x) {
  Lanes r;
  HUORN_EACH r.at[i] = x;
  return r;
}
static inline Lanes load(const float* p) {
  Lanes r;
  memcpy(r.at, p, sizeof r.at);
  return r;
}
static inline Lanes load_n(const float* p, int n) {
  Lanes r = splat(0.0f);
  for (int i = 0; i < n; ++i) r.at[i] = p[i];
  return r;
}
static inline void store(float* p, const Lanes& x) { memcpy(p, x.at, sizeof x.at); }
static inline void store_n(float* p, const Lanes& x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.at[i];
}
static inline Lanes add(const Lanes& a, const Lanes& b) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] + b.at[i];
  return r;
}
static inline Lanes sub(const Lanes& a, const Lanes& b) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] - b.at[i];
  return r;
}
static inline Lanes mul(const Lanes& a, const Lanes& b) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] * b.at[i];
  return r;
}
static inline Lanes div(const Lanes& a, const Lanes& b) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] / b.at[i];
  return r;
}
// a * b + c, rounded twice: without an FMA unit std::fma is a slow call.
static inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] * b.at[i] + c.at[i];
  return r;
}
static inline Lanes max(const Lanes& a, const Lanes& b) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
  return r;
}
static inline Lanes min(const Lanes& a, const Lanes& b) {
  Lanes r;
  HUORN_EACH r.at[i] = a.at[i] < b.at[i] ? a.at[i] : b.at[i];
  return r;
}
static inline float sum(const Lanes& x) {
  float part[8];
  for (int i = 0; i < 8; ++i) part[i] = x.at[i] + x.at[i + 8];
  for (int width = 4; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = part[i] + part[i + width];
  return part[0];
}
static inline Lanes nearest(const Lanes& x) {
  Lanes r;
  HUORN_EACH r.at[i] = nearbyintf(x.at[i]);
  return r;
}
// x * 2^n for whole n whose result is a normal number.
static inline Lanes scale2(const Lanes& x, const Lanes& n) {
  Lanes r;
  HUORN_EACH {
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.at[i]) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    r.at[i] = x.at[i] * power;
  }
  return r;
}
static inline Lanes load_bf16(const void* p) {
  uint16_t half[16];
  memcpy(half, p, sizeof half);
  uint32_t bits[16];
  HUORN_EACH bits[i] = static_cast<uint32_t>(half[i]) << 16;
  Lanes r;
  memcpy(r.at, bits, sizeof bits);
  return r;
}
// To the nearest BF16, ties to even; NaN stays NaN.
static inline void store_bf16(void* p, const Lanes& x) {
  uint32_t bits[16];
  uint16_t half[16];
  memcpy(bits, x.at, sizeof bits);
  HUORN_EACH {
    uint32_t rounded = (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16;
    half[i] = static_cast<uint16_t>((bits[i] & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
  }
  memcpy(p, half, sizeof half);
}
static inline Lanes load_i8(const int8_t* p) {
  Lanes r;
  HUORN_EACH r.at[i] = static_cast<float>(p[i]);
  return r;
}
// Whole numbers from -128 to 127.
static inline void store_i8(int8_t* p, const Lanes& x) {
  HUORN_EACH p[i] = static_cast<int8_t>(x.at[i]);
}

#undef HUORN_EACH

// By code: mantissa * 2^-9 for exponent 0, (8 + mantissa) * 2^(exponent - 10) otherwise.
struct E4m3Values {
  float value[256] = {};
  constexpr E4m3Values() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      float magnitude = exponent == 0 ? static_cast<float>(mantissa) : static_cast<float>(8 + mantissa);
      for (int i = 0; i < 9; ++i) magnitude *= 0.5f;
      for (int i = 1; i < exponent; ++i) magnitude *= 2.0f;
      if (code == 127) magnitude = __builtin_nanf("");
      value[code] = magnitude;
      value[code + 128] = -magnitude;
    }
  }
};
static constexpr E4m3Values e4m3;
static inline Lanes load_f8(const uint8_t* p) {
  Lanes r;
  for (int i = 0; i < 16; ++i) r.at[i] = e4m3.value[p[i]];
  return r;
}
