// Sums in the order of torch's CPU `sum` over a contiguous dimension, so that the results have its bits. There are 4
// columns of 8 lanes. After every 2^p rows of columns, a running sum is carried to the next of 4 levels.
#pragma once

#include "../simd/simd.h"

namespace {

constexpr int COLUMN = 8, COLUMNS = 4, SPAN = COLUMN * COLUMNS, LEVELS = 4;

inline int ceil_log2(int64_t x) {
  int bits = 1;
  while ((int64_t{1} << bits) < x) ++bits;
  return bits;
}

// The sum of fewer than 8 numbers has 4 columns of one lane.
template <class One>
inline float short_sum(int64_t size, const One& one) {
  float lanes[COLUMNS] = {};
  for (int c = 0; size >= COLUMNS && c < COLUMNS; ++c) lanes[c] = one(c);
  for (int64_t k = size / COLUMNS * COLUMNS; k < size; ++k) lanes[0] += one(k);
  for (int c = 1; c < COLUMNS; ++c) lanes[0] += lanes[c];
  return lanes[0];
}

// at(k) returns LANES values from k on, and one(k) returns value k.
template <class At, class One>
inline float cascade_sum(int64_t size, const At& at, const One& one) {
  if (size < COLUMN) return short_sum(size, one);
  constexpr int VECTORS = SPAN / LANES;
  F levels[LEVELS][VECTORS];
  for (auto& level : levels)
    for (F& sum : level) sum = zero();
  const int64_t steps = size / SPAN, power = at_least(4, ceil_log2(steps) / LEVELS);
  const int64_t mask = (int64_t{1} << power) - 1;
  for (int64_t i = 0; i < steps;) {
    for (int v = 0; v < VECTORS; ++v) levels[0][v] = add(levels[0][v], at(i * SPAN + v * LANES));
    ++i;
    for (int j = 1; j < LEVELS && (i & mask << (j - 1) * power) == 0; ++j)
      for (int v = 0; v < VECTORS; ++v) {
        levels[j][v] = add(levels[j][v], levels[j - 1][v]);
        levels[j - 1][v] = zero();
      }
  }
  float lanes[SPAN];
  for (int v = 0; v < VECTORS; ++v) {
    for (int j = 1; j < LEVELS; ++j) levels[0][v] = add(levels[0][v], levels[j][v]);
    store(lanes + v * LANES, levels[0][v]);
  }
  const int64_t whole = size / COLUMN * COLUMN;
  for (int64_t k = steps * SPAN; k < whole; ++k) lanes[k % COLUMN] += one(k);
  for (int c = 1; c < COLUMNS; ++c)
    for (int l = 0; l < COLUMN; ++l) lanes[l] += lanes[c * COLUMN + l];
  float total = 0.0f;
  for (int64_t k = whole; k < size; ++k) total += one(k);
  for (int l = 0; l < COLUMN; ++l) total += lanes[l];
  return total;
}

}  // namespace
