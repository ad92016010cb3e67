// Activation functions on vectors of floats.
#pragma once

#include <cmath>

#include "../kernels.h"
#include "../simd/simd.h"

namespace {

// exp(r) for |r| <= log(2) / 2.
inline F exp_of_rest(F r) {
  F p = set1(0.000198527617612853646278381f);
  p = fmadd(p, r, set1(0.00139304355252534151077271f));
  p = fmadd(p, r, set1(0.00833336077630519866943359f));
  p = fmadd(p, r, set1(0.0416664853692054748535156f));
  p = fmadd(p, r, set1(0.166666671633720397949219f));
  p = fmadd(p, r, set1(0.5f));
  return add(set1(1.0f), fmadd(mul(r, r), p, r));
}

constexpr float LOG2_E = 1.44269504088896341f, LN2_HIGH = 0.693145751953125f, LN2_LOW = 1.428606765330187045e-6f;

// exp with the algorithm of torch's vectorized code (Sleef by Shibata, expf within 1 ulp), so that silu has torch's
// bits.
inline F exp_as_torch(F x) {
  const F n = round(mul(x, set1(LOG2_E)));
  const F r = fmadd(n, set1(-LN2_LOW), fmadd(n, set1(-LN2_HIGH), x)), p = exp_of_rest(r);
  const F bounded = min(max(n, set1(-160.0f)), set1(160.0f));  // beyond these, the result is 0 or infinity
  const F usual = select_below(x, 100.0f, scale_by_power_of_two(p, bounded), set1(INFINITY));
  return keep_nan(select_below(x, -104.0f, zero(), usual), x);
}

inline F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp_as_torch(sub(zero(), x)))); }
inline F silu(F x) { return div(x, add(set1(1.0f), exp_as_torch(sub(zero(), x)))); }

// x * sigmoid(1.702 x), rounded after each step as transformers does it (Hendrycks and Gimpel 2016, arXiv 1606.08415).
inline F gelu_quick(F x) { return mul(x, sigmoid(mul(x, set1(1.702f)))); }

inline F relu(F x) { return select_below(x, 0.0f, zero(), x); }

// The square of relu(x) (So and others 2021, arXiv 2109.08668).
inline F relu_squared(F x) { return mul(relu(x), relu(x)); }

// x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x^3). tanh(|y|) is computed as 1 - 2 e / (1 + e) with
// e = exp(-2 |y|), whose result is rounded only once if it is near 1.
inline F gelu_tanh(F x) {
  const F cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  const F y = mul(add(x, cubic), set1(0.7978845608028654f));
  const F e = exp_as_torch(mul(set1(-2.0f), abs(y))), rest = div(add(e, e), add(set1(1.0f), e));
  const F tanh = select_below(y, 0.0f, sub(rest, set1(1.0f)), sub(set1(1.0f), rest));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh));
}

// log2(erfc(a / sqrt(2)) / 2) + 1 for a >= 0: a minimax polynomial on [0, 6], where its error is below 3e-7 up to 3.5 and
// grows to 2e-5. It falls on behind 6, and is below -150 from 12.2 on.
inline F log2_of_tail(F a) {
  F p = set1(-1.6594962e-8f);
  p = fmadd(p, a, set1(5.3492079e-7f));
  p = fmadd(p, a, set1(-7.3686183e-6f));
  p = fmadd(p, a, set1(5.4647619e-5f));
  p = fmadd(p, a, set1(-2.0121942e-4f));
  p = fmadd(p, a, set1(-1.7078093e-4f));
  p = fmadd(p, a, set1(7.1670236e-3f));
  p = fmadd(p, a, set1(-5.2598443e-2f));
  p = fmadd(p, a, set1(-4.5916691e-1f));
  p = fmadd(p, a, set1(-1.1511104f));
  return mul(p, a);
}

// 2^r / 2 for |r| <= 1 / 2 with a relative error below 1e-7 before rounding.
inline F half_exp2_of_rest(F r) {
  F p = set1(6.6323637e-4f);
  p = fmadd(p, r, set1(4.8357565e-3f));
  p = fmadd(p, r, set1(2.7753668e-2f));
  p = fmadd(p, r, set1(1.2011121e-1f));
  p = fmadd(p, r, set1(3.4657350e-1f));
  return fmadd(p, r, set1(0.5f));
}

// x / 2 * (1 + erf(x / sqrt(2))). 1 + erf would lose the digits of a negative x. So it is -tail, or x - tail for a
// positive x, with tail = |x| / 2 * erfc(|x| / sqrt(2)), whose error is below 6e-8, and relatively below 2e-6 up to 3.5.
inline F gelu(F x) {
  const F a = min(abs(x), set1(12.5f));  // there the tail is 0
  const F exponent = log2_of_tail(a), n = round(exponent);
  const F tail = scale_by_power_of_two(mul(half_exp2_of_rest(sub(exponent, n)), a), n);
  return sub(select_below(x, 0.0f, zero(), x), tail);
}

// `kind` is an Activation.
inline F activated(int32_t kind, F x) {
  switch (kind) {
    case NONE: return x;
    case SILU: return silu(x);
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU_QUICK: return gelu_quick(x);
    case SIGMOID: return sigmoid(x);
    case RELU_SQUARED: return relu_squared(x);
    default: return relu(x);
  }
}

inline bool has_gate(const Linear& linear) { return linear.epilogue != NONE && linear.epilogue <= GELU_TANH_MUL; }

// act(gate) * up, where `epilogue` is an Epilogue other than NONE.
inline F gated(int32_t epilogue, F gate, F up) {
  switch (epilogue) {
    case SILU_MUL: return mul(silu(gate), up);
    case GELU_MUL: return mul(gelu(gate), up);
    default: return mul(gelu_tanh(gate), up);
  }
}

}  // namespace
