// What stands between the matrix products. Strides are in elements; the last dimension is contiguous.
#pragma once

#include "types.h"

enum NormKind : int32_t { RMS = 0, LAYER = 1 };

// out = normalized(x) * (offset + weight) + bias, over the last dimension of [rows, size].
// residual: then x + residual, rounded to dtype, is what is normalized, and it is written to `sum`.
struct NormCall {
  const void* x;
  const void* residual;  // or null
  void* sum;             // or null; [rows, size], packed
  void* out;             // [rows, size], packed
  const void* weight;    // or null for 1
  const void* bias;      // or null for 0
  int64_t x_stride, residual_stride;
  int64_t rows, size;
  float eps, offset;
  int32_t kind;
  int32_t round_first;  // the normalized x is rounded to dtype before it is multiplied
  int32_t dtype, weight_dtype, bias_dtype, out_dtype;
  int32_t threads;
};

// One of the tensors that are rotated: [batch, heads, tokens, size], any strides but the last.
struct Rotated {
  const void* x;
  void* out;  // may be x
  int64_t x_batch, x_head, x_token;
  int64_t out_batch, out_head, out_token;
  int64_t heads, size;
};

// out = x * cos + rotated(x) * sin on the first rotary_dim numbers of a head; the others are copied.
struct RopeCall {
  Rotated tensors[2];  // q and k
  const void* cos;     // [batch or 1, tokens, rotary_dim, or half of it]
  const void* sin;
  int64_t table_batch, table_token;  // strides
  int64_t batch, tokens, rotary_dim;
  int32_t half_tables;  // one column serves both numbers of a pair
  int32_t interleaved;  // pairs are (0, 1), (2, 3), ...; else (i, i + rotary_dim / 2)
  int32_t round_each;   // round both products to dtype before they are added
  int32_t dtype, table_dtype;
  int32_t threads;
};

// out = act(gate) * up; act(gate) is rounded to dtype first. An Epilogue of linear.h.
struct GatedCall {
  const void* gate;
  const void* up;
  void* out;  // [rows, size], packed
  int64_t gate_stride, up_stride;
  int64_t rows, size;
  int32_t activation, dtype;
  int32_t threads;
};

// The largest of each row of logits [rows, size]; NaN is the largest of all, of equals the first comes first.
struct VocabularyCall {
  const void* logits;
  int64_t stride, rows, size;
  int64_t k;
  void* values;      // [rows, k] of dtype (top-k)
  int64_t* indices;  // [rows, k]
  int32_t dtype;
  int32_t threads;
};
