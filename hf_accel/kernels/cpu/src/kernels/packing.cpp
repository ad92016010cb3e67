// Packs, unpacks and quantizes weights; kernels.h describes the packed layout.
#include "../kernels.h"
#include "../parallel.h"
#include "../simd/simd.h"

namespace {

inline uint32_t load_word(const void* p) { uint32_t word; std::memcpy(&word, p, 4); return word; }
inline void store_word(void* p, uint32_t word) { std::memcpy(p, &word, 4); }

int64_t block_bytes(int32_t format, int64_t in_features) {
  return ceil_div(in_features, 4) * 4 * BLOCK / (format == INT8 ? 1 : 2);
}

// Copies the levels of one output to its place in a block. Each level is a byte; they are padded to whole words.
void place(int32_t format, const uint8_t* levels, int64_t in_features, uint8_t* block, int64_t output) {
  uint8_t* out = block + output * 4;
  if (format == INT8) {
    for (int64_t k = 0; k < in_features; k += 4, out += BLOCK * 4) store_word(out, load_word(levels + k) ^ 0x80808080u);
  } else {
    for (int64_t k = 0; k < in_features; k += 8, out += BLOCK * 4)
      store_word(out, load_word(levels + k) | load_word(levels + k + 4) << 4);
  }
}

void take(int32_t format, const uint8_t* block, int64_t output, int64_t in_features, uint8_t* levels) {
  const uint8_t* in = block + output * 4;
  if (format == INT8) {
    for (int64_t k = 0; k < in_features; k += 4, in += BLOCK * 4) store_word(levels + k, load_word(in) ^ 0x80808080u);
  } else {
    for (int64_t k = 0; k < in_features; k += 8, in += BLOCK * 4) {
      store_word(levels + k, load_word(in) & 0x0f0f0f0fu);
      store_word(levels + k + 4, load_word(in) >> 4 & 0x0f0f0f0fu);
    }
  }
}

struct Levels;

uint8_t* level_scratch(int64_t in_features) {
  auto* levels = static_cast<uint8_t*>(scratch<Levels>(static_cast<size_t>(in_features + 8 + LANES)));
  std::memset(levels + in_features, 0, 8);
  return levels;
}

template <class T>
bool quantize_group(const T* weight, int64_t count, int32_t format, T& stored_scale, uint8_t* levels) {
  F above = zero(), below = zero(), poison = zero();
  for (int64_t k = 0; k < count; k += LANES) {
    const F value = load_as_n(weight + k, static_cast<int>(at_most(LANES, count - k)));
    above = max(value, above);
    below = max(sub(zero(), value), below);
    poison = fmadd(value, zero(), poison);  // NaN if a value is NaN or infinity, else 0
  }
  const float high = reduce_max(above), low = reduce_max(below), largest = high > low ? high : low;
  // In 4 bits the number of largest magnitude becomes -8, whatever its sign.
  from_float(format == INT8 ? largest / 127.0f : largest / (high > low ? -8.0f : 8.0f), stored_scale);
  // The divisor is the stored, rounded scale, because dequantization multiplies by it.
  const float scale = to_float(stored_scale);
  const F divisor = set1(scale == 0.0f ? 1.0f : scale);
  const F least = set1(format == INT8 ? -127.0f : -8.0f), most = set1(format == INT8 ? 127.0f : 7.0f);
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = static_cast<int>(at_most(LANES, count - k));
    const F level = min(max(round(div(load_as_n(weight + k, n), divisor)), least), most);
    store_as_n(reinterpret_cast<int8_t*>(levels) + k, format == INT8 ? level : add(level, set1(8.0f)), n);
  }
  return reduce_add(poison) == 0.0f;
}

// Quantizes to levels from 0 to 15. The level `zero_point` stands for the weight 0.
template <class T>
bool quantize_asymmetric(const T* weight, int64_t count, T& stored_scale, uint8_t& zero_point, uint8_t* levels) {
  F high = zero(), negated_low = zero(), poison = zero();  // the range includes 0
  for (int64_t k = 0; k < count; k += LANES) {
    const F value = load_as_n(weight + k, static_cast<int>(at_most(LANES, count - k)));
    high = max(value, high);
    negated_low = max(sub(zero(), value), negated_low);
    poison = fmadd(value, zero(), poison);
  }
  const float below = reduce_max(negated_low);
  from_float((reduce_max(high) * 0.5f + below * 0.5f) / 7.5f, stored_scale);  // halves, because the range may overflow
  const float scale = to_float(stored_scale), step = scale == 0.0f ? 1.0f : scale;
  const bool finite = reduce_add(poison) == 0.0f;
  const float offset = finite ? reduce_max(min(round(set1(below / step)), set1(15.0f))) : 0.0f;
  zero_point = static_cast<uint8_t>(offset);
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = static_cast<int>(at_most(LANES, count - k));
    const F level = add(round(div(load_as_n(weight + k, n), set1(step))), set1(offset));
    store_as_n(reinterpret_cast<int8_t*>(levels) + k, min(max(level, zero()), set1(15.0f)), n);
  }
  return finite;
}

template <class T>
void quantize(const QuantizeCall& call) {
  const int64_t groups = call.in_features / call.group;
  std::atomic<bool> finite{true};
  parallel_for(ceil_div(call.out_features, BLOCK), call.threads, [&](int64_t b) {
    uint8_t* levels = level_scratch(call.in_features);
    uint8_t* block = static_cast<uint8_t*>(call.packed) + b * block_bytes(call.format, call.in_features);
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
              ? quantize_asymmetric(group, call.group, scales[g], call.zeros[output * groups + g], to)
              : quantize_group(group, call.group, call.format, scales[g], to);
          if (!good) finite = false;
        }
      }
      place(call.format, levels, call.in_features, block, i);
    }
  });
  *call.finite = finite;
}

}  // namespace

void HFA_NAMESPACE::pack(const PackCall& call) {
  parallel_for(ceil_div(call.out_features, BLOCK), call.threads, [&](int64_t b) {
    uint8_t* levels = level_scratch(call.in_features);
    uint8_t* block = static_cast<uint8_t*>(call.packed) + b * block_bytes(call.format, call.in_features);
    const int64_t row_bytes = call.format == INT8 ? call.in_features : call.in_features / 2;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const uint8_t* row = static_cast<const uint8_t*>(call.stored) + (b * BLOCK + i) * row_bytes;
      if (b * BLOCK + i >= call.out_features) std::memset(levels, 0, static_cast<size_t>(call.in_features));
      else if (call.format == INT8) std::memcpy(levels, row, static_cast<size_t>(row_bytes));
      else for (int64_t k = 0; k < row_bytes; ++k) levels[2 * k] = row[k] & 15, levels[2 * k + 1] = row[k] >> 4;
      place(call.format, levels, call.in_features, block, i);
    }
  });
}

void HFA_NAMESPACE::unpack(const PackCall& call) {
  parallel_for(ceil_div(call.out_features, BLOCK), call.threads, [&](int64_t b) {
    uint8_t* levels = level_scratch(call.in_features);
    const uint8_t* block = static_cast<const uint8_t*>(call.packed) + b * block_bytes(call.format, call.in_features);
    const int64_t row_bytes = call.format == INT8 ? call.in_features : call.in_features / 2;
    for (int64_t i = 0; i < at_most(BLOCK, call.out_features - b * BLOCK); ++i) {
      uint8_t* row = static_cast<uint8_t*>(call.stored) + (b * BLOCK + i) * row_bytes;
      take(call.format, block, i, call.in_features, levels);
      if (call.format == INT8) std::memcpy(row, levels, static_cast<size_t>(row_bytes));
      else for (int64_t k = 0; k < row_bytes; ++k) row[k] = static_cast<uint8_t>(levels[2 * k] | levels[2 * k + 1] << 4);
    }
  });
}

void HFA_NAMESPACE::quantize_weight(const QuantizeCall& call) {
  switch (call.dtype) {
    case BF16: return quantize<Bf16>(call);
    case F16: return quantize<F16_>(call);
    default: return quantize<float>(call);
  }
}
