// The words of the products: a 32-bit word is a float, or a pair of bfloat16.
//
//   STEP           the numbers of a word, which are neighbours along the summed dimension
//   load           reads LANES words from the n > 0 numbers at p, with zeros after them
//   dot            sum + a * b over the numbers of each word
//   interleave     copies numbers of a row as vectors of words; for pairs, a word also has the number of the next row
//   store_weights  stores LANES floats as numbers
#pragma once

#include "../../simd/simd.h"

namespace {

struct FloatWords {
  static constexpr int STEP = 1;
  typedef float Number;

  template <class T>
  static F load(const T* p, int64_t n) { return n >= LANES ? load_as(p) : load_as_n(p, static_cast<int>(n)); }
  static F dot(F sum, F a, F b) { return fmadd(a, b, sum); }
  static void store_weights(float* p, F x) { store(p, x); }

  // Copies LANES columns, of which n exist, of rows[0].
  template <class T>
  static void interleave(const T* const* rows, int64_t column, int64_t n, float* out) {
    store(out, load(after(rows[0], column), n));
  }
};

#if defined(HFA_BF16)

// Products are exact and are added in float32. int8, fp8 and int4 are converted to bfloat16 exactly.
struct PairWords {
  static constexpr int STEP = 2;
  typedef Bf16 Number;

  static F load(const Bf16* p, int64_t n) {
    if (n >= 2 * LANES) return _mm512_castsi512_ps(_mm512_loadu_si512(p));
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1u, p));
  }
  template <class T>
  static F load(const T* p, int64_t n) {
    const F low = FloatWords::load(p, n), high = n > LANES ? FloatWords::load(after(p, LANES), n - LANES) : zero();
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  static F dot(F sum, F a, F b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static void store_weights(Bf16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
  }

  // Copies 2 * LANES columns, of which n exist, of rows[0] and rows[1]. A null row counts as zeros.
  template <class T>
  static void interleave(const T* const* rows, int64_t column, int64_t n, float* out) {
    const I a = _mm512_castps_si512(rows[0] ? load(after(rows[0], column), n) : zero());
    const I b = _mm512_castps_si512(rows[1] ? load(after(rows[1], column), n) : zero());
    const I low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);  // within 128-bit quarters
    const I first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(out + LANES, _mm512_permutex2var_epi64(low, last, high));
  }
};

#endif

}  // namespace
