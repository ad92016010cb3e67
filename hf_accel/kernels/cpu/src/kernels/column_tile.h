// The innermost loops of linear layers with float weights [in, out], as GPT-2's and some experts have them.
//
// The lanes of a vector are consecutive outputs, whose sums are each in the order of the inputs, or of pairs of them,
// which begin at even inputs. So they depend neither on the other rows of a tile nor on how inputs and outputs are split
// among loops and tasks.
#pragma once

#include <type_traits>

#include "../parallel.h"
#include "float_tile.h"

namespace {

// A word is what a lane is multiplied by at once: INPUTS numbers of one output, which are neighbours along the inputs.
// `factor` gives those of a row of inputs in all lanes, `words` those of LANES outputs, of which `left` exist; of the
// word's inputs, `inputs` do.
struct ColumnDot : FloatDot {
  static constexpr int64_t CHUNK = 512, INPUTS = 1;
  static F factor(const float* x) { return set1(*x); }
  template <class T>
  static F words(const T* w, int64_t, int64_t, int64_t left) {
    return left >= LANES ? load_as(w) : load_as_n(w, static_cast<int>(at_least(0, left)));
  }
};

#if defined(HFA_BF16)
struct PairColumnDot {
  typedef Bf16 Number;
  static constexpr int64_t CHUNK = 512, WHOLE_ROWS = 1, INPUTS = 2;
  static constexpr int STEP = PairDot::STEP;
  static F factor(const Bf16* x) {
    float pair;
    std::memcpy(&pair, x, sizeof pair);
    return set1(pair);
  }
  static F words(const Bf16* w, int64_t stride, int64_t inputs, int64_t left) {
    const int n = static_cast<int>(at_most(LANES, at_least(0, left)));
    const I first = bits_of(load_as_n(w, n)), second = inputs > 1 ? bits_of(load_as_n(w + stride, n)) : iset1(0);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(first, 16), second));
  }
  static F dot(F sum, F w, F x) { return dot_pairs(sum, bits_of(w), bits_of(x)); }
};
template <class Dot>
constexpr bool BY_COLUMNS = std::is_same<Dot, ColumnDot>::value || std::is_same<Dot, PairColumnDot>::value;
#else
template <class Dot>
constexpr bool BY_COLUMNS = std::is_same<Dot, ColumnDot>::value;
#endif

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
constexpr int64_t PANEL_WORDS = 16384 / (PANEL_OUTPUTS * sizeof(float));  // a panel has half of a first-level cache
constexpr int64_t PANELS_OUTPUTS = 128;  // of the panels that are packed at once: a fourth of a second-level cache
constexpr int64_t PACKED_AHEAD = 16;     // inputs that are prefetched
constexpr int64_t ROWS_OF_PANELS = 96;   // rows whose inputs stay in that cache while panels change

// Weights of some inputs and outputs.
template <class T>
struct Columns {
  const T* first;
  int64_t stride, inputs, outputs;
};

// Adds x[r, k] * w[k, n] over WORDS words of inputs to sums[r, n]. inputs: of the last word. ahead: whether weights are
// prefetched.
template <class Dot, class T, int ROWS, int WORDS>
inline void add_inputs(const typename Dot::Number* x, int64_t x_stride, const Columns<T>& w, int64_t inputs, bool ahead,
                       float* sums, int64_t sums_stride) {
  constexpr int LINE = 64 / static_cast<int>(sizeof(T));
  F factors[ROWS * WORDS];
  unrolled<ROWS * WORDS>([&](auto i) HFA_INLINE {
    factors[i] = Dot::factor(x + i / WORDS * x_stride + i % WORDS * Dot::INPUTS);
  });
  const auto add = [&](int64_t n, int64_t left) HFA_INLINE {
    F weights[WORDS];
    unrolled<WORDS>([&](auto i) HFA_INLINE {
      weights[i] = Dot::words(w.first + i * Dot::INPUTS * w.stride + n, w.stride, i + 1 < WORDS ? Dot::INPUTS : inputs, left);
    });
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      F total = load(sums + r * sums_stride + n);
      unrolled<WORDS>([&](auto i) HFA_INLINE { total = Dot::dot(total, weights[i], factors[r * WORDS + i]); });
      store(sums + r * sums_stride + n, total);
    });
  };
  int64_t n = 0;
  for (; n + LINE <= w.outputs; n += LINE) {
    if (ahead)
      unrolled<WORDS * Dot::INPUTS>([&](auto i) HFA_INLINE { prefetch(w.first + (i + INPUTS_AHEAD) * w.stride + n); });
    unrolled<LINE / LANES>([&](auto v) HFA_INLINE { add(n + v * LANES, LANES); });
  }
  for (; n < w.outputs; n += LANES) add(n, w.outputs - n);
}

// The same for `rows` rows, at most ROWS.
template <class Dot, class T, int ROWS, int WORDS>
inline void add_inputs_of(int64_t rows, const typename Dot::Number* x, int64_t x_stride, const Columns<T>& w,
                          int64_t inputs, bool ahead, float* sums, int64_t sums_stride) {
  if constexpr (ROWS > 1)
    if (rows < ROWS)
      return add_inputs_of<Dot, T, ROWS - 1, WORDS>(rows, x, x_stride, w, inputs, ahead, sums, sums_stride);
  add_inputs<Dot, T, ROWS, WORDS>(x, x_stride, w, inputs, ahead, sums, sums_stride);
}

template <class Dot, class T>
inline void add_to_few_rows(const typename Dot::Number* x, int64_t x_stride, int64_t rows, const Columns<T>& w,
                            float* sums, int64_t sums_stride) {
  const auto add = [&](int64_t k, auto words) HFA_INLINE {
    const int64_t inputs = at_most(Dot::INPUTS, w.inputs - k);  // of a word that is the last one
    const bool is_ahead = k + INPUTS_AHEAD + words * Dot::INPUTS <= w.inputs;
    for_row_tiles<FEW_ROWS_OF_TILE>(0, rows, [&](int64_t, int64_t r, int64_t height) {
      add_inputs_of<Dot, T, FEW_ROWS_OF_TILE, words>(
          height, x + r * x_stride + k, x_stride, {w.first + k * w.stride, w.stride, w.inputs - k, w.outputs}, inputs,
          is_ahead && r == 0, sums + r * sums_stride, sums_stride);
    });
  };
  int64_t k = 0;
  for (; k + INPUTS_AT_ONCE <= w.inputs; k += INPUTS_AT_ONCE)
    add(k, std::integral_constant<int, INPUTS_AT_ONCE / Dot::INPUTS>());
  for (; k < w.inputs; k += Dot::INPUTS) add(k, std::integral_constant<int, 1>());
}

// Adds x[r] . w of a packed panel [words][PANEL_OUTPUTS] to sums in registers, [ROWS][COLUMN_VECTORS].
template <class Dot, int ROWS>
inline HFA_INLINE void add_panel(const typename Dot::Number* x, int64_t x_stride, const float* panel, int64_t words,
                                 F (&acc)[ROWS * COLUMN_VECTORS]) {
  const auto add = [&](int64_t k) HFA_INLINE {
    F weights[COLUMN_VECTORS];
    unrolled<COLUMN_VECTORS>([&](auto v) HFA_INLINE { weights[v] = load(panel + k * PANEL_OUTPUTS + v * LANES); });
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      const F factor = Dot::factor(x + r * x_stride + k * Dot::INPUTS);
      unrolled<COLUMN_VECTORS>([&](auto v) HFA_INLINE {
        acc[r * COLUMN_VECTORS + v] = Dot::dot(acc[r * COLUMN_VECTORS + v], weights[v], factor);
      });
    });
  };
  int64_t k = 0;
  for (; k + 2 <= words; k += 2) add(k), add(k + 1);
  if (k < words) add(k);
}

// The same to sums[r].
template <class Dot, int ROWS>
inline void panel_tile(const typename Dot::Number* x, int64_t x_stride, const float* panel, int64_t words, float* sums,
                       int64_t sums_stride) {
  F acc[ROWS * COLUMN_VECTORS];
  unrolled<ROWS * COLUMN_VECTORS>([&](auto i) HFA_INLINE {
    acc[i] = load(sums + i / COLUMN_VECTORS * sums_stride + i % COLUMN_VECTORS * LANES);
  });
  add_panel<Dot, ROWS>(x, x_stride, panel, words, acc);
  unrolled<ROWS * COLUMN_VECTORS>([&](auto i) HFA_INLINE {
    store(sums + i / COLUMN_VECTORS * sums_stride + i % COLUMN_VECTORS * LANES, acc[i]);
  });
}

// The same for `rows` rows, at most ROWS.
template <class Dot, int ROWS>
inline void panel_tile_of(int64_t rows, const typename Dot::Number* x, int64_t x_stride, const float* panel,
                          int64_t words, float* sums, int64_t sums_stride) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return panel_tile_of<Dot, ROWS - 1>(rows, x, x_stride, panel, words, sums, sums_stride);
  panel_tile<Dot, ROWS>(x, x_stride, panel, words, sums, sums_stride);
}

// Packs panels one behind the other, with zeros up to PANEL_OUTPUTS.
template <class Dot, class T>
inline void pack_panels(const Columns<T>& w, float* panels) {
  const int64_t outputs = ceil_div(w.outputs, PANEL_OUTPUTS) * PANEL_OUTPUTS, words = ceil_div(w.inputs, Dot::INPUTS);
  for (int64_t k = 0; k < w.inputs; k += Dot::INPUTS) {
    const T* const from = w.first + k * w.stride;
    for (int64_t i = k + PACKED_AHEAD; i < at_most(w.inputs, k + PACKED_AHEAD + Dot::INPUTS); ++i)
      for (int64_t n = 0; n < w.outputs; n += 64 / static_cast<int64_t>(sizeof(T))) prefetch(w.first + i * w.stride + n);
    for (int64_t n = 0; n < outputs; n += LANES)
      store(panels + (n / PANEL_OUTPUTS * words + k / Dot::INPUTS) * PANEL_OUTPUTS + n % PANEL_OUTPUTS,
            Dot::words(from + n, w.stride, at_most(Dot::INPUTS, w.inputs - k), w.outputs - n));
  }
}

template <class Dot, class T>
inline void add_to_many_rows(const typename Dot::Number* x, int64_t x_stride, int64_t rows, const Columns<T>& w,
                             float* sums, int64_t sums_stride) {
  struct Panels;
  constexpr int64_t INPUTS = PANEL_WORDS * Dot::INPUTS;
  float* const panels = static_cast<float*>(scratch<Panels>(PANEL_WORDS * PANELS_OUTPUTS * sizeof(float)));
  for (int64_t k = 0; k < w.inputs; k += INPUTS)
    for (int64_t n = 0; n < w.outputs; n += PANELS_OUTPUTS) {
      const int64_t inputs = at_most(INPUTS, w.inputs - k), outputs = at_most(PANELS_OUTPUTS, w.outputs - n);
      const int64_t words = ceil_div(inputs, Dot::INPUTS);
      pack_panels<Dot, T>({w.first + k * w.stride + n, w.stride, inputs, outputs}, panels);
      for_row_tiles<ROWS_OF_PANELS>(0, rows, [&](int64_t, int64_t first, int64_t count) {
        for (int64_t p = 0; p < outputs; p += PANEL_OUTPUTS)
          for_row_tiles<COLUMN_ROWS>(first, first + count, [&](int64_t, int64_t r, int64_t height) {
            panel_tile_of<Dot, COLUMN_ROWS>(height, x + r * x_stride + k, x_stride, panels + p * words, words,
                                            sums + r * sums_stride + n + p, sums_stride);
          });
      });
    }
}

// Adds x[r, k] * w[k, n] to sums[r, n], which have room for a multiple of PANEL_OUTPUTS.
template <class Dot, class T>
inline void add_columns(const typename Dot::Number* x, int64_t x_stride, int64_t rows, const Columns<T>& w, float* sums,
                        int64_t sums_stride) {
  if (rows <= FEW_COLUMN_ROWS) add_to_few_rows<Dot>(x, x_stride, rows, w, sums, sums_stride);
  else add_to_many_rows<Dot>(x, x_stride, rows, w, sums, sums_stride);
}

}  // namespace
