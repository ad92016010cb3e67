// Linear layers: out[r, n] = sum_k x[r, k] * w[n, k] (+ bias[n]) (then an epilogue).
#pragma once

#include "types.h"

// Integer weights are packed in blocks of 64 outputs; the last block is padded with outputs of zeros.
constexpr int64_t BLOCK = 64;

enum Epilogue : int32_t { NONE = 0, SILU_MUL = 1, GELU_MUL = 2, GELU_TANH_MUL = 3 };

// One weight matrix [out_features, in_features].
//   INT8  weight: see packing.h; scales: float32 [blocks * 64]; zeros: null
//   INT4  weight: see packing.h; scales: [blocks, groups, 64] of scale_dtype; zeros: uint8 likewise, or null for 8
//   BF16, F16, F32  weight: row-major, read in place
struct Matrix {
  int64_t out_features;
  const void* weight;
  const void* scales;
  const uint8_t* zeros;
  const void* bias;  // or null
  int32_t scale_dtype, bias_dtype;
  int64_t column;  // where its outputs begin in a row of `out`
};

// Matrices that share their input. With an epilogue there are two, gate and up, of equal size, and the output
// is act(gate) * up at the gate's column.
struct Linear {
  int32_t format;  // Dtype of the weights
  int32_t group;   // inputs that share an activation scale (INT8, INT4) and a weight scale (INT4)
  int64_t in_features;
  int32_t count;
  int32_t epilogue;
  const Matrix* matrices;
};

// x [rows, in_features] and out [rows, ...] with a stride between rows, in elements.
// residual: like out, or null; added in float32 before the only rounding.
struct LinearCall {
  const void* x;
  int64_t x_stride;
  int64_t rows;
  void* out;
  int64_t out_stride;
  const void* residual;
  int64_t residual_stride;
  int32_t x_dtype, out_dtype;
  int32_t threads;
};
