// The product of one row with float weights that are read as one stream, in the order of their memory.
//
// Then its time is that of reading, and a CPU reads one stream faster than several side by side: its own prefetching
// follows few of them, and rows that begin at the same place of a page compete for the same cache sets. It is helped by
// a prefetch of lines close by; which page comes next it cannot foresee, so a line of a page far ahead is fetched early.
// Sums have the order of float_tile.h, and so the same bits.
#pragma once

#include "float_tile.h"
#include "stream.h"

namespace {

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

// The product of `count` inputs of a block, in lanes. x is packed.
template <class Dot, class T>
inline F stream_block(const typename Dot::Number* x, const T* w, int64_t count) {
  F sum = zero();
  int64_t k = 0;
  for (; k + Dot::STEP <= count; k += Dot::STEP) {
    prefetch_l2(reinterpret_cast<const char*>(w + k) + LINES_AHEAD);
    sum = Dot::dot(sum, Dot::load(w + k), Dot::load(x + k));
  }
  return k < count ? Dot::dot(sum, Dot::load_n(w + k, static_cast<int>(count - k)), Dot::load(x + k)) : sum;
}

// Adds x . w[n] to sums[n] for weights [outputs, in_features]. x: its first block of inputs; the next ones are `x_block`
// numbers behind.
template <class Dot, class T>
void stream_row(const typename Dot::Number* x, int64_t x_block, const T* weight, int64_t outputs, int64_t in_features,
                const void* next, float* sums) {
  const Stream stream{weight + outputs * in_features, next};
  WaitingSums waiting{sums, {}, {}};
  for (int64_t n = 0; n < outputs; ++n) {
    const T* row = weight + n * in_features;
    const typename Dot::Number* block = x;
    for (int64_t k = 0; k < in_features; k += block_inputs<Dot>(), block += x_block) {
      prefetch(stream.ahead(row + k, PAGES_AHEAD));
      waiting.add(stream_block<Dot>(block, row + k, at_most(block_inputs<Dot>(), in_features - k)), n);
    }
  }
  waiting.add_up();
}

}  // namespace
