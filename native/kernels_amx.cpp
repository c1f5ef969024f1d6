#define HUORN_AMX
#define HUORN_VARIANT amx
#include "variant.h"
