// The rotation of the keys and values in pages of int4.
#pragma once

#include <cmath>

#include "../simd/simd.h"

namespace {

// With a constant HALF the compiler makes vectors of the smallest steps too.
template <int64_t HALF>
inline void add_and_subtract(float* x, int64_t dim, int64_t half = HALF) {
  for (int64_t start = 0; start < dim; start += 2 * half)
    for (int64_t i = start; i < start + half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
}

// Multiplies x [dim] by Hadamard's matrix over the root of its size, in blocks of the largest power of two that divides
// dim. The result has the bits of `rotate` in cache/quantized.py.
inline void rotate(float* x, int64_t dim) {
  int64_t half = 1;
  for (; dim % (2 * half) == 0; half *= 2) switch (half) {
      case 1: add_and_subtract<1>(x, dim); break;
      case 2: add_and_subtract<2>(x, dim); break;
      case 4: add_and_subtract<4>(x, dim); break;
      default: add_and_subtract<0>(x, dim, half);
    }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(half)));
  for (int64_t i = 0; i < dim; ++i) x[i] *= factor;
}

}  // namespace
