// Stores past the caches: for what nobody reads before the next pass. A line that is stored whole need not be read first.
#pragma once

#include "../kernels.h"

namespace {

constexpr int64_t PAST_CACHE = 1 << 20;  // bytes of a call, from which they would not be in a cache any more

// Whether a call stores rows of `width` numbers at p, `count` numbers in all, past the caches: whole lines alone can be.
inline bool goes_past_cache(const float* p, int64_t width, int64_t count) {
  const bool whole = reinterpret_cast<uintptr_t>(p) % (LANES * sizeof(float)) == 0 && width % LANES == 0;
  return whole && count * static_cast<int64_t>(sizeof(float)) >= PAST_CACHE;
}

}  // namespace
