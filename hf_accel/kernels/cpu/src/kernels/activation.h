// Activation functions on vectors of floats.
#pragma once

#include "../linear.h"
#include "../simd/simd.h"

namespace {

inline F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// x * Phi(x) by the tanh formula: (1 + tanh(y)) / 2 = sigmoid(2 y), y = sqrt(2 / pi) * (x + 0.044715 x^3)
inline F gelu_tanh(F x) {
  const F cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  return mul(x, sigmoid(mul(add(x, cubic), set1(1.5957691216057308f))));
}

// x * Phi(x) = x * erfc(-x / sqrt(2)) / 2: TODO
inline F gelu(F x) { return gelu_tanh(x); }

// act(gate) * up by an Epilogue other than NONE
inline F gated(int32_t epilogue, F gate, F up) {
  switch (epilogue) {
    case SILU_MUL: return mul(silu(gate), up);
    case GELU_MUL: return mul(gelu(gate), up);
    default: return mul(gelu_tanh(gate), up);
  }
}

}  // namespace
