// Elementary functions over lanes. A lane's result depends on its own input only, so it does not matter which lane a number is in.
#pragma once

static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline int larger(int a, int b) { return a > b ? a : b; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// e^x, relative error below 2e-7; x is clamped to [-87, 88], where F32 has normal results.
// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and the Taylor series of e^r up to r^7 / 7!.
static inline Lanes exponential(Lanes x) {
  x = max(splat(-87.0f), min(splat(88.0f), x));  // in this order of operands a NaN passes
  Lanes n = nearest(mul(x, splat(1.44269504f)));
  Lanes r = fma(n, splat(-0.693359375f), x);      // ln 2 in two parts, the first exact in 10 bits
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return scale2(p, n);
}

static inline Lanes sigmoid(Lanes x) { return div(splat(1.0f), add(splat(1.0f), exponential(sub(splat(0.0f), x)))); }
static inline Lanes silu(Lanes x) { return mul(x, sigmoid(x)); }

// Sum of squares of n numbers: 16 running sums in steps of 16, then across.
static inline float square_sum(const float* x, int n) {
  Lanes total = splat(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    Lanes v = load(x + i);
    total = fma(v, v, total);
  }
  if (i < n) {
    Lanes v = load_n(x + i, n - i);
    total = fma(v, v, total);
  }
  return sum(total);
}

// y = x * factor * scale, elementwise over n; scale null counts as 1.
static inline void scaled(const float* x, float factor, const float* scale, int n, float* y) {
  for (int i = 0; i < n; i += 16) {
    int count = smaller(16, n - i);
    Lanes v = mul(load_n(x + i, count), splat(factor));
    if (scale != nullptr) v = mul(v, load_n(scale + i, count));
    store_n(y + i, v, count);
  }
}

// RMS norm: x / sqrt(mean(x^2) + eps) * scale. y may be x.
static inline void rms_norm(const float* x, const float* scale, float eps, int n, float* y) {
  scaled(x, 1.0f / sqrtf(square_sum(x, n) / static_cast<float>(n) + eps), scale, n, y);
}
