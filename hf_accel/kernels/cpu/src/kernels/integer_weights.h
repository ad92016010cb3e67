// Where the integer weights of a block of 64 outputs are. kernels.h describes their layout.
#pragma once

#include <array>

#include "../kernels.h"
#include "../simd/simd.h"
#include "any_dtype.h"

namespace {

constexpr int64_t LINE = 64;         // bytes of a cache line
constexpr int64_t STEP = BLOCK * 4;  // bytes of a block's weights that one dot4 of all lanes consumes

// The weights of one block and group.
struct GroupTask {
  const uint8_t* weight;
  int64_t steps;        // the number of dot4 steps along the inputs
  const void* scales;   // the 64 weight scales of this group, or null if scales belong to outputs
  int32_t scale_dtype;
  const uint8_t* zeros; // the 64 zero points, or null if all are those of Levels
  const void* minima;   // the 64 minima of this group, or null
};

// Element i of the scales or minima of a group.
inline F weight_factor(const GroupTask& task, const void* values, int64_t i) {
  switch (task.scale_dtype) {
    case BF16: return load_as(static_cast<const Bf16*>(values) + i);
    case F16: return load_as(static_cast<const F16_*>(values) + i);
    default: return load_as(static_cast<const float*>(values) + i);
  }
}

template <int FORMAT>
constexpr bool IN_BYTES = FORMAT == INT8 || FORMAT == INT8_GROUPS;

// Whether dot4_limited multiplies a format. Not small groups of inputs: there each row has more beyond the limit, and its
// end takes longer than its products save (with groups of 32, 512 rows took 1.1 times as long, with 64 as long).
template <int FORMAT>
#if defined(HFA_LIMITED_PAIRS)
constexpr bool LIMITED = FORMAT == INT8;
#else
constexpr bool LIMITED = false;
#endif

// How the numbers of a format lie. A unit of PLANES * STEP bytes has WORDS words for each of 64 outputs; a word has the
// numbers of 4 inputs. each(lane, f) reads those of LANES outputs, the first of which is at `lane` (see lane_offset), and
// calls f(word, bytes). each_in_place(lane, f) calls f(word, i, bytes) with the numbers times 2^SHIFTS[i], which takes
// fewer steps. MIDDLE: the number that stands for 0 where there are no zero points; numbers in bytes have another. MOST:
// the largest number.
template <int FORMAT>
struct Levels {  // in bytes
  static constexpr int WORDS = 1, PLANES = 1;
  template <class Function>
  inline HFA_INLINE void each(const uint8_t* lane, const Function& f) const { f(Constant<0>{}, load_bytes(lane)); }
};

template <>
struct Levels<INT4> {
  static constexpr int WORDS = 2, PLANES = 1, MIDDLE = 8, MOST = 15;
  template <class Function>
  inline HFA_INLINE void each(const uint8_t* lane, const Function& f) const {
    const I both = load_bytes(lane);
    f(Constant<0>{}, bits_from<0>(both, 15));
    f(Constant<1>{}, bits_from<4>(both, 15));
  }
  static constexpr std::array<int, 2> SHIFTS = {0, 4};
  template <class Function>
  inline HFA_INLINE void each_in_place(const uint8_t* lane, const Function& f) const {
    const I both = held(load_bytes(lane));
    f(Constant<0>{}, Constant<0>{}, bits_from<0>(both, 0x0f));
    f(Constant<1>{}, Constant<1>{}, bits_from<0>(both, 0xf0));
  }
};

template <>
struct Levels<INT3> {
  static constexpr int WORDS = 8, PLANES = 3, MIDDLE = 4, MOST = 7;
  template <class Function>
  inline HFA_INLINE void each(const uint8_t* lane, const Function& f) const {
    const I a = held(load_bytes(lane)), b = held(load_bytes(lane + LINE)), c = held(load_bytes(lane + 2 * LINE));
    f(Constant<0>{}, bits_from<0>(a, 7));
    f(Constant<1>{}, bits_from<3>(a, 7));
    f(Constant<2>{}, bits_from<0>(b, 7));
    f(Constant<3>{}, bits_from<3>(b, 7));
    f(Constant<4>{}, bits_from<0>(c, 7));
    f(Constant<5>{}, bits_from<3>(c, 7));
    f(Constant<6>{}, either(bits_from<5>(a, 6), bits_from<6>(c, 1)));
    f(Constant<7>{}, either(bits_from<5>(b, 6), bits_from<7>(c, 1)));
  }
  static constexpr std::array<int, 3> SHIFTS = {0, 3, 5};
  template <class Function>
  inline HFA_INLINE void each_in_place(const uint8_t* lane, const Function& f) const {
    const I a = held(load_bytes(lane)), b = held(load_bytes(lane + LINE)), c = held(load_bytes(lane + 2 * LINE));
    f(Constant<0>{}, Constant<0>{}, bits_from<0>(a, 0x07));
    f(Constant<1>{}, Constant<1>{}, bits_from<0>(a, 0x38));
    f(Constant<2>{}, Constant<0>{}, bits_from<0>(b, 0x07));
    f(Constant<3>{}, Constant<1>{}, bits_from<0>(b, 0x38));
    f(Constant<4>{}, Constant<0>{}, bits_from<0>(c, 0x07));
    f(Constant<5>{}, Constant<1>{}, bits_from<0>(c, 0x38));
    f(Constant<6>{}, Constant<2>{}, either(bits_from<0>(a, 0xc0), bits_from<1>(c, 0x20)));
    f(Constant<7>{}, Constant<2>{}, either(bits_from<0>(b, 0xc0), bits_from<2>(c, 0x20)));
  }
};

template <>
struct Levels<INT2> {
  static constexpr int WORDS = 4, PLANES = 1, MIDDLE = 2, MOST = 3;
  template <class Function>
  inline HFA_INLINE void each(const uint8_t* lane, const Function& f) const {
    const I all = load_bytes(lane);
    unrolled<WORDS>([&](auto word) HFA_INLINE { f(word, bits_from<2 * word>(all, 3)); });
  }
  static constexpr std::array<int, 4> SHIFTS = {0, 2, 4, 6};
  template <class Function>
  inline HFA_INLINE void each_in_place(const uint8_t* lane, const Function& f) const {
    const I all = held(load_bytes(lane));
    unrolled<WORDS>([&](auto word) HFA_INLINE { f(word, word, bits_from<0>(all, 3 << 2 * word)); });
  }
};

// FP4: twice the number plus 12, so that it is a whole number, and at least 0. Scales are halves of the stored ones.
constexpr uint8_t FP4_LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <>
struct Levels<FP4> {
  static constexpr int WORDS = 2, PLANES = 1, MIDDLE = 12, MOST = 24;
  decltype(table16(FP4_LEVELS)) table = table16(FP4_LEVELS);
  template <class Function>
  inline HFA_INLINE void each(const uint8_t* lane, const Function& f) const {
    Levels<INT4>{}.each(lane, [&](auto word, I halves) HFA_INLINE { f(word, lookup16(table, halves)); });
  }
};

template <int FORMAT>
constexpr int BITS = 8 * Levels<FORMAT>::PLANES / Levels<FORMAT>::WORDS;  // of a number

// The first byte of an output in a unit. The planes of 16 outputs follow each other, so that memory is read in order:
// with whole planes one after the other, 3 bits had 0.85 of the speed.
template <int FORMAT>
constexpr int64_t lane_offset(int64_t output) {
  return output / 16 * Levels<FORMAT>::PLANES * LINE + output % 16 * 4;
}

// Calls f with the format of a linear layer as a constant.
template <class Function>
inline void for_format(int32_t format, const Function& f) {
  switch (format) {
    case INT4: return f(Constant<INT4>{});
    case INT3: return f(Constant<INT3>{});
    case INT2: return f(Constant<INT2>{});
    case FP4: return f(Constant<FP4>{});
    case INT8_GROUPS: return f(Constant<INT8_GROUPS>{});
    default: return f(Constant<INT8>{});
  }
}

// The scales and minima of LANES outputs of a group, which turn integer sums into their share of the result.
template <int FORMAT>
struct GroupFactors {
  bool lowered;
  F scale, minimum;

  GroupFactors() = default;
  GroupFactors(const GroupTask& task, int64_t i)
      : lowered(task.minima != nullptr), scale(weight_factor(task, task.scales, i)),
        minimum(lowered ? weight_factor(task, task.minima, i) : zero()) {}
  inline HFA_INLINE F share(I sum) const { return mul(to_f(sum), scale); }
  // Where the group has minima. x_sum: the sum of its quantized inputs.
  inline HFA_INLINE F lowered_share(I sum, int32_t x_sum) const {
    return sub(share(sum), mul(minimum, set1(static_cast<float>(x_sum))));
  }
};

// INT8 has none: its scales belong to outputs.
template <>
struct GroupFactors<INT8> {
  static constexpr bool lowered = false;
  GroupFactors() = default;
  GroupFactors(const GroupTask&, int64_t) {}
  inline HFA_INLINE F share(I sum) const { return to_f(sum); }
  inline HFA_INLINE F lowered_share(I sum, int32_t) const { return share(sum); }
};

// The weights of block `b` of a matrix.
template <int FORMAT>
struct BlockWeights {
  const Matrix& matrix;
  int64_t b, inputs, inputs_per_group, groups, group_bytes;
  const uint8_t* weight;

  BlockWeights(const Linear& linear, const Matrix& of, int64_t block)
      : matrix(of), b(block), inputs(ceil_div(linear.in_features, 4) * 4), inputs_per_group(linear.group),
        groups(ceil_div(linear.in_features, linear.group)), group_bytes(bytes(linear.group)),
        weight(static_cast<const uint8_t*>(of.weight) + block * bytes(inputs)) {}

  // The bytes of some inputs of all 64 outputs.
  static int64_t bytes(int64_t count) { return count * BLOCK * BITS<FORMAT> / 8; }

  GroupTask group(int64_t g) const {
    const int64_t scale_bytes = BLOCK * (matrix.scale_dtype == F32 ? 4 : 2);
    GroupTask task;
    task.weight = weight + g * group_bytes;
    task.steps = at_most(inputs_per_group, inputs - g * inputs_per_group) / 4;
    const auto at = [&](const void* values) {
      return values ? static_cast<const uint8_t*>(values) + (b * groups + g) * scale_bytes : nullptr;
    };
    task.scales = FORMAT == INT8 ? nullptr : at(matrix.scales);
    task.minima = at(matrix.minima);
    task.scale_dtype = matrix.scale_dtype;
    task.zeros = matrix.zeros ? matrix.zeros + (b * groups + g) * BLOCK : nullptr;
    return task;
  }
};

// What turns the sums of a block over all groups into results: these times the scales of the outputs (INT8), or divided
// by the divisor of all scales (FP4); plus the bias. It is compiled once for all formats.
struct OutputFactors {
  const float* scales = nullptr;
  const float* biases = nullptr;
  float divisor = 1.0f;
  alignas(64) float converted[BLOCK];  // biases of another dtype, or of a part of a block

  OutputFactors(int32_t format, const Matrix& matrix, int64_t b) {
    const int64_t first = b * BLOCK, outputs = at_most(BLOCK, matrix.out_features - first);
    if (format == INT8) scales = static_cast<const float*>(matrix.scales) + first;
    if (format == FP4) divisor = matrix.divisor;
    if (!matrix.bias) return;
    biases = converted;
    if (matrix.bias_dtype == F32 && outputs == BLOCK) biases = static_cast<const float*>(matrix.bias) + first;
    else
      for (int64_t i = 0; i < outputs; i += LANES) {
        const int n = static_cast<int>(at_most(LANES, outputs - i));
        store(converted + i, load_dtype(matrix.bias, matrix.bias_dtype, first + i, n));
      }
  }
  // LANES results from output i of the block on.
  inline HFA_INLINE F results(const float* sums, int64_t i) const {
    F value = load(sums + i);
    if (scales) value = mul(value, load(scales + i));
    else if (divisor != 1.0f) value = div(value, set1(divisor));
    return biases ? add(value, load(biases + i)) : value;
  }
};

}  // namespace
