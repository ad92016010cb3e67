// How integer weights lie in memory, the same for every instruction set: blocks of 64 outputs, one after the other.
//
//   INT8  a block is [inputs / 4, 64, 4] bytes: 4 inputs in a row of each output, as the byte dot products take them;
//         a byte is q + 128. Inputs are padded to a multiple of 4.
//   INT4  a block is [inputs / 8, 64, 4] bytes: byte i has input i of 8 in its low half and input 4 + i in its high
//         half; a half is q + 8, or q as it is where the weight has zero points.
#pragma once

#include "types.h"

struct PackCall {
  int32_t format;  // INT8 or INT4
  int32_t threads;
  int64_t out_features, in_features;
  // INT8: int8 [out, in]; INT4: [out, in / 2] bytes, the first of two inputs in the low half (compressed-tensors)
  void* stored;
  void* packed;
};

// Round to nearest, symmetric: the largest magnitude of a group becomes 127 or 7.
struct QuantizeCall {
  int32_t format, dtype, threads;  // dtype: of the weight and the scales
  int64_t out_features, in_features, group;  // INT8: one group, all inputs
  const void* weight;                        // [out, in]
  int64_t weight_stride;
  void* scales;  // [out, in / group], written
  void* packed;  // written
  int32_t finite;  // written: 0 if the weight holds NaN or infinity, and then nothing else is of use
};
