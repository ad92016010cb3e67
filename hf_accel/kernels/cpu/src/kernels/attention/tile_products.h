// The two matrix products of attention by tiles (simd/tiles.h), where the CPU has them and words are pairs: a packed
// operand of products.h is a second factor as it is. Tiles add in another order than vectors, so they multiply any number
// of rows. What they add at once are 16 words from a multiple of 16 on, of which those without numbers are zeros: so a
// sum depends neither on the other rows of a call nor on which keys these see.
#pragma once

#include "products.h"
#if defined(HFA_TILES)
#include "../../simd/tiles.h"
#endif

namespace {

#if defined(HFA_TILES)
template <class W>
constexpr bool BY_TILES = W::STEP == 2;
#else
template <class W>
constexpr bool BY_TILES = false;
#endif

// Rows are multiplied in groups; the keys that a group sees, and the words of a row, are filled up to a multiple.
template <class W>
constexpr int64_t GROUP = BY_TILES<W> ? 16 : 8;
template <class W>
constexpr int64_t WHOLE_KEYS = BY_TILES<W> ? 2 * LANES : LANES;
template <class W>
constexpr int64_t WHOLE_WORDS = BY_TILES<W> ? LANES : 1;

#if defined(HFA_TILES)
// As product_tile, for the rows of a tile and WIDE vectors. `first` and `last` are multiples of 16.
template <int WIDE>
inline void tile_columns(Words a, const float* b, int64_t b_stride, int64_t b_step, int64_t first, int64_t last,
                         float* out, int64_t out_stride) {
  constexpr int64_t WORD = sizeof(float);
  unrolled<WIDE>([](auto v) HFA_INLINE { zero_tile<v>(); });
  for (int64_t w = first; w < last; w += TILE_WORDS) {
    load_tile<4>(a.data + w, a.stride * WORD);
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      constexpr int REGISTER = 5 + v % 3;
      load_tile<REGISTER>(b + w * b_stride + v * b_step, b_stride * WORD);
      dot_bf16<v, 4, REGISTER>();
    });
  }
  unrolled<WIDE>([&](auto v) HFA_INLINE { store_tile<v>(out + v * TILE_WORDS, out_stride * WORD); });
}

// The same for an even number of vectors, as whole keys and padded values have. There is memory for all rows of a tile
// of `a` and `out`.
inline void product_by_tiles(Words a, const float* b, int64_t b_stride, int64_t b_step, int64_t first, int64_t last,
                             int64_t count, float* out, int64_t out_stride) {
  int64_t v = 0;
  for (; v + 4 <= count; v += 4)
    tile_columns<4>(a, b + v * b_step, b_stride, b_step, first, last, out + v * TILE_WORDS, out_stride);
  if (v < count) tile_columns<2>(a, b + v * b_step, b_stride, b_step, first, last, out + v * TILE_WORDS, out_stride);
}
#endif

// `product`, by tiles or not.
template <class W>
inline void multiply(int64_t rows, Words a, const float* b, int64_t b_stride, int64_t b_step, int64_t first,
                     int64_t last, int64_t count, float* out, int64_t out_stride) {
#if defined(HFA_TILES)
  if constexpr (BY_TILES<W>) return product_by_tiles(a, b, b_stride, b_step, first, last, count, out, out_stride);
#endif
  product<W>(rows, a, b, b_stride, b_step, first, last, count, out, out_stride);
}

}  // namespace
