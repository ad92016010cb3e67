// A whole draft in one call; draft.cpp has its code.
#pragma once

#include "kernels.h"

// Drafts by a head that reads states (EAGLE): the tokens of `layer.sequences` sequences, `steps` one after the other. The
// first step reads layer.tokens rows, of one or several tokens of each sequence; each later step reads tokens and states
// that the step before has given. All numbers but weights and pages are of layer.dtype.
//
// A draft is a chain, or with `parents` a tree (EAGLE-2, 2406.16858): each step goes on from the `width` tokens of the
// step before that are likeliest to be accepted, by the head, and of all tokens the likeliest are drafted. Each of
// the `width` branches has its last tokens in blocks of its own, which a step copies for the next.
struct DraftCall {
  LayerCall fuse;   // of [embedding, state] of a row, what the layer reads
  LayerCall layer;  // the step sets all that it reads and writes but the blocks; kv_len is that of the first step
  LayerCall head;   // of what the layer gives, [state, logits]; `out` has those of the last step: [rows, hidden + tokens]
  const void* embeddings;    // [vocabulary, hidden], contiguous
  const void* cos;           // [positions, table_size] of layer.table_dtype, contiguous
  const void* sin;
  const int64_t* positions;  // [rows of the first step]
  const int64_t* ids;        // [rows of the first step]
  const void* states;        // [rows of the first step, hidden]
  const int64_t* ends;       // [sequences]: the last row of each in the first step
  const int64_t* going;      // [steps]: how many of the sequences, the first ones, a step drafts for
  const int32_t* singles;    // [rows + 1]: 0, 1, 2, ...
  const int64_t* known;      // [tokens]: the ids of the tokens that the head knows; null if these are 0, 1, 2, ...
  const int64_t* numbers;    // [steps, sequences]: as DrawCall has them, of 8 bytes each; null for LIKELIEST
  float* probabilities;      // [steps, sequences, vocabulary], zeros: what the tokens of a chain were drawn from; or null
  const int32_t* spare;      // [2, sequences, width, num_spare]: blocks for the last tokens of branches
  const int64_t* nodes;      // [sequences]: the most tokens of each tree
  int64_t* drafted;          // [steps, sequences], or of trees [sequences, most_nodes]: a parent comes before its children
  int64_t* parents;          // [sequences, most_nodes]: which of its tokens each one follows, -1 for none; null for chains
  int64_t* counts;           // [sequences]: the tokens of each tree
  int64_t state_stride, table_size, hidden, tokens, steps, width, most_nodes, num_spare, vocabulary, top_k;
  float temperature, top_p;
  int32_t draw, unused;
};

void run_draft(const Kernels& kernels, const DraftCall& call);
