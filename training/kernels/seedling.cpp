// Fused forward and backward kernels for training seedling on a CPU, one thread per process.
// PyTorch does the matrix products; these loops do what lies between them. Activations that feed a matrix product
// are BF16 (held as uint16_t), everything that accumulates is F32. Built by training/native.py with -O3 -ffast-math.
//
// Shapes: N tokens (B sequences of S), D hidden, P routed pairs, I expert width, C convolution channels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

static inline float up(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline bf16 down(float value) {  // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

extern "C" {

// y = x / rms(x) * (1 + w). x [N, D] f32, w [D] f32 -> y [N, D] bf16, rstd [N] f32.
void rms_norm(const float* x, const float* w, bf16* y, float* rstd, int64_t n, int64_t d, float eps) {
    for (int64_t t = 0; t < n; ++t) {
        const float* xt = x + t * d;
        float sum = 0;
        for (int64_t i = 0; i < d; ++i) sum += xt[i] * xt[i];
        float r = 1.0f / std::sqrt(sum / d + eps);
        rstd[t] = r;
        for (int64_t i = 0; i < d; ++i) y[t * d + i] = down(xt[i] * r * (1.0f + w[i]));
    }
}

// dy [N, D] bf16 -> dx [N, D] f32 (written), dw [D] f32 (added).
void rms_norm_backward(const float* x, const float* w, const float* rstd, const bf16* dy, float* dx, float* dw,
                       int64_t n, int64_t d) {
    for (int64_t t = 0; t < n; ++t) {
        const float* xt = x + t * d;
        const bf16* g = dy + t * d;
        float r = rstd[t], dot = 0;
        for (int64_t i = 0; i < d; ++i) {
            float gi = up(g[i]);
            dw[i] += gi * xt[i] * r;
            dot += gi * (1.0f + w[i]) * xt[i];
        }
        float c = dot * r * r * r / d;
        for (int64_t i = 0; i < d; ++i) dx[t * d + i] = up(g[i]) * (1.0f + w[i]) * r - xt[i] * c;
    }
}

// a = weight * silu(gate) * up, one routed pair per row. h [P, 2I] bf16 (gate | up), weight [P] f32 -> a [P, I] bf16.
void swiglu(const bf16* h, const float* weight, bf16* a, int64_t p, int64_t width) {
    for (int64_t r = 0; r < p; ++r) {
        const bf16 *gate = h + r * 2 * width, *lift = gate + width;
        float w = weight[r];
        for (int64_t i = 0; i < width; ++i) {
            float g = up(gate[i]);
            a[r * width + i] = down(w * g * sigmoid(g) * up(lift[i]));
        }
    }
}

// da [P, I] bf16 -> dh [P, 2I] bf16, dweight [P] f32.
void swiglu_backward(const bf16* h, const float* weight, const bf16* da, bf16* dh, float* dweight, int64_t p,
                     int64_t width) {
    for (int64_t r = 0; r < p; ++r) {
        const bf16 *gate = h + r * 2 * width, *lift = gate + width;
        bf16 *dgate = dh + r * 2 * width, *dlift = dgate + width;
        float w = weight[r], total = 0;
        for (int64_t i = 0; i < width; ++i) {
            float g = up(gate[i]), u = up(lift[i]), d = up(da[r * width + i]);
            float s = sigmoid(g), silu = g * s;
            total += d * silu * u;
            dlift[i] = down(w * d * silu);
            dgate[i] = down(w * d * u * (s + silu * (1.0f - s)));
        }
        dweight[r] = total;
    }
}

// y[t] = sum over k of rows[place[t, k]]. rows [P, D] bf16, place [N, K] int64 -> y [N, D] f32.
void sum_pairs(const bf16* rows, const int64_t* place, float* y, int64_t n, int64_t k, int64_t d) {
    for (int64_t t = 0; t < n; ++t) {
        float* yt = y + t * d;
        std::fill(yt, yt + d, 0.0f);
        for (int64_t j = 0; j < k; ++j) {
            const bf16* row = rows + place[t * k + j] * d;
            for (int64_t i = 0; i < d; ++i) yt[i] += up(row[i]);
        }
    }
}

// Causal depthwise convolution and SiLU. x [B, S, C] bf16, w [C, W] f32 -> y [B, S, C] bf16.
// The convolution's result before SiLU is kept in pre [B, S, C] bf16 for the backward pass. wt is w transposed, [W, C].
void conv_silu(const bf16* x, const float* wt, bf16* pre, bf16* y, int64_t b, int64_t s, int64_t c, int64_t taps) {
    std::vector<float> acc(c);
    for (int64_t n = 0; n < b; ++n)
        for (int64_t t = 0; t < s; ++t) {
            std::fill(acc.begin(), acc.end(), 0.0f);
            for (int64_t j = 0; j < taps; ++j) {
                int64_t at = t - (taps - 1) + j;
                if (at < 0) continue;
                const bf16* xt = x + (n * s + at) * c;
                const float* wj = wt + j * c;
                for (int64_t i = 0; i < c; ++i) acc[i] += up(xt[i]) * wj[i];
            }
            int64_t o = (n * s + t) * c;
            for (int64_t i = 0; i < c; ++i) {
                pre[o + i] = down(acc[i]);
                y[o + i] = down(acc[i] * sigmoid(acc[i]));
            }
        }
}

// dy [B, S, C] bf16 -> dx [B, S, C] bf16, dwt [W, C] f32 (added).
void conv_silu_backward(const bf16* x, const float* wt, const bf16* pre, const bf16* dy, bf16* dx, float* dwt,
                        int64_t b, int64_t s, int64_t c, int64_t taps) {
    std::vector<float> dpre(s * c), acc(c);
    for (int64_t n = 0; n < b; ++n) {
        int64_t base = n * s * c;
        for (int64_t i = 0; i < s * c; ++i) {
            float p = up(pre[base + i]), g = sigmoid(p);
            dpre[i] = up(dy[base + i]) * (g + p * g * (1.0f - g));
        }
        for (int64_t t = 0; t < s; ++t) {
            std::fill(acc.begin(), acc.end(), 0.0f);
            const bf16* xt = x + base + t * c;
            for (int64_t j = 0; j < taps; ++j) {
                int64_t to = t + (taps - 1) - j;  // the output that tap j of input t feeds
                if (to >= s) continue;
                const float *g = dpre.data() + to * c, *wj = wt + j * c;
                float* dw = dwt + j * c;
                for (int64_t i = 0; i < c; ++i) {
                    acc[i] += g[i] * wj[i];
                    dw[i] += g[i] * up(xt[i]);
                }
            }
            for (int64_t i = 0; i < c; ++i) dx[base + t * c + i] = down(acc[i]);
        }
    }
}

// Gated norm of the delta net: y = o / rms(o) * w * silu(z), rows of one head. o [R, V] f32, z, y [R, V] bf16, w [V].
void gated_norm(const float* o, const bf16* z, const float* w, bf16* y, float* rstd, int64_t rows, int64_t v,
                float eps) {
    for (int64_t r = 0; r < rows; ++r) {
        const float* x = o + r * v;
        float sum = 0;
        for (int64_t i = 0; i < v; ++i) sum += x[i] * x[i];
        float scale = 1.0f / std::sqrt(sum / v + eps);
        rstd[r] = scale;
        for (int64_t i = 0; i < v; ++i) {
            float g = up(z[r * v + i]);
            y[r * v + i] = down(x[i] * scale * w[i] * g * sigmoid(g));
        }
    }
}

void gated_norm_backward(const float* o, const bf16* z, const float* w, const float* rstd, const bf16* dy, float* d_o,
                         bf16* dz, float* dw, int64_t rows, int64_t v) {
    for (int64_t r = 0; r < rows; ++r) {
        const float* x = o + r * v;
        float scale = rstd[r], dot = 0;
        float* out = d_o + r * v;
        for (int64_t i = 0; i < v; ++i) {
            float g = up(z[r * v + i]), s = sigmoid(g), d = up(dy[r * v + i]), normed = x[i] * scale;
            dz[r * v + i] = down(d * normed * w[i] * (s + g * s * (1.0f - s)));
            float common = d * g * s;
            dw[i] += common * normed;
            out[i] = common * w[i];
            dot += out[i] * x[i];
        }
        float c = dot * scale * scale * scale / v;
        for (int64_t i = 0; i < v; ++i) out[i] = out[i] * scale - x[i] * c;
    }
}

// Gated delta rule, one step per token (Yang et al., "Gated Delta Networks", 2024, eq. 10), heads of size KxV:
//   S' = a S;  e = b (v - S'^T k);  S = S' + k e^T;  o = S^T q        with a = exp(g), q and k already normalised.
// q, k [B, S, Hk, K] f32, v [B, S, Hv, V] bf16, g, beta [B, S, Hv] f32 -> o [B, S, Hv, V] f32.
// Every CHUNK-th state is kept in saved [B, Hv, S/CHUNK, K, V] so that the backward pass repeats CHUNK steps at a time.
static constexpr int64_t CHUNK = 32;
static constexpr int64_t KD = 64, VD = 64;  // head sizes are compile-time so that the loops stay in registers

static inline void delta_step(float* state, const float* k, const float* v, float a, float b, float* e) {
    float memory[VD] = {0};
    for (int64_t i = 0; i < KD; ++i) {
        float* row = state + i * VD;
        float ki = k[i];
        for (int64_t j = 0; j < VD; ++j) {
            row[j] *= a;
            memory[j] += row[j] * ki;
        }
    }
    for (int64_t j = 0; j < VD; ++j) e[j] = b * (v[j] - memory[j]);
}

void delta_scan(const float* q, const float* k, const bf16* v, const float* g, const float* beta, float* o,
                float* saved, int64_t b, int64_t s, int64_t hk, int64_t hv) {
    int64_t chunks = (s + CHUNK - 1) / CHUNK, group = hv / hk;
    alignas(64) float state[KD * VD], value[VD], e[VD], out[VD];
    for (int64_t n = 0; n < b; ++n)
        for (int64_t h = 0; h < hv; ++h) {
            std::memset(state, 0, sizeof state);
            for (int64_t t = 0; t < s; ++t) {
                if (t % CHUNK == 0)
                    std::memcpy(saved + ((n * hv + h) * chunks + t / CHUNK) * KD * VD, state, sizeof state);
                int64_t qk = ((n * s + t) * hk + h / group) * KD, at = (n * s + t) * hv + h;
                for (int64_t j = 0; j < VD; ++j) value[j] = up(v[at * VD + j]), out[j] = 0;
                delta_step(state, k + qk, value, std::exp(g[at]), beta[at], e);
                for (int64_t i = 0; i < KD; ++i) {
                    float* row = state + i * VD;
                    float ki = k[qk + i], qi = q[qk + i];
                    for (int64_t j = 0; j < VD; ++j) {
                        row[j] += ki * e[j];
                        out[j] += row[j] * qi;
                    }
                }
                std::memcpy(o + at * VD, out, sizeof out);
            }
        }
}

// d_o as o -> dq, dk (added: several value heads share a key head), dv bf16, dg, dbeta.
void delta_scan_backward(const float* q, const float* k, const bf16* v, const float* g, const float* beta,
                         const float* saved, const float* d_o, float* dq, float* dk, bf16* dv, float* dg,
                         float* dbeta, int64_t b, int64_t s, int64_t hk, int64_t hv) {
    int64_t chunks = (s + CHUNK - 1) / CHUNK, group = hv / hk;
    std::vector<float> decayed(CHUNK * KD * VD), errors(CHUNK * VD);  // S' and e of each step of one chunk
    alignas(64) float state[KD * VD], ds[KD * VD], value[VD], de[VD], dm[VD], dkr[KD];
    for (int64_t n = 0; n < b; ++n)
        for (int64_t h = 0; h < hv; ++h) {
            std::memset(ds, 0, sizeof ds);
            for (int64_t c = chunks - 1; c >= 0; --c) {
                int64_t first = c * CHUNK, last = std::min(s, first + CHUNK);
                std::memcpy(state, saved + ((n * hv + h) * chunks + c) * KD * VD, sizeof state);
                for (int64_t t = first; t < last; ++t) {
                    int64_t qk = ((n * s + t) * hk + h / group) * KD, at = (n * s + t) * hv + h;
                    float* e = errors.data() + (t - first) * VD;
                    for (int64_t j = 0; j < VD; ++j) value[j] = up(v[at * VD + j]);
                    delta_step(state, k + qk, value, std::exp(g[at]), beta[at], e);
                    std::memcpy(decayed.data() + (t - first) * KD * VD, state, sizeof state);
                    for (int64_t i = 0; i < KD; ++i)
                        for (int64_t j = 0; j < VD; ++j) state[i * VD + j] += k[qk + i] * e[j];
                }
                for (int64_t t = last - 1; t >= first; --t) {
                    int64_t qk = ((n * s + t) * hk + h / group) * KD, at = (n * s + t) * hv + h;
                    const float *sd = decayed.data() + (t - first) * KD * VD, *e = errors.data() + (t - first) * VD;
                    const float* go = d_o + at * VD;
                    float a = std::exp(g[at]), bt = beta[at];
                    std::memset(de, 0, sizeof de);
                    for (int64_t i = 0; i < KD; ++i) {
                        float ki = k[qk + i], qi = q[qk + i], dqi = 0, dki = 0;
                        float* d = ds + i * VD;
                        const float* p = sd + i * VD;
                        for (int64_t j = 0; j < VD; ++j) {
                            dqi += (p[j] + ki * e[j]) * go[j];
                            d[j] += qi * go[j];
                            dki += d[j] * e[j];
                            de[j] += d[j] * ki;
                        }
                        dq[qk + i] += dqi;
                        dkr[i] = dki;
                    }
                    float db = 0, dgt = 0;
                    for (int64_t j = 0; j < VD; ++j) {
                        dm[j] = -bt * de[j];
                        db += de[j] * e[j];  // e = beta * residual
                        dv[at * VD + j] = down(bt * de[j]);
                    }
                    dbeta[at] = db / std::max(bt, 1e-12f);
                    for (int64_t i = 0; i < KD; ++i) {
                        float ki = k[qk + i], dki = dkr[i];
                        float* d = ds + i * VD;
                        const float* p = sd + i * VD;
                        for (int64_t j = 0; j < VD; ++j) {
                            dki += p[j] * dm[j];
                            d[j] += ki * dm[j];
                            dgt += d[j] * p[j];
                            d[j] *= a;
                        }
                        dk[qk + i] += dki;
                    }
                    dg[at] = dgt;
                }
            }
        }
}

// Cross entropy over one block of rows, logits -> gradient in place. logits [N, V] bf16, target [N] int64.
// Writes the loss of each row [N] f32; the gradient is scaled by 1 / total rows of the batch.
void cross_entropy(bf16* logits, const int64_t* target, float* loss, int64_t n, int64_t v, float scale) {
    std::vector<float> row(v);
    for (int64_t t = 0; t < n; ++t) {
        bf16* l = logits + t * v;
        float top = -3.0e38f, sum = 0;
        for (int64_t i = 0; i < v; ++i) row[i] = up(l[i]), top = std::max(top, row[i]);
        float chosen = row[target[t]];
        for (int64_t i = 0; i < v; ++i) row[i] = std::exp(row[i] - top), sum += row[i];
        loss[t] = std::log(sum) + top - chosen;
        float c = scale / sum;
        for (int64_t i = 0; i < v; ++i) l[i] = down(row[i] * c);
        l[target[t]] = down(row[target[t]] * c - scale);
    }
}
}
