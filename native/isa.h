// Which variant this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace huorn {

// Variants this CPU and this kernel allow, the best last: "portable", "avx2", "avx512", "amx".
std::vector<const Kernels*> available_kernels();

// Whether one of the E4M3 codes is NaN (0x7f or 0xff). Compiled for every CPU: loops over bytes vectorise anywhere.
bool has_nan_code(const uint8_t* codes, size_t count);

}  // namespace huorn
