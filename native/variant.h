// One variant of all kernels. The including file has set HUORN_VARIANT (a namespace) and what the compiler may use.
//
// Everything here has internal linkage, and nothing of the standard library that could be emitted out of line is used, so no
// function compiled for a newer CPU can replace one that runs on every CPU.

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace huorn {
namespace HUORN_VARIANT {

#if defined(HUORN_AMX) || defined(HUORN_AVX512)
#include "lanes_avx512.h"
#elif defined(HUORN_AVX2)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif

#include "arithmetic.h"

#if defined(HUORN_AMX)
#include "product_amx.h"
#elif defined(HUORN_AVX512)
#include "product_avx512.h"
#else
#include "product.h"

#include "product_lanes.h"
#endif

#include "dense.h"

#include "attention.h"
#include "delta_net.h"
#include "experts.h"
#include "coded_rows.h"
#include "predictor_bank.h"
#include "predictor_features.h"
#include "limits.h"

struct LinearTask {
  Dense dense;
};
static void linear_task(Worker& worker, const void* context) {
  variant_begin();
  dense(worker, 0, static_cast<const LinearTask*>(context)->dense, worker.scratch);
  variant_end();
}
static void linear(Pool& pool, const Matrix& m, const float* norm_scale, float eps, const float* x, int tokens, int columns,
                   float* y) {
  const Output out{&m, y, static_cast<size_t>(m.rows), false};
  LinearTask task{{x, static_cast<size_t>(m.cols), norm_scale, eps, m.cols, tokens, columns, &out, 1}};
  pool_run(pool, linear_task, &task, dense_scratch(m.cols, columns));
}

// Rows of the token table as F32; BF16 expands exactly.
static void embed(const uint8_t* table, Format format, int hidden, const int64_t* ids, int tokens, float* x) {
  Matrix m{table, nullptr, 0, hidden, format};
  for (int t = 0; t < tokens; ++t) {
    float* row = x + static_cast<size_t>(t) * hidden;
    const uint8_t* p = m.data + row_bytes(m) * static_cast<size_t>(ids[t]);
    if (format == Format::F32) {
      memcpy(row, p, row_bytes(m));
      continue;
    }
    for (int i = 0; i < hidden; i += 16) {
      int some = smaller(16, hidden - i);
      uint8_t half[32] = {};
      memcpy(half, p + 2 * i, 2 * static_cast<size_t>(some));
      store_n(row + i, load_bf16(half), some);
    }
  }
}

}  // namespace HUORN_VARIANT

#define HUORN_TABLE_NAME(variant) HUORN_JOIN(variant, _kernels)
#define HUORN_JOIN(a, b) a##b
#define HUORN_TEXT(x) HUORN_TEXT_(x)
#define HUORN_TEXT_(x) #x

const Kernels HUORN_TABLE_NAME(HUORN_VARIANT){
    HUORN_TEXT(HUORN_VARIANT), HUORN_VARIANT::linear,  HUORN_VARIANT::delta_net, HUORN_VARIANT::attention, HUORN_VARIANT::route,
    HUORN_VARIANT::run_plan,   HUORN_VARIANT::combine, HUORN_VARIANT::embed,     HUORN_VARIANT::code_rows,
    HUORN_VARIANT::bound_rows, HUORN_VARIANT::score_heads, HUORN_VARIANT::head_features, HUORN_VARIANT::read_memory, HUORN_VARIANT::multiply};

}  // namespace huorn
