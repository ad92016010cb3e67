// The two matrix products of attention, on packed operands. Each sum is in one lane, in the order of the summed
// dimension, so that it does not depend on the other rows of a call.
#pragma once

#include "words.h"

namespace {

#if defined(HFA_AVX512)
constexpr int MOST_ROWS = 8;
#else
constexpr int MOST_ROWS = 4;
#endif

// A matrix of words, which have the size of a float.
struct Words {
  const float* data;
  int64_t stride;
};

// out[r, v * out_step + lane] = sum_w a[r, w] * b[w, v * b_step + lane] for w in [first, last), R rows and V vectors.
template <class W, int R, int V>
inline void product_tile(Words a, const float* b, int64_t b_stride, int64_t b_step, int64_t first, int64_t last,
                         float* out, int64_t out_stride) {
  F sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = zero();
  for (int64_t w = first; w < last; ++w) {
    F x[V];
    for (int v = 0; v < V; ++v) x[v] = load(b + w * b_stride + v * b_step);
    for (int r = 0; r < R; ++r) {
      const F y = set1(a.data[r * a.stride + w]);
      for (int v = 0; v < V; ++v) sums[r][v] = W::dot(sums[r][v], y, x[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * out_stride + v * LANES, sums[r][v]);
}

// The same for R rows and `count` vectors.
template <class W, int R>
inline void product_rows(Words a, const float* b, int64_t b_stride, int64_t b_step, int64_t first, int64_t last,
                         int64_t count, float* out, int64_t out_stride) {
  constexpr int V = R <= MOST_ROWS / 2 ? 4 : 2;
  int64_t v = 0;
  for (; v + V <= count; v += V)
    product_tile<W, R, V>(a, b + v * b_step, b_stride, b_step, first, last, out + v * LANES, out_stride);
  for (; v < count; ++v)
    product_tile<W, R, 1>(a, b + v * b_step, b_stride, b_step, first, last, out + v * LANES, out_stride);
}

template <class W>
inline void product(int64_t rows, Words a, const float* b, int64_t b_stride, int64_t b_step, int64_t first,
                    int64_t last, int64_t count, float* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r += MOST_ROWS) {
    const Words part = {a.data + r * a.stride, a.stride};
    float* const to = out + r * out_stride;
    switch (at_most(MOST_ROWS, rows - r)) {
      case 1: product_rows<W, 1>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
      case 2: product_rows<W, 2>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
      case 3: product_rows<W, 3>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
      case 4: product_rows<W, 4>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
#if defined(HFA_AVX512)
      case 5: product_rows<W, 5>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
      case 6: product_rows<W, 6>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
      case 7: product_rows<W, 7>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
      case 8: product_rows<W, 8>(part, b, b_stride, b_step, first, last, count, to, out_stride); break;
#endif
    }
  }
}

}  // namespace
