// Where the levels of one output lie in a packed block; kernels.h describes the layout.
#pragma once

#include "../kernels.h"
#include "../parallel.h"
#include "integer_weights.h"

namespace {

inline uint32_t load_word(const void* p) { uint32_t word; std::memcpy(&word, p, 4); return word; }
inline void store_word(void* p, uint32_t word) { std::memcpy(p, &word, 4); }

// Joins the words of a unit to its planes, for one output, and splits them again. A word has 4 levels. See Levels.
template <int FORMAT> struct Packing;

constexpr uint32_t EACH_BYTE = 0x01010101u;

template <> struct Packing<INT8> {
  static void join(const uint32_t* words, uint32_t* planes) { planes[0] = words[0] ^ 128 * EACH_BYTE; }
  static void split(const uint32_t* planes, uint32_t* words) { words[0] = planes[0] ^ 128 * EACH_BYTE; }
};

template <> struct Packing<INT4> {
  static void join(const uint32_t* words, uint32_t* planes) { planes[0] = words[0] | words[1] << 4; }
  static void split(const uint32_t* planes, uint32_t* words) {
    words[0] = planes[0] & 15 * EACH_BYTE;
    words[1] = planes[0] >> 4 & 15 * EACH_BYTE;
  }
};

template <> struct Packing<INT3> {
  static void join(const uint32_t* words, uint32_t* planes) {
    for (int p = 0; p < 3; ++p) planes[p] = words[2 * p] | words[2 * p + 1] << 3;
    for (int p = 0; p < 2; ++p) {
      planes[p] |= (words[6 + p] & 6 * EACH_BYTE) << 5;
      planes[2] |= (words[6 + p] & EACH_BYTE) << (6 + p);
    }
  }
  static void split(const uint32_t* planes, uint32_t* words) {
    for (int p = 0; p < 3; ++p) {
      words[2 * p] = planes[p] & 7 * EACH_BYTE;
      words[2 * p + 1] = planes[p] >> 3 & 7 * EACH_BYTE;
    }
    for (int p = 0; p < 2; ++p) words[6 + p] = (planes[p] >> 5 & 6 * EACH_BYTE) | (planes[2] >> (6 + p) & EACH_BYTE);
  }
};

template <> struct Packing<INT2> {
  static void join(const uint32_t* words, uint32_t* planes) {
    planes[0] = words[0] | words[1] << 2 | words[2] << 4 | words[3] << 6;
  }
  static void split(const uint32_t* planes, uint32_t* words) {
    for (int w = 0; w < 4; ++w) words[w] = planes[0] >> 2 * w & 3 * EACH_BYTE;
  }
};

// Calls f with the format of a packed weight as a constant.
template <class Function>
inline void for_packing(int32_t format, const Function& f) {
  switch (format) {
    case INT2: return f(Constant<INT2>{});
    case INT3: return f(Constant<INT3>{});
    case INT4: return f(Constant<INT4>{});
    default: return f(Constant<INT8>{});
  }
}

template <int FORMAT>
inline int64_t block_bytes(int64_t in_features) { return ceil_div(in_features, 4) * 4 * BLOCK * BITS<FORMAT> / 8; }

// Copies the levels of one output to its place in a block. Each level is a byte; they are padded to whole words.
template <int FORMAT>
inline void place(const uint8_t* levels, int64_t in_features, uint8_t* block, int64_t output) {
  constexpr int WORDS = Levels<FORMAT>::WORDS, PLANES = Levels<FORMAT>::PLANES;
  uint8_t* out = block + lane_offset<FORMAT>(output);
  for (int64_t k = 0; k < in_features; k += 4 * WORDS, out += PLANES * STEP) {
    uint32_t words[WORDS], planes[PLANES];
    for (int w = 0; w < WORDS; ++w) words[w] = load_word(levels + k + 4 * w);
    Packing<FORMAT>::join(words, planes);
    for (int p = 0; p < PLANES; ++p) store_word(out + p * LINE, planes[p]);
  }
}

template <int FORMAT>
inline void take(const uint8_t* block, int64_t output, int64_t in_features, uint8_t* levels) {
  constexpr int WORDS = Levels<FORMAT>::WORDS, PLANES = Levels<FORMAT>::PLANES;
  const uint8_t* in = block + lane_offset<FORMAT>(output);
  for (int64_t k = 0; k < in_features; k += 4 * WORDS, in += PLANES * STEP) {
    uint32_t words[WORDS], planes[PLANES];
    for (int p = 0; p < PLANES; ++p) planes[p] = load_word(in + p * LINE);
    Packing<FORMAT>::split(planes, words);
    for (int w = 0; w < WORDS; ++w) store_word(levels + k + 4 * w, words[w]);
  }
}

struct Row;

// Memory for the levels of an output, and zeros behind them.
inline uint8_t* level_scratch(int64_t in_features) {
  auto* levels = static_cast<uint8_t*>(scratch<Row>(static_cast<size_t>(in_features + 8 + LANES)));
  std::memset(levels + in_features, 0, 8);
  return levels;
}

}  // namespace
