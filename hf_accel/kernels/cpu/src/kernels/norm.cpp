// RMSNorm over the last dimension in float32. It rounds at the same points as transformers' modules.
#include <cmath>

#include "../parallel.h"
#include "any_dtype.h"
#include "cascade_sum.h"
#include "../kernels.h"

namespace {

template <class T>
void norm_row(const NormCall& call, int64_t r) {
  const T* x = static_cast<const T*>(call.x) + r * call.x_stride;
  const float squares = cascade_sum(
      call.size, [&](int64_t k) { const F value = load_as(x + k); return mul(value, value); },
      [&](int64_t k) { const float value = to_float(x[k]); return value * value; });
  const F scale = set1(1.0f / std::sqrt(squares / static_cast<float>(call.size) + call.eps)), offset = set1(call.offset);
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int n = static_cast<int>(at_most(LANES, call.size - i));
    F value = mul(load_upto(x + i, n), scale);
    if (call.round_first) value = round_as(value, x);
    value = mul(value, add(offset, load_dtype(call.weight, call.weight_dtype, i, n)));
    store_dtype(call.out, call.out_dtype, r * call.size + i, value, n);
  }
}

}  // namespace

void HFA_NAMESPACE::norm(const NormCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t part = at_least(1, 16384 / at_least(1, call.size));  // rows of a task
    parallel_for(ceil_div(call.rows, part), call.threads, [&](int64_t task) {
      for (int64_t r = task * part; r < at_most(call.rows, (task + 1) * part); ++r)
        norm_row<std::remove_pointer_t<decltype(null)>>(call, r);
    });
  });
}
