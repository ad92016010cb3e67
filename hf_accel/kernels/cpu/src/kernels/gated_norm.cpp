// The RMSNorm behind a recurrent layer and its gate, in float32. Without a weight there is the gate alone.
//   y = x / sqrt(mean(x^2) + eps) * weight * act(gate), or the norm of x * act(gate)
// A row's numbers do not depend on the others.
#include <cmath>

#include "../kernels.h"
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"
#include "cascade_sum.h"

namespace {

// A part of a row. values: room for its numbers.
template <class T>
void part(const GatedNormCall& c, int64_t row, int64_t number, float* values) {
  const int64_t start = number * c.size;
  const float* x = c.x + row * c.x_stride + start;
  const T* gate = static_cast<const T*>(c.gate) + row * c.gate_stride + start;
  const auto gated = [&](F value, int64_t i) {
    return mul(activated(c.activation, load_upto(gate + i, c.size - i)), value);
  };
  const bool gate_first = !c.weight || c.gate_first;
  for (int64_t i = 0; i < c.size; i += LANES) {
    F value = load_upto(x + i, c.size - i);
    if (c.rounds) value = round_as(value, gate);
    store_upto(values + i, gate_first ? gated(value, i) : value, c.size - i);
  }
  F scale = set1(1.0f);
  if (c.weight) {
    const float squares = cascade_sum(
        c.size, [&](int64_t k) { const F value = load(values + k); return mul(value, value); },
        [&](int64_t k) { return values[k] * values[k]; });
    scale = set1(1.0f / std::sqrt(squares / static_cast<float>(c.size) + c.eps));
  }
  for (int64_t i = 0; i < c.size; i += LANES) {
    const int n = static_cast<int>(at_most(LANES, c.size - i));
    F value = load_upto(values + i, n);
    if (c.weight) {
      value = mul(value, scale);
      if (c.rounds) value = round_as(value, gate);
      value = mul(value, load_dtype(c.weight, c.weight_dtype, number * c.weight_stride + i, n));
      if (!gate_first) value = gated(value, i);
    }
    store_dtype(c.out, c.out_dtype, row * c.out_stride + start + i, value, n);
  }
}

}  // namespace

void HFA_NAMESPACE::gated_norm(const GatedNormCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t parts = call.rows * call.parts, many = at_least(1, 16384 / at_least(1, call.size));  // of a task
    parallel_for(ceil_div(parts, many), call.threads, [&](int64_t task) {
      struct Own;
      float* values = static_cast<float*>(scratch<Own>(static_cast<size_t>(call.size) * sizeof(float)));
      for (int64_t p = task * many; p < at_most(parts, (task + 1) * many); ++p)
        part<std::remove_pointer_t<decltype(null)>>(call, p / call.parts, p % call.parts, values);
    });
  });
}
