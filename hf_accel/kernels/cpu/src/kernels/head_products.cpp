// A product for each head, with the weights of that head. Weights are packed as floats, and stay in the caches while all
// tokens use them. Each sum is in one lane and in the order of the inputs, so it does not depend on other tokens.
#include "../kernels.h"

#include "../parallel.h"
#include "any_dtype.h"
#include "attention/products.h"

namespace {

constexpr int64_t PANEL = 16384;  // numbers of the packed weights of a task: half of a small second-level cache
constexpr int64_t TOKENS = 8;     // of a product

// Outputs [first, first + count) of one head.
struct Panel {
  int64_t head, first, count;
};

inline F scaled(const HeadsCall& c, F x, int64_t head, int64_t row) {
  return c.scales ? mul(x, set1(c.scales[head * c.scale_head + row])) : x;
}

// Packs the weights of a panel as [inputs][vectors of outputs], of which the last is filled up with zeros.
template <class T>
void pack_panel(const HeadsCall& c, const Panel& p, int64_t stride, float* out) {
  const T* const weight = static_cast<const T*>(c.weight) + p.head * c.weight_head;
  if (c.transposed) {
    for (int64_t i = 0; i < c.inputs; ++i)
      for (int64_t o = 0; o < p.count; o += LANES)
        store(out + i * stride + o, scaled(c, load_upto(weight + i * c.weight_row + p.first + o, p.count - o), p.head, i));
    return;
  }
  for (int64_t o = 0; o < p.count; o += LANES)
    for (int64_t i = 0; i < c.inputs; i += LANES) {
      F x[LANES];
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = p.first + o + lane;
        x[lane] = o + lane < p.count
                      ? scaled(c, load_upto(weight + row * c.weight_row + i, c.inputs - i), p.head, row) : zero();
      }
      transpose(x);
      for (int64_t lane = 0; lane < at_most(LANES, c.inputs - i); ++lane) store(out + (i + lane) * stride + o, x[lane]);
    }
}

template <class X>
void multiply(const HeadsCall& c, const Panel& p, int64_t stride, const float* weights) {
  struct Inputs; struct Sums;
  const int64_t width = ceil_div(c.inputs, LANES) * LANES;
  float* const x = static_cast<float*>(scratch<Inputs>(static_cast<size_t>(TOKENS * width) * sizeof(float)));
  float* const sums = static_cast<float*>(scratch<Sums>(static_cast<size_t>(TOKENS * stride) * sizeof(float)));
  for (int64_t n = 0; n < c.tokens; n += TOKENS) {
    const int64_t tokens = at_most(TOKENS, c.tokens - n);
    for (int64_t t = 0; t < tokens; ++t) {
      const X* const from = static_cast<const X*>(c.x) + (n + t) * c.x_token + p.head * c.x_head;
      for (int64_t i = 0; i < c.inputs; i += LANES) store(x + t * width + i, load_upto(from + i, c.inputs - i));
    }
    product<FloatWords>(tokens, {x, width}, weights, stride, LANES, 0, c.inputs, stride / LANES, sums, stride);
    for (int64_t t = 0; t < tokens; ++t) {
      X* const to = static_cast<X*>(c.out) + (n + t) * c.out_token + p.head * c.out_head + p.first;
      for (int64_t o = 0; o < p.count; o += LANES) store_upto(to + o, load(sums + t * stride + o), p.count - o);
    }
  }
}

void pack_panel(const HeadsCall& c, const Panel& p, int64_t stride, float* out) {
  if (c.weight_dtype == INT8) return pack_panel<int8_t>(c, p, stride, out);
  for_dtype(c.weight_dtype, [&](auto* null) { pack_panel<std::remove_pointer_t<decltype(null)>>(c, p, stride, out); });
}

}  // namespace

void HFA_NAMESPACE::head_products(const HeadsCall& call) {
  const int64_t width = at_least(PANEL / at_least(call.inputs, 1) / LANES, 1) * LANES;
  const int64_t panels = ceil_div(call.outputs, width);
  parallel_for(call.heads * panels, call.threads, [&](int64_t task) {
    struct Packed;
    const int64_t first = task % panels * width;
    const Panel panel = {task / panels, first, at_most(width, call.outputs - first)};
    const int64_t stride = ceil_div(panel.count, LANES) * LANES;
    float* const weights = static_cast<float*>(
        scratch<Packed>(static_cast<size_t>((call.inputs + LANES) * stride) * sizeof(float)));
    pack_panel(call, panel, stride, weights);
    for_dtype(call.dtype, [&](auto* null) {
      multiply<std::remove_pointer_t<decltype(null)>>(call, panel, stride, weights);
    });
  });
}
