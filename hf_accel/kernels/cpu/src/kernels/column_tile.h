// The innermost loop of linear layers with float weights [in, out], as some experts have them.
//
// The lanes of a vector are consecutive outputs, whose sums are each in the order of the inputs. So they depend
// neither on the other rows of a tile nor on how outputs are split among tasks.
#pragma once

#include "float_tile.h"

namespace {

struct ColumnDot : FloatDot {
  static constexpr int64_t CHUNK = 256;
};

constexpr int64_t COLUMN_AHEAD = 8;  // how many inputs ahead to prefetch: they are far apart in memory
// The most rows of a tile, and the vectors of outputs of a tile for each number of rows.
#if defined(HFA_AVX512)
constexpr int COLUMN_ROWS = 4;
constexpr int vectors_for(int rows) { return rows == 1 ? 16 : rows == 2 ? 8 : 4; }
#else
constexpr int COLUMN_ROWS = 2;
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : 4; }
#endif

// Adds x[r, k] * w[k, n] over `count` inputs to sums[r, n], for `outputs` columns, which a tile has room for.
template <class T, int ROWS>
inline void column_tile(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t count, int64_t outputs,
                        float* sums, int64_t sums_stride) {
  constexpr int VECTORS = vectors_for(ROWS);
  const bool whole = outputs == VECTORS * LANES;
  F acc[ROWS * VECTORS];
  unrolled<ROWS * VECTORS>([&](auto i) HFA_INLINE {
    acc[i] = load(sums + i / VECTORS * sums_stride + i % VECTORS * LANES);
  });
  const auto add_input = [&](int64_t k, const auto& weights) HFA_INLINE {
    F factors[ROWS];
    unrolled<ROWS>([&](auto r) HFA_INLINE { factors[r] = set1(x[r * x_stride + k]); });
    unrolled<VECTORS>([&](auto v) HFA_INLINE {
      const F weight = weights(v);
      unrolled<ROWS>([&](auto r) HFA_INLINE { acc[r * VECTORS + v] = fmadd(factors[r], weight, acc[r * VECTORS + v]); });
    });
  };
  for (int64_t k = 0; k < count; ++k) {
    const T* row = w + k * w_stride;
    if (k + COLUMN_AHEAD < count) {
      const char* soon = reinterpret_cast<const char*>(row + COLUMN_AHEAD * w_stride);
      for (int64_t i = 0; i < outputs * static_cast<int64_t>(sizeof(T)); i += 64) prefetch(soon + i);
    }
    if (whole)
      add_input(k, [&](int v) HFA_INLINE { return load_as(row + v * LANES); });
    else
      add_input(k, [&](int v) HFA_INLINE {
        return load_as_n(row + v * LANES, static_cast<int>(at_least(0, at_most(LANES, outputs - v * LANES))));
      });
  }
  unrolled<ROWS * VECTORS>([&](auto i) HFA_INLINE {
    store(sums + i / VECTORS * sums_stride + i % VECTORS * LANES, acc[i]);
  });
}

template <class T, int ROWS>
inline void column_rows(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t count, int64_t outputs,
                        float* sums, int64_t sums_stride) {
  constexpr int64_t WIDE = vectors_for(ROWS) * LANES;
  for (int64_t n = 0; n < outputs; n += WIDE)
    column_tile<T, ROWS>(x, x_stride, w + n, w_stride, count, at_most(WIDE, outputs - n), sums + n, sums_stride);
}

// The same for any numbers of rows and outputs.
template <class T>
inline void column_tiles(const float* x, int64_t x_stride, int64_t rows, const T* w, int64_t w_stride, int64_t count,
                         int64_t outputs, float* sums, int64_t sums_stride) {
  int64_t r = 0;
  for (; r + COLUMN_ROWS <= rows; r += COLUMN_ROWS)
    column_rows<T, COLUMN_ROWS>(x + r * x_stride, x_stride, w, w_stride, count, outputs, sums + r * sums_stride,
                                sums_stride);
  for (; r + 2 <= rows; r += 2)
    column_rows<T, 2>(x + r * x_stride, x_stride, w, w_stride, count, outputs, sums + r * sums_stride, sums_stride);
  for (; r < rows; ++r)
    column_rows<T, 1>(x + r * x_stride, x_stride, w, w_stride, count, outputs, sums + r * sums_stride, sums_stride);
}

}  // namespace
