// Convolutions of each channel over the rows of sequences, as in a Conformer (Gulati et al. 2020, arXiv 2005.08100). Sums
// are in float32 and in the order of the rows; each step is rounded to the dtype of the inputs.
#include "../kernels.h"
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"

namespace {

constexpr int64_t PART = 64;  // channels of a task

// The norm of a vector of channels: x * factor + rest.
template <class T>
void norm_of(const RowNorm& norm, int64_t channel, int64_t n, F& factor, F& rest) {
  const auto at = [&](const void* p) { return load_upto(static_cast<const T*>(p) + channel, n); };
  factor = div(at(norm.weight), sqrt(add(at(norm.variance), set1(norm.eps))));
  rest = sub(at(norm.bias), mul(at(norm.mean), factor));
}

// A vector of channels of a sequence. Its inputs and weights are copied, so that they stand side by side.
template <class T>
void channels(const RowConvCall& c, int64_t sequence, int64_t channel, float* weights, float* inputs) {
  const int64_t n = at_most(c.channels - channel, LANES), first = c.starts[sequence], rows = c.starts[sequence + 1] - first;
  const int64_t read = c.lengths ? c.lengths[sequence] : rows;
  const T* x = static_cast<const T*>(c.x) + first * c.x_stride + channel;
  for (int64_t i = 0; i < rows + c.length - 1; ++i) {
    const int64_t row = i - c.before;
    store(inputs + i * LANES, row >= 0 && row < read ? load_upto(x + row * c.x_stride, n) : zero());
  }
  const T* weight = static_cast<const T*>(c.weight) + channel * c.length;
  for (int64_t j = 0; j < c.length; ++j)
    for (int64_t lane = 0; lane < LANES; ++lane)
      weights[j * LANES + lane] = lane < n ? to_float(weight[lane * c.length + j]) : 0.0f;
  const F bias = c.bias ? load_upto(static_cast<const T*>(c.bias) + channel, n) : zero();
  F factor = zero(), rest = zero();
  if (c.norm) norm_of<T>(*c.norm, channel, n, factor, rest);
  T* out = static_cast<T*>(c.out) + first * c.out_stride + channel;
  for (int64_t row = 0; row < rows; ++row) {
    F sum = bias;
    for (int64_t j = 0; j < c.length; ++j) sum = fmadd(load(inputs + (row + j) * LANES), load(weights + j * LANES), sum);
    if (c.norm) sum = fmadd(round_as(sum, x), factor, rest);
    if (c.activation >= 0) sum = activated(c.activation, round_as(sum, x));
    store_upto(out + row * c.out_stride, sum, n);
  }
}

}  // namespace

void HFA_NAMESPACE::row_conv(const RowConvCall& call) {
  const int64_t parts = ceil_div(call.channels, PART);
  int64_t longest = 0;
  for (int64_t s = 0; s < call.sequences; ++s) longest = at_least(longest, call.starts[s + 1] - call.starts[s]);
  for_dtype(call.dtype, [&](auto* null) {
    parallel_for(call.sequences * parts, call.threads, [&](int64_t task) {
      struct Weights; struct Inputs;
      const size_t vector = LANES * sizeof(float);
      float* weights = static_cast<float*>(scratch<Weights>(static_cast<size_t>(call.length) * vector));
      float* inputs = static_cast<float*>(scratch<Inputs>(static_cast<size_t>(longest + call.length) * vector));
      const int64_t begin = task % parts * PART, end = at_most(call.channels, begin + PART);
      for (int64_t channel = begin; channel < end; channel += LANES)
        channels<std::remove_pointer_t<decltype(null)>>(call, task / parts, channel, weights, inputs);
    });
  });
}
