// A whole draft in one call; layer.cpp has its code.
#pragma once

#include "kernels.h"

// Drafts by a head that reads states (EAGLE): the tokens of `layer.sequences` sequences, `steps` one after the other. The
// first step reads layer.tokens rows, of one or several tokens of each sequence; each later step reads the token and the
// state that the step before has given. All numbers but weights and pages are of layer.dtype.
struct DraftCall {
  LayerCall fuse;   // of [embedding, state] of a row, what the layer reads
  LayerCall layer;  // `slots` has those of the rows of all steps; kv_len is that of the first step
  LayerCall head;   // of what the layer gives, [state, logits]; `out` has those of the last step: [sequences, hidden + tokens]
  const void* embeddings;    // [vocabulary, hidden], contiguous
  const void* cos;           // [positions, table_size] of layer.table_dtype, contiguous
  const void* sin;
  const int64_t* positions;  // [rows of all steps]
  const int64_t* ids;        // [rows of the first step]
  const void* states;        // [rows of the first step, hidden]
  const int64_t* ends;       // [sequences]: the last row of each in the first step
  const int64_t* going;      // [steps]: how many of the sequences, the first ones, a step drafts for
  const int32_t* singles;    // [sequences + 1]: 0, 1, 2, ...
  const int64_t* known;      // [tokens]: the ids of the tokens that the head knows; null if these are 0, 1, 2, ...
  int64_t* drafted;          // [steps, sequences]
  int64_t state_stride, table_size, hidden, tokens, steps;
};

void run_draft(const Kernels& kernels, const DraftCall& call);
