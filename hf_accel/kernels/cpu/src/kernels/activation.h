// Activation functions on vectors of floats.
#pragma once

#include <cmath>

#include "../kernels.h"
#include "../simd/simd.h"

namespace {

// exp with the algorithm of torch's vectorized code (Sleef by Shibata, expf within 1 ulp), so that silu has torch's
// bits.
inline F exp_as_torch(F x) {
  const F n = round(mul(x, set1(1.44269504088896341f)));
  F r = fmadd(n, set1(-0.693145751953125f), x);
  r = fmadd(n, set1(-1.428606765330187045e-6f), r);
  F p = set1(0.000198527617612853646278381f);
  p = fmadd(p, r, set1(0.00139304355252534151077271f));
  p = fmadd(p, r, set1(0.00833336077630519866943359f));
  p = fmadd(p, r, set1(0.0416664853692054748535156f));
  p = fmadd(p, r, set1(0.166666671633720397949219f));
  p = fmadd(p, r, set1(0.5f));
  p = add(set1(1.0f), fmadd(mul(r, r), p, r));
  const F bounded = min(max(n, set1(-160.0f)), set1(160.0f));  // beyond these, the result is 0 or infinity
  const F usual = select_below(x, 100.0f, scale_by_power_of_two(p, bounded), set1(INFINITY));
  return keep_nan(select_below(x, -104.0f, zero(), usual), x);
}

inline F silu(F x) { return div(x, add(set1(1.0f), exp_as_torch(sub(zero(), x)))); }

// x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x^3). tanh(|y|) is computed as 1 - 2 e / (1 + e) with
// e = exp(-2 |y|), whose result is rounded only once if it is near 1.
inline F gelu_tanh(F x) {
  const F cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  const F y = mul(add(x, cubic), set1(0.7978845608028654f));
  const F e = exp_as_torch(mul(set1(-2.0f), abs(y))), rest = div(add(e, e), add(set1(1.0f), e));
  const F tanh = select_below(y, 0.0f, sub(rest, set1(1.0f)), sub(set1(1.0f), rest));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh));
}

// erf with an absolute error below 2e-7, by Abramowitz and Stegun 7.1.26, as in torch.
inline F erf(F x) {
  const F magnitude = abs(x), t = div(set1(1.0f), fmadd(set1(0.3275911f), magnitude, set1(1.0f)));
  F p = set1(1.061405429f);
  p = fmadd(p, t, set1(-1.453152027f));
  p = fmadd(p, t, set1(1.421413741f));
  p = fmadd(p, t, set1(-0.284496736f));
  p = fmadd(p, t, set1(0.254829592f));
  const F falling = sub(zero(), exp_as_torch(sub(zero(), mul(x, x))));
  const F positive = fmadd(mul(falling, t), p, set1(1.0f));
  return select_below(x, 0.0f, sub(zero(), positive), positive);
}

// x / 2 * (1 + erf(x / sqrt(2))), as in torch.
inline F gelu(F x) {
  return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.70710678118654752f)))));
}

// act(gate) * up, where `epilogue` is an Epilogue other than NONE.
inline F gated(int32_t epilogue, F gate, F up) {
  switch (epilogue) {
    case SILU_MUL: return mul(silu(gate), up);
    case GELU_MUL: return mul(gelu(gate), up);
    default: return mul(gelu_tanh(gate), up);
  }
}

}  // namespace
