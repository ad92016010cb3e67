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

// x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x^3). tanh(|y|) is computed as 1 - 2 e / (1 + e) with
// e = exp(-2 |y|), whose result is rounded only once if it is near 1.
inline F gelu_tanh(F x) {
  const F cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  const F y = mul(add(x, cubic), set1(0.7978845608028654f));
  const F e = exp_as_torch(mul(set1(-2.0f), abs(y))), rest = div(add(e, e), add(set1(1.0f), e));
  const F tanh = select_below(y, 0.0f, sub(rest, set1(1.0f)), sub(set1(1.0f), rest));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh));
}

// exp(a^2 / 2) * erfc(a / sqrt(2)) / 2 for 0 <= a <= 15, with a relative error below 5e-8 before rounding: a minimax
// polynomial in (a - 3) / (a + 3), over a + 3. The variable is that of Shepherd and Laframboise (1981,
// "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x"); with it the terms fall quickly.
inline F scaled_tail(F a) {
  const F inverse = reciprocal(add(a, set1(3.0f))), t = fmadd(inverse, set1(-6.0f), set1(1.0f));
  F p = set1(-2.6524390e-4f);
  p = fmadd(p, t, set1(-9.0101955e-4f));
  p = fmadd(p, t, set1(1.0755393e-3f));
  p = fmadd(p, t, set1(6.9223475e-3f));
  p = fmadd(p, t, set1(-1.0480012e-2f));
  p = fmadd(p, t, set1(-4.7255777e-2f));
  p = fmadd(p, t, set1(2.3001938e-1f));
  p = fmadd(p, t, set1(-5.0933230e-1f));
  p = fmadd(p, t, set1(7.2908366e-1f));
  return mul(p, inverse);
}

// exp(r) for |r| <= log(2) / 2 with a relative error below 2e-9 before rounding: fewer steps than exp_of_rest.
inline F short_exp_of_rest(F r) {
  F p = set1(1.3836795e-3f);
  p = fmadd(p, r, set1(8.3748568e-3f));
  p = fmadd(p, r, set1(4.1668229e-2f));
  p = fmadd(p, r, set1(1.6666420e-1f));
  p = fmadd(p, r, set1(4.9999991e-1f));
  p = fmadd(p, r, set1(1.0f));
  return fmadd(p, r, set1(1.0f));
}

// -a^2 / 2 for 0 <= a <= 15: rounded, and exactly, as high + low.
struct HalfSquare {
  F rounded, high, low;
};

inline HalfSquare half_square(F a) {
#if defined(HFA_AVX2) || defined(HFA_NEON)
  const F half = mul(a, set1(-0.5f));
  const F high = mul(a, half);
  return {high, high, fmadd(a, half, sub(zero(), high))};
#else  // without a fused multiply-add, `high` has few bits and is exact
  const F shift = set1(0x1.8p19f), coarse = sub(add(a, shift), shift);  // to a sixteenth: the sum has no finer bits
  const F high = mul(mul(coarse, coarse), set1(-0.5f));
  const F low = mul(mul(sub(a, coarse), add(a, coarse)), set1(-0.5f));
  return {add(high, low), high, low};
#endif
}

// x / 2 * (1 + erf(x / sqrt(2))) within 7 ulps. 1 + erf would lose the digits of a negative x. So it is -tail, or
// x - tail for a positive x, with tail = |x| / 2 * erfc(|x| / sqrt(2)).
inline F gelu(F x) {
  const F a = min(abs(x), set1(15.0f));  // there the tail is 0
  const HalfSquare exponent = half_square(a);
  const F n = round(mul(exponent.rounded, set1(LOG2_E)));
  const F r = fmadd(n, set1(-LN2_LOW), add(fmadd(n, set1(-LN2_HIGH), exponent.high), exponent.low));
  const F tail = scale_by_power_of_two(mul(short_exp_of_rest(r), mul(scaled_tail(a), a)), n);
  return sub(select_below(x, 0.0f, zero(), x), tail);
}

// `kind` is an Activation.
inline F activated(int32_t kind, F x) {
  switch (kind) {
    case SILU: return silu(x);
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU_QUICK: return gelu_quick(x);
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
