#define HUORN_AVX512
#define HUORN_VARIANT avx512
#include "variant.h"
