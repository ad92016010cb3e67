// The operations of a layer; layer.cpp runs them.
#pragma once

#include "kernels.h"

// Where an operation reads or writes: row n of a buffer has its numbers at n * stride + offset. Buffer 0 is the layer's
// input, buffer 1 its output; the others are memory of the call, or what else the layer is given. A stride of 0 stands for no place at all. `head` is the
// stride between heads, 0 if they stand end to end.
struct Columns {
  int64_t buffer, offset, stride, head;
};

enum LayerOpKind : int32_t { INTEGER_LINEAR, FLOAT_LINEAR, NORM, ROPE, WRITE, ATTEND, ADD, LAYER_NORM, ATTEND_ROWS, GATE, JOIN, POSITION_SCORES, ATTEND_SOURCE, SHORT_CONV, DELTA_RULE, STATE_SCAN, GATED_NORM, BIAS_GATES, ROW_CONV, MULTIPLY, PAGE_CONV, HEAD_PRODUCTS, BY_POSITION };

struct LayerOp {
  int32_t kind;
  int32_t weight_dtype;     // NORM, LAYER_NORM, ATTEND
  // ROPE: q and k; WRITE: K and V; ADD: both summands; LAYER_NORM: the summands, the second may be missing, the norm,
  // and the sum if it has a place; ATTEND_ROWS: Q and K in x and y, V in z, and the
  // gates of a bias in out2 if it has such; GATE: y may be missing; POSITION_SCORES: Q and K; JOIN: the parts of each head;
  // DELTA_RULE: the results of the convolution, a and b; STATE_SCAN: those and dt, and b
  // and c in z where each column has a rate, else behind x; GATED_NORM: x and the gate; else x alone.
  // What SHORT_CONV, DELTA_RULE, STATE_SCAN and BIAS_GATES give is float32: a buffer of so many bytes.
  Columns x, y, out, out2, z;
  const void* weight;       // a Linear, or what a norm multiplies by; ADD, MULTIPLY: the scale of y, or of x, or null; ATTEND: sinks, or null
  const void* bias;         // LAYER_NORM, SHORT_CONV, BIAS_GATES, ROW_CONV, PAGE_CONV: or null; ADD: takes the place of x in all rows, and x that of y; or null
  const void* skip;         // STATE_SCAN; BIAS_GATES: the factors of heads; ROW_CONV: its RowNorm, or null; HEAD_PRODUCTS: scales of the rows of int8, or null
  int64_t heads, kv_heads;  // NORM, LAYER_NORM: each of `heads` parts of a row is normalized; ROPE: without keys kv_heads is 0
  int64_t dim, value_dim;   // NORM: the numbers of a part; ADD: of a row; JOIN: of both parts; PAGE_CONV: channels, and their weights;
                            // MULTIPLY: value_dim is how many numbers the weight has, 1 for all columns
  // ATTEND, ATTEND_ROWS, ATTEND_SOURCE; ATTEND is causal. HEAD_PRODUCTS: the rows from one head's weights to the
  // next one's; and how many numbers of a head behind those that it multiplies are copied. BY_POSITION: how many numbers
  // of cos stand before a token's factor. LAYER_NORM: the numbers from one part's weights to the next one's.
  int64_t window, ahead;
  float eps, offset;      // NORM, LAYER_NORM
  float scale, softcap;  // ATTEND, ATTEND_SOURCE, POSITION_SCORES; ADD: scale is the factor of y; MULTIPLY: of x
  int32_t round_first;   // NORM; ADD, MULTIPLY: whether out is float32, and the x of ADD
  int32_t interleaved, round_each;  // ROPE; HEAD_PRODUCTS: interleaved says how weights are transposed; MULTIPLY: round_each says whether x is float32
  int32_t tile_rows;                // INTEGER_LINEAR, FLOAT_LINEAR
  int32_t bias_dtype;               // LAYER_NORM, DELTA_RULE, STATE_SCAN
  int32_t skip_dtype;               // STATE_SCAN
  int32_t gate_first;               // GATED_NORM; ATTEND: whether values are the first numbers of keys
  int32_t activation;               // GATE: out = act(x) * y, or x * y for NONE; ROW_CONV: or -1
  int32_t halves_in, halves_out;    // INTEGER_LINEAR, ROPE, GATE, ATTEND_ROWS: whether what is read, or written, is bfloat16 in a call of float32
};
