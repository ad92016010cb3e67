// A product for each head, with the weights of that head. Weights are packed as floats, and stay in the caches while all
// tokens use them; those of few tokens are used as they are read. Each sum is in one lane and in the order of the inputs, so it does not depend on other tokens.
#include "../kernels.h"

#include "../parallel.h"
#include "any_dtype.h"
#include "attention/products.h"

namespace {

constexpr int64_t PANEL = 16384;  // numbers of the packed weights of a task: half of a small second-level cache
constexpr int64_t TOKENS = 8;     // of a product
constexpr int64_t FEW_BY_COLUMNS = 4, FEW_BY_ROWS = 16;  // tokens for which weights are not packed
constexpr int64_t ROWS = 8;       // of weights that are read side by side

// Outputs [first, first + count) of one head.
struct Panel {
  int64_t head, first, count;
};

// Packs the weights of a panel as [inputs][vectors of outputs], of which the last is filled up with zeros.
template <class T>
void pack_panel(const HeadsCall& c, const Panel& p, int64_t stride, float* out) {
  const T* const weight = static_cast<const T*>(c.weight) + p.head * c.weight_head;
  if (c.transposed) {
    for (int64_t i = 0; i < c.inputs; ++i)
      for (int64_t o = 0; o < p.count; o += LANES)
        store(out + i * stride + o, load_upto(weight + i * c.weight_row + p.first + o, p.count - o));
    return;
  }
  for (int64_t o = 0; o < p.count; o += LANES)
    for (int64_t i = 0; i < c.inputs; i += LANES) {
      F x[LANES];
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = p.first + o + lane;
        x[lane] = o + lane < p.count ? load_upto(weight + row * c.weight_row + i, c.inputs - i) : zero();
      }
      transpose(x);
      for (int64_t lane = 0; lane < at_most(LANES, c.inputs - i); ++lane) store(out + (i + lane) * stride + o, x[lane]);
    }
}

// The inputs and the sums of a few tokens.
struct Numbers {
  const float* x;
  int64_t width;
  float* sums;
  int64_t stride;
};

// Prefetches the lines of `count` vectors of weights.
template <class T>
inline HFA_INLINE void prefetch_vectors(const T* at, int64_t count) {
  const char* const from = reinterpret_cast<const char*>(at);
  for (int64_t i = 0; i < count * LANES * static_cast<int64_t>(sizeof(T)); i += 64) prefetch(from + i);
}

// Adds to the sums of LANES outputs what inputs [i, i + N) add.
template <int64_t N, class T>
inline HFA_INLINE void add_rows(const HeadsCall& c, const Panel& p, const T* weight, const Numbers& of, int64_t i, int64_t o) {
  F w[N];
  for (int64_t r = 0; r < N; ++r)
    w[r] = load_upto(weight + (i + r) * c.weight_row + p.first + o, p.count - o);
  for (int64_t t = 0; t < c.tokens; ++t) {
    float* const sums = of.sums + t * of.stride + o;
    F sum = load(sums);
    for (int64_t r = 0; r < N; ++r) sum = fmadd(set1(of.x[t * of.width + i + r]), w[r], sum);
    store(sums, sum);
  }
}

template <class T>
void stream_rows(const HeadsCall& c, const Panel& p, const T* weight, const Numbers& of) {
  std::memset(of.sums, 0, static_cast<size_t>(c.tokens * of.stride) * sizeof(float));
  int64_t i = 0;
  for (; i + ROWS <= c.inputs; i += ROWS)
    for (int64_t o = 0; o < p.count; o += LANES) {
      prefetch_vectors(weight + (i + ROWS) * c.weight_row + p.first + ROWS * o, ROWS);
      add_rows<ROWS>(c, p, weight, of, i, o);
    }
  for (; i < c.inputs; ++i)
    for (int64_t o = 0; o < p.count; o += LANES) add_rows<1>(c, p, weight, of, i, o);
}

template <class T>
void stream_columns(const HeadsCall& c, const Panel& p, const T* weight, const Numbers& of) {
  for (int64_t o = 0; o < p.count; o += LANES) {
    F sums[FEW_BY_COLUMNS];
    for (int64_t t = 0; t < FEW_BY_COLUMNS; ++t) sums[t] = zero();
    const int64_t rows = at_most(LANES, p.count - o);
    for (int64_t i = 0; i < c.inputs; i += LANES) {
      F w[LANES];
      prefetch_vectors(weight + (p.first + o + LANES) * c.weight_row + LANES * i, LANES);
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = p.first + o + lane;
        w[lane] = lane < rows ? load_upto(weight + row * c.weight_row + i, c.inputs - i) : zero();
      }
      transpose(w);
      const int64_t count = at_most(LANES, c.inputs - i);
      for (int64_t t = 0; t < c.tokens; ++t) {
        const float* const x = of.x + t * of.width + i;
        F sum = sums[t];
        if (count == LANES)
          for (int64_t lane = 0; lane < LANES; ++lane) sum = fmadd(set1(x[lane]), w[lane], sum);
        else
          for (int64_t lane = 0; lane < count; ++lane) sum = fmadd(set1(x[lane]), w[lane], sum);
        sums[t] = sum;
      }
    }
    for (int64_t t = 0; t < c.tokens; ++t) store(of.sums + t * of.stride + o, sums[t]);
  }
}

// Reads the inputs of tokens, times the scales of the rows that they are multiplied by.
template <class X>
void read_inputs(const HeadsCall& c, int64_t head, int64_t first, int64_t tokens, float* x, int64_t width) {
  const float* const scales = c.scales && c.transposed == 1 ? c.scales + head * c.scale_head : nullptr;
  for (int64_t t = 0; t < tokens; ++t) {
    const X* const from = static_cast<const X*>(c.x) + (first + t) * c.x_token + head * c.x_head;
    for (int64_t i = 0; i < c.inputs; i += LANES) {
      const F numbers = load_upto(from + i, c.inputs - i);
      store(x + t * width + i, scales ? mul(numbers, load_upto(scales + i, c.inputs - i)) : numbers);
    }
  }
}

// Writes the sums of tokens, times the scales of outputs.
template <class X>
void write_sums(const HeadsCall& c, const Panel& p, int64_t first, int64_t tokens, const float* sums, int64_t stride) {
  const float* const scales = c.scales && c.transposed != 1 ? c.scales + p.head * c.scale_head + p.first : nullptr;
  for (int64_t t = 0; t < tokens; ++t) {
    X* const to = static_cast<X*>(c.out) + (first + t) * c.out_token + p.head * c.out_head + p.first;
    for (int64_t o = 0; o < p.count; o += LANES) {
      const F sum = load(sums + t * stride + o);
      store_upto(to + o, scales ? mul(sum, load_upto(scales + o, p.count - o)) : sum, p.count - o);
    }
  }
}

template <class X, class T>
void multiply_few(const HeadsCall& c, const Panel& p, int64_t stride) {
  struct Inputs; struct Sums;
  const int64_t width = ceil_div(c.inputs, LANES) * LANES;
  float* const x = static_cast<float*>(scratch<Inputs>(static_cast<size_t>(FEW_BY_ROWS * width) * sizeof(float)));
  float* const sums = static_cast<float*>(scratch<Sums>(static_cast<size_t>(FEW_BY_ROWS * stride) * sizeof(float)));
  const T* const weight = static_cast<const T*>(c.weight) + p.head * c.weight_head;
  read_inputs<X>(c, p.head, 0, c.tokens, x, width);
  if (c.transposed) stream_rows(c, p, weight, {x, width, sums, stride});
  else stream_columns(c, p, weight, {x, width, sums, stride});
  write_sums<X>(c, p, 0, c.tokens, sums, stride);
}

template <class X>
void multiply_few(const HeadsCall& c, const Panel& p, int64_t stride) {
  if (c.weight_dtype == INT8) return multiply_few<X, int8_t>(c, p, stride);
  for_dtype(c.weight_dtype, [&](auto* null) { multiply_few<X, std::remove_pointer_t<decltype(null)>>(c, p, stride); });
}

template <class X>
void multiply(const HeadsCall& c, const Panel& p, int64_t stride, const float* weights) {
  struct Inputs; struct Sums;
  const int64_t width = ceil_div(c.inputs, LANES) * LANES;
  float* const x = static_cast<float*>(scratch<Inputs>(static_cast<size_t>(TOKENS * width) * sizeof(float)));
  float* const sums = static_cast<float*>(scratch<Sums>(static_cast<size_t>(TOKENS * stride) * sizeof(float)));
  for (int64_t n = 0; n < c.tokens; n += TOKENS) {
    const int64_t tokens = at_most(TOKENS, c.tokens - n);
    read_inputs<X>(c, p.head, n, tokens, x, width);
    product<FloatWords>(tokens, {x, width}, weights, stride, LANES, 0, c.inputs, stride / LANES, sums, stride);
    write_sums<X>(c, p, n, tokens, sums, stride);
  }
}

void pack_panel(const HeadsCall& c, const Panel& p, int64_t stride, float* out) {
  if (c.weight_dtype == INT8) return pack_panel<int8_t>(c, p, stride, out);
  for_dtype(c.weight_dtype, [&](auto* null) { pack_panel<std::remove_pointer_t<decltype(null)>>(c, p, stride, out); });
}

}  // namespace

void HFA_NAMESPACE::head_products(const HeadsCall& call) {
  const bool few = call.tokens <= (call.transposed ? FEW_BY_ROWS : FEW_BY_COLUMNS);
  // Rows that are read as they are should be read whole, where the sums of all tokens stay in a cache.
  const int64_t wide = !few || !call.transposed ? 1 : call.tokens > FEW_BY_COLUMNS ? 2 : 4;
  const int64_t width = wide * at_least(PANEL / at_least(call.inputs, 1) / LANES, 1) * LANES;
  const int64_t panels = ceil_div(call.outputs, width);
  parallel_for(call.heads * panels, call.threads, [&](int64_t task) {
    struct Packed;
    const int64_t first = task % panels * width;
    const Panel panel = {task / panels, first, at_most(width, call.outputs - first)};
    const int64_t stride = ceil_div(panel.count, LANES) * LANES;
    if (few)
      return for_dtype(call.dtype, [&](auto* null) {
        multiply_few<std::remove_pointer_t<decltype(null)>>(call, panel, stride);
      });
    float* const weights = static_cast<float*>(
        scratch<Packed>(static_cast<size_t>((call.inputs + LANES) * stride) * sizeof(float)));
    pack_panel(call, panel, stride, weights);
    for_dtype(call.dtype, [&](auto* null) {
      multiply<std::remove_pointer_t<decltype(null)>>(call, panel, stride, weights);
    });
  });
}
