// A whole draft in one call; draft.cpp has its code.
#pragma once

#include "kernels.h"

// One sequence of a draft. Its first step reads `rows` rows, behind `before` tokens that its blocks hold; the first of them
// is at `position`. It is drafted for in `steps` steps, and a tree of it has at most `nodes` tokens.
struct DraftedSequence {
  int64_t rows, before, position, steps, nodes;
};

// Drafts by a head that reads states (EAGLE): the tokens of sequences, the longest drafts first, one token after the other.
// The first step reads rows of one or several tokens of each sequence; each later step reads tokens and states that the
// step before has given. All numbers but weights and pages are of the layer's dtype.
//
// A draft is a chain, or with `parents` a tree (EAGLE-2, 2406.16858): each step goes on from the `width` tokens of the
// step before that are likeliest to be accepted, by the head, and of all tokens the likeliest are drafted. Each of
// the `width` branches has its last tokens in blocks of its own, which a step copies for the next.
struct DraftCall {
  // Four: of the target's states, what the head reads of them; of [embedding, state] of a row, what its layer reads; that
  // layer; and of what it gives, [state, logits]. A step sets all that they read and write but weights.
  const LayerCall* parts;
  const void* embeddings;    // [vocabulary, hidden], contiguous
  const int64_t* known;      // [tokens]: the ids of the tokens that the head knows; null if these are 0, 1, 2, ...
  const void* cos;           // [positions, table_size] of the layer's table_dtype, contiguous
  const void* sin;
  int64_t hidden, tokens, table_size;
  const DraftedSequence* sequences;  // [num_sequences]
  const int64_t* ids;        // [rows of the first step]
  const int64_t* states;     // [rows of the first step, pieces]: addresses of the target's states, of a part of a row each,
                             // or with is_own of the head's
  int64_t pieces;
  void* out;                 // [rows of the last step, hidden + tokens]: the states and logits of that; or null
  int64_t* drafted;          // [steps, sequences], or of trees [sequences, most_nodes]: a parent comes before its children
  int64_t num_sequences, steps, width;
  void* k_pages;             // as in LayerCall
  void* v_pages;
  void* k_scales;
  void* v_scales;
  const int32_t* block_table;  // [sequences, table_stride]
  int64_t table_stride, block_size;
  int32_t page_dtype, scale_dtype, threads, is_own, draw;
  float temperature, top_p;
  int64_t top_k;
  const int64_t* numbers;    // [steps, sequences]: as DrawCall has them, of 8 bytes each; null for LIKELIEST
  float* probabilities;      // [steps, sequences, vocabulary], zeros: what the tokens of a chain were drawn from; or null
  int64_t vocabulary;
  const int32_t* spare;      // [2, sequences, width, num_spare]: blocks for the last tokens of branches
  int64_t* parents;          // [sequences, most_nodes]: which of its tokens each one follows, -1 for none; null for chains
  int64_t* counts;           // [sequences]: the tokens of each tree
  int64_t most_nodes, num_spare;
};

void run_draft(const Kernels& kernels, const DraftCall& call);
