// The innermost loops of linear layers with float weights [in, out], as GPT-2's and some experts have them.
//
// The lanes of a vector are consecutive outputs, whose sums are each in the order of the inputs. So they depend
// neither on the other rows of a tile nor on how inputs and outputs are split among loops and tasks.
#pragma once

#include "../parallel.h"
#include "float_tile.h"

namespace {

struct ColumnDot : FloatDot {
  static constexpr int64_t CHUNK = 512;
};
constexpr int64_t LEAST_TASK_OUTPUTS = 64;

// With few rows, the sums of a task are in the first-level cache, and some inputs at once are added to all of them, so
// that whole lines of weights are read one after the other: rows of weights are far apart in memory. On an EPYC (Zen)
// that takes 0.8 to 1.0 of the time of sums in registers with one row, and 0.5 to 0.8 of it with four.
constexpr int64_t FEW_COLUMN_ROWS = 8;
constexpr int FEW_ROWS_OF_TILE = 4, INPUTS_AT_ONCE = 4;
constexpr int64_t INPUTS_AHEAD = 4;  // that are prefetched

// With more rows, sums are in registers, and weights are packed in panels of outputs that stay in the cache.
#if defined(HFA_AVX512)
constexpr int COLUMN_ROWS = 12;
#elif defined(HFA_AVX2) || defined(HFA_NEON)
constexpr int COLUMN_ROWS = 6;
#else
constexpr int COLUMN_ROWS = 2;
#endif
constexpr int COLUMN_VECTORS = 2;
constexpr int64_t PANEL_OUTPUTS = COLUMN_VECTORS * LANES;
constexpr int64_t PANEL_INPUTS = 16384 / (PANEL_OUTPUTS * sizeof(float));  // a panel has half of a first-level cache
constexpr int64_t PANELS_OUTPUTS = 128;  // of the panels that are packed at once: a fourth of a second-level cache
constexpr int64_t PACKED_AHEAD = 16;     // inputs that are prefetched
constexpr int64_t ROWS_OF_PANELS = 96;   // rows whose inputs stay in that cache while panels change

// Weights of some inputs and outputs.
template <class T>
struct Columns {
  const T* first;
  int64_t stride, inputs, outputs;
};

// Adds x[r, k] * w[k, n] over INPUTS inputs to sums[r, n]. ahead: whether weights are prefetched.
template <class T, int ROWS, int INPUTS>
inline void add_inputs(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t outputs, bool ahead,
                       float* sums, int64_t sums_stride) {
  constexpr int LINE = 64 / static_cast<int>(sizeof(T));
  F factors[ROWS * INPUTS];
  unrolled<ROWS * INPUTS>([&](auto i) HFA_INLINE { factors[i] = set1(x[i / INPUTS * x_stride + i % INPUTS]); });
  const auto add = [&](float* sum, const auto& weight) HFA_INLINE {
    F weights[INPUTS];
    unrolled<INPUTS>([&](auto i) HFA_INLINE { weights[i] = weight(i); });
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      F total = load(sum + r * sums_stride);
      unrolled<INPUTS>([&](auto i) HFA_INLINE { total = fmadd(factors[r * INPUTS + i], weights[i], total); });
      store(sum + r * sums_stride, total);
    });
  };
  int64_t n = 0;
  for (; n + LINE <= outputs; n += LINE) {
    if (ahead) unrolled<INPUTS>([&](auto i) HFA_INLINE { prefetch(w + (i + INPUTS_AHEAD) * w_stride + n); });
    unrolled<LINE / LANES>([&](auto v) HFA_INLINE {
      add(sums + n + v * LANES, [&](int i) HFA_INLINE { return load_as(w + i * w_stride + n + v * LANES); });
    });
  }
  for (; n < outputs; n += LANES) {
    const int left = static_cast<int>(at_most(LANES, outputs - n));
    add(sums + n, [&](int i) HFA_INLINE { return load_as_n(w + i * w_stride + n, left); });
  }
}

// The same for `rows` rows, at most ROWS.
template <class T, int ROWS, int INPUTS>
inline void add_inputs_of(int64_t rows, const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                          int64_t outputs, bool ahead, float* sums, int64_t sums_stride) {
  if constexpr (ROWS > 1)
    if (rows < ROWS)
      return add_inputs_of<T, ROWS - 1, INPUTS>(rows, x, x_stride, w, w_stride, outputs, ahead, sums, sums_stride);
  add_inputs<T, ROWS, INPUTS>(x, x_stride, w, w_stride, outputs, ahead, sums, sums_stride);
}

template <class T>
inline void add_to_few_rows(const float* x, int64_t x_stride, int64_t rows, const Columns<T>& w, float* sums,
                            int64_t sums_stride) {
  const auto add = [&](int64_t k, auto inputs) HFA_INLINE {
    const bool is_ahead = k + INPUTS_AHEAD + inputs <= w.inputs;
    for_row_tiles<FEW_ROWS_OF_TILE>(0, rows, [&](int64_t, int64_t r, int64_t height) {
      add_inputs_of<T, FEW_ROWS_OF_TILE, inputs>(height, x + r * x_stride + k, x_stride, w.first + k * w.stride, w.stride,
                                                 w.outputs, is_ahead && r == 0, sums + r * sums_stride, sums_stride);
    });
  };
  int64_t k = 0;
  for (; k + INPUTS_AT_ONCE <= w.inputs; k += INPUTS_AT_ONCE) add(k, std::integral_constant<int, INPUTS_AT_ONCE>());
  for (; k < w.inputs; ++k) add(k, std::integral_constant<int, 1>());
}

// Adds x[r] . w of a packed panel [inputs][PANEL_OUTPUTS] to sums[r].
template <int ROWS>
inline void panel_tile(const float* x, int64_t x_stride, const float* panel, int64_t inputs, float* sums,
                       int64_t sums_stride) {
  F acc[ROWS * COLUMN_VECTORS];
  unrolled<ROWS * COLUMN_VECTORS>([&](auto i) HFA_INLINE {
    acc[i] = load(sums + i / COLUMN_VECTORS * sums_stride + i % COLUMN_VECTORS * LANES);
  });
  for (int64_t k = 0; k < inputs; ++k) {
    F weights[COLUMN_VECTORS];
    unrolled<COLUMN_VECTORS>([&](auto v) HFA_INLINE { weights[v] = load(panel + k * PANEL_OUTPUTS + v * LANES); });
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      const F factor = set1(x[r * x_stride + k]);
      unrolled<COLUMN_VECTORS>([&](auto v) HFA_INLINE {
        acc[r * COLUMN_VECTORS + v] = fmadd(factor, weights[v], acc[r * COLUMN_VECTORS + v]);
      });
    });
  }
  unrolled<ROWS * COLUMN_VECTORS>([&](auto i) HFA_INLINE {
    store(sums + i / COLUMN_VECTORS * sums_stride + i % COLUMN_VECTORS * LANES, acc[i]);
  });
}

// The same for `rows` rows, at most ROWS.
template <int ROWS>
inline void panel_tile_of(int64_t rows, const float* x, int64_t x_stride, const float* panel, int64_t inputs,
                          float* sums, int64_t sums_stride) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return panel_tile_of<ROWS - 1>(rows, x, x_stride, panel, inputs, sums, sums_stride);
  panel_tile<ROWS>(x, x_stride, panel, inputs, sums, sums_stride);
}

// Packs panels one behind the other, with zeros up to PANEL_OUTPUTS.
template <class T>
inline void pack_panels(const Columns<T>& w, float* panels) {
  const int64_t outputs = ceil_div(w.outputs, PANEL_OUTPUTS) * PANEL_OUTPUTS;
  for (int64_t k = 0; k < w.inputs; ++k) {
    const T* const from = w.first + k * w.stride;
    if (k + PACKED_AHEAD < w.inputs)
      for (int64_t n = 0; n < w.outputs; n += 64 / static_cast<int64_t>(sizeof(T)))
        prefetch(from + PACKED_AHEAD * w.stride + n);
    for (int64_t n = 0; n < outputs; n += LANES) {
      float* const to = panels + n / PANEL_OUTPUTS * w.inputs * PANEL_OUTPUTS + k * PANEL_OUTPUTS + n % PANEL_OUTPUTS;
      const int64_t left = w.outputs - n;
      store(to, left >= LANES ? load_as(from + n) : load_as_n(from + n, static_cast<int>(at_least(0, left))));
    }
  }
}

template <class T>
inline void add_to_many_rows(const float* x, int64_t x_stride, int64_t rows, const Columns<T>& w, float* sums,
                             int64_t sums_stride) {
  struct Panels;
  float* const panels = static_cast<float*>(scratch<Panels>(PANEL_INPUTS * PANELS_OUTPUTS * sizeof(float)));
  for (int64_t k = 0; k < w.inputs; k += PANEL_INPUTS)
    for (int64_t n = 0; n < w.outputs; n += PANELS_OUTPUTS) {
      const int64_t inputs = at_most(PANEL_INPUTS, w.inputs - k), outputs = at_most(PANELS_OUTPUTS, w.outputs - n);
      pack_panels<T>({w.first + k * w.stride + n, w.stride, inputs, outputs}, panels);
      for_row_tiles<ROWS_OF_PANELS>(0, rows, [&](int64_t, int64_t first, int64_t count) {
        for (int64_t p = 0; p < outputs; p += PANEL_OUTPUTS)
          for_row_tiles<COLUMN_ROWS>(first, first + count, [&](int64_t, int64_t r, int64_t height) {
            panel_tile_of<COLUMN_ROWS>(height, x + r * x_stride + k, x_stride, panels + p * inputs, inputs,
                                       sums + r * sums_stride + n + p, sums_stride);
          });
      });
    }
}

// Adds x[r, k] * w[k, n] to sums[r, n], which have room for a multiple of PANEL_OUTPUTS.
template <class T>
inline void add_columns(const float* x, int64_t x_stride, int64_t rows, const Columns<T>& w, float* sums,
                        int64_t sums_stride) {
  if (rows <= FEW_COLUMN_ROWS) add_to_few_rows(x, x_stride, rows, w, sums, sums_stride);
  else add_to_many_rows(x, x_stride, rows, w, sums, sums_stride);
}

}  // namespace
