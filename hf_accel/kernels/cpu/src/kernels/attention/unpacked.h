// The two matrix products of attention for a tile of few rows, which would use what is packed once: keys and values go
// from the pages through registers. The sums have the order of products.h, and so the same bits.
#pragma once

#include "pack.h"
#include "tile_products.h"

namespace {

template <class W, class T, int R>
struct UnpackedRows {
  // out[r, key] for the keys of vectors [first, last).
  static void scores(Words q, const KeyRows& rows, int64_t first, int64_t last, int64_t dim, float* out,
                     int64_t out_stride) {
    const int64_t words = ceil_div(dim, W::STEP);
    for (int64_t vector = first; vector < last; ++vector) {
      prefetch_ahead(rows.k, vector * LANES, LANES, last * LANES, bytes_of<T>(dim));
      F sums[R];
      unrolled<R>([&](int r) HFA_INLINE { sums[r] = zero(); });
      const auto add_word = [&](int64_t word, F keys) HFA_INLINE {
        unrolled<R>([&](int r) HFA_INLINE { sums[r] = W::dot(sums[r], set1(q.data[r * q.stride + word]), keys); });
      };
      int64_t word = 0;
      for (; (word + LANES) * W::STEP <= dim; word += LANES) {
        F x[LANES];
        load_keys<W, T, true>(rows, vector, word, dim, x);
        unrolled<LANES>([&](auto i) HFA_INLINE { add_word(word + i, x[i]); });
      }
      if (word < words) {
        F last[LANES];
        load_last_keys<W, T>(rows, vector, word, dim, last);
        for (int64_t i = 0; word + i < words; ++i) add_word(word + i, last[i]);
      }
      unrolled<R>([&](auto r) HFA_INLINE { store(out + r * out_stride + vector * LANES, sums[r]); });
    }
  }

  // out[r, column] of the weights and the values of `keys`.
  static void values(Words weights, const KeyRows& rows, Range keys, int64_t dim, float* out, int64_t out_stride) {
    constexpr int WIDE = R <= 4 ? 2 : 1;  // so that the sums have room in the registers
    constexpr int64_t COLUMNS = W::STEP * LANES;
    int64_t column = 0;
    for (; column + WIDE * COLUMNS <= dim; column += WIDE * COLUMNS)
      columns<WIDE, true>(weights, rows, keys, column, dim, out + column, out_stride);
    for (; column < dim; column += COLUMNS)
      columns<1, false>(weights, rows, keys, column, dim, out + column, out_stride);
  }

  // The same for WIDE * STEP vectors of columns from `column` on. WHOLE: whether the values have as many.
  template <int WIDE, bool WHOLE>
  static void columns(Words weights, const KeyRows& rows, Range keys, int64_t column, int64_t dim, float* out,
                      int64_t out_stride) {
    constexpr int VECTORS = WIDE * W::STEP;
    F sums[R * VECTORS];
    unrolled<R * VECTORS>([&](auto i) HFA_INLINE { sums[i] = zero(); });
    for (int64_t word = keys.first / W::STEP; word * W::STEP < keys.last; ++word) {
      if (column == 0) prefetch_ahead(rows.v, word * W::STEP, W::STEP, keys.last, bytes_of<T>(dim));
      unrolled<WIDE>([&](auto wide) HFA_INLINE {
        F x[W::STEP];
        load_values<W, T, WHOLE>(rows, word, column + wide * W::STEP * LANES, dim, x);
        unrolled<R>([&](auto r) HFA_INLINE {
          const F weight = set1(weights.data[r * weights.stride + word]);
          unrolled<W::STEP>([&](auto i) HFA_INLINE {
            F& sum = sums[r * VECTORS + wide * W::STEP + i];
            sum = W::dot(sum, weight, x[i]);
          });
        });
      });
    }
    unrolled<R * VECTORS>([&](auto i) HFA_INLINE {
      store(out + i / VECTORS * out_stride + i % VECTORS * LANES, sums[i]);
    });
  }
};

// The most rows for which keys and values are not packed: the sums and a square of keys must have room in the registers.
// Tiles add in another order than vectors, so that they multiply any number of rows.
template <class W>
constexpr int64_t most_unpacked() { return BY_TILES<W> ? 0 : W::STEP == 1 ? 4 : MOST_ROWS; }

// Calls f with the number of rows as a constant.
template <class W, class Function>
inline void for_rows(int64_t rows, const Function& f) {
  switch (rows) {
    case 1: return f(Constant<1>{});
    case 2: return f(Constant<2>{});
    case 3: return f(Constant<3>{});
    case 4: return f(Constant<4>{});
  }
  if constexpr (most_unpacked<W>() > 4)
    switch (rows) {
      case 5: return f(Constant<5>{});
      case 6: return f(Constant<6>{});
      case 7: return f(Constant<7>{});
      case 8: return f(Constant<8>{});
    }
}

// The same for up to most_unpacked rows.
template <class W, class T>
struct Unpacked {
  static void scores(int64_t count, Words q, const KeyRows& rows, int64_t first, int64_t last, int64_t dim, float* out,
                     int64_t out_stride) {
    for_rows<W>(count, [&](auto r) { UnpackedRows<W, T, r>::scores(q, rows, first, last, dim, out, out_stride); });
  }
  static void values(int64_t count, Words weights, const KeyRows& rows, Range keys, int64_t dim, float* out,
                     int64_t out_stride) {
    for_rows<W>(count, [&](auto r) { UnpackedRows<W, T, r>::values(weights, rows, keys, dim, out, out_stride); });
  }
};

}  // namespace
