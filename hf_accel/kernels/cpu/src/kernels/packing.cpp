// Packs, unpacks and quantizes weights; kernels.h describes the packed layout.
#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
#include "packed_levels.h"

namespace {

// Converts between a stored row and a byte for each of its levels. 8 levels have as many bytes as one has bits.
template <int FORMAT>
void spread(const uint8_t* row, int64_t in_features, uint8_t* levels) {
  constexpr int COUNT = BITS<FORMAT>;
  if (COUNT == 8) return void(std::memcpy(levels, row, static_cast<size_t>(in_features)));
  for (int64_t k = 0; k < in_features; k += 8, row += COUNT) {
    uint64_t word = 0;
    std::memcpy(&word, row, COUNT);
    for (int i = 0; i < 8; ++i) levels[k + i] = static_cast<uint8_t>(word >> COUNT * i & ((1u << COUNT) - 1));
  }
}

template <int FORMAT>
void gather(const uint8_t* levels, int64_t in_features, uint8_t* row) {
  constexpr int COUNT = BITS<FORMAT>;
  if (COUNT == 8) return void(std::memcpy(row, levels, static_cast<size_t>(in_features)));
  for (int64_t k = 0; k < in_features; k += 8, row += COUNT) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(levels[k + i]) << COUNT * i;
    std::memcpy(row, &word, COUNT);
  }
}

template <int FORMAT, class T>
bool quantize_group(const T* weight, int64_t count, T& stored_scale, uint8_t* levels) {
  constexpr bool IS_BYTE = FORMAT == INT8;
  constexpr float HALF = 1 << (BITS<FORMAT> - 1);
  F above = zero(), below = zero(), poison = zero();
  for (int64_t k = 0; k < count; k += LANES) {
    const F value = load_upto(weight + k, count - k);
    above = max(value, above);
    below = max(sub(zero(), value), below);
    poison = fmadd(value, zero(), poison);  // NaN if a value is NaN or infinity, else 0
  }
  const float high = reduce_max(above), low = reduce_max(below), largest = high > low ? high : low;
  // In fewer bits than 8 the number of largest magnitude becomes the lowest level, whatever its sign.
  from_float(IS_BYTE ? largest / 127.0f : largest / (high > low ? -HALF : HALF), stored_scale);
  // The divisor is the stored, rounded scale, because dequantization multiplies by it.
  const float scale = to_float(stored_scale);
  const F divisor = set1(scale == 0.0f ? 1.0f : scale);
  const F least = set1(IS_BYTE ? -127.0f : -HALF), most = set1(HALF - 1.0f);
  for (int64_t k = 0; k < count; k += LANES) {
    const F level = min(max(round(div(load_upto(weight + k, count - k), divisor)), least), most);
    store_upto(reinterpret_cast<int8_t*>(levels) + k, IS_BYTE ? level : add(level, set1(HALF)), count - k);
  }
  return reduce_add(poison) == 0.0f;
}

// Quantizes to levels from 0 on. The level `zero_point` stands for the weight 0.
template <int FORMAT, class T>
bool quantize_asymmetric(const T* weight, int64_t count, T& stored_scale, uint8_t& zero_point, uint8_t* levels) {
  constexpr float STEPS = (1 << BITS<FORMAT>) - 1;
  F high = zero(), negated_low = zero(), poison = zero();  // the range includes 0
  for (int64_t k = 0; k < count; k += LANES) {
    const F value = load_upto(weight + k, count - k);
    high = max(value, high);
    negated_low = max(sub(zero(), value), negated_low);
    poison = fmadd(value, zero(), poison);
  }
  const float below = reduce_max(negated_low);
  // By halves, because the range may overflow.
  from_float((reduce_max(high) * 0.5f + below * 0.5f) / (STEPS / 2.0f), stored_scale);
  const float scale = to_float(stored_scale), step = scale == 0.0f ? 1.0f : scale;
  const bool finite = reduce_add(poison) == 0.0f;
  const float offset = finite ? reduce_max(min(round(set1(below / step)), set1(STEPS))) : 0.0f;
  zero_point = static_cast<uint8_t>(offset);
  for (int64_t k = 0; k < count; k += LANES) {
    const F level = add(round(div(load_upto(weight + k, count - k), set1(step))), set1(offset));
    store_upto(reinterpret_cast<int8_t*>(levels) + k, min(max(level, zero()), set1(STEPS)), count - k);
  }
  return finite;
}

template <int FORMAT, class T>
void quantize(const QuantizeCall& call) {
  const int64_t groups = call.in_features / call.group;
  std::atomic<bool> finite{true};
  parallel_for(ceil_div(call.out_features, BLOCK), call.threads, [&](int64_t b) {
    uint8_t* levels = level_scratch(call.in_features);
    uint8_t* block = static_cast<uint8_t*>(call.packed) + b * block_bytes<FORMAT>(call.in_features);
    for (int64_t i = 0; i < BLOCK; ++i) {
      const int64_t output = b * BLOCK + i;
      if (output >= call.out_features) {
        std::memset(levels, 0, static_cast<size_t>(call.in_features));
      } else {
        const T* row = static_cast<const T*>(call.weight) + output * call.weight_stride;
        T* scales = static_cast<T*>(call.scales) + output * groups;
        for (int64_t g = 0; g < groups; ++g) {
          const T* group = row + g * call.group;
          uint8_t* to = levels + g * call.group;
          const bool good = call.zeros
              ? quantize_asymmetric<FORMAT>(group, call.group, scales[g], call.zeros[output * groups + g], to)
              : quantize_group<FORMAT>(group, call.group, scales[g], to);
          if (!good) finite = false;
        }
      }
      place<FORMAT>(levels, call.in_features, block, i);
    }
  });
  *call.finite = finite;
}

template <int FORMAT>
void pack_rows(const PackCall& call) {
  parallel_for(ceil_div(call.out_features, BLOCK), call.threads, [&](int64_t b) {
    uint8_t* levels = level_scratch(call.in_features);
    uint8_t* block = static_cast<uint8_t*>(call.packed) + b * block_bytes<FORMAT>(call.in_features);
    const int64_t row_bytes = call.in_features * BITS<FORMAT> / 8;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const uint8_t* row = static_cast<const uint8_t*>(call.stored) + (b * BLOCK + i) * row_bytes;
      if (b * BLOCK + i >= call.out_features) std::memset(levels, 0, static_cast<size_t>(call.in_features));
      else spread<FORMAT>(row, call.in_features, levels);
      place<FORMAT>(levels, call.in_features, block, i);
    }
  });
}

template <int FORMAT>
void unpack_rows(const PackCall& call) {
  parallel_for(ceil_div(call.out_features, BLOCK), call.threads, [&](int64_t b) {
    uint8_t* levels = level_scratch(call.in_features);
    const uint8_t* block = static_cast<const uint8_t*>(call.packed) + b * block_bytes<FORMAT>(call.in_features);
    const int64_t row_bytes = call.in_features * BITS<FORMAT> / 8;
    for (int64_t i = 0; i < at_most(BLOCK, call.out_features - b * BLOCK); ++i) {
      take<FORMAT>(block, i, call.in_features, levels);
      gather<FORMAT>(levels, call.in_features, static_cast<uint8_t*>(call.stored) + (b * BLOCK + i) * row_bytes);
    }
  });
}

}  // namespace

void HFA_NAMESPACE::pack(const PackCall& call) {
  for_packing(call.format, [&](auto format) { pack_rows<format>(call); });
}

void HFA_NAMESPACE::unpack(const PackCall& call) {
  for_packing(call.format, [&](auto format) { unpack_rows<format>(call); });
}

void HFA_NAMESPACE::quantize_weight(const QuantizeCall& call) {
  for_packing(call.format, [&](auto format) {
    switch (call.dtype) {
      case BF16: return quantize<format, Bf16>(call);
      case F16: return quantize<format, F16_>(call);
      default: return quantize<format, float>(call);
    }
  });
}
