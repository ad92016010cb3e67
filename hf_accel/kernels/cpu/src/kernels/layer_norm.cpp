// LayerNorm (Ba, Kiros and Hinton 2016, arXiv 1607.06450) over the last dimension in float32, of a sum if there is one.
// The mean comes first, and then the mean of the squared distances from it, so that a mean far from 0 costs no digits.
#include <cmath>

#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
#include "cascade_sum.h"

namespace {

// Converts a row, or the sum of two rows, to floats. What a sum loses by its dtype, its norm loses too.
template <class T>
void read_row(const LayerNormCall& call, int64_t r, float* values) {
  const T* x = static_cast<const T*>(call.x) + r * call.x_stride;
  const T* y = call.y ? static_cast<const T*>(call.y) + r * call.y_stride : nullptr;
  T* sum = call.sum ? static_cast<T*>(call.sum) + r * call.sum_stride : nullptr;
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int64_t n = call.size - i;
    F value = load_upto(x + i, n);
    if (y) value = round_as(add(value, load_upto(y + i, n)), x);
    if (sum) store_upto(sum + i, value, n);
    store_upto(values + i, value, n);
  }
}

// The next factors of a row. A sum of weight and offset is rounded, as code rounds it that adds before it calls the norm.
inline F factors(const LayerNormCall& call, int64_t i, int n) {
  F weight = load_dtype(call.weight, call.weight_dtype, i, n);
  if (call.offset != 0.0f)
    for_dtype(call.weight_dtype, [&](auto* null) { weight = round_as(add(weight, set1(call.offset)), null); });
  return weight;
}

template <class T>
void layer_norm_row(const LayerNormCall& call, int64_t r) {
  struct Values;
  float* const values = static_cast<float*>(scratch<Values>(static_cast<size_t>(call.size) * sizeof(float)));
  read_row<T>(call, r, values);
  const float size = static_cast<float>(call.size);
  const float center = cascade_sum(call.size, [&](int64_t k) { return load(values + k); },
                                   [&](int64_t k) { return values[k]; }) / size;
  const F mean = set1(center);
  const float squares = cascade_sum(
      call.size, [&](int64_t k) { const F value = sub(load(values + k), mean); return mul(value, value); },
      [&](int64_t k) { const float value = values[k] - center; return value * value; });
  const F scale = set1(1.0f / std::sqrt(squares / size + call.eps));
  T* out = static_cast<T*>(call.out) + r * call.out_stride;
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int n = static_cast<int>(at_most(LANES, call.size - i));
    F value = mul(sub(load_upto(values + i, n), mean), scale);
    if (call.weight) value = mul(value, factors(call, i, n));
    if (call.bias) value = add(value, load_dtype(call.bias, call.bias_dtype, i, n));
    store_upto(out + i, value, n);
  }
}

}  // namespace

void HFA_NAMESPACE::layer_norm(const LayerNormCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t part = at_least(1, 16384 / at_least(1, call.size));  // rows of a task
    parallel_for(ceil_div(call.rows, part), call.threads, [&](int64_t task) {
      for (int64_t r = task * part; r < at_most(call.rows, (task + 1) * part); ++r)
        layer_norm_row<std::remove_pointer_t<decltype(null)>>(call, r);
    });
  });
}
