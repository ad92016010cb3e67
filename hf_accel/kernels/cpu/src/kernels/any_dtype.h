// Loads and stores of numbers whose storage type is known only at run time.
#pragma once

#include <type_traits>

#include "../simd/simd.h"

namespace {

// Loads and stores the next n numbers of a row, but at most a vector. Whole ones take a fraction of the time.
template <class T>
inline F load_upto(const T* p, int64_t n) {
  return n >= LANES ? load_as(p) : load_as_n(p, static_cast<int>(n));
}
template <class T>
inline void store_upto(T* p, F x, int64_t n) {
  if (n >= LANES) store_as(p, x);
  else store_as_n(p, x, static_cast<int>(n));
}

inline F load_dtype(const void* p, int32_t dtype, int64_t i, int n) {
  switch (dtype) {
    case BF16: return load_upto(static_cast<const Bf16*>(p) + i, n);
    case F16: return load_upto(static_cast<const F16_*>(p) + i, n);
    default: return load_upto(static_cast<const float*>(p) + i, n);
  }
}

inline void store_dtype(void* p, int32_t dtype, int64_t i, F x, int n) {
  switch (dtype) {
    case BF16: return store_upto(static_cast<Bf16*>(p) + i, x, n);
    case F16: return store_upto(static_cast<F16_*>(p) + i, x, n);
    default: return store_upto(static_cast<float*>(p) + i, x, n);
  }
}

// Calls f with a null pointer of the storage type, so that f is instantiated for each type.
template <class Function>
inline void for_dtype(int32_t dtype, const Function& f) {
  switch (dtype) {
    case BF16: return f(static_cast<Bf16*>(nullptr));
    case F16: return f(static_cast<F16_*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

}  // namespace
