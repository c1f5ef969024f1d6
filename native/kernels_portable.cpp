#define HUORN_VARIANT portable
#include "variant.h"
