// The kernels and the structs that a call of each fills: Python's own list of the same is structs.py.
// kernels/*.cpp is compiled once for each instruction set. Strides are in elements.
#pragma once

#include "types.h"

// Every kernel: its name, and its struct. The interface (api.cpp) and each instruction set's table are made of this.
#define HFA_KERNELS(KERNEL)               \
  KERNEL(integer_linear, LinearCall)      \
  KERNEL(float_linear, LinearCall)        \
  KERNEL(pack, PackCall)                  \
  KERNEL(unpack, PackCall)                \
  KERNEL(quantize_weight, QuantizeCall)   \
  KERNEL(norm, NormCall)                  \
  KERNEL(rope, RopeCall)                  \
  KERNEL(argmax, LogitsCall)          \
  KERNEL(topk, LogitsCall)            \
  KERNEL(attention, AttentionCall)        \
  KERNEL(write_pages, WriteCall)

// -- linear layers: out[r, n] = sum_k x[r, k] * w[n, k] (+ bias[n]) (then an epilogue) --------------------------------

// Integer weights lie in blocks of 64 outputs, one after the other, the same for every instruction set. The last
// block is padded with outputs of zeros.
//   INT8  a block is [inputs / 4, 64, 4] bytes: 4 inputs in a row of each output, as the byte dot products take them;
//         a byte is q + 128. Inputs are padded to a multiple of 4.
//   INT4  a block is [inputs / 8, 64, 4] bytes: byte i has input i of 8 in its low half and input 4 + i in its high
//         half; a half is q + 8, or q as it is where the weight has zero points.
constexpr int64_t BLOCK = 64;

enum Epilogue : int32_t { NONE = 0, SILU_MUL = 1, GELU_MUL = 2, GELU_TANH_MUL = 3 };

// One weight matrix [out_features, in_features].
//   INT8  weight: packed; scales: float32 [blocks * 64]; zeros: null
//   INT4  weight: packed; scales: [blocks, groups, 64] of scale_dtype; zeros: uint8 likewise, or null for 8
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

// x [rows, in_features] -> out [rows, ...]
struct LinearCall {
  const Linear* linear;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  void* out;
  int64_t out_stride;
  int32_t x_dtype, out_dtype;
  int32_t threads;
};

struct PackCall {
  int32_t format;  // INT8 or INT4
  int32_t threads;
  int64_t out_features, in_features;
  void* stored;  // INT8: int8 [out, in]; INT4: [out, in / 2] bytes, the first of two inputs in the low half
  void* packed;
};

// Round to nearest: the largest magnitude of a group becomes 127 or 7. With zeros (INT4 only), a group's range,
// widened to hold 0, is cut into 15 steps.
struct QuantizeCall {
  int32_t format, dtype, threads;  // dtype: of the weight and the scales
  int64_t out_features, in_features, group;  // INT8: one group, all inputs
  const void* weight;                        // [out, in]
  int64_t weight_stride;
  void* scales;     // [out, in / group], written
  uint8_t* zeros;   // likewise, written: 0..15; or null
  void* packed;     // written
  uint8_t* finite;  // written: 0 if the weight holds NaN or infinity, and then nothing else is of use
};

// -- what stands between the matrix products -------------------------------------------------------------------------

// out = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension of [rows, size].
struct NormCall {
  const void* x;
  void* out;           // [rows, size], packed
  const void* weight;  // [size]
  int64_t x_stride, rows, size;
  float eps, offset;
  int32_t round_first;  // the normalized x is rounded to dtype before it is multiplied
  int32_t dtype, weight_dtype, out_dtype, threads;
};

// One of the tensors that are rotated: [batch, heads, tokens, size], any strides but the last.
struct Rotated {
  const void* x;
  void* out;
  int64_t x_batch, x_head, x_token;
  int64_t out_batch, out_head, out_token;
  int64_t heads;
};

// out = x * cos + rotated(x) * sin
struct RopeCall {
  Rotated q, k;
  const void* cos;  // [batch or 1, tokens, size]
  const void* sin;
  int64_t table_batch, table_token;  // strides
  int64_t batch, tokens, size;
  int32_t interleaved;  // pairs are (0, 1), (2, 3), ...; else (i, i + size / 2)
  int32_t round_each;   // round both products to dtype before they are added
  int32_t dtype, table_dtype, threads;
};

// The k largest of each row of logits [rows, size]; NaN is the largest of all, of equals the first comes first.
struct LogitsCall {
  const void* logits;
  int64_t stride, rows, size, k;
  void* values;      // [rows, k] of dtype (top-k)
  int64_t* indices;  // [rows, k]
  int32_t dtype, threads;
};

// -- attention over keys and values that stand in pages or in a row, and the writing of pages ------------------------

// Where the heads of a tensor stand; the numbers of a head are contiguous.
//   pages           batch: between blocks; token: between the slots of a block
//   sequences       batch: between sequences (0 where they stand end to end); token: between tokens
struct Rows {
  const void* data;
  int64_t batch, head, token;
};

// out[n, h] = softmax(softcap(scale * q k^T)) v over the keys that query n sees; see attention/base.py.
struct AttentionCall {
  Rows q, k, v;
  const void* k_scales;        // [blocks, kv_heads, block_size] of scale_dtype, or null
  const void* v_scales;        // likewise
  void* out;                   // [N, heads, value_dim], contiguous, of q_dtype
  float* lse;                  // [N, heads] or null
  const void* sinks;           // [heads] of sink_dtype or null
  const int32_t* block_table;  // [sequences, table_stride], or null where keys stand in a row
  const int32_t* cu_q;         // [sequences + 1], or null: num_queries each
  const int32_t* cu_k;         // [sequences + 1] where sequences stand end to end, or null
  const int32_t* kv_len;       // [sequences], or null: cu_k's, or num_keys each
  int64_t sequences, heads, kv_heads, head_dim, value_dim, num_queries, num_keys;
  int64_t table_stride, block_size;
  int64_t window;  // keys a query sees, or 0 for all
  int64_t causal;
  float scale, softcap;  // softcap 0: none
  int32_t q_dtype, k_dtype, v_dtype, scale_dtype, sink_dtype, threads;
};

// states [tokens, heads, dim] of `dtype` into slots of pages [blocks, heads, block_size, dim], contiguous, of
// page_dtype: the same, or INT8 or FP8 with scales [blocks, heads, block_size] of `dtype`.
struct PageWrite {
  const void* states;
  int64_t head, token;  // strides of the states
  void* pages;
  void* scales;
  int64_t dim;
};

struct WriteCall {
  PageWrite keys, values;
  const int64_t* slots;  // [tokens]
  int64_t tokens, heads, block_size;
  int32_t dtype, page_dtype, threads;
};

// -- the tables ------------------------------------------------------------------------------------------------------

// The kernels of one instruction set.
struct Kernels {
#define HFA_MEMBER(name, Call) void (*name)(const Call&);
  HFA_KERNELS(HFA_MEMBER)
#undef HFA_MEMBER
};

// What each instruction set defines. The build gives HFA_NAMESPACE and HFA_TABLE, its names.
#if defined(HFA_NAMESPACE)
namespace HFA_NAMESPACE {
#define HFA_DECLARATION(name, Call) void name(const Call&);
HFA_KERNELS(HFA_DECLARATION)
#undef HFA_DECLARATION
}  // namespace HFA_NAMESPACE
#endif
