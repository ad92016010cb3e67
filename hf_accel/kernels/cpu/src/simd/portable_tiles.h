// Tiles in memory, with the results of AMX. Like AMX, they stop a program that uses them without a Tiles object. Products
// are not inlined: with them, kernels would take minutes to compile.
#pragma once

#include <cmath>
#include <cstring>

#include "../types.h"

namespace {

union TileMemory {
  uint8_t bytes[TILE_HEIGHT][TILE_WIDTH];
  int8_t levels[TILE_HEIGHT][TILE_WIDTH];
  int32_t words[TILE_HEIGHT][TILE_WORDS];
  float floats[TILE_HEIGHT][TILE_WORDS];
  Bf16 halves[TILE_HEIGHT][2 * TILE_WORDS];
};

thread_local bool has_tiles = false;

inline TileMemory& tile_number(int number) {
  static thread_local TileMemory tiles[8];
  if (!has_tiles) __builtin_trap();
  return tiles[number];
}

inline const char* refused_tiles() { return nullptr; }

class Tiles {
 public:
  Tiles() {
    if (has_tiles) __builtin_trap();  // the inner object would take the tiles from the outer one
    has_tiles = true;
    for (int number = 0; number < 8; ++number) std::memset(&tile_number(number), 0xff, sizeof(TileMemory));
  }
  ~Tiles() { has_tiles = false; }
  Tiles(const Tiles&) = delete;
};

template <int T>
inline void zero_tile() { std::memset(&tile_number(T), 0, sizeof(TileMemory)); }

template <int T>
inline void load_tile(const void* p, int64_t stride) {
  TileMemory& tile = tile_number(T);
  for (int64_t i = 0; i < TILE_HEIGHT; ++i)
    std::memcpy(tile.bytes[i], static_cast<const uint8_t*>(p) + i * stride, TILE_WIDTH);
}

template <int T>
inline void store_tile(void* p, int64_t stride) {
  const TileMemory& tile = tile_number(T);
  for (int64_t i = 0; i < TILE_HEIGHT; ++i)
    std::memcpy(static_cast<uint8_t*>(p) + i * stride, tile.bytes[i], TILE_WIDTH);
}

template <int C, int A, int B>
__attribute__((noinline)) void dot_int8() {
  static_assert(C != A && A != B && B != C, "AMX has no such instruction");
  TileMemory& c = tile_number(C);
  const TileMemory &a = tile_number(A), &b = tile_number(B);
  for (int64_t m = 0; m < TILE_HEIGHT; ++m)
    for (int64_t k = 0; k < TILE_HEIGHT; ++k)
      for (int64_t n = 0; n < TILE_WORDS; ++n) {
        int32_t sum = 0;
        for (int64_t i = 0; i < 4; ++i) sum += a.levels[m][4 * k + i] * b.levels[k][4 * n + i];
        c.words[m][n] += sum;
      }
}

inline float without_denormal(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f * x : x; }

template <int C, int A, int B>
__attribute__((noinline)) void dot_bf16() {
  static_assert(C != A && A != B && B != C, "AMX has no such instruction");
  TileMemory& c = tile_number(C);
  const TileMemory &a = tile_number(A), &b = tile_number(B);
  for (int64_t m = 0; m < TILE_HEIGHT; ++m)
    for (int64_t n = 0; n < TILE_WORDS; ++n) {
      float sums[2] = {};
      for (int64_t k = 0; k < TILE_HEIGHT; ++k)
        for (int64_t i = 0; i < 2; ++i) {
          const float x = without_denormal(to_float(a.halves[m][2 * k + i]));
          const float y = without_denormal(to_float(b.halves[k][2 * n + i]));
          sums[i] = without_denormal(std::fma(x, y, sums[i]));
        }
      const float sum = without_denormal(sums[0] + sums[1]);
      c.floats[m][n] = without_denormal(without_denormal(c.floats[m][n]) + sum);
    }
}

}  // namespace
