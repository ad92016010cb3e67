// NEON of armv8-a; HFA_DOTPROD adds the dot product of signed bytes, HFA_I8MM that of unsigned and signed bytes.
// A vector is two registers. Lanes and the order of sums are those of avx2.h, so that all results have its bits.
#pragma once

#include <arm_neon.h>

namespace {

constexpr int LANES = 8;
struct F { float32x4_t low, high; };
struct I { int32x4_t low, high; };
struct Mask { uint32x4_t low, high; };

// The first n lanes.
inline Mask first(int n) {
  const int32x4_t numbers = {0, 1, 2, 3}, count = vdupq_n_s32(n);
  return {vcltq_s32(numbers, count), vcltq_s32(vaddq_s32(numbers, vdupq_n_s32(4)), count)};
}
inline Mask below(F a, F b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
inline Mask ordered(F x) { return {vceqq_f32(x.low, x.low), vceqq_f32(x.high, x.high)}; }  // lanes that are not NaN
inline F select(Mask mask, F yes, F no) {
  return {vbslq_f32(mask.low, yes.low, no.low), vbslq_f32(mask.high, yes.high, no.high)};
}

inline F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F x) { vst1q_f32(p, x.low), vst1q_f32(p + 4, x.high); }
inline void store_past_cache(float* p, F x) { store(p, x); }
inline void finish_past_cache() {}
inline F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline F div(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
// As with the x86 instructions, the result is the second operand if either is NaN.
inline F min(F a, F b) { return select(below(a, b), a, b); }
inline F max(F a, F b) { return select(below(b, a), a, b); }
inline F abs(F a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline F sqrt(F a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
inline F fmadd(F a, F b, F c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline F round(F a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
inline F keep_nan(F a, F x) { return select(ordered(x), a, x); }
inline F zero_nan(F x) { return select(ordered(x), x, zero()); }
inline F zero_below(F a, F x, float limit) { return select(below(x, set1(limit)), zero(), a); }
inline F select_below(F x, float limit, F yes, F no) { return select(below(x, set1(limit)), yes, no); }
inline float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
inline float32x4_t scale_by_power_of_two(float32x4_t a, float32x4_t n) {  // in two steps, because 2^128 is not a float
  const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  return vmulq_f32(vmulq_f32(a, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
}
inline F scale_by_power_of_two(F a, F n) {
  return {scale_by_power_of_two(a.low, n.low), scale_by_power_of_two(a.high, n.high)};
}
inline F select_range(F x, F other, int from, int to) { return select(first(from), other, select(first(to), x, other)); }
inline HFA_INLINE void transpose(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
  const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  a = vreinterpretq_f32_f64(vtrn1q_f64(ab_even, cd_even));
  b = vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd));
  c = vreinterpretq_f32_f64(vtrn2q_f64(ab_even, cd_even));
  d = vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd));
}
inline HFA_INLINE void transpose(F (&x)[LANES]) {
  for (int i = 0; i < LANES; i += 4) {
    transpose(x[i].low, x[i + 1].low, x[i + 2].low, x[i + 3].low);
    transpose(x[i].high, x[i + 1].high, x[i + 2].high, x[i + 3].high);
  }
  for (int i = 0; i < 4; ++i) {
    const float32x4_t high = x[i].high;
    x[i].high = x[4 + i].low;
    x[4 + i].low = high;
  }
}
inline void reduce_add4(F a, F b, F c, F d, float* sums) {
  float32x4_t x = vaddq_f32(a.low, a.high), y = vaddq_f32(b.low, b.high);
  float32x4_t z = vaddq_f32(c.low, c.high), w = vaddq_f32(d.low, d.high);
  transpose(x, y, z, w);
  vst1q_f32(sums, vaddq_f32(vaddq_f32(x, z), vaddq_f32(y, w)));
}
inline float reduce_add(F a) {
  const float32x4_t x = vaddq_f32(a.low, a.high);
  const float32x2_t y = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
}
inline float reduce_max(F a) {  // by comparisons, like max
  const float32x4_t x = vbslq_f32(vcltq_f32(a.high, a.low), a.low, a.high), other = vextq_f32(x, x, 2);
  const float32x4_t y = vbslq_f32(vcltq_f32(other, x), x, other);
  const float even = vgetq_lane_f32(y, 0), odd = vgetq_lane_f32(y, 1);
  return even > odd ? even : odd;
}

inline F load_as(const float* p) { return load(p); }
inline void store_as(float* p, F x) { store(p, x); }

inline F widen_bf16(uint16x8_t x) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(x), 16))};
}
inline F load_as(const Bf16* p) { return widen_bf16(vld1q_u16(reinterpret_cast<const uint16_t*>(p))); }
// Integer operations, because the conversion instruction is not in every CPU.
inline uint16x4_t narrow_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}
inline uint16x8_t narrow_bf16(F x) { return vcombine_u16(narrow_bf16(x.low), narrow_bf16(x.high)); }
inline void store_as(Bf16* p, F x) { vst1q_u16(reinterpret_cast<uint16_t*>(p), narrow_bf16(x)); }

inline F widen_f16(uint16x8_t x) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(x)))};
}
inline uint16x8_t narrow_f16(F x) {
  return vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(x.low)), vreinterpret_u16_f16(vcvt_f16_f32(x.high)));
}
inline F load_as(const F16_* p) { return widen_f16(vld1q_u16(reinterpret_cast<const uint16_t*>(p))); }
inline void store_as(F16_* p, F x) { vst1q_u16(reinterpret_cast<uint16_t*>(p), narrow_f16(x)); }

inline F round_as(F x, const float*) { return x; }
inline F round_as(F x, const Bf16*) { return widen_bf16(narrow_bf16(x)); }
inline F round_as(F x, const F16_*) { return widen_f16(narrow_f16(x)); }

inline F load_as(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
// The floats must be whole numbers from -128 to 127; see round.
inline void store_as(int8_t* p, F x) {
  vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.low)), vqmovn_s32(vcvtnq_s32_f32(x.high)))));
}

// The bits of an e4m3 number, shifted to the format of a half, are its value times 2^-8, also for denormals.
inline F load_as(const Fp8* p) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
  const uint16x8_t magnitude = vandq_u16(wide, vdupq_n_u16(0x7f)), sign = vandq_u16(wide, vdupq_n_u16(0x80));
  const uint16x8_t half = vorrq_u16(vshlq_n_u16(sign, 8), vshlq_n_u16(magnitude, 7));
  const uint16x8_t is_nan = vceqq_u16(magnitude, vdupq_n_u16(0x7f));
  return mul(widen_f16(vbslq_u16(is_nan, vdupq_n_u16(0x7e00), half)), set1(256.0f));
}

inline F load_as(const Int4* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  const uint32x4_t both = vdupq_n_u32(bits), mask = vdupq_n_u32(15);
  const int32x4_t low = {0, -4, -8, -12}, high = {-16, -20, -24, -28};
  const F levels = {vcvtq_f32_u32(vandq_u32(vshlq_u32(both, low), mask)),
                    vcvtq_f32_u32(vandq_u32(vshlq_u32(both, high), mask))};
  return sub(levels, set1(7.5f));
}

template <class T> inline F load_as_n(const T* p, int n) {
  T lanes[LANES] = {};
  std::memcpy(lanes, p, sizeof(T) * static_cast<size_t>(n));
  return load_as(lanes);
}
template <class T> inline void store_as_n(T* p, F x, int n) {
  T lanes[LANES];
  store_as(lanes, x);
  std::memcpy(p, lanes, sizeof(T) * static_cast<size_t>(n));
}
inline F load_n(const float* p, int n) { return load_as_n(p, n); }
inline void store_n(float* p, F x, int n) { store_as_n(p, x, n); }

// -- integers ---------------------------------------------------------------------------------------------

inline I iset1(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline I load_bytes(const void* p) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  return {vreinterpretq_s32_u8(vld1q_u8(bytes)), vreinterpretq_s32_u8(vld1q_u8(bytes + 16))};
}
inline I broadcast4(const int8_t* p) { int32_t x; std::memcpy(&x, p, 4); return iset1(x); }

// Adds four products of signed bytes to each lane. The bytes of a are at least -127.
inline int32x4_t dot4_signed(int32x4_t sum, int32x4_t w, int32x4_t a) {
  const int8x16_t x = vreinterpretq_s8_s32(w), y = vreinterpretq_s8_s32(a);
#if defined(HFA_DOTPROD)
  return vdotq_s32(sum, x, y);
#else
  // The sum of two products is at most 2 * 128 * 127, which fits 16 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}
inline I dot4_nibbles(I sum, I w, I a) {
  return {dot4_signed(sum.low, w.low, a.low), dot4_signed(sum.high, w.high, a.high)};
}
#if defined(HFA_I8MM)
inline int32x4_t dot4_bytes(int32x4_t sum, int32x4_t w, int32x4_t a) {
  return vusdotq_s32(sum, vreinterpretq_u8_s32(w), vreinterpretq_s8_s32(a));
}
#else
inline int32x4_t dot4_bytes(int32x4_t sum, int32x4_t w, int32x4_t a) {  // w less DOT4_OFFSET is a signed byte
  return dot4_signed(sum, veorq_s32(w, vdupq_n_s32(static_cast<int32_t>(0x80808080u))), a);
}
#endif
inline I dot4(I sum, I w, I a) {
  return {dot4_bytes(sum.low, w.low, a.low), dot4_bytes(sum.high, w.high, a.high)};
}
template <int PLACE> inline int32x4_t bits_from(int32x4_t x, uint8x16_t mask) {
  uint8x16_t bytes = vreinterpretq_u8_s32(x);
  if constexpr (PLACE != 0) bytes = vshrq_n_u8(bytes, PLACE);
  return vreinterpretq_s32_u8(vandq_u8(bytes, mask));
}
template <int PLACE> inline I bits_from(I x, int mask) {
  const uint8x16_t masks = vdupq_n_u8(static_cast<uint8_t>(mask));
  return {bits_from<PLACE>(x.low, masks), bits_from<PLACE>(x.high, masks)};
}
inline I held(I x) { return x; }
inline I either(I a, I b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
inline I table16(const uint8_t* p) {
  const int32x4_t table = vreinterpretq_s32_u8(vld1q_u8(p));
  return {table, table};
}
inline I lookup16(I table, I x) {
  const uint8x16_t of = vreinterpretq_u8_s32(table.low);
  return {vreinterpretq_s32_u8(vqtbl1q_u8(of, vreinterpretq_u8_s32(x.low))),
          vreinterpretq_s32_u8(vqtbl1q_u8(of, vreinterpretq_u8_s32(x.high)))};
}
inline I mul_i32(I a, I b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }
inline I load_u8_as_i32(const uint8_t* p) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(p));
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(wide)))};
}
inline I max_i32(I a, I b) { return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)}; }
inline int32_t reduce_max(I a) { return vmaxvq_s32(vmaxq_s32(a.low, a.high)); }
inline I bits_of(F x) { return {vreinterpretq_s32_f32(x.low), vreinterpretq_s32_f32(x.high)}; }
inline F to_f(I x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
inline HFA_INLINE void prefetch(const void* p) { __builtin_prefetch(p); HFA_KEPT; }
inline HFA_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); HFA_KEPT; }

}  // namespace
