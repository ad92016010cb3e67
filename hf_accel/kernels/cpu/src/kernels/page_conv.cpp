// Short causal convolutions of each channel over inputs in pages. Sums are in float32 and in the order of the tokens,
// whatever else is computed, and are rounded once.
#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
#include "channel_weights.h"

namespace {

constexpr int64_t PART = 256;  // channels of a task

// A vector of channels of a sequence's tokens, of the half that `pages` hold. first: the first channel of that half.
// weights: room for `length` vectors and one more.
template <class T>
void channels(const PageConvCall& c, int64_t sequence, const T* pages, int64_t first, int64_t channel, float* weights) {
  const int64_t n = at_most(c.half - channel, LANES), begin = c.cu_q[sequence], end = c.cu_q[sequence + 1];
  const int32_t* table = c.block_table + sequence * c.table_stride;
  const auto input = [&](int64_t place) {
    if (place < 0) return zero();  // before the first token
    const int64_t slot = table[place / c.block_size] * c.block_size + place % c.block_size;
    return load_upto(pages + slot * c.half + channel, n);
  };
  copy_weights(c.weight, c.bias, c.weight_dtype, first + channel, c.length, n, weights);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t oldest = c.kv_len[sequence] - (end - t) - (c.length - 1);
    F sum = mul(input(oldest), load(weights));
    for (int64_t j = 1; j < c.length; ++j) sum = add(sum, mul(input(oldest + j), load(weights + j * LANES)));
    if (c.bias) sum = add(sum, load(weights + c.length * LANES));
    store_upto(static_cast<T*>(c.out) + t * c.out_stride + first + channel, sum, n);
  }
}

}  // namespace

void HFA_NAMESPACE::page_conv(const PageConvCall& call) {
  const int64_t parts = ceil_div(call.half, PART);
  for_dtype(call.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    parallel_for(call.sequences * 2 * parts, call.threads, [&](int64_t task) {
      struct Own;
      float* weights = static_cast<float*>(scratch<Own>(static_cast<size_t>((call.length + 1) * LANES) * sizeof(float)));
      const int64_t side = task / parts % 2, begin = task % parts * PART, end = at_most(call.half, begin + PART);
      const T* pages = static_cast<const T*>(side ? call.v_pages : call.k_pages);
      for (int64_t channel = begin; channel < end; channel += LANES)
        channels<T>(call, task / parts / 2, pages, side * call.half, channel, weights);
    });
  });
}
