// Plain C++ loops, which the compiler turns into the vector instructions of its target (SSE2, NEON, SVE).
#pragma once

#include <cmath>

namespace {

constexpr int LANES = 8;
struct F { float v[LANES]; };
struct I { int32_t v[LANES]; };

#define HFA_EACH for (int i = 0; i < LANES; ++i)

inline F set1(float x) { F r; HFA_EACH r.v[i] = x; return r; }
inline F zero() { return set1(0.0f); }
inline F add(F a, F b) { HFA_EACH a.v[i] += b.v[i]; return a; }
inline F sub(F a, F b) { HFA_EACH a.v[i] -= b.v[i]; return a; }
inline F mul(F a, F b) { HFA_EACH a.v[i] *= b.v[i]; return a; }
inline F div(F a, F b) { HFA_EACH a.v[i] /= b.v[i]; return a; }
// As with the x86 instructions, the result is the second operand if either is NaN.
inline F min(F a, F b) { HFA_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F max(F a, F b) { HFA_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F abs(F a) { HFA_EACH a.v[i] = std::fabs(a.v[i]); return a; }
inline F sqrt(F a) { HFA_EACH a.v[i] = std::sqrt(a.v[i]); return a; }
inline F fmadd(F a, F b, F c) { return add(mul(a, b), c); }
inline float round_scalar(float x) {  // x + 1.5 * 2^23 has no bits for a fraction; larger x is returned as it is
  const float shift = std::copysign(0x1.8p23f, x), rounded = (x + shift) - shift;
  return std::fabs(x) < 0x1p22f ? rounded : x;
}
inline F round(F a) { HFA_EACH a.v[i] = round_scalar(a.v[i]); return a; }
inline F keep_nan(F a, F x) { HFA_EACH a.v[i] = x.v[i] == x.v[i] ? a.v[i] : x.v[i]; return a; }
inline F zero_nan(F x) { HFA_EACH x.v[i] = x.v[i] == x.v[i] ? x.v[i] : 0.0f; return x; }
inline F zero_below(F a, F x, float limit) { HFA_EACH a.v[i] = x.v[i] < limit ? 0.0f : a.v[i]; return a; }
inline F select_below(F x, float limit, F yes, F no) {
  HFA_EACH no.v[i] = x.v[i] < limit ? yes.v[i] : no.v[i];
  return no;
}
inline F scale_by_power_of_two(F a, F n) {  // in two steps, because 2^128 is not a float; exp handles NaN in n
  HFA_EACH {
    const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0, half = whole >> 1;
    a.v[i] *= bits_to_float(static_cast<uint32_t>(half + 127) << 23);
    a.v[i] *= bits_to_float(static_cast<uint32_t>(whole - half + 127) << 23);
  }
  return a;
}
inline F select_range(F x, F other, int from, int to) {
  HFA_EACH if (i < from || i >= to) x.v[i] = other.v[i];
  return x;
}
inline HFA_INLINE void transpose(F (&x)[LANES]) {
  HFA_EACH for (int j = 0; j < i; ++j) {
    const float lane = x[i].v[j];
    x[i].v[j] = x[j].v[i];
    x[j].v[i] = lane;
  }
}
inline float reduce_add(F a) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline void reduce_add4(F a, F b, F c, F d, float* sums) {
  sums[0] = reduce_add(a);
  sums[1] = reduce_add(b);
  sums[2] = reduce_add(c);
  sums[3] = reduce_add(d);
}
inline float reduce_max(F a) {
  for (int i = 1; i < LANES; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}

template <class T> inline F load_as(const T* p) { F r; HFA_EACH r.v[i] = to_float(p[i]); return r; }
inline F load_as(const Int4* p) {
  F r;
  HFA_EACH r.v[i] = static_cast<float>(p[i / 2].bits >> 4 * (i % 2) & 15) - 7.5f;
  return r;
}
template <class T> inline void store_as(T* p, F x) { HFA_EACH from_float(x.v[i], p[i]); }
template <class T> inline F round_as(F x, const T*) {
  HFA_EACH { T rounded; from_float(x.v[i], rounded); x.v[i] = to_float(rounded); }
  return x;
}
inline void store_as(int8_t* p, F x) { HFA_EACH p[i] = static_cast<int8_t>(x.v[i]); }
template <class T> inline F load_as_n(const T* p, int n) {
  F r = zero();
  for (int i = 0; i < n; ++i) r.v[i] = to_float(p[i]);
  return r;
}
template <class T> inline void store_as_n(T* p, F x, int n) {
  T lanes[LANES];
  store_as(lanes, x);
  std::memcpy(p, lanes, sizeof(T) * static_cast<size_t>(n));
}
inline F load(const float* p) { return load_as(p); }
inline F load_n(const float* p, int n) { return load_as_n(p, n); }
inline void store(float* p, F x) { store_as(p, x); }
inline void store_past_cache(float* p, F x) { store(p, x); }
inline void finish_past_cache() {}
inline void store_n(float* p, F x, int n) { store_as_n(p, x, n); }

// -- integers: a vector of bytes is LANES words of four bytes -----------------------------------------------

inline I iset1(int32_t x) { I r; HFA_EACH r.v[i] = x; return r; }
inline I load_bytes(const void* p) { I r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline I broadcast4(const int8_t* p) { int32_t x; std::memcpy(&x, p, 4); return iset1(x); }
inline I dot4(I sum, I w, I a) {
  HFA_EACH {
    const uint32_t bytes = static_cast<uint32_t>(w.v[i]), others = static_cast<uint32_t>(a.v[i]);
    int32_t s = sum.v[i];
    for (int shift = 0; shift < 32; shift += 8)
      s += static_cast<int32_t>(bytes >> shift & 255u) * static_cast<int8_t>(others >> shift & 255u);
    sum.v[i] = s;
  }
  return sum;
}
inline I dot4_nibbles(I sum, I w, I a) { return dot4(sum, w, a); }
template <int PLACE> inline I bits_from(I x, int mask) {
  HFA_EACH x.v[i] = static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) >> PLACE & static_cast<uint32_t>(mask) * 0x01010101u);
  return x;
}
inline I held(I x) { return x; }
inline I either(I a, I b) { HFA_EACH a.v[i] |= b.v[i]; return a; }
struct Table16 { uint8_t v[16]; };
inline Table16 table16(const uint8_t* p) { Table16 table; std::memcpy(table.v, p, 16); return table; }
inline I lookup16(const Table16& table, I x) {
  uint8_t bytes[sizeof x.v];
  std::memcpy(bytes, x.v, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table.v[byte];
  std::memcpy(x.v, bytes, sizeof bytes);
  return x;
}
inline I mul_i32(I a, I b) { HFA_EACH a.v[i] *= b.v[i]; return a; }
inline I load_u8_as_i32(const uint8_t* p) { I r; HFA_EACH r.v[i] = p[i]; return r; }
inline I max_i32(I a, I b) { HFA_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline int32_t reduce_max(I a) {
  for (int i = 1; i < LANES; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}
inline I bits_of(F x) { I r; std::memcpy(r.v, x.v, sizeof r.v); return r; }
inline F to_f(I x) { F r; HFA_EACH r.v[i] = static_cast<float>(x.v[i]); return r; }
inline void prefetch(const void*) {}
inline void prefetch_l2(const void*) {}

#undef HFA_EACH

}  // namespace
