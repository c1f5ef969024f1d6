#define HUORN_AVX2
#define HUORN_VARIANT avx2
#include "variant.h"
