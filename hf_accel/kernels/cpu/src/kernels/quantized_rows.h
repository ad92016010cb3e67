// Activations quantized to int8 at run time. Each row and group of inputs has a scale, so that an outlier affects only
// its group.
#pragma once

#include <cfloat>
#include <cmath>

#include "../parallel.h"
#include "any_dtype.h"

namespace {

// What the levels of one step, four inputs, have beyond those that limit_pairs left: they are multiplied once more.
struct Excess {
  int32_t step;
  int8_t levels[4];
};
struct ExcessRange { int64_t first, last; };  // of a row in a group

// levels [groups, rows, group], scales and sums [groups, rows]. The groups come first, so that the kernel finds the
// rows of a group side by side. Levels beyond the inputs are 0. A group with NaN or infinity has the scale NaN, which
// makes the results of its row NaN, and of no other row.
struct QuantizedRows {
  int8_t* levels;
  float* scales;
  int32_t* sums;  // the sums of the levels
  int64_t rows, group, groups;
  Excess* excess;              // if pairs are limited, at most [rows, groups, group / 4]
  ExcessRange* excess_ranges;  // [groups, rows]

  const int8_t* row(int64_t g, int64_t r) const { return levels + (g * rows + r) * group; }
};

constexpr float LEAST = 1e-35f;  // a group with a smaller largest magnitude counts as 0, because 127 / it overflows

template <class T>
inline void quantize_group(const T* x, int64_t count, int64_t group, int8_t* levels, float& scale, int32_t& sum) {
  const auto part = [&](int64_t k) HFA_INLINE { return load_upto(x + k, count - k); };
  I largest = iset1(0);  // as bits, in whose order infinity and NaN come after all other magnitudes
  for (int64_t k = 0; k < count; k += LANES) largest = max_i32(bits_of(abs(part(k))), largest);
  const float absmax = bits_to_float(static_cast<uint32_t>(reduce_max(largest)));
  const bool broken = !(absmax <= FLT_MAX), usable = !broken && absmax >= LEAST;
  const F inverse = set1(usable ? 127.0f / absmax : 0.0f);
  scale = broken ? NAN : usable ? absmax / 127.0f : 0.0f;
  F total = zero();  // exact, since all partial sums are integers below 2^24
  for (int64_t k = 0; usable && k < count; k += LANES) {
    const F level = round(mul(part(k), inverse));
    store_upto(levels + k, level, group - k);  // what follows a group are levels of another row
    total = add(total, level);
  }
  const int64_t filled = usable ? at_most(group, ceil_div(count, LANES) * LANES) : 0;
  if (filled < group) std::memset(levels + filled, 0, static_cast<size_t>(group - filled));
  sum = static_cast<int32_t>(reduce_add(total));
}

#if defined(HFA_LIMITED_PAIRS)
// Limits the pairs of a group, a multiple of 32 levels. Returns in how many steps they had more.
inline int32_t limit_group(int8_t* levels, int64_t group, Excess* excess) {
  constexpr int64_t PART = 128, VECTOR = 32;
  int32_t count = 0;
  for (int64_t start = 0; start < group; start += PART) {
    int8_t more[PART];
    uint32_t steps = 0;  // those that had more; found first, since branches on what is in the data are mispredicted
    for (int64_t k = 0; k < at_most(PART, group - start); k += VECTOR)
      steps |= limit_pairs(levels + start + k, more + k) << k / 4;
    for (; steps; steps &= steps - 1, ++count) {
      const int step = __builtin_ctz(steps);
      excess[count].step = static_cast<int32_t>(start / 4) + step;
      std::memcpy(excess[count].levels, more + 4 * step, 4);
    }
  }
  return count;
}
#endif

// limited: limits the pairs of levels, where HFA_LIMITED_PAIRS is defined.
template <class T>
inline QuantizedRows quantize_rows(const T* x, int64_t stride, int64_t rows, int64_t in_features, int64_t group,
                                   [[maybe_unused]] bool limited, int threads) {
  struct Levels; struct Scales; struct Sums;
  QuantizedRows q;
  q.rows = rows;
  q.group = group;
  q.groups = ceil_div(in_features, group);
  // Tiles read 32 rows of 64 levels, also where there are fewer; what they read there is not used.
  q.levels = static_cast<int8_t*>(scratch<Levels>(static_cast<size_t>((q.groups * rows + 32) * group + 64)));
  q.scales = static_cast<float*>(scratch<Scales>(static_cast<size_t>(q.groups * rows) * sizeof(float)));
  q.sums = static_cast<int32_t*>(scratch<Sums>(static_cast<size_t>(q.groups * rows) * sizeof(int32_t)));
#if defined(HFA_LIMITED_PAIRS)
  struct OfExcess; struct Ranges;
  if (limited) {
    const auto count = static_cast<size_t>(q.groups * rows);
    q.excess = static_cast<Excess*>(scratch<OfExcess>(count * static_cast<size_t>(group / 4) * sizeof(Excess)));
    q.excess_ranges = static_cast<ExcessRange*>(scratch<Ranges>(count * sizeof(ExcessRange)));
  }
#endif
  const int64_t chunk = 8;  // rows of a task; with fewer rows, a second thread would cost more than it saves
  parallel_for(ceil_div(rows, chunk), threads, [&](int64_t task) {
    const int64_t first = task * chunk, last = at_most(rows, first + chunk);
    for (int64_t r = first; r < last; ++r)
      for (int64_t g = 0; g < q.groups; ++g)
        quantize_group(x + r * stride + g * group, at_most(group, in_features - g * group), group,
                       q.levels + (g * rows + r) * group, q.scales[g * rows + r], q.sums[g * rows + r]);
#if defined(HFA_LIMITED_PAIRS)
    if (!limited) return;
    int64_t at = first * q.groups * (group / 4);  // without gaps, so that little of the memory is touched
    for (int64_t g = 0; g < q.groups; ++g)
      for (int64_t r = first; r < last; ++r) {
        const int64_t from = at;
        at += limit_group(q.levels + (g * rows + r) * group, group, q.excess + at);
        q.excess_ranges[g * rows + r] = {from, at};
      }
#endif
  });
  return q;
}

}  // namespace
