#pragma once

#include <nanobind/nanobind.h>

namespace huorn {

void bind_reader(nanobind::module_& m);

}  // namespace huorn
