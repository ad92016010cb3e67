// The product of one row with float weights that are read as one stream, in the order of their memory.
//
// Then its time is that of reading, and a CPU reads one stream faster than several side by side: its own prefetching
// follows few of them, and rows that begin at the same place of a page compete for the same cache sets. It is helped by
// a prefetch of lines close by; which page comes next it cannot foresee, so a line of a page far ahead is fetched early.
// But each output reads all inputs again, and if they are long, the weights that come between drive them out of the
// first-level cache. Then several outputs share a reading of the inputs, and their weights are as many streams.
// Sums have the order of float_tile.h, and so the same bits.
#pragma once

#include "float_tile.h"
#include "stream.h"

namespace {

// Inputs of so many bytes are long: half of a first-level cache. Measured on an EPYC with AVX-512: those of 22 KB are read
// 1.2 to 1.5 times as fast by four outputs at once, those of 12 KB and less 1.05 to 1.2 times as fast by one.
constexpr int64_t LONG_INPUTS = 16384;
constexpr int OUTPUTS_AT_ONCE = 4;

// Lanes that wait for others: they are added up for four sums at a time.
struct WaitingSums {
  float* sums;
  F waiting[4];
  int64_t outputs[4];
  int count = 0;

  void add(F lanes, int64_t output) {
    waiting[count] = lanes;
    outputs[count++] = output;
    if (count == 4) add_up();
  }
  void add_up() {
    float totals[4];
    for (int i = count; i < 4; ++i) waiting[i] = zero();
    reduce_add4(waiting[0], waiting[1], waiting[2], waiting[3], totals);
    for (int i = 0; i < count; ++i) sums[outputs[i]] += totals[i];
    count = 0;
  }
};

// The products of `count` inputs of a block and the weights of WIDE outputs, in lanes. x is packed.
template <class Dot, class T, int WIDE>
inline void stream_block(const typename Dot::Number* x, const T* w, int64_t w_stride, int64_t count, F (&acc)[WIDE]) {
  unrolled<WIDE>([&](int i) HFA_INLINE { acc[i] = zero(); });
  int64_t k = 0;
  for (; k + Dot::STEP <= count; k += Dot::STEP)
    unrolled<WIDE>([&](int i) HFA_INLINE {
      const T* const weights = w + i * w_stride + k;
      prefetch_l2(reinterpret_cast<const char*>(weights) + LINES_AHEAD);
      acc[i] = Dot::dot(acc[i], Dot::load(weights), Dot::load(x + k));
    });
  if (k < count)
    unrolled<WIDE>([&](int i) HFA_INLINE {
      const auto weights = Dot::load_n(w + i * w_stride + k, static_cast<int>(count - k));
      acc[i] = Dot::dot(acc[i], weights, Dot::load(x + k));
    });
}

// The weights [outputs, in_features] of one row: x is its first block of inputs, the next ones are `x_block` numbers behind.
template <class Dot, class T>
struct StreamedRow {
  const typename Dot::Number* x;
  int64_t x_block;
  const T* weight;
  int64_t outputs, in_features;
  Stream stream;

  // Adds x . w[n] for outputs from `first` on, WIDE at once, and returns the first of those that are left.
  template <int WIDE>
  int64_t add(int64_t first, WaitingSums& waiting) const {
    for (; first + WIDE <= outputs; first += WIDE) {
      const T* const rows = weight + first * in_features;
      const typename Dot::Number* block = x;
      for (int64_t k = 0; k < in_features; k += block_inputs<Dot>(), block += x_block) {
        unrolled<WIDE>([&](int i) HFA_INLINE { prefetch(stream.ahead(rows + i * in_features + k, PAGES_AHEAD)); });
        F acc[WIDE];
        stream_block<Dot, T, WIDE>(block, rows + k, in_features, at_most(block_inputs<Dot>(), in_features - k), acc);
        for (int i = 0; i < WIDE; ++i) waiting.add(acc[i], first + i);
      }
    }
    return first;
  }
};

// Adds x . w[n] to sums[n] for weights [outputs, in_features].
template <class Dot, class T>
void stream_row(const typename Dot::Number* x, int64_t x_block, const T* weight, int64_t outputs, int64_t in_features,
                const void* next, float* sums) {
  const StreamedRow<Dot, T> row{x, x_block, weight, outputs, in_features, {weight + outputs * in_features, next}};
  WaitingSums waiting{sums, {}, {}};
  const bool is_long = in_features * static_cast<int64_t>(sizeof *x) >= LONG_INPUTS;
  row.template add<1>(is_long ? row.template add<OUTPUTS_AT_ONCE>(0, waiting) : 0, waiting);
  waiting.add_up();
}

}  // namespace
