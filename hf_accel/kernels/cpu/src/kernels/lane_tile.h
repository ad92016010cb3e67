// Products of many rows by float weights [out, in], for CPUs whose registers hold few sums (AVX2): a tile of those of
// float_tile.h reads weights from the second-level cache for each four rows, and waits for it.
//
// On an EPYC of Zen 3, 512 rows of float32 take 0.9 of the time, and with them a BERT of 8 texts of 128 tokens 0.85.
//
// The lanes of a vector are outputs here, so that a vector of weights serves more rows. The bits are those of
// float_tile.h, where lanes are consecutive inputs and are added up at the end of a block: all inputs of a lane come
// one after the other, and the sums of the lanes are added in the same order.
#pragma once

#include "any_dtype.h"
#include "column_tile.h"

namespace {

struct LaneDot : FloatDot {
  static constexpr int STEP = LANES * LANES;  // inputs are packed by so many: LANES of each lane
};
template <class Dot>
constexpr bool BY_LANES = std::is_same<Dot, LaneDot>::value;

#if defined(HFA_AVX2) && !defined(HFA_AVX512)
#define HFA_LANE_TILES

constexpr int64_t LANE_ROWS = 64;  // the fewest rows that packing weights pays for
// The place of each lane in the order in which reduce_add4 adds them: 0 and 4, 2 and 6, these four, and then the others.
constexpr int LANE_PLACE[LANES] = {0, 4, 2, 6, 1, 5, 3, 7};

// Inputs [64], or less, are LANES of each lane; those of a lane are `stride` numbers before those of the next one.
// vectors: gives vector i of LANES numbers, whose lanes are put where their places are.
template <class Vectors>
inline HFA_INLINE void pack_lanes(const Vectors& vectors, int64_t stride, float* to) {
  F x[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = vectors(i);
  transpose(x);
  for (int lane = 0; lane < LANES; ++lane) store(to + LANE_PLACE[lane] * stride, x[lane]);
}

template <class T>
inline F load_left(const T* p, int64_t n) { return n > 0 ? load_upto(p, n) : zero(); }

// Of a block of inputs, those of each lane, with zeros up to whole vectors.
inline int64_t lane_inputs(int64_t count) { return ceil_div(count, LaneDot::STEP) * LANES; }

// Packs a block of a row of inputs as [lanes][lane_inputs].
template <class T>
inline void pack_row_by_lanes(const T* from, int64_t count, float* to) {
  const int64_t inputs = lane_inputs(count);
  for (int64_t i = 0; i < inputs; i += LANES)
    pack_lanes([&](int v) HFA_INLINE { return load_left(from + (i + v) * LANES, count - (i + v) * LANES); }, inputs, to + i);
}

// Packs a block of weights as [panels of outputs][lanes][lane_inputs][PANEL_OUTPUTS].
template <class T>
inline void pack_weights_by_lanes(const T* block, int64_t stride, int64_t outputs, int64_t count, float* to) {
  const int64_t inputs = lane_inputs(count), whole = ceil_div(outputs, PANEL_OUTPUTS) * PANEL_OUTPUTS;
  for (int64_t n = 0; n < whole; n += LANES) {
    float* const panel = to + n / PANEL_OUTPUTS * inputs * LANES * PANEL_OUTPUTS + n % PANEL_OUTPUTS;
    for (int64_t i = 0; i < inputs; ++i)
      pack_lanes([&](int v) HFA_INLINE {
        return n + v < outputs ? load_left(block + (n + v) * stride + i * LANES, count - i * LANES) : zero();
      }, inputs * PANEL_OUTPUTS, panel + i * PANEL_OUTPUTS);
  }
}

// Adds x[r] . w of a panel to sums[r]. ahead: weights that are prefetched meanwhile, so many bytes of each row.
template <int ROWS>
inline void lane_tile(const float* x, int64_t x_stride, const float* panel, int64_t inputs, float* sums,
                      int64_t sums_stride, const Ahead& ahead, int64_t bytes) {
  constexpr int COUNT = ROWS * COLUMN_VECTORS;
  F waiting[3][COUNT];  // sums of one, two or four places, to which those of as many others are added
  int most = 0;
  for (int place = 0; place < LANES; ++place, x += inputs, panel += inputs * PANEL_OUTPUTS) {
    for (int i = 0; i < ahead.rows; ++i)
      for (int64_t at = bytes * place / LANES; at < bytes * (place + 1) / LANES; at += 64)
        prefetch_l2(ahead.first + i * ahead.stride + at);
    F acc[COUNT];
    unrolled<COUNT>([&](auto i) HFA_INLINE { acc[i] = zero(); });
    add_panel<ColumnDot, ROWS>(x, x_stride, panel, inputs, acc);
    for (int pairs = place; pairs & 1; pairs >>= 1) {
      --most;
      unrolled<COUNT>([&](auto i) HFA_INLINE { acc[i] = add(waiting[most][i], acc[i]); });
    }
    if (place + 1 < LANES) {
      unrolled<COUNT>([&](auto i) HFA_INLINE { waiting[most][i] = acc[i]; });
      ++most;
      continue;
    }
    unrolled<COUNT>([&](auto i) HFA_INLINE {
      float* const sum = sums + i / COLUMN_VECTORS * sums_stride + i % COLUMN_VECTORS * LANES;
      store(sum, add(load(sum), acc[i]));
    });
  }
}

// The same for `rows` rows, at most ROWS.
template <int ROWS>
inline void lane_tile_of(int64_t rows, const float* x, int64_t x_stride, const float* panel, int64_t inputs, float* sums,
                         int64_t sums_stride, const Ahead& ahead, int64_t bytes) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return lane_tile_of<ROWS - 1>(rows, x, x_stride, panel, inputs, sums, sums_stride, ahead, bytes);
  lane_tile<ROWS>(x, x_stride, panel, inputs, sums, sums_stride, ahead, bytes);
}

#endif

}  // namespace
