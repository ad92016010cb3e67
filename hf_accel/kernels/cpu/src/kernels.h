// The kernels of one instruction set, as a table; kernels/*.cpp is compiled once for each.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "packing.h"

struct Kernels {
  void (*integer_linear)(const Linear&, const LinearCall&);
  void (*pack)(const PackCall&);
  void (*unpack)(const PackCall&);
  void (*quantize_weight)(QuantizeCall&);
  void (*float_linear)(const Linear&, const LinearCall&);
  void (*norm)(const NormCall&);
  void (*rope)(const RopeCall&);
  void (*gated)(const GatedCall&);
  void (*argmax)(const VocabularyCall&);
  void (*topk)(const VocabularyCall&);
  void (*attention)(const AttentionCall&);
  void (*write_pages)(const WriteCall&);
};
