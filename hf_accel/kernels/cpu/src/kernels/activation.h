// Activation functions on vectors of floats.
#pragma once

#include "../simd/simd.h"

namespace {

inline F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// x * Phi(x) by the tanh formula: (1 + tanh(y)) / 2 = sigmoid(2 y), y = sqrt(2 / pi) * (x + 0.044715 x^3)
inline F gelu_tanh(F x) {
  const F cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  return mul(x, sigmoid(mul(add(x, cubic), set1(1.5957691216057308f))));
}

}  // namespace
