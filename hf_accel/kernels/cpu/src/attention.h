// Attention over keys and values that stand in pages or in a row, and the writing of pages.
#pragma once

#include "types.h"

// Where the rows of a tensor stand, strides in elements; a row's numbers are contiguous.
//   pages           batch: between blocks; token: between the slots of a block
//   sequences       batch: between sequences (0 where they stand end to end); token: between tokens
struct Rows {
  const void* data;
  int64_t batch, head, token;
};

// out[n, h] = softmax(softcap(scale * q k^T)) v over the keys that query n sees; see attention/base.py.
struct AttentionCall {
  Rows q, k, v;
  const void *k_scales, *v_scales;  // [blocks, kv_heads, block_size] of scale_dtype, or null
  void* out;                        // [N, heads, value_dim], contiguous, of q_dtype
  float* lse;                       // [N, heads] or null
  const void* sinks;                // [heads] of sink_dtype or null
  const int32_t* block_table;       // [sequences, table_stride], or null where keys stand in a row
  const int32_t* cu_q;              // [sequences + 1], or null: num_queries each
  const int32_t* cu_k;              // [sequences + 1] where sequences stand end to end, or null
  const int32_t* kv_len;            // [sequences], or null: cu_k's, or num_keys each
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
  Rows states;  // batch is not used
  void* pages;
  void* scales;
  int64_t dim;
};

struct WriteCall {
  PageWrite keys, values;
  const int64_t* slots;  // [tokens]
  int64_t tokens, heads, block_size;
  int32_t dtype, page_dtype, threads, unused;
};
