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

// erfc(x) for x >= 0, relative error about 1e-6: Cephes erfcf, one branch below 1, 2, and beyond.
inline F polynomial(F x, const float* coefficients, int count) {
  F p = set1(coefficients[0]);
  for (int i = 1; i < count; ++i) p = fmadd(p, x, set1(coefficients[i]));
  return p;
}
inline F erfc_of_positive(F x) {
  static const float small[] = {7.853861353153693e-5f, -8.010193625184903e-4f, 5.188327685732524e-3f,
                                -2.685381193529856e-2f, 1.128358514861418e-1f, -3.761262582423300e-1f,
                                1.128379165726710e+0f};
  static const float middle[] = {2.326819970068386e-2f, -1.387039388740657e-1f, 3.687424674597105e-1f,
                                 -5.824733027278666e-1f, 6.210004621745983e-1f, -4.944515323274145e-1f,
                                 3.404879937665872e-1f, -2.741127028184656e-1f, 5.638259427386472e-1f};
  static const float large[] = {-1.047766399936249e+1f, 1.297719955372516e+1f, -7.495518717768503e+0f,
                                2.921019019210786e+0f, -1.015265279202700e+0f, 4.218463358204948e-1f,
                                -2.820767439740514e-1f, 5.641895067754075e-1f};
  const F square = mul(x, x), near = sub(set1(1.0f), mul(x, polynomial(square, small, 7)));
  const F inverse = div(set1(1.0f), x), y = mul(inverse, inverse);
  const F tail = select_below(x, 2.0f, polynomial(y, middle, 9), polynomial(y, large, 8));
  return select_below(x, 1.0f, near, mul(mul(exp(sub(zero(), square)), inverse), tail));
}

// x * Phi(x), Phi(x) = erfc(-x / sqrt(2)) / 2, or 1 less the tail on the other side
inline F gelu(F x) {
  const F tail = mul(set1(0.5f), erfc_of_positive(mul(abs(x), set1(0.70710678118654752f))));
  return keep_nan(mul(x, select_below(x, 0.0f, tail, sub(set1(1.0f), tail))), x);
}

// act(gate) * up by an Epilogue other than NONE
inline F gated(int32_t epilogue, F gate, F up) {
  switch (epilogue) {
    case SILU_MUL: return mul(silu(gate), up);
    case GELU_MUL: return mul(gelu(gate), up);
    default: return mul(gelu_tanh(gate), up);
  }
}

}  // namespace
