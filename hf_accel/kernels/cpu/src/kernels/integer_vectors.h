// Products of few rows by integer weights: dot products of vectors, whose lanes are consecutive outputs of a block.
#pragma once

#include "integer_weights.h"
#include "quantized_rows.h"

namespace {

// The rows and vectors of a tile, whose sums are in registers.
#if defined(HFA_AVX512)
constexpr int TILE_ROWS = 6;
constexpr int wide_for(int) { return 4; }
#elif defined(HFA_SHORT_SUMS)
constexpr int TILE_ROWS = 8;
constexpr int wide_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }
#else
constexpr int TILE_ROWS = 4;
constexpr int wide_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

// The rows of a tile of a format. Where pairs are limited it is one row, as each has its own excess; else bytes have 4 rows
// of two vectors, which are a little faster than 8 rows of one.
template <int FORMAT>
#if defined(HFA_SHORT_SUMS)
constexpr int TALL = LIMITED<FORMAT> ? 1 : IN_BYTES<FORMAT> ? 4 : TILE_ROWS;
#else
constexpr int TALL = TILE_ROWS;
#endif

// What a tile prefetches: so many lines in each step. The tiles of a chunk, of which all but the first find their weights
// in a cache, share the weights of the next group among them, so that memory is read while they multiply: with AVX-512
// 24 rows took 1.33 times as long without, with AVX2 4 rows 1.8 times. One or two tiles of few rows prefetch nothing: on
// EPYCs with AVX2 and with AVX-512 the CPU's own prefetching is better, and one row of INT4 took up to 1.4 times as long
// with ours.
struct Ahead {
  const uint8_t* at;
  int64_t lines, tiles;  // the lines of a step, and how many tiles side by side fetch them

  inline HFA_INLINE void fetch() {
    for (int64_t i = 0; i < lines; ++i, at += LINE) prefetch_l2(at);
  }
};
struct NothingAhead {
  inline HFA_INLINE void fetch() {}
};

template <int FORMAT, int ROWS, int WIDE, class Next>
inline HFA_INLINE void sum_int8(const uint8_t* weight, int64_t steps, const int8_t* x, int64_t x_stride, Next next,
                                I (&sums)[ROWS][WIDE]) {
  for (int64_t k = 0; k < steps; ++k, weight += STEP, x += 4) {
    next.fetch();
    I w[WIDE];
    unrolled<WIDE>([&](int v) HFA_INLINE { w[v] = load_bytes(weight + v * LANES * 4); });
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      const I a = broadcast4(x + r * x_stride);
      unrolled<WIDE>([&](int v) HFA_INLINE {
#if defined(HFA_LIMITED_PAIRS)
        if constexpr (LIMITED<FORMAT>) sums[r][v] = dot4_limited(sums[r][v], w[v], a);
        else
#endif
        sums[r][v] = dot4(sums[r][v], w[v], a);
      });
    });
  }
}

#if defined(HFA_LIMITED_PAIRS)
// Adds what the levels of a row and group have beyond those that were limited.
template <int FORMAT, int WIDE>
inline HFA_INLINE void add_excess(const uint8_t* weight, const QuantizedRows& x, int64_t g, int64_t r, I (&sums)[1][WIDE]) {
  const ExcessRange range = x.excess_ranges[g * x.rows + r];
  for (int64_t i = range.first; i < range.last; ++i)
    sum_int8<FORMAT>(weight + x.excess[i].step * STEP, 1, x.excess[i].levels, 0, NothingAhead(), sums);
}
#endif

template <int FORMAT, int ROWS, int WIDE, class Next>
inline HFA_INLINE void sum_levels(const uint8_t* weight, int64_t steps, const int8_t* x, int64_t x_stride, Next next,
                                  I (&sums)[ROWS][WIDE]) {
  constexpr int WORDS = Levels<FORMAT>::WORDS, PLANES = Levels<FORMAT>::PLANES;
  const Levels<FORMAT> levels;
  for (int64_t k = 0; k < steps; k += WORDS, weight += PLANES * STEP, x += 4 * WORDS) {
    next.fetch();
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      levels.each(weight + lane_offset<FORMAT>(v * LANES), [&](auto word, I bytes) HFA_INLINE {
        unrolled<ROWS>([&](int r) HFA_INLINE {
          sums[r][v] = dot4_nibbles(sums[r][v], bytes, broadcast4(x + r * x_stride + 4 * word));
        });
      });
    });
  }
}

#if defined(HFA_SHORT_SUMS)
// The same for more rows than a tile of two vectors has: the products of some words are added up in 16 bits, so that a
// word takes one multiplication and not two. 64 rows of INT4 took 0.86 to 0.90 of the time; 1 row took 1.1 times as long.
constexpr int SHORT_ROWS = 5;

template <int FORMAT>
constexpr int64_t SHORT_WORDS = 32767 / (2 * 127 * Levels<FORMAT>::MOST) / Levels<FORMAT>::WORDS * Levels<FORMAT>::WORDS;

// The sums of at most so many words.
template <int FORMAT, int ROWS, int WIDE, class Next>
inline HFA_INLINE void sum_shorts(const uint8_t* weight, int64_t steps, const int8_t* x, int64_t x_stride, Next& next,
                                  I (&shorts)[ROWS][WIDE]) {
  constexpr int WORDS = Levels<FORMAT>::WORDS, PLANES = Levels<FORMAT>::PLANES;
  const Levels<FORMAT> levels;
  unrolled<ROWS>([&](auto r) HFA_INLINE {
    unrolled<WIDE>([&](int v) HFA_INLINE { shorts[r][v] = iset1(0); });
  });
  for (int64_t k = 0; k < steps; k += WORDS, weight += PLANES * STEP, x += 4 * WORDS) {
    next.fetch();
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      levels.each(weight + lane_offset<FORMAT>(v * LANES), [&](auto word, I bytes) HFA_INLINE {
        unrolled<ROWS>([&](int r) HFA_INLINE {
          shorts[r][v] = dot2(shorts[r][v], bytes, x + r * x_stride + 4 * word);
        });
      });
    });
  }
}

// begin: sets the sums. It is called after the first words, so that the sums are in no register before.
template <int FORMAT, int ROWS, int WIDE, class Next, class Begin>
inline HFA_INLINE void sum_by_shorts(const uint8_t* weight, int64_t steps, const int8_t* x, int64_t x_stride, Next next,
                                     I (&sums)[ROWS][WIDE], const Begin& begin) {
  constexpr int64_t MOST = SHORT_WORDS<FORMAT>;
  for (int64_t k = 0; k < steps; k += MOST) {
    I shorts[ROWS][WIDE];
    sum_shorts<FORMAT>(weight + k / Levels<FORMAT>::WORDS * Levels<FORMAT>::PLANES * STEP, at_most(MOST, steps - k),
                       x + 4 * k, x_stride, next, shorts);
    if (k == 0) begin();
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      unrolled<WIDE>([&](int v) HFA_INLINE { sums[r][v] = add_shorts(sums[r][v], shorts[r][v]); });
    });
  }
}
#endif

#if defined(HFA_AVX512)
// The same for one row, whose sums leave registers free: numbers stay at their place in the byte, those of each place
// have sums of their own, and only these are shifted. So one row of 3 bits waits for memory alone, as one of 4 does.
template <int FORMAT, int WIDE>
inline HFA_INLINE void sum_in_place(const uint8_t* weight, int64_t steps, const int8_t* x, I (&sums)[1][WIDE]) {
  constexpr int WORDS = Levels<FORMAT>::WORDS, PLANES = Levels<FORMAT>::PLANES, COUNT = Levels<FORMAT>::SHIFTS.size();
  const Levels<FORMAT> levels;
  I parts[WIDE][COUNT];
  unrolled<WIDE>([&](auto v) HFA_INLINE {
    unrolled<COUNT>([&](auto i) HFA_INLINE { parts[v][i] = i == 0 ? sums[0][v] : iset1(0); });
  });
  for (int64_t k = 0; k < steps; k += WORDS, weight += PLANES * STEP, x += 4 * WORDS) {
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      levels.each_in_place(weight + lane_offset<FORMAT>(v * LANES), [&](auto word, auto i, I bytes) HFA_INLINE {
        parts[v][i] = dot4(parts[v][i], bytes, broadcast4(x + 4 * word));
      });
    });
  }
  unrolled<WIDE>([&](auto v) HFA_INLINE {
    sums[0][v] = parts[v][0];
    unrolled<COUNT - 1>([&](auto i) HFA_INLINE {
      sums[0][v] = add_i32(sums[0][v], shift_right<Levels<FORMAT>::SHIFTS[i + 1]>(parts[v][i + 1]));
    });
  });
}

template <int FORMAT, int ROWS>
constexpr bool IN_PLACE = ROWS == 1 && !IN_BYTES<FORMAT> && FORMAT != FP4;  // whose numbers are looked up
#endif

// Begins the sums over a group. Weights are stored with an offset, so they start from -offset * sum(x).
template <int FORMAT, int ROWS, int WIDE>
inline HFA_INLINE void begin_sums(const GroupTask& task, int start, const int32_t* x_sums, I (&sums)[ROWS][WIDE]) {
  unrolled<ROWS>([&](auto r) HFA_INLINE {
    I same;  // for all outputs
    if constexpr (IN_BYTES<FORMAT>) same = iset1((LIMITED<FORMAT> ? -128 : DOT4_OFFSET - 128) * x_sums[r]);
    else if (task.minima) same = iset1(0);
#if defined(HFA_SHORT_SUMS)  // which multiplies outputs in parts, and would move each product to a vector for each part
    else if (!task.zeros) same = mul_i32(held(iset1(x_sums[r])), iset1(-Levels<FORMAT>::MIDDLE));
#else
    else if (!task.zeros) same = iset1(-Levels<FORMAT>::MIDDLE * x_sums[r]);
#endif
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      if (IN_BYTES<FORMAT> || task.minima || !task.zeros) sums[r][v] = same;
      else sums[r][v] = mul_i32(load_u8_as_i32(task.zeros + start + v * LANES), iset1(-x_sums[r]));
    });
  });
}

// begin: sets the sums, before anything is added to them.
template <int FORMAT, int ROWS, int WIDE, class Next, class Begin>
inline HFA_INLINE void add_steps(const uint8_t* weight, int64_t steps, const int8_t* x, int64_t x_stride, Next next,
                                 I (&sums)[ROWS][WIDE], const Begin& begin) {
#if defined(HFA_SHORT_SUMS)
  if constexpr (!IN_BYTES<FORMAT> && ROWS >= SHORT_ROWS)
    return sum_by_shorts<FORMAT>(weight, steps, x, x_stride, next, sums, begin);
#endif
  begin();
  if constexpr (IN_BYTES<FORMAT>) sum_int8<FORMAT, ROWS, WIDE>(weight, steps, x, x_stride, next, sums);
#if defined(HFA_AVX512)
  else if constexpr (IN_PLACE<FORMAT, ROWS>) sum_in_place<FORMAT, WIDE>(weight, steps, x, sums);
#endif
  else sum_levels<FORMAT, ROWS, WIDE>(weight, steps, x, x_stride, next, sums);
}

// FIRST: `out` holds nothing yet. MINIMA: the group has some. (Asked for each row, these two took 3 % of the time of
// AVX2.)
template <int FORMAT, bool FIRST, bool MINIMA, int ROWS, int WIDE>
inline HFA_INLINE void add_group_as(const GroupTask& task, int start, const QuantizedRows& x, int64_t g, int64_t r0,
                                 const I (&sums)[ROWS][WIDE], float* out) {
  const int32_t* x_sums = x.sums + g * x.rows + r0;
  const float* x_scales = x.scales + g * x.rows + r0;
  unrolled<WIDE>([&](auto v) HFA_INLINE {
    const GroupFactors<FORMAT> factors(task, start + v * LANES);
    unrolled<ROWS>([&](int r) HFA_INLINE {
      float* sum = out + r * BLOCK + start + v * LANES;
      const F before = FIRST ? zero() : load(sum);
      const F share = MINIMA ? factors.lowered_share(sums[r][v], x_sums[r]) : factors.share(sums[r][v]);
      store(sum, add(before, mul(share, set1(x_scales[r]))));
    });
  });
}

// Adds the sums over group g to `out`, for outputs from `start` on.
template <int FORMAT, int ROWS, int WIDE>
inline HFA_INLINE void add_group(const GroupTask& task, int start, const QuantizedRows& x, int64_t g, int64_t r0,
                                 const I (&sums)[ROWS][WIDE], float* out) {
  const auto add = [&](auto first, auto minima) HFA_INLINE {
    add_group_as<FORMAT, first, minima>(task, start, x, g, r0, sums, out);
  };
  using Yes = Constant<1>;
  using No = Constant<0>;
  if (FORMAT != INT8 && task.minima) g == 0 ? add(Yes{}, Yes{}) : add(No{}, Yes{});
  else g == 0 ? add(Yes{}, No{}) : add(No{}, No{});
}

// Adds the sums over one group to `out`, for ROWS rows and outputs [start, start + WIDE * LANES) of the block.
template <int FORMAT, int ROWS, int WIDE, class Next>
inline HFA_INLINE void group_tile(const GroupTask& group, int start, const QuantizedRows& x, int64_t g, int64_t r0,
                                  Next next, float* out) {
  const GroupTask task = group;  // in registers: what is written to `out` cannot change it
  const uint8_t* const weight = task.weight + lane_offset<FORMAT>(start);
  I sums[ROWS][WIDE];
  add_steps<FORMAT>(weight, task.steps, x.row(g, r0), x.group, next, sums,
                    [&]() HFA_INLINE { begin_sums<FORMAT>(task, start, x.sums + g * x.rows + r0, sums); });
#if defined(HFA_LIMITED_PAIRS)
  if constexpr (LIMITED<FORMAT>) add_excess<FORMAT>(weight, x, g, r0, sums);
#endif
  add_group<FORMAT>(task, start, x, g, r0, sums, out);
}

// The same for all outputs of the block.
template <int FORMAT, int ROWS>
inline void group_rows(const GroupTask& task, const QuantizedRows& x, int64_t g, int64_t r0, const Ahead& from, float* out) {
  constexpr int WIDE = wide_for(ROWS);
  Ahead ahead = from;
  for (int start = 0; start < BLOCK; start += WIDE * LANES) {
    if constexpr (2 * ROWS >= TALL<FORMAT> || ROWS >= 3) {  // the height of one of several tiles, or of enough rows
      if (ahead.tiles > 0) {
        group_tile<FORMAT, ROWS, WIDE>(task, start, x, g, r0, ahead, out);
        ahead.at += task.steps / Levels<FORMAT>::WORDS * ahead.lines * LINE;
        --ahead.tiles;
        continue;
      }
    }
    group_tile<FORMAT, ROWS, WIDE>(task, start, x, g, r0, NothingAhead(), out);
  }
}

// Calls f with the rows of a tile as a constant.
template <int FORMAT, int ROWS = 1, class Function>
inline void for_height(int64_t rows, const Function& f) {
  if (TALL<FORMAT> == 1 || rows == ROWS) return f(Constant<ROWS>{});
  if constexpr (ROWS < TALL<FORMAT>) for_height<FORMAT, ROWS + 1>(rows, f);
}

// Calls f(tile, first row, rows) for tiles of nearly equal height. For example, 7 rows are tiles of 4 and 3, not of 6 and 1.
template <int FORMAT, class Function>
inline void for_tiles(int64_t rows, const Function& f) {
  if (rows <= TALL<FORMAT>) return f(0, 0, rows);
  if constexpr (TALL<FORMAT> == 1) {
    for (int64_t r = 0; r < rows; ++r) f(r, r, 1);
    return;
  }
  const int64_t tiles = ceil_div(rows, TALL<FORMAT>);
  for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
    const int64_t height = ceil_div(rows - r, tiles - tile);
    f(tile, r, height);
    r += height;
  }
}

// next: the weights of the group that comes after this one.
template <int FORMAT>
void group_chunk(const GroupTask& task, const QuantizedRows& x, int64_t g, int64_t r0, int64_t rows,
                 const uint8_t* next, float* out) {
  constexpr int64_t UNIT = Levels<FORMAT>::PLANES * STEP / LINE;  // the lines of a step
  const int64_t tiles = ceil_div(rows, TALL<FORMAT>);
  const int64_t wide = BLOCK / LANES / wide_for(tiles > 1 ? TALL<FORMAT> : static_cast<int>(rows));  // tiles side by side
  const int64_t lines = ceil_div(UNIT, tiles * wide), fetching = tiles > 1 || wide > 2 ? ceil_div(UNIT, lines) : 0;
  const int64_t bytes = task.steps / Levels<FORMAT>::WORDS * wide * lines * LINE;
  for_tiles<FORMAT>(rows, [&](int64_t tile, int64_t r, int64_t height) {
    const Ahead ahead = {next + tile * bytes, lines, fetching - tile * wide};
    for_height<FORMAT>(height, [&](auto constant) {
      group_rows<FORMAT, constant>(task, x, g, r0 + r, ahead, out + r * BLOCK);
    });
  });
}

}  // namespace
