// AVX-512 with VNNI; HFA_BF16 adds the bfloat16 dot product.
#pragma once

#include <immintrin.h>

namespace {

constexpr int LANES = 16;
typedef __m512 F;
typedef __m512i I;

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store_past_cache(float* p, F x) { _mm512_stream_ps(p, x); }
inline void finish_past_cache() { _mm_sfence(); }
inline void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
inline F fmadd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F keep_nan(F a, F x) { return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }
inline F zero_nan(F x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x); }
inline F zero_below(F a, F x, float limit) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, set1(limit), _CMP_LT_OQ), zero());
}
inline F select_below(F x, float limit, F yes, F no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, set1(limit), _CMP_LT_OQ), yes);
}
inline F scale_by_power_of_two(F a, F n) { return _mm512_scalef_ps(a, n); }
inline F select_range(F x, F other, int from, int to) {
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(first(to) & ~first(from)), x);
}
inline HFA_INLINE void transpose(F (&x)[LANES]) {
  F y[LANES];
  for (int i = 0; i < LANES; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(y[i + j]), high = _mm512_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int j = 0; j < 4; ++j) {  // x[4 i + j] now holds column j of each quarter for rows 4 i..4 i + 3
    y[j] = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88);
    y[4 + j] = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);
    y[8 + j] = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    y[12 + j] = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0x88);
    x[8 + j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0xdd);
    x[4 + j] = _mm512_shuffle_f32x4(y[4 + j], y[12 + j], 0x88);
    x[12 + j] = _mm512_shuffle_f32x4(y[4 + j], y[12 + j], 0xdd);
  }
}
inline float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
inline void reduce_add4(F a, F b, F c, F d, float* sums) {
  const F ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const F cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  F all = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  all = add(all, _mm512_permute_ps(all, 0x4e));
  all = add(all, _mm512_permute_ps(all, 0xb1));
  const I every_fourth = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(every_fourth, all)));
}

inline F load_as(const float* p) { return load(p); }
inline F load_as_n(const float* p, int n) { return load_n(p, n); }
inline void store_as(float* p, F x) { store(p, x); }
inline void store_as_n(float* p, F x, int n) { store_n(p, x, n); }

inline F widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline F load_as(const Bf16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_as_n(const Bf16* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p)); }
inline __m256i narrow_bf16(F x) {
  const I bits = _mm512_castps_si512(x);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  I rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const I quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  return _mm512_cvtepi32_epi16(rounded);
}
inline void store_as(Bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x)); }
inline void store_as_n(Bf16* p, F x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(x)); }

inline F load_as(const F16_* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_as_n(const F16_* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store_as(F16_* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_as_n(F16_* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline F round_as(F x, const float*) { return x; }
inline F round_as(F x, const Bf16*) { return widen_bf16(narrow_bf16(x)); }
inline F round_as(F x, const F16_*) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline F widen_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline F load_as(const int8_t* p) { return widen_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_as_n(const int8_t* p, int n) { return widen_int8(_mm_maskz_loadu_epi8(first(n), p)); }
// The floats must be whole numbers from -128 to 127; see round.
inline void store_as(int8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
inline void store_as_n(int8_t* p, F x, int n) {
  _mm_mask_storeu_epi8(p, first(n), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

// The bits of an e4m3 number, shifted to the format of a half, are its value times 2^-8, also for denormals.
inline F widen_fp8(__m128i x) {
  const __m256i wide = _mm256_cvtepu8_epi16(x);
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  half = _mm256_blendv_epi8(half, _mm256_set1_epi16(0x7e00), nan);
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
inline F load_as(const Fp8* p) { return widen_fp8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_as_n(const Fp8* p, int n) { return widen_fp8(_mm_maskz_loadu_epi8(first(n), p)); }

inline F load_as(const Int4* p) {
  uint64_t bits;
  std::memcpy(&bits, p, 8);
  const __m512i both = _mm512_inserti64x4(_mm512_set1_epi32(static_cast<int>(bits)),
                                          _mm256_set1_epi32(static_cast<int>(bits >> 32)), 1);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i levels = _mm512_and_si512(_mm512_srlv_epi32(both, shifts), _mm512_set1_epi32(15));
  return _mm512_sub_ps(_mm512_cvtepi32_ps(levels), _mm512_set1_ps(7.5f));
}

// -- integers ---------------------------------------------------------------------------------------------

inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I sub_bytes(I a, I b) { return _mm512_sub_epi8(a, b); }
inline I broadcast4(const int8_t* p) { int32_t x; std::memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
// This is assembly because with the intrinsic gcc 12 copies the sums, which then do not fit the registers. That is
// three times slower.
inline I dot4(I sum, I w, I a) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a));
  return sum;
}
inline I dot4_nibbles(I sum, I w, I a) { return dot4(sum, w, a); }
template <int PLACE> inline I bits_from(I x, int mask) {
  return _mm512_and_si512(PLACE ? _mm512_srli_epi16(x, PLACE) : x, _mm512_set1_epi8(static_cast<char>(mask)));
}
inline I add_i32(I a, I b) { return _mm512_add_epi32(a, b); }
template <int BITS> inline I shift_right(I x) { return _mm512_srai_epi32(x, BITS); }
inline I held(I x) { __asm__("" : "+v"(x)); return x; }
inline I either(I a, I b) { return _mm512_or_si512(a, b); }
inline I table16(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I lookup16(I table, I x) { return _mm512_shuffle_epi8(table, x); }
inline I mul_i32(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I load_u8_as_i32(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I max_i32(I a, I b) { return _mm512_max_epi32(a, b); }
inline int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a); }
inline I bits_of(F x) { return _mm512_castps_si512(x); }
inline F to_f(I x) { return _mm512_cvtepi32_ps(x); }
inline int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a); }
#if defined(HFA_BF16)
inline I load_pairs(const Bf16* p) { return _mm512_loadu_si512(p); }
inline I load_pairs_n(const Bf16* p, int n) { return _mm512_maskz_loadu_epi16((1ull << n) - 1ull, p); }
inline F dot_pairs(F sum, I a, I b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif
inline HFA_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); HFA_KEPT; }
inline HFA_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); HFA_KEPT; }

}  // namespace
