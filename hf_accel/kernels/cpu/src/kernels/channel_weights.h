// The weights of convolutions of each channel.
#pragma once

#include "any_dtype.h"

namespace {

// Copies the weights [channels, length] of n channels, at most LANES, to vectors of channels [length]. They are read once
// for all tokens.
template <class T>
inline void copy_weights(const T* weight, int64_t length, int64_t n, float* out) {
  for (int64_t j = 0; j < length; ++j)
    for (int64_t lane = 0; lane < LANES; ++lane)
      out[j * LANES + lane] = lane < n ? to_float(weight[lane * length + j]) : 0.0f;
}

// The same of a dtype, from `channel` on, and the biases behind them: zeros, if there are none. It is compiled once for
// all dtypes of the inputs, because it takes longer to compile than what uses the weights.
__attribute__((noinline)) inline void copy_weights(const void* weight, const void* bias, int32_t dtype, int64_t channel,
                                                   int64_t length, int64_t n, float* out) {
  for_dtype(dtype, [&](auto* null) {
    copy_weights(static_cast<decltype(null)>(const_cast<void*>(weight)) + channel * length, length, n, out);
  });
  store(out + length * LANES, bias ? load_dtype(bias, dtype, channel, static_cast<int>(n)) : zero());
}

}  // namespace
