// Short causal convolutions with an activation. Sums are in float32 and in the order of the tokens, whatever else is
// computed; the sum and the activation are each rounded to the dtype of the inputs.
#include "../kernels.h"
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"
#include "channel_weights.h"

namespace {

constexpr int64_t PART = 256;  // channels of a task

// A vector of channels of a sequence's tokens. weights: room for `length` vectors and one more.
template <class T>
void channels(const ConvCall& c, int64_t sequence, int64_t channel, float* weights) {
  const int64_t n = at_most(c.channels - channel, LANES), first = c.starts[sequence], kept = c.length - 1;
  const T* x = static_cast<const T*>(c.x) + channel;
  const auto page = [&](int64_t slot, int64_t place) { return c.kept + (slot * kept + place) * c.channels + channel; };
  const auto input = [&](int64_t t) {  // of a token that may come before the pass
    if (t >= first) return load_upto(x + t * c.x_stride, n);
    return c.before[sequence] < 0 ? zero() : load_upto(page(c.before[sequence], kept + t - first), n);
  };
  copy_weights(c.weight, c.bias, c.weight_dtype, channel, c.length, n, weights);
  for (int64_t t = first; t < c.starts[sequence + 1]; ++t) {
    F sum = mul(input(t - kept), load(weights));
    for (int64_t j = 1; j < c.length; ++j) sum = add(sum, mul(input(t - kept + j), load(weights + j * LANES)));
    if (c.bias) sum = add(sum, load(weights + c.length * LANES));
    store_upto(c.out + t * c.channels + channel, round_as(activated(c.activation, round_as(sum, x)), x), n);
    if (c.slots[t] >= 0)
      for (int64_t j = 0; j < kept; ++j) store_upto(page(c.slots[t], j), input(t - kept + 1 + j), n);
  }
}

}  // namespace

void HFA_NAMESPACE::short_conv(const ConvCall& call) {
  const int64_t parts = ceil_div(call.channels, PART);
  for_dtype(call.dtype, [&](auto* null) {
    parallel_for(call.sequences * parts, call.threads, [&](int64_t task) {
      struct Own;
      float* weights = static_cast<float*>(scratch<Own>(static_cast<size_t>((call.length + 1) * LANES) * sizeof(float)));
      const int64_t begin = task % parts * PART, end = at_most(call.channels, begin + PART);
      for (int64_t channel = begin; channel < end; channel += LANES)
        channels<std::remove_pointer_t<decltype(null)>>(call, task / parts, channel, weights);
    });
  });
}
