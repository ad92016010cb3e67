// The kernels of one instruction set, as a table; kernels/*.cpp is compiled once for each.
#pragma once

#include "linear.h"

struct Kernels {
  void (*integer_linear)(const Linear&, const LinearCall&);
  void (*float_linear)(const Linear&, const LinearCall&);
};
