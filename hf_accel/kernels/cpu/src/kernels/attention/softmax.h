// Converts scores to softmax weights, and merges partial results.
#pragma once

#include <cfloat>
#include <cmath>

#include "pack.h"

namespace {

// The partial result of a row over some keys. Weights are exp(score - largest), and `total` is their sum.
// Lower scores count as -FLT_MAX, so that the difference of two maxima is never NaN.
struct Partial {
  float largest = -FLT_MAX, total = 0.0f;
};

inline F tanh(F x) {  // absolute error below 1e-7
  const F e = exp(mul(min(max(x, set1(-20.0f)), set1(20.0f)), set1(2.0f)));
  return keep_nan(sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))), x);
}

inline F keep_lanes(F x, F other, int64_t first, int64_t last) {  // lanes [first, last) of x, other lanes of `other`
  return select_range(x, other, static_cast<int>(at_least(first, 0)), static_cast<int>(at_most(last, LANES)));
}

// Loads lanes [first, last) of the vector at p, and touches no other memory.
inline F load_lanes(const float* p, int64_t first, int64_t last) {
  alignas(64) float lanes[LANES] = {};
  for (int64_t i = at_least(first, 0); i < at_most(last, LANES); ++i) lanes[i] = p[i];
  return load(lanes);
}

// Converts the scores of a row to weights in place. `seen`: the keys that the row sees, as indices in the split. Other
// weights of `group` become 0; it begins and ends at a multiple of LANES. bias: what is added to the scores, times `gate`,
// if there is one; attention without it is compiled without it.
template <class W, bool HAS_BIAS>
inline Partial to_weights(const AttentionCall& c, const KeyRows& rows, Range seen, Range group,
                          [[maybe_unused]] const float* bias, [[maybe_unused]] float gate, float* scores) {
  Partial part;
  auto* const weights = reinterpret_cast<typename W::Number*>(scores);
  const int64_t begin = seen.first / LANES * LANES;
  const F scale = set1(c.scale), cap = set1(c.softcap), inverse_cap = set1(c.softcap ? 1.0f / c.softcap : 0.0f);
  F largest = set1(-FLT_MAX);
  for (int64_t j = begin; j < seen.last; j += LANES) {
    F x = load(scores + j);
    if (c.k_scales) x = mul(x, load(rows.k_scales + j));
    x = mul(x, scale);
    if (c.softcap != 0.0f) x = mul(tanh(mul(x, inverse_cap)), cap);
    const bool partly = j < seen.first || j + LANES > seen.last;
    if constexpr (HAS_BIAS) {  // a gate of 1 changes no bit
      const F added = partly ? load_lanes(bias + j, seen.first - j, seen.last - j) : load(bias + j);
      x = fmadd(added, set1(gate), x);
    }
    if (partly) x = keep_lanes(x, set1(-FLT_MAX), seen.first - j, seen.last - j);
    store(scores + j, x);
    largest = max(x, largest);
  }
  part.largest = reduce_max(largest);
  for (int64_t j = group.first; j < begin; j += LANES) W::store_weights(weights + j, zero());
  const F shift = set1(part.largest);
  F total = zero();
  for (int64_t j = begin; j < seen.last; j += LANES) {
    F x = exp_nonpositive(sub(load(scores + j), shift));
    const bool partly = j < seen.first || j + LANES > seen.last;
    if (partly) x = keep_lanes(x, zero(), seen.first - j, seen.last - j);
    total = add(total, x);
    if (c.v_scales) {
      x = mul(x, load(rows.v_scales + j));
      if (partly) x = keep_lanes(x, zero(), seen.first - j, seen.last - j);
    }
    W::store_weights(weights + j, x);
  }
  part.total = reduce_add(total);
  for (int64_t j = ceil_div(seen.last, LANES) * LANES; j < group.last; j += LANES)
    W::store_weights(weights + j, zero());
  return part;
}

// Adds a partial result, `part` and `part_sums`, to `state` and `sums`.
inline void merge(Partial& state, float* sums, const Partial& part, const float* part_sums, int64_t count) {
  const float largest = part.largest > state.largest ? part.largest : state.largest;
  alignas(64) float lanes[LANES];
  store(lanes, exp(set1(state.largest - largest)));
  const float old_share = lanes[0];
  store(lanes, exp(set1(part.largest - largest)));
  const float new_share = lanes[0];
  state.largest = largest;
  state.total = state.total * old_share + part.total * new_share;
  const F a = set1(old_share), b = set1(new_share);
  for (int64_t i = 0; i < count; i += LANES)
    store(sums + i, add(mul(load(sums + i), a), mul(load(part_sums + i), b)));
}

template <class T>
inline void store_row(T* out, const float* sums, F total, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const F x = div(load(sums + i), total);
    if (count - i >= LANES) store_as(out + i, x);
    else store_as_n(out + i, x, static_cast<int>(count - i));
  }
}

// Writes the output and lse of query `n` and head `h`. The sink is added to the denominator. A row without keys is 0.
inline void finish_row(const AttentionCall& c, int64_t n, int64_t h, const Partial& state, const float* sums) {
  float largest = state.largest, total = state.total, share = 1.0f;
  if (c.sinks) {
    const float sink = load_scalar(c.sinks, c.sink_dtype, h);
    largest = sink > state.largest ? sink : state.largest;
    alignas(64) float lanes[LANES];
    store(lanes, exp(set1(state.largest - largest)));
    share = lanes[0];
    store(lanes, exp(set1(sink - largest)));
    total = state.total * share + lanes[0];
  }
  const int64_t row = n * c.heads + h, at = row * c.value_dim;
  // A sink reduces the weights of all keys by the factor `share`; without one it is 1. share and total are never both
  // 0.
  const F divisor = set1(state.total == 0.0f ? INFINITY : total / share);
  switch (c.q_dtype) {
    case BF16: store_row(static_cast<Bf16*>(c.out) + at, sums, divisor, c.value_dim); break;
    case F16: store_row(static_cast<F16_*>(c.out) + at, sums, divisor, c.value_dim); break;
    default: store_row(static_cast<float*>(c.out) + at, sums, divisor, c.value_dim);
  }
  if (c.lse) c.lse[row] = total == 0.0f ? -INFINITY : largest + std::log(total);
}

}  // namespace
