// The kernels of one instruction set, as a table; kernels/*.cpp is compiled once for each.
#pragma once

#include "attention.h"
#include "linear.h"
#include "packing.h"

struct Kernels {
  void (*integer_linear)(const Linear&, const LinearCall&);
  void (*pack)(const PackCall&);
  void (*unpack)(const PackCall&);
  void (*quantize_weight)(QuantizeCall&);
  void (*attention)(const AttentionCall&);
  void (*write_pages)(const WriteCall&);
};
