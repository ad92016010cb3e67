// The dtypes of pages, of keys in the low byte of a page_dtype, and of values in the next one.
#pragma once

#include <cstdint>

namespace {

inline int32_t key_dtype(int32_t page_dtype) { return page_dtype & 255; }
inline int32_t value_dtype(int32_t page_dtype) { return page_dtype >> 8; }

}  // namespace
