// Activations quantized to int8 at run time. Each row and group of inputs has a scale, so that an outlier affects only
// its group.
#pragma once

#include <cfloat>
#include <cmath>

#include "../parallel.h"
#include "../simd/simd.h"

namespace {

// levels [groups, rows, group], scales and sums [groups, rows]. The groups come first, so that the kernel finds the
// rows of a group side by side. Levels beyond the inputs are 0. A group with NaN or infinity has the scale NaN, which
// makes the results of its row NaN, and of no other row.
struct QuantizedRows {
  int8_t* levels;
  float* scales;
  int32_t* sums;  // the sums of the levels
  int64_t rows, group, groups;

  const int8_t* row(int64_t g, int64_t r) const { return levels + (g * rows + r) * group; }
};

constexpr float LEAST = 1e-35f;  // a group with a smaller largest magnitude counts as 0, because 127 / it overflows

template <class T>
inline F load_part(const T* p, int64_t n) {
  return n >= LANES ? load_as(p) : load_as_n(p, static_cast<int>(n));
}

template <class T>
inline void quantize_group(const T* x, int64_t count, int64_t group, int8_t* levels, float& scale, int32_t& sum) {
  I largest = iset1(0);  // as bits, in whose order infinity and NaN come after all other magnitudes
  for (int64_t k = 0; k < count; k += LANES) largest = max_i32(bits_of(abs(load_part(x + k, count - k))), largest);
  const float absmax = bits_to_float(static_cast<uint32_t>(reduce_max(largest)));
  const bool broken = !(absmax <= FLT_MAX), usable = !broken && absmax >= LEAST;
  const F inverse = set1(usable ? 127.0f / absmax : 0.0f);
  scale = broken ? NAN : usable ? absmax / 127.0f : 0.0f;
  F total = zero();  // exact, since all partial sums are integers below 2^24
  for (int64_t k = 0; k < group; k += LANES) {
    const F value = usable && k < count ? load_part(x + k, count - k) : zero(), level = round(mul(value, inverse));
    store_as(levels + k, level);
    total = add(total, level);
  }
  sum = static_cast<int32_t>(reduce_add(total));
}

template <class T>
inline QuantizedRows quantize_rows(const T* x, int64_t stride, int64_t rows, int64_t in_features, int64_t group,
                                   int threads) {
  struct Levels; struct Scales; struct Sums;
  QuantizedRows q;
  q.rows = rows;
  q.group = group;
  q.groups = ceil_div(in_features, group);
  // Tiles read 32 rows of 64 levels, also where there are fewer; what they read there is not used.
  q.levels = static_cast<int8_t*>(scratch<Levels>(static_cast<size_t>((q.groups * rows + 32) * group + 64)));
  q.scales = static_cast<float*>(scratch<Scales>(static_cast<size_t>(q.groups * rows) * sizeof(float)));
  q.sums = static_cast<int32_t*>(scratch<Sums>(static_cast<size_t>(q.groups * rows) * sizeof(int32_t)));
  const int64_t chunk = 8;  // rows of a task; with fewer rows, a second thread would cost more than it saves
  parallel_for(ceil_div(rows, chunk), threads, [&](int64_t task) {
    for (int64_t r = task * chunk; r < at_most(rows, (task + 1) * chunk); ++r)
      for (int64_t g = 0; g < q.groups; ++g)
        quantize_group(x + r * stride + g * group, at_most(group, in_features - g * group), group,
                       q.levels + (g * rows + r) * group, q.scales[g * rows + r], q.sums[g * rows + r]);
  });
  return q;
}

}  // namespace
