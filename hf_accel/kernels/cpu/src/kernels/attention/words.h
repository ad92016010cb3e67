// The words of the products: a 32-bit word is a float, or a pair of bfloat16.
//
//   STEP           the numbers of a word, which are neighbours along the summed dimension
//   load           reads LANES words from the n > 0 numbers at p, with zeros after them
//   load_shifted   the same of int4, with `shift` added to each number
//   dot            sum + a * b over the numbers of each word
//   interleave     makes STEP vectors of words of a row's numbers; for pairs, a word also has the number of the next row
//   store_weights  stores LANES floats as numbers
#pragma once

#include "../any_dtype.h"

namespace {

struct FloatWords {
  static constexpr int STEP = 1;
  typedef float Number;

  template <class T>
  static F load(const T* p, int64_t n) { return load_upto(p, n); }
  static F load_shifted(const Int4* p, int64_t n, F shift) { return add(load(p, n), shift); }
  static F dot(F sum, F a, F b) { return fmadd(a, b, sum); }
  static void store_weights(float* p, F x) { store(p, x); }

  // LANES columns, of which n exist, of rows[0].
  template <class T>
  static void interleave(const T* const* rows, int64_t column, int64_t n, F (&out)[STEP]) {
    out[0] = load(rows[0] + column, n);
  }
  static void interleave(const Int4* const* rows, int64_t column, int64_t n, F (&out)[STEP], const float* shifts) {
    out[0] = load_shifted(rows[0] + column / 2, n, set1(shifts[0]));
  }
};

#if defined(HFA_BF16)

// Products are exact and are added in float32. int8 and fp8 are converted to bfloat16 exactly, int4
// is rounded after its shift.
struct PairWords {
  static constexpr int STEP = 2;
  typedef Bf16 Number;

  static F load(const Bf16* p, int64_t n) {
    if (n >= 2 * LANES) return _mm512_castsi512_ps(_mm512_loadu_si512(p));
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1u, p));
  }
  template <class T>
  static F load(const T* p, int64_t n) {
    const F low = FloatWords::load(p, n), high = n > LANES ? FloatWords::load(p + LANES, n - LANES) : zero();
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  static F load_shifted(const Int4* p, int64_t n, F shift) {
    const F low = FloatWords::load_shifted(p, n, shift);
    const F high = n > LANES ? FloatWords::load_shifted(p + LANES / 2, n - LANES, shift) : zero();
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  static F dot(F sum, F a, F b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static void store_weights(Bf16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
  }

  // 2 * LANES columns, of which n exist, of rows[0] and rows[1]. A null row counts as zeros.
  template <class T>
  static void interleave(const T* const* rows, int64_t column, int64_t n, F (&out)[STEP]) {
    interleave(rows[0] ? load(rows[0] + column, n) : zero(), rows[1] ? load(rows[1] + column, n) : zero(), out);
  }
  static void interleave(const Int4* const* rows, int64_t column, int64_t n, F (&out)[STEP], const float* shifts) {
    const F first = rows[0] ? load_shifted(rows[0] + column / 2, n, set1(shifts[0])) : zero();
    interleave(first, rows[1] ? load_shifted(rows[1] + column / 2, n, set1(shifts[1])) : zero(), out);
  }
  static void interleave(F first_row, F second_row, F (&out)[STEP]) {
    const I a = _mm512_castps_si512(first_row), b = _mm512_castps_si512(second_row);
    const I low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);  // within 128-bit quarters
    const I first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    out[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, first, high));
    out[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, last, high));
  }
};

#endif

}  // namespace
