// The cross entropy of rows of logits, and its gradient, in float32. Each pass over a row reads it while it is in the cache.
#include "activation.h"
#include "any_dtype.h"
#include "cascade_sum.h"
#include "../kernels.h"
#include "../parallel.h"

namespace {

template <class T>
float largest(const T* x, int64_t size) {
  F most = set1(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) most = max(load_as(x + i), most);
  float found = reduce_max(most);
  for (; i < size; ++i) found = to_float(x[i]) > found ? to_float(x[i]) : found;
  return found;
}

template <class T>
void lose(const CrossEntropyCall& call, int64_t r) {
  const T* x = static_cast<const T*>(call.logits) + r * call.stride;
  const int64_t label = call.labels[r];
  call.losses[r] = call.largest[r] = call.sums[r] = 0.0f;
  if (label < 0) return;
  const float most = largest(x, call.size);
  const F all = set1(most);
  const auto exp_of = [&](F value) { return exp_as_torch(sub(value, all)); };
  const float sum = cascade_sum(
      call.size, [&](int64_t k) { return exp_of(load_as(x + k)); },
      [&](int64_t k) { return std::exp(to_float(x[k]) - most); });
  call.largest[r] = most;
  call.sums[r] = sum;
  call.losses[r] = std::log(sum) - (to_float(x[label]) - most);
}

template <class T>
void differentiate(const CrossEntropyCall& call, int64_t r) {
  const T* x = static_cast<const T*>(call.logits) + r * call.stride;
  T* out = static_cast<T*>(call.gradient) + r * call.gradient_stride;
  const int64_t label = call.labels[r];
  if (label < 0) {
    for (int64_t i = 0; i < call.size; i += LANES) store_upto(out + i, zero(), call.size - i);
    return;
  }
  const F all = set1(call.largest[r]), share = set1(call.factor / call.sums[r]);
  const float own = std::exp(to_float(x[label]) - call.largest[r]) / call.sums[r] - 1.0f;  // before out, perhaps x, is written
  for (int64_t i = 0; i < call.size; i += LANES)
    store_upto(out + i, mul(exp_as_torch(sub(load_upto(x + i, call.size - i), all)), share), call.size - i);
  store_upto(out + label, set1(own * call.factor), 1);
}

}  // namespace

void HFA_NAMESPACE::cross_entropy(const CrossEntropyCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t part = at_least(1, 16384 / at_least(1, call.size));  // rows of a task
    parallel_for(ceil_div(call.rows, part), call.threads, [&](int64_t task) {
      for (int64_t r = task * part; r < at_most(call.rows, (task + 1) * part); ++r)
        if (call.gradient) differentiate<T>(call, r);
        else lose<T>(call, r);
    });
  });
}
