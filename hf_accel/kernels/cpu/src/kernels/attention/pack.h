// Packs the keys and values of a split for the products: converts them and changes their layout.
#pragma once

#include <type_traits>

#include "../../kernels.h"
#include "words.h"

namespace {

constexpr int64_t SPLIT = 512;  // the keys of a split; it is constant so that the order of sums is
constexpr int64_t WHOLE = 32;   // the keys of a part of it: what no query sees of the first and the last part is null
constexpr int64_t AHEAD = 48;   // how many keys ahead to prefetch

struct Range {
  int64_t first, last;  // `last` is not in the range
  bool empty() const { return first >= last; }
  Range within(Range r) const { return {at_least(first, r.first), at_most(last, r.last)}; }
};

// Pointers to the keys and values of a split, by their index in it; null for keys that no query of the tile sees.
struct KeyRows {
  const uint8_t *k[SPLIT + 16], *v[SPLIT + 16];
  alignas(64) float k_scales[SPLIT + 16], v_scales[SPLIT + 16];
  float k_shifts[SPLIT + 16], v_shifts[SPLIT + 16];  // of int4
};

inline int64_t dtype_bytes(int32_t dtype) { return dtype == F32 ? 4 : dtype == BF16 || dtype == F16 ? 2 : 1; }

inline float load_scalar(const void* p, int32_t dtype, int64_t i) {
  switch (dtype) {
    case BF16: return to_float(static_cast<const Bf16*>(p)[i]);
    case F16: return to_float(static_cast<const F16_*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}

// Loads the scales of `count` slots of pages of `dtype` from slot `first` on; of int4 also the shifts.
inline void load_scales(const void* from, int32_t scale_dtype, int32_t dtype, int64_t first, int64_t count, float* scales,
                        float* shifts) {
  const int64_t step = dtype == INT4 ? 2 : 1;
  for (int64_t n = 0; n < count; ++n) scales[n] = load_scalar(from, scale_dtype, step * (first + n));
  if (dtype == INT4)
    for (int64_t n = 0; n < count; ++n) shifts[n] = load_scalar(from, scale_dtype, step * (first + n) + 1);
}

// Fills `rows` for the range `keys`, which lies within [start, start + SPLIT) of sequence b.
inline void find_rows(const AttentionCall& c, int64_t b, int64_t head, int64_t start, Range keys, KeyRows& rows) {
  const int64_t k_bytes = dtype_bytes(c.k_dtype), v_bytes = dtype_bytes(c.v_dtype);
  const uint8_t* k = static_cast<const uint8_t*>(c.k.data) + head * c.k.head * k_bytes;
  const uint8_t* v = static_cast<const uint8_t*>(c.v.data) + head * c.v.head * v_bytes;
  const int64_t k_step = c.k.token * k_bytes, v_step = c.v.token * v_bytes;
  int64_t i = keys.first - start;
  const int64_t end = keys.last - start;
  for (int64_t j = i / WHOLE * WHOLE; j < i; ++j) rows.k[j] = rows.v[j] = nullptr;
  for (int64_t j = end; j < ceil_div(end, WHOLE) * WHOLE; ++j) rows.k[j] = rows.v[j] = nullptr;
  if (!c.block_table) {
    const int64_t first = keys.first + (c.cu_k ? c.cu_k[b] : 0);
    k += (b * c.k.batch + first * c.k.token) * k_bytes;
    v += (b * c.v.batch + first * c.v.token) * v_bytes;
    for (; i < end; ++i, k += k_step, v += v_step) rows.k[i] = k, rows.v[i] = v;
    return;
  }
  int64_t number = keys.first / c.block_size, offset = keys.first % c.block_size;
  for (; i < end; ++number, offset = 0) {
    const int64_t block = c.block_table[b * c.table_stride + number];
    const uint8_t* k_row = k + block * c.k.batch * k_bytes + offset * k_step;
    const uint8_t* v_row = v + block * c.v.batch * v_bytes + offset * v_step;
    const int64_t scale = (block * c.kv_heads + head) * c.block_size + offset;
    const int64_t count = at_most(c.block_size - offset, end - i);
    for (int64_t n = 0; n < count; ++n, k_row += k_step, v_row += v_step)
      rows.k[i + n] = k_row, rows.v[i + n] = v_row;
    if (c.k_scales) {
      load_scales(c.k_scales, c.scale_dtype, c.k_dtype, scale, count, rows.k_scales + i, rows.k_shifts + i);
      load_scales(c.v_scales, c.scale_dtype, c.v_dtype, scale, count, rows.v_scales + i, rows.v_shifts + i);
    }
    i += count;
  }
}

inline void prefetch_row(const uint8_t* row, int64_t bytes) {
  if (row)
    for (int64_t i = 0; i < bytes; i += 64) prefetch(row + i);
}

// Prefetches the keys or the values that come AHEAD of rows [i, i + count), before row `end`.
inline void prefetch_ahead(const uint8_t* const* rows, int64_t i, int64_t count, int64_t end, int64_t bytes) {
  for (int64_t j = i + AHEAD; j < at_most(i + AHEAD + count, end); ++j) prefetch_row(rows[j], bytes);
}

// Reads LANES words, from `word` on, of each of LANES keys, and transposes them: lane j of x[i] is word i of key j.
// WHOLE: whether the keys have as many words, so that nothing of their end is compiled.
template <class W, class T, bool WHOLE = false>
inline HFA_INLINE void load_keys(const KeyRows& rows, int64_t vector, int64_t word, int64_t dim, F (&x)[LANES]) {
  const uint8_t* const* row = rows.k + vector * LANES;
  const int64_t count = WHOLE ? W::STEP * LANES : dim - word * W::STEP;
  for (int i = 0; i < LANES; ++i)
    if constexpr (std::is_same<T, Int4>::value)
      x[i] = row[i] ? W::load_shifted(reinterpret_cast<const T*>(row[i]) + word * W::STEP / 2, count,
                                      set1(rows.k_shifts[vector * LANES + i])) : zero();
    else
      x[i] = row[i] ? W::load(reinterpret_cast<const T*>(row[i]) + word * W::STEP, count) : zero();
  transpose(x);
}

// The same for keys that end before. It is compiled once for all numbers of rows.
template <class W, class T>
__attribute__((noinline)) void load_last_keys(const KeyRows& rows, int64_t vector, int64_t word, int64_t dim,
                                              F (&x)[LANES]) {
  load_keys<W, T>(rows, vector, word, dim, x);
}

// Reads values from `column` on of the keys of one word.
template <class W, class T, bool WHOLE = false>
inline HFA_INLINE void load_values(const KeyRows& rows, int64_t word, int64_t column, int64_t dim, F (&x)[W::STEP]) {
  const T* const* typed = reinterpret_cast<const T* const*>(rows.v + word * W::STEP);
  const int64_t count = WHOLE ? W::STEP * LANES : dim - column;
  if constexpr (std::is_same<T, Int4>::value)
    W::interleave(typed, column, count, x, rows.v_shifts + word * W::STEP);
  else
    W::interleave(typed, column, count, x);
}

template <class W, class T>
struct Packing {
  // Packs the keys of vectors [first, last) as words [vector][word][lane]. Each lane is a key. Words without numbers are
  // zeros.
  static void keys(const KeyRows& rows, int64_t first, int64_t last, int64_t dim, int64_t words, float* out) {
    for (int64_t vector = first; vector < last; ++vector) {
      prefetch_ahead(rows.k, vector * LANES, LANES, last * LANES, bytes_of<T>(dim));
      for (int64_t word = 0; word < words; word += LANES) {
        F x[LANES];
        load_keys<W, T>(rows, vector, word, dim, x);
        float* to = out + (vector * words + word) * LANES;
        if (words - word >= LANES)
          for (int i = 0; i < LANES; ++i) store(to + i * LANES, x[i]);
        else
          for (int i = 0; i < words - word; ++i) store(to + i * LANES, x[i]);
      }
    }
  }

  // Packs the values of `keys` as words [key / STEP][padded value_dim].
  static void values(const KeyRows& rows, Range keys, int64_t dim, int64_t padded, float* out) {
    for (int64_t word = keys.first / W::STEP; word * W::STEP < keys.last; ++word) {
      prefetch_ahead(rows.v, word * W::STEP, W::STEP, keys.last, bytes_of<T>(dim));
      for (int64_t column = 0; column < dim; column += W::STEP * LANES) {
        F x[W::STEP];
        load_values<W, T>(rows, word, column, dim, x);
        for (int i = 0; i < W::STEP; ++i) store(out + word * padded + column + i * LANES, x[i]);
      }
    }
  }
};

}  // namespace
