// One vocabulary of vector operations; each instruction set has a file that defines it.
//
//   F          LANES floats                       I          LANES int32
//   fmadd      a * b + c; rounded once where the hardware can. Where results must be equal on every
//              instruction set, write add(mul(a, b), c) instead: contraction is off.
//   load_as    LANES numbers of a storage type as floats; store_as rounds to nearest even
//   round_as   rounded to the storage type of the pointer, and back to float
//   select_below  yes where x < limit, else no (NaN is not below)
//   *_n        the first n lanes only, 0 <= n <= LANES: memory beyond them is not touched, lanes read as 0
//   reduce_add4  the sums of four vectors, each added up in the same order wherever it stands
//   dot_pairs  (HFA_BF16 only) F += two products of bf16 in each lane; denormals count as zero
//   zero_nan   0 where x is NaN
//   select_range(x, other, from, to)  lanes from..to-1 of x, the others of `other`
//   transpose  lane j of vector i becomes lane i of vector j, over LANES vectors
//   dot4       I += four unsigned bytes of w times four signed bytes of a in each lane, exactly (no saturation);
//              dot4_nibbles the same where w <= 15
#pragma once

#include "../types.h"

#if defined(HFA_AVX512)
#include "avx512.h"
#elif defined(HFA_AVX2)
#include "avx2.h"
#else
#include "portable.h"
#endif

namespace {

// f(0), f(1), ... f(COUNT - 1) with constants for arguments, so that arrays indexed by them stay in registers
// (gcc keeps an array in memory if it unrolls the loop over it only late).
template <int VALUE> struct Constant { constexpr operator int() const { return VALUE; } };

template <int COUNT, class Function>
inline __attribute__((always_inline)) void unrolled(const Function& f) {
  if constexpr (COUNT > 0) {
    unrolled<COUNT - 1>(f);
    f(Constant<COUNT - 1>{});
  }
}
#define HFA_INLINE __attribute__((always_inline))

// exp(x), relative error below 2e-7; 0 below -87.3 (so that hidden scores of -inf vanish), NaN stays NaN.
// Argument reduction and polynomial: Cephes expf.
inline F exp(F x) {
  const F clamped = min(max(x, set1(-87.33654f)), set1(88.37626f));
  const F n = round(mul(clamped, set1(1.44269504088896341f)));
  F r = fmadd(n, set1(-0.693359375f), clamped);
  r = fmadd(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fmadd(p, r, set1(1.3981999507e-3f));
  p = fmadd(p, r, set1(8.3334519073e-3f));
  p = fmadd(p, r, set1(4.1665795894e-2f));
  p = fmadd(p, r, set1(1.6666665459e-1f));
  p = fmadd(p, r, set1(5.0000001201e-1f));
  p = add(fmadd(p, mul(r, r), r), set1(1.0f));
  return keep_nan(zero_below(scale_by_power_of_two(p, n), x, -87.33654f), x);
}

// exp(x) of x <= 0 in half the steps, relative error below 4e-7: exactly 1 at 0, 0 below -174; NaN stays NaN.
// 2^r on [-1/2, 1/2] by its Taylor polynomial of degree 7.
inline F exp_nonpositive(F x) {
  const F t = max(set1(-252.0f), mul(x, set1(1.44269504088896341f)));  // the second operand where it is NaN
  const F n = round(t), r = sub(t, n);
  F p = set1(1.5252733804e-5f);
  p = fmadd(p, r, set1(1.5403530393e-4f));
  p = fmadd(p, r, set1(1.3333558146e-3f));
  p = fmadd(p, r, set1(9.6181291076e-3f));
  p = fmadd(p, r, set1(5.5504108664e-2f));
  p = fmadd(p, r, set1(2.4022650695e-1f));
  p = fmadd(p, r, set1(6.9314718056e-1f));
  p = fmadd(p, r, set1(1.0f));
  return scale_by_power_of_two(p, n);
}

}  // namespace
