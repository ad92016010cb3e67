// The innermost loop of linear layers with float weights. A tile of rows and outputs has its sums in registers.
//
// The lanes of a vector are consecutive inputs, so that weights can be read in place. The sum over a block of inputs is
// one vector accumulator per row and output, whose lanes are added in a fixed order at the end. So tiles of any size,
// and packed and unpacked weights, give the same bits.
#pragma once

#include "../simd/simd.h"

namespace {

// The product of a vector of weights and a vector of inputs. `Number` is the type of packed inputs and packed weights,
// CHUNK the number of outputs of a task, a multiple of every tile's width. Rows are split among tasks, and their sums
// kept, by multiples of WHOLE_ROWS.
struct FloatDot {
  typedef float Number;
  static constexpr int64_t CHUNK = 48, WHOLE_ROWS = 1;
  static constexpr int STEP = LANES;  // inputs per vector
  template <class T> static F load(const T* p) { return load_as(p); }
  template <class T> static F load_n(const T* p, int n) { return load_as_n(p, n); }
  static F dot(F sum, F w, F x) { return fmadd(w, x, sum); }
};

#if defined(HFA_BF16)
struct PairDot {
  typedef Bf16 Number;
  static constexpr int64_t CHUNK = 48, WHOLE_ROWS = 1;
  static constexpr int STEP = 2 * LANES;
  static I load(const Bf16* p) { return load_pairs(p); }
  static I load_n(const Bf16* p, int n) { return load_pairs_n(p, n); }
  static F dot(F sum, I w, I x) { return dot_pairs(sum, w, x); }
};
#endif

// The most rows of a tile, and the outputs of a tile for each number of rows. They are chosen so that the sums fill the
// registers.
#if defined(HFA_AVX512)
constexpr int TILE_ROWS = 6;
constexpr int wide_for(int rows) { return rows <= 3 ? 8 : rows == 4 ? 6 : 4; }
#elif defined(HFA_AVX2) || defined(HFA_NEON)
constexpr int TILE_ROWS = 4;
constexpr int wide_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 6 : rows == 3 ? 4 : 3; }
#else
constexpr int TILE_ROWS = 2;
constexpr int wide_for(int) { return 2; }
#endif

constexpr int64_t BLOCK_BYTES = 4096;  // the bytes of a row's inputs that are summed in one accumulator

template <class Dot>
constexpr int64_t block_inputs() { return BLOCK_BYTES / static_cast<int64_t>(sizeof(typename Dot::Number)); }

// The stride between rows of packed blocks of so many inputs. It is an odd number of cache lines, so that rows do not
// compete for the same cache sets.
template <class Dot>
constexpr int64_t packed_stride(int64_t in_features) {
  const int64_t line = 64 / static_cast<int64_t>(sizeof(typename Dot::Number));
  const int64_t whole = ceil_div(at_most(in_features, block_inputs<Dot>()), Dot::STEP) * Dot::STEP;
  return (ceil_div(whole, line) | 1) * line;
}

// Memory to prefetch: `rows` rows from `first` on, `stride` bytes apart.
struct Ahead {
  const char* first;
  int64_t stride;
  int rows;
};

// Calls f(tile, first row, rows) for tiles of nearly equal height, at most MOST. For example, 7 rows are tiles of 4 and 3,
// not of 6 and 1.
template <int64_t MOST, class Function>
inline void for_row_tiles(int64_t first, int64_t last, const Function& f) {
  const int64_t tiles = ceil_div(last - first, MOST);
  for (int64_t t = 0, r = first; t < tiles; ++t) {
    const int64_t rows = ceil_div(last - r, tiles - t);
    f(t, r, rows);
    r += rows;
  }
}

template <int ROWS, int WIDE>
inline void add_sums(const F (&acc)[ROWS * WIDE], float* sums, int64_t sums_stride) {
  constexpr int COUNT = ROWS * WIDE;
  unrolled<(COUNT + 3) / 4>([&](auto quarter) HFA_INLINE {
    constexpr int i = 4 * quarter;
    float total[4];
    reduce_add4(acc[i], i + 1 < COUNT ? acc[i + 1] : zero(), i + 2 < COUNT ? acc[i + 2] : zero(),
                i + 3 < COUNT ? acc[i + 3] : zero(), total);
    if constexpr (WIDE % 4 == 0) {  // side by side, so that they are added as one vector
      float* const out = sums + i / WIDE * sums_stride + i % WIDE;
      for (int j = 0; j < 4; ++j) out[j] += total[j];
    } else {
      for (int j = i; j < i + 4 && j < COUNT; ++j) sums[j / WIDE * sums_stride + j % WIDE] += total[j - i];
    }
  });
}

// Adds x[r] . w[n] over `count` inputs of a block to sums[r, n]. Rows of x are packed, and zero beyond `count`.
template <class Dot, class T, int ROWS, int WIDE>
inline void tile(const typename Dot::Number* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t count,
                 float* sums, int64_t sums_stride, const Ahead& ahead) {
  F acc[ROWS * WIDE];
  unrolled<ROWS * WIDE>([&](int i) HFA_INLINE { acc[i] = zero(); });
  int64_t k = 0;
  for (; k + Dot::STEP <= count; k += Dot::STEP) {
    const char* soon = ahead.first + k * static_cast<int64_t>(sizeof(T));
    for (int i = 0; i < ahead.rows; ++i, soon += ahead.stride) prefetch_l2(soon);
    unrolled<WIDE>([&](auto n) HFA_INLINE {
      const auto weights = Dot::load(w + n * w_stride + k);
      unrolled<ROWS>([&](int r) HFA_INLINE {
        acc[r * WIDE + n] = Dot::dot(acc[r * WIDE + n], weights, Dot::load(x + r * x_stride + k));
      });
    });
  }
  if (k < count)
    unrolled<WIDE>([&](auto n) HFA_INLINE {
      const auto weights = Dot::load_n(w + n * w_stride + k, static_cast<int>(count - k));
      unrolled<ROWS>([&](int r) HFA_INLINE {
        acc[r * WIDE + n] = Dot::dot(acc[r * WIDE + n], weights, Dot::load(x + r * x_stride + k));
      });
    });
  add_sums<ROWS, WIDE>(acc, sums, sums_stride);
}

}  // namespace
