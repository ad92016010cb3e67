// The kernels, and the struct of arguments of each. structs.py and the files next to it declare the same structs.
// kernels/*.cpp is compiled once for each instruction set. Strides are in elements.
#pragma once

#include "types.h"

// What the library exports.
#if defined(_WIN32)
#define HFA_API __declspec(dllexport)
#else
#define HFA_API __attribute__((visibility("default")))
#endif

// The name and the struct of every kernel. The C interface (api.cpp) and the table of each instruction set are made
// from this list. Linear kernels have forms by tiles and by products of bytes: two instruction sets may differ in them alone.
#define HFA_LINEAR_KERNELS(KERNEL)        \
  KERNEL(integer_linear, LinearCall)      \
  KERNEL(integer_experts, ExpertsCall)    \
  KERNEL(float_linear, LinearCall)        \
  KERNEL(float_experts, ExpertsCall)      \
  KERNEL(mixture, MixtureCall)
#define HFA_ATTENTION_KERNELS(KERNEL) KERNEL(attention, AttentionCall)
#define HFA_OTHER_KERNELS(KERNEL)         \
  KERNEL(adapt, AdaptCall)                \
  KERNEL(pack, PackCall)                  \
  KERNEL(unpack, PackCall)                \
  KERNEL(rows, RowsCall)                  \
  KERNEL(quantize_weight, QuantizeCall)   \
  KERNEL(norm, NormCall)                  \
  KERNEL(rope, RopeCall)                  \
  KERNEL(add, AddCall)                    \
  KERNEL(activate, ActivateCall)          \
  KERNEL(layer_norm, LayerNormCall)       \
  KERNEL(argmax, LogitsCall)              \
  KERNEL(topk, LogitsCall)                \
  KERNEL(draw, DrawCall)                  \
  KERNEL(cross_entropy, CrossEntropyCall) \
  KERNEL(position_scores, PositionScoresCall) \
  KERNEL(bias_gates, BiasGatesCall) \
  KERNEL(row_conv, RowConvCall) \
  KERNEL(page_conv, PageConvCall) \
  KERNEL(write_pages, WriteCall)          \
  KERNEL(delta_rule, DeltaCall)           \
  KERNEL(short_conv, ConvCall)            \
  KERNEL(gated_norm, GatedNormCall)       \
  KERNEL(state_scan, ScanCall)            \
  KERNEL(head_products, HeadsCall)        \
  KERNEL(samples, SamplesCall)
#define HFA_KERNELS(KERNEL) HFA_LINEAR_KERNELS(KERNEL) HFA_ATTENTION_KERNELS(KERNEL) HFA_OTHER_KERNELS(KERNEL)

// -- linear layers: out[r, n] = sum_k x[r, k] * w[n, k] (+ bias[n]) (then an epilogue) --------------------------------

// Integer weights are packed in blocks of 64 outputs, in the same layout for every instruction set. The last block is
// padded with outputs of zeros.
//   INT8  A block is [inputs / 4, 64, 4] bytes. Each output has 4 consecutive inputs side by side, as the byte dot
//         products need them. A byte is q + 128. Inputs are padded to a multiple of 4.
//   INT4  A block is [inputs / 8, 64, 4] bytes. Of 8 inputs, byte i holds input i in its low half and input 4 + i in
//         its high half. A half is q + 8, or q if the weight has zero points or minima.
//   INT3  A block is [inputs / 32, 4, 3, 16, 4] bytes: of each 16 outputs 8 words of 4 inputs, in 3 planes. Byte i of the words, each
//         from 0 to 7, is in byte i of the planes: words 0 and 1 in the lowest 6 bits of the first plane, words 2 and 3
//         in those of the second, 4 and 5 in those of the third. The two upper bits of words 6 and 7 are the upper bits
//         of the first and of the second plane; their lowest bits are bits 6 and 7 of the third. q is stored as for INT4,
//         with 4 instead of 8.
//   INT2  A block is [inputs / 16, 64, 4] bytes. Byte i holds inputs i, 4 + i, 8 + i and 12 + i, the first in its lowest
//         bits. q is stored as for INT4, with 2 instead of 8.
//   INT8_GROUPS  packed as INT8
constexpr int64_t BLOCK = 64;

enum Epilogue : int32_t { NONE = 0, SILU_MUL = 1, GELU_MUL = 2, GELU_TANH_MUL = 3 };
// Functions of one number. As the epilogue of a linear layer, they are applied to each output.
enum Activation : int32_t { SILU = 4, GELU = 5, GELU_TANH = 6, GELU_QUICK = 7, RELU = 8, SIGMOID = 9, RELU_SQUARED = 10 };

// One weight matrix [out_features, in_features].
//   INT8  weight: packed; scales: float32 [blocks * 64]; zeros and minima: null
//   INT8_GROUPS  weight: packed; scales: [blocks, groups, 64] of scale_dtype; zeros: null; minima: as for INT4
//   INT4  weight: packed; scales: [blocks, groups, 64] of scale_dtype; zeros: uint8 [blocks, groups, 64], or null if
//         all zero points are 8; with INT3 4, with INT2 2; minima: [blocks, groups, 64] of scale_dtype, or null. With minima the weight is
//         q * scale - minimum, and zeros is null.
//   BF16, F16, F32  weight: row-major, read in place; scales, zeros and minima: null
struct Matrix {
  int64_t out_features;
  const void* weight;
  const void* scales;
  const uint8_t* zeros;
  const void* minima;
  const void* bias;  // or null
  int32_t scale_dtype, bias_dtype;
  int64_t column;  // the column of `out` at which its outputs begin
  float divisor;   // FP4: all scales are divided by it
};

// Matrices with the same input. With an Epilogue that multiplies there are two matrices of equal size, gate and up, and
// the output is act(gate) * up at the gate's column. With an Activation it is act(output) for any number of matrices.
struct Linear {
  int32_t format;  // the Dtype of the weights
  int32_t group;   // inputs that share an activation scale (integers) and a weight scale (all but INT8)
  int64_t in_features;
  int32_t count;
  int32_t epilogue;  // an Epilogue or an Activation
  int32_t by_inputs;  // of experts with float weights: whether these are [in_features, out_features]
  const Matrix* matrices;
};

// x is [rows, in_features], out is [rows, all outputs].
struct LinearCall {
  const Linear* linear;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  void* out;
  int64_t out_stride;
  int32_t x_dtype, out_dtype;
  int32_t threads;
  int32_t tile_rows;  // the fewest rows that tiles multiply, at a level that has them
};

// What an adapter adds to the product of one matrix [out, in]: scale * b (a x) of `rank` sums.
//   a  packed in blocks of 64 inputs, [blocks, rank, 64]; the last block is padded with zeros
//   b  likewise in blocks of 64 outputs
struct LowRank {
  const void* a;  // null if the adapter leaves this matrix as it is
  const void* b;
  int64_t rank;
  float scale;
  int32_t dtype;  // of a and b
};

// Rows of a pass that one adapter is for: rows[first] to rows[first + count - 1] are their numbers.
struct AdaptedRows {
  int64_t adapter, first, count;
};

// The adapters of a pass. Adapter i has parts[i * stride + m] for matrix m of those that the call is about.
struct Adapters {
  const LowRank* parts;
  const AdaptedRows* groups;
  const int32_t* rows;
  int64_t stride, count;  // the number of groups
};

// For each matrix of `linear`, and in the rows of an adapter alone: out = base rounded to dtype, and if the adapter
// changes the matrix, what it adds to it, summed in float32 and rounded again. base may be out.
struct AdaptCall {
  Adapters adapters;
  const Linear* linear;  // of which the sizes and the columns are read
  const void* x;         // [rows, in_features] of dtype
  const void* base;      // [rows, all outputs] of base_dtype
  void* out;             // likewise, of dtype
  int64_t x_stride, base_stride, out_stride;
  int32_t dtype, base_dtype, threads;
};

// The experts of a mixture: `linear` has a matrix for each, all of one shape and with columns 0. Rows
// [starts[e], starts[e + 1]) of x are multiplied by matrix e. An expert without rows is not read.
struct ExpertsCall {
  const Linear* linear;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  void* out;
  int64_t out_stride;
  const int64_t* starts;  // [linear->count + 1]
  int32_t x_dtype, out_dtype;
  int32_t threads;
  int32_t tile_rows;
};

// How the results of the first weights of experts become the inputs of the second ones. GATE_HALVES: act(gate) * up of
// the first and the second half. GATE_CLAMPED: of numbers that take turns, (up + 1) * gate * sigmoid(alpha * gate), where gate is at
// most `limit` and up between -limit and limit. Each step is rounded to dtype.
enum MixtureGate : int32_t { NO_GATE = 0, GATE_HALVES = 1, GATE_CLAMPED = 2 };

// All of the experts of a mixture. chosen: the experts of each token; scores: the factors of their results, which are
// added up in float32. If both dtypes are the same, each product is rounded first.
struct MixtureCall {
  const Linear* up;    // a matrix for each expert, as for ExpertsCall
  const Linear* down;  // likewise
  const void* x;       // [tokens, up->in_features]
  int64_t x_stride, tokens, top_k;
  const int64_t* chosen;  // [tokens, top_k]
  const void* scores;     // [tokens, top_k]
  void* out;              // [tokens, outputs of down]
  uint8_t* known;         // output: 0 if an expert was chosen that is not there; nothing is computed then
  float alpha, limit;     // of GATE_CLAMPED
  int32_t gate, activation, dtype, score_dtype, threads, tile_rows;
};

struct PackCall {
  int32_t format;  // INT8, INT4, INT3 or INT2
  int32_t threads;
  int64_t out_features, in_features;
  void* stored;  // INT8: int8 [out, in]; fewer bits: [out, in * bits / 8] bytes, the first input in the lowest bits
  void* packed;
};

// Looks outputs of one packed integer weight up: out[n] is output outputs[n], dequantized in float32 and rounded once.
struct RowsCall {
  const Linear* linear;
  const int64_t* outputs;  // [rows]
  int64_t rows;
  void* out;       // [rows, in_features]
  uint8_t* known;  // output: 0 if the weight has not all of these outputs; others are looked up
  int32_t out_dtype, threads;
};

// Quantizes by rounding to nearest. The largest magnitude of a group becomes 127, or the lowest level. With zeros (not
// INT8), the range of a group, extended to include 0, is divided into 15, 7 or 3 steps.
struct QuantizeCall {
  int32_t format, dtype, threads;  // dtype: the dtype of the weight and of the scales
  int64_t out_features, in_features, group;  // for INT8, group is in_features
  const void* weight;                        // [out, in]
  int64_t weight_stride;
  void* scales;     // output [out, in / group]
  uint8_t* zeros;   // output [out, in / group], levels; or null
  void* packed;     // output
  uint8_t* finite;  // output: 0 if the weight holds NaN or infinity; the other outputs are then undefined
};

// -- norms and rotary embeddings -------------------------------------------------------------------------------------

// out = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension of [rows, size].
struct NormCall {
  const void* x;
  void* out;           // [rows, size], contiguous
  const void* weight;  // [size]
  int64_t x_stride, rows, size;
  float eps, offset;
  int32_t round_first;  // whether the normalized x is rounded to dtype before it is multiplied
  int32_t dtype, weight_dtype, out_dtype, threads;
};

// A tensor that is rotated: [batch, heads, tokens, size]. The last stride is 1, the others are given.
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
  int32_t interleaved;  // whether pairs are (0, 1), (2, 3), ...; otherwise they are (i, i + size / 2). 2: pair i has number i of a table; 3: likewise, and its results are i and i + size / 2; 4: as 0, and a table has size / 2 numbers
  int32_t round_each;   // whether both products are rounded to dtype before they are added
  int32_t dtype, table_dtype, threads;
};

// out = x + factor * y over [rows, size], contiguous; with a scale it is x + scale * y, the factor is not read, and rows of
// x are x_stride apart, 0 if there is one for all. The product is rounded to dtype before it is added.
struct AddCall {
  const void* x;  // or null: out is the product
  const void* y;
  const void* scale;  // [size] of dtype, or [1] with one_scale, or null
  void* out;
  int64_t rows, size, x_stride;
  float factor;
  int32_t dtype, y_dtype, threads;  // y_dtype: that of y, which is dtype where there is a scale
  int32_t one_scale;
};

// out = act(x) over [rows, size], or act(x) rounded to dtype, times y. `kind` is an Activation. out is of out_dtype.
struct ActivateCall {
  const void* x;
  const void* y;  // or null
  void* out;
  int64_t x_stride, y_stride, out_stride, rows, size;
  int32_t kind, dtype, out_dtype, threads;
};

// out = (s - mean(s)) / sqrt(variance(s) + eps) * (offset + weight) + bias over the last dimension of [rows, size], with
// s = x + y rounded to dtype, or s = x if y is null. s is also written to `sum` if that is not null.
struct LayerNormCall {
  const void* x;
  const void* y;       // or null
  void* sum;           // or null
  void* out;
  const void* weight;  // [size], or null for ones
  const void* bias;    // [size], or null for zeros
  int64_t x_stride, y_stride, sum_stride, out_stride, rows, size;
  float eps, offset;  // a weight and an offset other than 0 are added in weight_dtype
  int32_t dtype, weight_dtype, bias_dtype, threads;
};

// The k largest of each row of logits [rows, size]. NaN counts as the largest. Equal logits are in order of their
// index.
struct LogitsCall {
  const void* logits;
  int64_t stride, rows, size, k;
  void* values;      // [rows, k] of dtype (top-k)
  int64_t* indices;  // [rows, k]
  int32_t dtype, threads;
};

// How a token is chosen: the likeliest ones; the winners of a race, of which each has the time -log(random) / weight; or
// the first whose weights up to it exceed a random share of all. Python's noise.py and inverse.py say how.
enum Draw : int32_t { LIKELIEST = 0, RACE = 1, INVERSE = 2 };

// The k first tokens of each row, of which INVERSE has one. With top_k, or a top_p below 1, other tokens weigh nothing;
// top_p alone is not applied where it needs more than a few hundred tokens.
struct DrawCall {
  const void* rows;       // [rows, size]: logits of dtype, or with is_weights float32 weights, which may not be negative
  const int64_t* ids;     // [size]: the tokens of a row; null if these are 0, 1, 2, ...
  const void* numbers;    // [rows]: int64 keys of RACE, or float64 numbers in [0, 1) of INVERSE
  int64_t* tokens;        // [rows, k]; -1 where there are fewer that weigh anything
  float* confidences;     // [rows, k]: of each token, the logarithm of how likely it is to be the first; or null
  float* probabilities;   // [rows, probability_stride]: those that the token was drawn from, by token; or null
  int64_t stride, num_rows, size, k, probability_stride, top_k;
  float temperature, top_p;
  int32_t kind, is_weights, dtype, threads;
};

// losses = log(sums) - (logits[label] - largest) of each row of logits [rows, size], with the sums of exp(logits - largest);
// all three are 0 where a label is negative. With a gradient these are read, and gradient = factor * (exp(logits - largest) /
// sums - (1 at the label)), zeros where there is none; it may stand where the logits do.
struct CrossEntropyCall {
  const void* logits;
  const int64_t* labels;  // [rows], below size
  float* largest;         // [rows]
  float* sums;            // [rows]
  float* losses;          // [rows]
  void* gradient;         // [rows, size] of dtype, or null
  int64_t stride, gradient_stride, rows, size;
  float factor;
  int32_t dtype, threads;
};

// -- attention over pages or contiguous sequences, and writing to pages ----------------------------------------------

// A tensor and its strides, those of int4 in bytes. The numbers of a head are contiguous.
//   pages      batch: the stride between blocks; token: between the slots of a block
//   sequences  batch: the stride between sequences (0 if they stand end to end); token: between tokens
struct Rows {
  const void* data;
  int64_t batch, head, token;
};

// What is added to the scores of head h of sequence b: data[b * sequence + h * head + i * query + j], where i is the
// position of a query and j that of a key. A bias of their distance has query = -1, and `data` is the entry of distance 0.
// In a sequence of more queries than keys, the positions of both begin at 0.
struct ScoreBias {
  const float* data;  // or null
  int64_t sequence, head, query;
};

constexpr int64_t EVERY_KEY = -1;

// out[n, h] = softmax(softcap(scale * q k^T) + gate * bias) v over the keys that query n sees; see
// hf_accel/attention/contract.py. The position of query i of Q is that of key T - Q + i of T.
struct AttentionCall {
  Rows q, k, v;
  const void* k_scales;        // [blocks, kv_heads, block_size] of scale_dtype, of INT4 [.., 2], or null
  const void* v_scales;        // of the same shape, or null
  void* out;                   // [N, heads, value_dim], contiguous, of q_dtype
  float* lse;                  // [N, heads] or null
  const void* sinks;           // [heads] of sink_dtype or null
  const float* gates;          // [N, heads]: what the bias of a query is multiplied by; null for 1
  const int32_t* block_table;  // [sequences, table_stride], or null if keys are not in pages
  const int32_t* cu_q;         // [sequences + 1], or null if every sequence has num_queries queries
  const int32_t* cu_k;         // [sequences + 1] if the keys of sequences stand end to end, or null
  const int32_t* kv_len;       // [sequences], or null if cu_k or num_keys gives the lengths
  int64_t sequences, heads, kv_heads, head_dim, value_dim, num_queries, num_keys;
  int64_t table_stride, block_size;
  int64_t window;  // how many keys up to its own a query sees, its own included, or 0 for all
  int64_t ahead;   // how many keys after its own it sees, or EVERY_KEY; 0 is causal
  ScoreBias bias;
  float scale, softcap;  // softcap is 0 if there is none
  int32_t q_dtype, k_dtype, v_dtype, scale_dtype, sink_dtype, threads;
};

// out[b, h, i, j] = scale * (q_i . keys[r] + k_j . queries[r]) for the tokens i and j of sequence b, where r = rows[i - j];
// see recognition/position_attention.py. Without `queries` there is no second product. Other entries of `out` are left
// as they are.
struct PositionScoresCall {
  const void* q;        // [tokens, heads, dim] of dtype; q_token, k_token: the strides between tokens
  const void* k;
  const void* keys;     // [positions, heads, dim] of dtype, contiguous
  const void* queries;  // likewise, or null
  const int32_t* rows;  // the entry of distance 0
  const int32_t* starts;  // [sequences + 1]
  float* out;             // [sequences, heads, size, size]
  int64_t q_token, k_token, sequences, heads, dim, size;
  float scale;
  int32_t dtype, threads;
};

// out[n, h] = a * (b * factors[h] - 1) + 2, where a and b are the sigmoids of two sums of the numbers that a linear layer
// with weight [2 * terms, dim] and a bias makes of head h of row n (Chi et al. 2022, "XLM-E", arXiv 2106.16138; Chen et al.
// 2022, "WavLM", arXiv 2110.13900).
struct BiasGatesCall {
  const void* x;        // [rows, heads, dim] of dtype
  const void* weight;   // these three of weight_dtype, contiguous
  const void* bias;     // or null
  const void* factors;  // [heads]
  float* out;           // [rows, heads], contiguous
  int64_t x_stride, rows, heads, dim, terms;
  int32_t dtype, weight_dtype, threads;
};

// A convolution of each channel over the rows of each sequence, then a BatchNorm and an activation if there are any. Rows
// next to those of a sequence count as zeros.
struct RowNorm {
  const void* mean;  // [channels] each, of the dtype of the call
  const void* variance;
  const void* weight;
  const void* bias;
  float eps;
};

struct RowConvCall {
  const void* x;           // [rows, channels] of dtype
  const void* weight;      // [channels, length] of dtype, contiguous
  const void* bias;        // [channels] of dtype, contiguous; null for none
  const RowNorm* norm;     // or null
  void* out;               // [rows, channels] of dtype
  const int32_t* starts;   // [sequences + 1]
  const int32_t* lengths;  // [sequences]: the rows behind these count as zeros too, though they have results; null for all
  int64_t x_stride, out_stride, sequences, channels, length;
  int64_t before;      // how many of the inputs of a row come before it
  int32_t activation;  // an Activation, or -1 for none
  int32_t dtype, threads;
};

// Convolutions of each channel over the last `length` inputs of a token, which are in pages; see kernels/page_conv.cpp.
struct PageConvCall {
  const void* weight;   // [2 * half, length] of weight_dtype
  const void* bias;     // [2 * half] of weight_dtype, or null
  void* out;            // [tokens, 2 * half]
  const void* k_pages;  // [slots, half]: the first half of the channels
  const void* v_pages;  // [slots, half]
  const int32_t* block_table;  // as in AttentionCall
  const int32_t* cu_q;
  const int32_t* kv_len;
  int64_t out_stride, table_stride, sequences, block_size, half, length;
  int32_t dtype, weight_dtype, threads;
};

// Writes states [tokens, heads, dim] of `dtype` to slots of contiguous pages [blocks, heads, block_size, dim] of
// page_dtype, which says that of keys and that of values (kernels/page_dtype.h). Each is `dtype`, or INT8, FP8 or INT4,
// with scales [blocks, heads, block_size] of `dtype`, or of
// float for F16. The numbers of INT4 are two in a byte and rotated; it has scales [.., 2], see cache/quantized.py.
struct PageWrite {
  const void* states;
  int64_t head, token;  // strides of `states`
  void* pages;
  void* scales;
  int64_t dim;
};

struct WriteCall {
  PageWrite keys, values;
  const int64_t* slots;    // [tokens]
  const int64_t* written;  // [tokens]: which of the states go there; null for all of them in order
  int64_t tokens, heads, block_size;
  int32_t dtype, page_dtype, threads;
};

// -- a layer, whose operations are kernels one after the other (src/layer.cpp) --------------------------------

struct LayerOp;  // in layer.cpp, with the kinds of operations
extern const int64_t LAYER_OP_SIZE;

// Pages of keys and values that every query of a sequence sees: those of an encoder's output, as in AttentionCall. Their
// dtypes are those of the layer's other pages.
struct SourcePages {
  void* k_pages;
  void* v_pages;
  void* k_scales;
  void* v_scales;
  const int32_t* block_table;
  const int32_t* cu_q;
  const int32_t* kv_len;
  int64_t table_stride, sequences, block_size;
};

// The states of fixed size that operations of a layer read and write: of SHORT_CONV, DELTA_RULE and STATE_SCAN.
struct StatePages {
  float* states;           // as in DeltaCall and ScanCall
  float* kept;             // the inputs of the convolution, as in ConvCall
  const int64_t* slots;    // [tokens]
  const int64_t* starts;   // [sequences + 1]
  const int64_t* before;   // [sequences]
  const int64_t* limited;  // [tokens], see ScanCall
  int64_t sequences;
};

constexpr int64_t GIVEN = INT64_MIN;

// One layer over `tokens` tokens of `sequences` sequences, in `batch` rows of equal length. All numbers but weights and
// pages are of `dtype`. ATTEND_ROWS reads the keys of the call's own tokens, which cu_q divides; then there need be no
// pages. With kv_len all sequences have one number of tokens, and the keys are the first kv_len of each.
struct LayerCall {
  const LayerOp* ops;
  const int64_t* starts;  // [buffers]: where each one begins, in numbers of a token; buffers may share memory. One that
                          // is read behind the call is in `out`, and has the complement of where it begins there;
                          // that of `given` is GIVEN
  int64_t count, width;   // the operations; the numbers that a token has in all buffers
  const void* given;      // what the layer is given besides x, rows of tokens end to end; or null
  const void* x;          // [tokens, hidden], contiguous
  void* out;              // likewise, or as many of these as are read behind the call
  const void* cos;        // [batch or 1, tokens / batch, head_dim] of table_dtype
  const void* sin;
  int64_t tokens, batch, table_batch, table_token;  // table_batch, table_token: strides
  void* k_pages;                // as in AttentionCall
  void* v_pages;
  void* k_scales;
  void* v_scales;
  const int64_t* slots;    // [num_written]
  const int64_t* written;  // [num_written]: the tokens whose K and V go there; null for all of them in order
  const int32_t* block_table;
  const int32_t* cu_q;
  const int32_t* kv_len;
  int64_t table_stride, sequences, block_size, num_written;
  ScoreBias score_bias;  // of ATTEND and ATTEND_ROWS; positions begin at 0 in each sequence. POSITION_SCORES writes it
  const void* position_keys;  // as in PositionScoresCall
  const void* position_queries;
  const int32_t* position_rows;
  SourcePages source;  // of ATTEND_SOURCE
  StatePages states;
  const Adapters* adapters;  // or null; their matrices are those of all linear layers, in the order of the operations
  int32_t dtype, table_dtype, page_dtype, scale_dtype, threads;
};

// -- recurrent states ------------------------------------------------------------------------------------------------

// The gated delta rule over sequences of tokens, which stand end to end; see kernels/delta_rule.cpp. All is float32 but
// a and b, which are of `dtype`, and the parameters of the heads.
// Value heads that follow each other share a key head.
struct DeltaCall {
  const float* q;  // [tokens, key_heads, key_dim]
  const float* k;
  const float* v;          // [tokens, value_heads, value_dim]
  const void* a;           // [tokens, value_heads]
  const void* b;           // likewise
  const void* log_rate;    // [value_heads] of rate_dtype
  const void* bias;        // [value_heads] of bias_dtype
  const float* decays;     // [tokens, value_heads, key_dim], contiguous; null if a, log_rate and bias make one of a head
  float* out;              // [tokens, value_heads, value_dim], contiguous
  float* states;           // [slots, value_heads, key_dim, value_dim], contiguous
  const int64_t* starts;   // [sequences + 1]
  const int64_t* before;   // [sequences]: the slot of the state before the first token; -1 for zeros
  const int64_t* slots;    // [tokens]: the slot that a token's state is written to; -1 for none
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;  // of tokens
  int64_t sequences, key_heads, value_heads, key_dim, value_dim;
  float beta_factor;
  int32_t dtype, rate_dtype, bias_dtype, threads;  // dtype: what beta is rounded to, too
};

// A causal convolution of each channel over sequences of tokens, which stand end to end, and the activation after it.
struct ConvCall {
  const void* x;           // [tokens, channels] of dtype
  const void* weight;      // [channels, length] of weight_dtype, contiguous; the last is a token's own
  const void* bias;        // [channels] of weight_dtype, contiguous; null for none
  float* out;              // [tokens, channels], contiguous
  float* kept;             // [slots, length - 1, channels], contiguous: the last inputs up to a token
  const int64_t* starts;   // [sequences + 1]
  const int64_t* before;   // [sequences]: the slot of the inputs before the first token; -1 for zeros
  const int64_t* slots;    // [tokens]: the slot that the inputs up to a token are written to; -1 for none
  int64_t x_stride, sequences, channels, length;
  int32_t activation;      // an Activation
  int32_t dtype, weight_dtype, threads;
};

// The scan of a state space over sequences of tokens, which stand end to end; see kernels/state_scan.cpp. All is float32
// but dt and the parameters of the heads, which are float32 too with each_rate.
// Heads that follow each other share a group of b and c. With each_rate there is one head and one group, and each column
// has a dt, a bias and a skip of its own.
struct ScanCall {
  const float* x;          // [tokens, heads, head_dim]
  const void* dt;          // [tokens, heads] or [tokens, head_dim] of dt_dtype
  const float* b;          // [tokens, groups, state_size]
  const float* c;          // likewise
  const void* log_rate;    // [heads] or [head_dim, state_size] of rate_dtype, contiguous
  const void* bias;        // [heads] or [head_dim] of bias_dtype
  const void* skip;        // likewise, of skip_dtype
  float* out;              // [tokens, heads, head_dim], contiguous
  float* states;           // [slots, heads, state_size, head_dim], contiguous
  const int64_t* starts;   // as in DeltaCall
  const int64_t* before;
  const int64_t* slots;
  const int64_t* limited;  // [tokens]: whether the limits hold for a token; null if they do for all
  int64_t x_stride, dt_stride, b_stride, c_stride;  // of tokens
  int64_t sequences, heads, groups, head_dim, state_size;
  float lowest, highest;  // the limits of delta
  int32_t each_rate, dt_dtype, rate_dtype, bias_dtype, skip_dtype, threads;
};

// The RMSNorm behind a recurrent layer, of parts of each row, and its gate; see recurrent/gated_norms.py.
struct GatedNormCall {
  const float* x;      // [rows, parts * size]
  const void* gate;    // likewise, of dtype
  const void* weight;  // of weight_dtype: [size] for each part, or [parts * size] with weight_stride; null for no norm
  void* out;           // as gate
  int64_t x_stride, gate_stride, out_stride, rows, parts, size, weight_stride;
  float eps;
  int32_t rounds;      // whether x and the normalized x are rounded to dtype
  int32_t gate_first;  // whether x is multiplied by the gate ahead of the norm
  int32_t activation;  // of the gate
  int32_t dtype, weight_dtype, out_dtype, threads;
};

// A product for each head: out[n, h, o] = sum_i x[n, h, i] * w[h, o, i], or w[h, i, o] if `transposed`.
struct HeadsCall {
  const void* x;        // of dtype
  const void* weight;   // of weight_dtype, or int8; a row is w[h, o], or w[h, i] if `transposed`, and is contiguous
  const float* scales;  // of each row of int8, or of each output if `transposed` is 2; null for floats
  void* out;            // of dtype
  int64_t x_token, x_head, out_token, out_head, weight_head, weight_row, scale_head;
  int64_t tokens, heads, inputs, outputs;
  int32_t transposed, dtype, weight_dtype, threads;
};

// Numbers of a tensor: `count` of `size` bytes (1, 2, 4 or 8), `step` bytes apart.
struct SampledTensor {
  const void* numbers;
  int64_t step, count, size;
};

// Copies the numbers of all tensors to `out`, one after the other.
struct SamplesCall {
  const SampledTensor* tensors;
  void* out;
  int64_t count;
};

// -- the tables ------------------------------------------------------------------------------------------------------

// The kernels of one instruction set. `refused` asks the system for what they need; it returns a clause that says why
// this process does not get it, or null.
struct Kernels {
  const char* (*refused)();
#define HFA_MEMBER(name, Call) void (*name)(const Call&);
  HFA_KERNELS(HFA_MEMBER)
#undef HFA_MEMBER
};

void run_layer(const Kernels& kernels, const LayerCall& call);

// The functions that each instruction set defines. The build sets HFA_NAMESPACE and HFA_TABLE for each of them. One that
// differs from another one in linear kernels alone has all else from it: HFA_BASE is the other's namespace. Tiles of pairs
// serve attention too.
#if defined(HFA_NAMESPACE)
#if !defined(HFA_BASE)
#define HFA_BASE HFA_NAMESPACE
#endif
#define HFA_DECLARATION(name, Call) void name(const Call&);
namespace HFA_BASE {
HFA_KERNELS(HFA_DECLARATION)
}  // namespace HFA_BASE
namespace HFA_NAMESPACE {
HFA_LINEAR_KERNELS(HFA_DECLARATION)
HFA_ATTENTION_KERNELS(HFA_DECLARATION)
}  // namespace HFA_NAMESPACE
#undef HFA_DECLARATION
#endif
