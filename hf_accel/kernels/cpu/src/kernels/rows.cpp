// Looks outputs of packed weights up, as floats; kernels.h describes the packed layout.
#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
#include "packed_levels.h"

namespace {

inline float number_at(const void* values, int32_t dtype, int64_t i) {
  switch (dtype) {
    case BF16: return to_float(static_cast<const Bf16*>(values)[i]);
    case F16: return to_float(static_cast<const F16_*>(values)[i]);
    default: return static_cast<const float*>(values)[i];
  }
}

template <int FORMAT, class T>
void look_up(const Linear& linear, int64_t output, T* out) {
  const Matrix& matrix = linear.matrices[0];
  const int64_t b = output / BLOCK, i = output % BLOCK;
  const int64_t group = linear.format == INT8 ? linear.in_features : linear.group, groups = linear.in_features / group;
  uint8_t* levels = level_scratch(linear.in_features);
  take<FORMAT>(static_cast<const uint8_t*>(matrix.weight) + b * block_bytes<FORMAT>(linear.in_features), i,
               linear.in_features, levels);
  for (int64_t g = 0; g < groups; ++g, levels += group, out += group) {
    const int64_t place = (b * groups + g) * BLOCK + i;
    const F scale = set1(number_at(matrix.scales, matrix.scale_dtype, place));
    const F minimum = set1(matrix.minima ? number_at(matrix.minima, matrix.scale_dtype, place) : 0.0f);
    float middle = 0.0f;
    if constexpr (!IN_BYTES<FORMAT>)
      if (!matrix.minima) middle = matrix.zeros ? matrix.zeros[place] : Levels<FORMAT>::MIDDLE;
    for (int64_t k = 0; k < group; k += LANES) {
      const F level = load_upto(reinterpret_cast<const int8_t*>(levels) + k, group - k);
      store_upto(out + k, sub(mul(sub(level, set1(middle)), scale), minimum), group - k);
    }
  }
}

template <int FORMAT, class T>
void look_up_all(const RowsCall& call) {
  constexpr int64_t CHUNK = 8;  // rows of a task; with fewer rows, a second thread would cost more than it saves
  const Linear& linear = *call.linear;
  std::atomic<bool> known{true};
  parallel_for(ceil_div(call.rows, CHUNK), call.threads, [&](int64_t task) {
    for (int64_t r = task * CHUNK; r < at_most(call.rows, (task + 1) * CHUNK); ++r) {
      const int64_t output = call.outputs[r];
      if (output < 0 || output >= linear.matrices[0].out_features) known = false;
      else look_up<FORMAT>(linear, output, static_cast<T*>(call.out) + r * linear.in_features);
    }
  });
  *call.known = known;
}

}  // namespace

void HFA_NAMESPACE::rows(const RowsCall& call) {
  for_packing(call.linear->format, [&](auto format) {
    for_dtype(call.out_dtype, [&](auto* type) { look_up_all<format, std::remove_pointer_t<decltype(type)>>(call); });
  });
}
