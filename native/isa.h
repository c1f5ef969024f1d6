// Which variant this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace huorn {

// Variants this CPU and this kernel allow, the best last: "portable", "avx2", "avx512", "amx".
std::vector<const Kernels*> available_kernels();

}  // namespace huorn
