// Activation functions over rows, in float32; the result is rounded once.
#include "../kernels.h"
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"

namespace {

template <class T>
void activate_row(const ActivateCall& call, int64_t r) {
  const T* x = static_cast<const T*>(call.x) + r * call.x_stride;
  const T* y = static_cast<const T*>(call.y) + r * call.y_stride;
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int n = static_cast<int>(at_most(LANES, call.size - i));
    const F result = activated(call.kind, load_upto(x + i, n));
    store_dtype(call.out, call.out_dtype, r * call.out_stride + i,
                call.y ? mul(round_as(result, x), load_upto(y + i, n)) : result, n);
  }
}

}  // namespace

void HFA_NAMESPACE::activate(const ActivateCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t part = at_least(1, 16384 / at_least(1, call.size));  // rows of a task
    parallel_for(ceil_div(call.rows, part), call.threads, [&](int64_t task) {
      for (int64_t r = task * part; r < at_most(call.rows, (task + 1) * part); ++r)
        activate_row<std::remove_pointer_t<decltype(null)>>(call, r);
    });
  });
}
