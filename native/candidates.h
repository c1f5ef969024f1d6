// Rows that can be among the k largest when only bounds of them are known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace huorn {

// Ids of the rows whose upper bound reaches the k-th largest lower bound, ascending; k >= 1. Writes the first `room` of them and
// returns how many there are. NaN is no lower bound, and an upper bound that everything is below.
size_t candidates(const float* lower, const float* upper, size_t rows, size_t k, int64_t* ids, size_t room);

}  // namespace huorn
