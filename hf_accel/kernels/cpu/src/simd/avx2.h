// AVX2 with FMA and F16C; HFA_AVX_VNNI adds the byte dot product.
#pragma once

#include <immintrin.h>

namespace {

constexpr int LANES = 8;
typedef __m256 F;
typedef __m256i I;

inline __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline void store_past_cache(float* p, F x) { _mm256_stream_ps(p, x); }
inline void finish_past_cache() { _mm_sfence(); }
inline void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
inline F fmadd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F keep_nan(F a, F x) { return _mm256_blendv_ps(a, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
inline F zero_nan(F x) { return _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q)); }
inline F zero_below(F a, F x, float limit) { return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(limit), _CMP_LT_OQ), a); }
inline F select_below(F x, float limit, F yes, F no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, set1(limit), _CMP_LT_OQ));
}
inline F scale_by_power_of_two(F a, F n) {  // in two steps, because 2^128 is not a float
  const I whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const I bias = _mm256_set1_epi32(127);
  const F first_part = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const F rest = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
  return mul(mul(a, first_part), rest);
}
inline F select_range(F x, F other, int from, int to) {
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(first(from), first(to))));
}
inline HFA_INLINE void transpose(F (&x)[LANES]) {
  F y[LANES];
  for (int i = 0; i < LANES; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
      x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
    }
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
  }
  for (int i = 0; i < LANES; ++i) x[i] = y[i];
}
inline float reduce_add(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline void reduce_add4(F a, F b, F c, F d, float* sums) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
  __m128 w = _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1));
  _MM_TRANSPOSE4_PS(x, y, z, w);
  _mm_storeu_ps(sums, _mm_add_ps(_mm_add_ps(x, z), _mm_add_ps(y, w)));
}
inline float reduce_max(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline F load_as(const float* p) { return load(p); }
inline F load_as_n(const float* p, int n) { return load_n(p, n); }
inline void store_as(float* p, F x) { store(p, x); }
inline void store_as_n(float* p, F x, int n) { store_n(p, x, n); }

inline F widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline F load_as(const Bf16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m128i narrow_bf16(F x) {
  const I bits = _mm256_castps_si256(x);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  I rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const I quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline void store_as(Bf16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x)); }

inline F load_as(const F16_* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_as(F16_* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline F round_as(F x, const float*) { return x; }
inline F round_as(F x, const Bf16*) { return widen_bf16(narrow_bf16(x)); }
inline F round_as(F x, const F16_*) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline F load_as(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The floats must be whole numbers from -128 to 127; see round.
inline void store_as(int8_t* p, F x) {
  const I wide = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// The bits of an e4m3 number, shifted to the format of a half, are its value times 2^-8, also for denormals.
inline F load_as(const Fp8* p) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  __m128i half = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));
  half = _mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

inline F load_as(const Int4* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  const I shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const I both = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), shifts);
  return sub(_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15))), set1(7.5f));
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

// -- integers ---------------------------------------------------------------------------------------------

inline I iset1(int32_t x) { return _mm256_set1_epi32(x); }
inline I load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bytes(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline I sub_bytes(I a, I b) { return _mm256_sub_epi8(a, b); }
inline I broadcast4(const int8_t* p) { int32_t x; std::memcpy(&x, p, 4); return _mm256_set1_epi32(x); }
inline I held(I x) { __asm__("" : "+x"(x)); return x; }
#if defined(HFA_AVX_VNNI)
inline I dot4(I sum, I w, I a) { return _mm256_dpbusd_avx_epi32(sum, w, a); }
inline I dot4_nibbles(I sum, I w, I a) { return dot4(sum, w, a); }
#else
// The multiply-add of bytes saturates if two products are more than 16 bits hold. Those of 15 and 127 are not.
inline I dot4_nibbles(I sum, I w, I a) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
}
// It takes the magnitude of w - 128, and a with the sign of w - 128: two products are 2 * 128 * 127 at most.
inline I dot4(I sum, I w, I a) {
  const I difference = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(difference), _mm256_sign_epi8(a, difference));
  return held(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
#if !defined(HFA_TILES)  // which multiply whole levels
#define HFA_LIMITED_PAIRS
inline I dot4_limited(I sum, I w, I a) { return held(dot4_nibbles(sum, w, a)); }  // two products are 255 * 128 at most
inline uint32_t limit_pairs(int8_t* levels, int8_t* excess) {
  const I whole = load_bytes(levels), sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), whole);
  const I above = _mm256_cmpgt_epi16(_mm256_abs_epi16(sums), _mm256_set1_epi16(128));
  const I near = _mm256_max_epi8(_mm256_min_epi8(whole, _mm256_set1_epi8(64)), _mm256_set1_epi8(-64));
  const I limited = _mm256_blendv_epi8(whole, near, above), rest = sub_bytes(whole, limited);
  store_bytes(levels, limited);
  store_bytes(excess, rest);
  const I none = _mm256_cmpeq_epi32(rest, _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(none))) & 0xff;
}
#endif
#define HFA_SHORT_SUMS
struct FourBytes { int8_t bytes[4]; };
// As one block, since gcc would read the bytes of all rows first, and then lack registers for the sums.
inline HFA_INLINE I dot2(I shorts, I w, const int8_t* a) {
  I products;
  __asm__("vpbroadcastd %2, %1\n\tvpmaddubsw %1, %3, %1\n\tvpaddw %1, %0, %0"
          : "+x"(shorts), "=&x"(products) : "m"(*reinterpret_cast<const FourBytes*>(a)), "x"(w));
  return shorts;
}
inline I add_shorts(I sum, I shorts) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(shorts, _mm256_set1_epi16(1)));
}
#endif
template <int PLACE> inline I bits_from(I x, int mask) {
  return _mm256_and_si256(PLACE ? _mm256_srli_epi16(x, PLACE) : x, _mm256_set1_epi8(static_cast<char>(mask)));
}
inline I either(I a, I b) { return _mm256_or_si256(a, b); }
inline I table16(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I lookup16(I table, I x) { return _mm256_shuffle_epi8(table, x); }
inline I mul_i32(I a, I b) { return _mm256_mullo_epi32(a, b); }
inline I load_u8_as_i32(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline I max_i32(I a, I b) { return _mm256_max_epi32(a, b); }
inline int32_t reduce_max(I a) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
inline I bits_of(F x) { return _mm256_castps_si256(x); }
inline F to_f(I x) { return _mm256_cvtepi32_ps(x); }
inline HFA_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); HFA_KEPT; }
inline HFA_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); HFA_KEPT; }

}  // namespace
