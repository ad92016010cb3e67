// Writes K and V of new tokens to the slots of pages, as they are, or quantized with a scale per token and head.
// The results have the bits of `quantize` in cache/quantized.py. The scale is rounded to its stored dtype before it is
// used.
#include <cfloat>

#include "../kernels.h"

#include "../parallel.h"
#include "any_dtype.h"
#include "page_dtype.h"
#include "rotate.h"

namespace {

inline void store_part(int8_t* p, F x, int64_t n) {
  if (n >= LANES) store_as(p, x);
  else store_as_n(p, x, static_cast<int>(n));
}
inline void store_part(Fp8* p, F x, int64_t n) {
  float lanes[LANES];
  store(lanes, x);
  for (int64_t i = 0; i < at_most(n, LANES); ++i) from_float(lanes[i], p[i]);
}

template <class P> constexpr float LARGEST = 127.0f;
template <> constexpr float LARGEST<Fp8> = 448.0f;
template <> constexpr float LARGEST<Int4> = 7.5f;

// The numbers of `scales` that a token's head has.
template <class P> constexpr int64_t SCALES = 1;
template <> constexpr int64_t SCALES<Int4> = 2;

inline F to_level(F x, const int8_t*) { return round(x); }
inline F to_level(F x, const Fp8*) { return x; }  // it is rounded when it is stored

// The type of the scales of quantized T. Half precision would round the scales of small numbers by several percent.
template <class T> struct ScaleOf { using type = T; };
template <> struct ScaleOf<F16_> { using type = float; };
template <class T> using Scale = typename ScaleOf<T>::type;

// Quantizes the numbers of a token's head. If one of them is NaN or infinite, so is the scale, and they are read back
// as NaN. Levels that would be NaN are stored as 0.
template <class T, class P>
inline void quantize(const T* x, int64_t dim, P* levels, Scale<T>* scale) {
  F largest = zero(), poison = zero();
  for (int64_t i = 0; i < dim; i += LANES) {
    const F value = abs(load_upto(x + i, dim - i));
    largest = max(value, largest);
    poison = add(poison, value);  // NaN if any value is; values are not negative, so infinities do not cancel
  }
  const float sum = reduce_add(poison);
  from_float(sum == sum ? reduce_max(largest) / LARGEST<P> : sum, *scale);
  const float rounded = to_float(*scale);
  const F divisor = set1(rounded == 0.0f ? 1.0f : rounded), limit = set1(LARGEST<P>);
  for (int64_t i = 0; i < dim; i += LANES) {
    const F level = zero_nan(to_level(div(load_upto(x + i, dim - i), divisor), levels));
    store_part(levels + i, max(min(level, limit), sub(zero(), limit)), dim - i);
  }
}

// Stores the scale and the shift of rotated numbers, which are (level + shift) * scale.
template <class S>
inline void store_range(const float* x, int64_t dim, S* scale) {
  float low = x[0], high = x[0], poison = 0.0f;
  for (int64_t i = 0; i < dim; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    poison += std::fabs(x[i]);  // NaN if any number is
  }
  const float middle = (low + high) * 0.5f;
  from_float(poison == poison ? (high - low) / 15.0f : poison, scale[0]);
  float shift = 0.5f;
  if (to_float(scale[0]) == 0.0f) from_float(middle, scale[0]);  // equal numbers, all at the level 0.5
  else shift = middle / to_float(scale[0]);
  from_float(shift, scale[1]);
  if (!(std::fabs(to_float(scale[1])) <= FLT_MAX)) from_float(0.0f, scale[1]);
}

template <class T>
inline void quantize(const T* x, int64_t dim, Int4* levels, Scale<T>* scale) {
  struct Head;
  float* const numbers = static_cast<float*>(scratch<Head>(static_cast<size_t>(dim + LANES) * sizeof(float)));
  for (int64_t i = 0; i < dim; i += LANES) store(numbers + i, load_upto(x + i, dim - i));
  rotate(numbers, dim);
  store_range(numbers, dim, scale);
  const float rounded = to_float(scale[0]);
  const F divisor = set1(rounded == 0.0f ? 1.0f : rounded), shift = set1(to_float(scale[1])), middle = set1(LARGEST<Int4>);
  for (int64_t i = 0; i < dim; i += LANES) {
    const F level = zero_nan(round(add(sub(div(load(numbers + i), divisor), shift), middle)));
    store(numbers + i, max(min(level, set1(15.0f)), zero()));
  }
  for (int64_t i = 0; i < dim; i += 2)
    levels[i / 2].bits = static_cast<uint8_t>(static_cast<int>(numbers[i]) | static_cast<int>(numbers[i + 1]) << 4);
}

template <class T, class P>
void write(const WriteCall& c, const PageWrite& w, int64_t token, int64_t slot) {
  const int64_t block = slot / c.block_size, offset = slot % c.block_size;
  for (int64_t h = 0; h < c.heads; ++h) {
    const T* const from = static_cast<const T*>(w.states) + token * w.token + h * w.head;
    const int64_t row = (block * c.heads + h) * c.block_size + offset;
    if constexpr (sizeof(P) == 1)
      quantize(from, w.dim, static_cast<P*>(w.pages) + bytes_of<P>(row * w.dim), static_cast<Scale<T>*>(w.scales) + row * SCALES<P>);
    else
      std::memcpy(static_cast<T*>(w.pages) + row * w.dim, from, sizeof(T) * static_cast<size_t>(w.dim));
  }
}

typedef void (*Write)(const WriteCall&, const PageWrite&, int64_t, int64_t);

template <class T>
Write choose_write(int32_t stored) {
  switch (stored) {
    case INT8: return write<T, int8_t>;
    case FP8: return write<T, Fp8>;
    case INT4: return write<T, Int4>;
    default: return write<T, T>;
  }
}

template <class T>
void write_as(const WriteCall& c) {
  const Write write_key = choose_write<T>(key_dtype(c.page_dtype));
  const Write write_value = choose_write<T>(value_dtype(c.page_dtype));
  const int64_t chunk = 16;  // tokens of a task
  parallel_for(ceil_div(c.tokens, chunk), c.threads, [&](int64_t task) {
    for (int64_t i = task * chunk; i < at_most(c.tokens, (task + 1) * chunk); ++i) {
      const int64_t token = c.written ? c.written[i] : i;
      write_key(c, c.keys, token, c.slots[i]);
      write_value(c, c.values, token, c.slots[i]);
    }
  });
}

}  // namespace

void HFA_NAMESPACE::write_pages(const WriteCall& c) {
  switch (c.dtype) {
    case BF16: return write_as<Bf16>(c);
    case F16: return write_as<F16_>(c);
    default: return write_as<float>(c);
  }
}
