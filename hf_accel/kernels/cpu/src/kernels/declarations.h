// What each instruction set defines. HFA_NAMESPACE and HFA_TABLE are its names, given by the build.
#pragma once

#include "../kernels.h"

namespace HFA_NAMESPACE {

void integer_linear(const Linear&, const LinearCall&);
void pack(const PackCall&);
void unpack(const PackCall&);
void quantize_weight(QuantizeCall&);
void float_linear(const Linear&, const LinearCall&);
void norm(const NormCall&);
void rope(const RopeCall&);
void gated(const GatedCall&);
void argmax(const VocabularyCall&);
void topk(const VocabularyCall&);
void attention(const AttentionCall&);
void write_pages(const WriteCall&);

}  // namespace HFA_NAMESPACE
