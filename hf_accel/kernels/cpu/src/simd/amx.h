// The tiles of a CPU with AMX. They are written in assembly: gcc's own macros take only literals as register numbers,
// and do not say that a load reads memory.
#pragma once

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

inline const char* refused_tiles() {
#if defined(__linux__)
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed ? nullptr : "the system does not permit AMX tiles (arch_prctl)";
#else
  return "how this system permits AMX tiles is not known";
#endif
}

// The operand of ldtilecfg. All tiles have the full size, so that it never changes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

class Tiles {
 public:
  Tiles() {
    static constexpr TileShapes shapes;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  }
  // After the release a switch of threads has no tiles to save, and other libraries find none that are not theirs.
  ~Tiles() { __asm__ volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
};

template <int T>
inline __attribute__((always_inline)) void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline __attribute__((always_inline)) void load_tile(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void store_tile(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void dot_int8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace
