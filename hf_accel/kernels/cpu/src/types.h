// Storage types of tensors, and the scalar conversions that every instruction set shares.
#pragma once

#include <cstdint>
#include <cstring>

// The numbers are part of the C interface: see library.py.
// INT8_GROUPS is INT8 whose scales belong to groups of inputs. FP4 is E2M1, and is packed as INT4 is.
enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, FP8 = 4, INT4 = 5, INT8_GROUPS = 6, FP4 = 7, INT3 = 8,
                       INT2 = 9 };

struct Bf16 { uint16_t bits; };
struct F16_ { uint16_t bits; };
struct Fp8 { uint8_t bits; };  // e4m3fn
struct Int4 { uint8_t bits; };  // two numbers from -7.5 to 7.5 in steps of 1, the first in the low bits

// Everything below has internal linkage, so that each instruction set has its own copy. Otherwise the linker could use
// a copy that was compiled for AVX-512 in the portable kernels.
namespace {

inline float bits_to_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return static_cast<float>(x); }
inline float to_float(Bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(F16_ x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The scaling by 2^112 = 2^(127 - 15) is exact. It turns denormal halves into normal floats.
  const float value = bits_to_float(magnitude << 13) * 0x1p112f;
  return bits_to_float(sign | float_to_bits(value));
}

inline float to_float(Fp8 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return bits_to_float(sign | 0x7fc00000u);
  const float value = bits_to_float(magnitude << 20) * 0x1p120f;
  return bits_to_float(sign | float_to_bits(value));
}

// All conversions round to nearest, ties to even.
inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, Bf16& out) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
  } else {
    out.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

inline void from_float(float x, F16_& out) {
  const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // a denormal half: the addition rounds at the right bit
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

// Larger values become 448, as is common with torch.float8_e4m3fn. NaN stays NaN.
inline void from_float(float x, Fp8& out) {
  const uint32_t bits = float_to_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  uint32_t fp8;
  if (magnitude > 0x7f800000u) {
    fp8 = 0x7fu;
  } else if (magnitude >= 0x43e00000u) {
    fp8 = 0x7eu;
  } else if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9
    fp8 = float_to_bits(bits_to_float(magnitude) + 0x1p14f) - float_to_bits(0x1p14f);
  } else {
    fp8 = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  }
  out.bits = static_cast<uint8_t>(sign | fp8);
}

template <class T> inline int64_t bytes_of(int64_t count) { return count * static_cast<int64_t>(sizeof(T)); }
template <> inline int64_t bytes_of<Int4>(int64_t count) { return count / 2; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace
