// When what a pass leaves goes past the caches to the memory: nobody reads it before the next pass, and a line that is
// written as a whole need not be read first.
#pragma once

#include "../kernels.h"

namespace {

constexpr int64_t STREAMED = 1 << 20;  // bytes of a call, from which they would not be in a cache any more

// Whether rows of `width` numbers, of which a call writes `count` in all, may be streamed: whole lines alone are.
inline bool may_stream(const float* p, int64_t width, int64_t count) {
  const bool aligned = reinterpret_cast<uintptr_t>(p) % (LANES * sizeof(float)) == 0 && width % LANES == 0;
  return aligned && count * static_cast<int64_t>(sizeof(float)) >= STREAMED;
}

}  // namespace
