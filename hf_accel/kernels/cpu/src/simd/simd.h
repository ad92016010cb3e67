// Vector operations. Each instruction set has a file that defines them.
//
//   F, I       vectors of LANES floats and of LANES int32
//   fmadd      a * b + c, rounded once if the hardware can. If results must be equal on every instruction set,
//              write add(mul(a, b), c) instead; the compiler does not contract it.
//   load_as    reads LANES numbers of a storage type as floats; store_as rounds to nearest, ties to even
//   round_as   rounds to the storage type of the pointer, and converts back to float
//   select_below(x, limit, yes, no)  yes if x < limit, else no; NaN is not below
//   *_n        use only the first n lanes, 0 <= n <= LANES. Other memory is not touched, and other lanes are read as 0
//   reduce_add4  the sums of four vectors. The order of the additions is the same for each of them
//   dot_pairs  (HFA_BF16 only) adds two products of bf16 to each lane of F; denormals count as zero
//   zero_nan   0 if x is NaN, else x
//   select_range(x, other, from, to)  lanes from..to-1 of x, the other lanes of `other`
//   transpose  of LANES vectors, lane j of vector i becomes lane i of vector j
//   dot4       adds four products of unsigned bytes of w, less DOT4_OFFSET, and signed bytes of a, which are at least
//              -127, to each lane of I, without saturation; dot4_nibbles adds those of w <= 15 itself
//   dot4_limited, limit_pairs  (where HFA_LIMITED_PAIRS is defined) the first is dot4 in fewer instructions, of w itself,
//              where the sums of the first and of the last two bytes of a are within 128. The second limits 32 bytes so,
//              and stores what they had more; it returns bit i if bytes 4 * i.. had more
//   dot2, add_shorts  (where HFA_SHORT_SUMS is defined) add two products of w itself and of the bytes at a to each half
//              of a lane, which has 16 bits and must not overflow; and the halves of each lane to a sum
//   bits_from<PLACE>(x, mask)  x >> PLACE & mask for each byte of x; the mask has 8 - PLACE bits at most
//   held       x, which is read from memory once and at this place: gcc would read it again for each use
//   either     the bits that one of both has
//   shift_right<BITS>, add_i32  (AVX-512 only) of each lane of I
//   lookup16   for each byte of x from 0 to 15, that byte of table16(p), which holds 16 of them
//   bits_of    the bits of F as integers; max_i32 and reduce_max compare these
//   store_bytes, sub_bytes  (where a level with tiles is made of it) the bytes of I
#pragma once

#include <utility>

#include "../types.h"

// For what must stay in registers: as a kernel's file grows, gcc stops inlining what it inlined before.
#define HFA_INLINE __attribute__((always_inline))
// Behind a prefetch: gcc 12 takes a function that does nothing else for one without effects, and drops the calls of it.
#define HFA_KEPT __asm__ volatile("")

#if defined(HFA_AVX512)
#include "avx512.h"
#elif defined(HFA_AVX2)
#include "avx2.h"
#elif defined(HFA_NEON)
#include "neon.h"
#else
#include "portable.h"
#endif

namespace {

inline F load_as_n(const Int4* p, int n) {  // n is even
  Int4 bytes[LANES / 2] = {};
  std::memcpy(bytes, p, static_cast<size_t>(n / 2));
  return select_range(load_as(bytes), zero(), 0, n);
}

// It is 128 where the hardware has only products of two signed bytes, or has no room for those of an unsigned one.
#if (defined(HFA_NEON) && !defined(HFA_I8MM)) || (defined(HFA_AVX2) && !defined(HFA_AVX512) && !defined(HFA_AVX_VNNI))
constexpr int DOT4_OFFSET = 128;
#else
constexpr int DOT4_OFFSET = 0;
#endif

// Calls f(0), f(1), ... f(COUNT - 1). The arguments are constants, so that arrays indexed by them stay in registers; an f
// of nothing within it takes an int, which is one as well when f is inlined: f(auto) is compiled once for each of them.
// (In a loop, gcc would keep the array in memory, because it unrolls loops too late.)
template <int VALUE> struct Constant { constexpr operator int() const { return VALUE; } };

template <class Function, int... INDEX>
inline HFA_INLINE void call_with_each(const Function& f, std::integer_sequence<int, INDEX...>) {
  (f(Constant<INDEX>{}), ...);
}

template <int COUNT, class Function>
inline HFA_INLINE void unrolled(const Function& f) {
  call_with_each(f, std::make_integer_sequence<int, COUNT>{});
}

// exp(x) with a relative error below 2e-7. It is 0 below -87.3, so that masked scores of -inf have no weight. NaN stays
// NaN. Argument reduction and polynomial are those of expf of Cephes.
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

// exp(x) for x <= 0 in half as many steps, with a relative error below 4e-7. It is exactly 1 at 0, and 0 below -174.
// NaN stays NaN. 2^r on [-1/2, 1/2] is its Taylor polynomial of degree 7.
inline F exp_nonpositive(F x) {
  const F t = max(set1(-252.0f), mul(x, set1(1.44269504088896341f)));  // max returns its second operand if it is NaN
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
