// Products of many rows by integer weights, by tiles. The results have the bits of the other products of
// integer_linear.cpp: the sums over a group are the same integers, and are scaled and added in the same order.
//
// The weights of some groups of a block, a panel, are unpacked to signed bytes in the order of the products: tiles side
// by side, which all rows use. With few rows, a panel is one group, in the first-level cache; with many rows,
// it is in the second-level cache. The float sums of a strip of rows stay in the first-level cache.
//
// A store waits until the last product of its tile is done, some 50 cycles, and nothing would multiply in between: so each
// tile of sums is stored while the next one is made. Meanwhile the vector units add the sums of the tile of rows before to
// the float sums. On an Intel Xeon with two threads 512 rows took 0.88 times as long as with four tiles stored together; of
// what is left, a quarter adds, and the bytes that come from the second-level cache (46 a cycle) bound the rest.
#pragma once

#if defined(HFA_TILES)

#include "../parallel.h"
#include "../simd/tiles.h"
#include "integer_weights.h"
#include "quantized_rows.h"

namespace {

constexpr int64_t STRIP = 64;                   // rows of a strip, whose float sums have 16 KB
constexpr int64_t PANEL_BYTES = 256 * 1024;     // the most bytes of a panel that many rows use
constexpr int64_t K_BYTES = BLOCK / TILE_WORDS * TILE_BYTES;  // a block's tiles for TILE_WIDTH inputs

// Unpacks the weights of a group, with zeros up to a whole tile. The tiles of 16 outputs each come after one another,
// then those of the next inputs.
template <int FORMAT>
void unpack_group(const GroupTask& task, uint8_t* tiles) {
  constexpr int WIDE = BLOCK / LANES;
  I offsets[WIDE];
  unrolled<WIDE>([&](auto v) HFA_INLINE {
    if constexpr (IN_BYTES<FORMAT>) offsets[v] = iset1(static_cast<int32_t>(0x80808080u));
    else if (task.minima) offsets[v] = iset1(0);
    else if (!task.zeros) offsets[v] = iset1(Levels<FORMAT>::MIDDLE * 0x01010101);
    else offsets[v] = mul_i32(load_u8_as_i32(task.zeros + v * LANES), iset1(0x01010101));
  });
  const auto store_word = [&](int64_t word, auto v, I bytes) HFA_INLINE {
    uint8_t* row = tiles + word / TILE_HEIGHT * K_BYTES + word % TILE_HEIGHT * TILE_WIDTH;
    constexpr int64_t lane = v * LANES;
    store_bytes(row + lane / TILE_WORDS * TILE_BYTES + lane % TILE_WORDS * 4, bytes);
  };
  const uint8_t* weight = task.weight;
  const Levels<FORMAT> levels;
  int64_t first = 0;
  for (; first < task.steps; first += Levels<FORMAT>::WORDS, weight += Levels<FORMAT>::PLANES * STEP)
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      levels.each(weight + lane_offset<FORMAT>(v * LANES), [&](auto word, I bytes) HFA_INLINE {
        store_word(first + word, v, sub_bytes(bytes, offsets[v]));
      });
    });
  for (; first % TILE_HEIGHT; ++first) unrolled<WIDE>([&](auto v) HFA_INLINE { store_word(first, v, iset1(0)); });
}

// The factors of a group for all outputs of the block.
template <int FORMAT>
struct PanelFactors {
  GroupFactors<FORMAT> of[BLOCK / LANES];
};

// The products of a tile of rows with COUNT groups, which are still to be added to its float sums.
template <int FORMAT, int COUNT>
struct Products {
  const int32_t* integers;      // [COUNT][TILE_HEIGHT][BLOCK]
  const PanelFactors<FORMAT>* factors;  // [COUNT]
  const float* x_scales;        // [COUNT][x_stride]
  const int32_t* x_sums;
  int64_t x_stride;
  float* sums;                  // [TILE_HEIGHT][BLOCK]

  template <int ROWS>
  inline HFA_INLINE void add_rows(int64_t first) const {
    unrolled<ROWS>([&](auto r) HFA_INLINE { add_row(first + r); });
  }

 private:
  inline HFA_INLINE void add_row(int64_t r) const {
    constexpr int WIDE = BLOCK / LANES;
    F totals[WIDE];
    unrolled<WIDE>([&](auto v) HFA_INLINE { totals[v] = load(sums + r * BLOCK + v * LANES); });
    unrolled<COUNT>([&](auto g) HFA_INLINE {
      const int32_t* from = integers + (g * TILE_HEIGHT + r) * BLOCK;
      const F x_scale = set1(x_scales[g * x_stride + r]);
      unrolled<WIDE>([&](auto v) HFA_INLINE {
        const F share = factors[g].of[v].share(load_bytes(from + v * LANES), x_sums[g * x_stride + r]);
        totals[v] = add(totals[v], mul(share, x_scale));
      });
    });
    unrolled<WIDE>([&](auto v) HFA_INLINE { store(sums + r * BLOCK + v * LANES, totals[v]); });
  }
};

constexpr int PARTS = BLOCK / TILE_WORDS;      // tiles of outputs, which are multiplied one after the other
constexpr int64_t INTEGERS_ROW = BLOCK * 4;    // bytes
constexpr int64_t UNIT = TILE_HEIGHT * BLOCK;  // sums of a tile of rows

// Multiplies a tile of x with the outputs of a block, over one group of STEPS tiles (0: of `steps`), and calls between(n)
// after each part. The sums go to integers [TILE_HEIGHT][BLOCK]; those of the last part are in register 3 still, and
// what was there before goes to `last`.
template <int STEPS, class Between>
inline HFA_INLINE void multiply(const int8_t* x, int64_t x_stride, const uint8_t* weight, int64_t steps, int32_t* last,
                                int32_t* integers, const Between& between) {
  if constexpr (STEPS != 0) {
    load_tile<4>(x, x_stride);
    if constexpr (STEPS == 2) load_tile<5>(x + TILE_WIDTH, x_stride);
  }
  unrolled<PARTS>([&](auto n) HFA_INLINE {
    const uint8_t* tiles = weight + n * TILE_BYTES;
    zero_tile<n>();
    if constexpr (STEPS == 0) {
      for (int64_t s = 0; s + 1 < steps; ++s, tiles += K_BYTES) {
        load_tile<4>(x + s * TILE_WIDTH, x_stride);
        load_tile<6>(tiles, TILE_WIDTH);
        dot_int8<n, 4, 6>();
      }
      load_tile<5>(x + (steps - 1) * TILE_WIDTH, x_stride);
    } else if constexpr (STEPS == 2) {
      load_tile<6>(tiles, TILE_WIDTH);
      dot_int8<n, 4, 6>();
      tiles += K_BYTES;
    }
    load_tile<7>(tiles, TILE_WIDTH);
    store_tile<(n + PARTS - 1) % PARTS>(n == 0 ? last : integers + (n - 1) * TILE_WORDS, INTEGERS_ROW);
    dot_int8<n, STEPS == 1 ? 4 : 5, 7>();
    between(n);
  });
}

// What to prefetch: `lines` cache lines during each part.
struct NextPanel {
  const uint8_t* at;
  int64_t lines;

  inline HFA_INLINE void fetch() {
    for (int64_t i = 0; i < lines; ++i, at += LINE) prefetch_l2(at);
  }
};

// Groups [first, last) of a block, unpacked, and the rows that use them.
template <int FORMAT>
struct Panel {
  const BlockWeights<FORMAT>& weights;
  const QuantizedRows& x;
  uint8_t* tiles;
  PanelFactors<FORMAT>* factors;
  int64_t first, last, steps;  // steps: tiles along the inputs of a group

  void unpack() const;
  // Adds the products of rows [r0, r0 + rows) to sums [rows, 64]. Both are filled up to whole tiles.
  void add_strip(int64_t r0, int64_t rows, NextPanel& next, float* sums) const {
    if (steps == 2) return add_groups<2, 1>(first, last, r0, rows, next, sums);
    if (steps > 2) return add_groups<0, 1>(first, last, r0, rows, next, sums);
    const int64_t even = first + (last - first) / 2 * 2;
    add_groups<1, 2>(first, even, r0, rows, next, sums);
    add_groups<1, 1>(even, last, r0, rows, next, sums);
  }

 private:
  template <int STEPS, int COUNT>
  void add_groups(int64_t from, int64_t to, int64_t r0, int64_t rows, NextPanel& next, float* sums) const;
};

template <int FORMAT>
void Panel<FORMAT>::unpack() const {
  for (int64_t g = first; g < last; ++g) {
    const GroupTask task = weights.group(g);
    unpack_group<FORMAT>(task, tiles + (g - first) * steps * K_BYTES);
    for (int v = 0; v < BLOCK / LANES; ++v) factors[g - first].of[v] = {task, v * LANES};
  }
}

template <int FORMAT>
template <int STEPS, int COUNT>
void Panel<FORMAT>::add_groups(int64_t from, int64_t to, int64_t r0, int64_t rows, NextPanel& next,
                               float* sums) const {
  if (from == to) return;
  alignas(64) int32_t integers[2][COUNT * UNIT];
  constexpr int SHARE = TILE_HEIGHT / (COUNT * PARTS);
  const int64_t group_bytes = steps * K_BYTES, x_group = x.rows * x.group;
  // The first call adds what it does not have yet: nothing.
  alignas(64) float nowhere[UNIT];
  std::memset(integers[1], 0, sizeof integers[1]);
  Products<FORMAT, COUNT> before{integers[1], factors, x.scales, x.sums, 0, nowhere};
  int32_t* last = integers[1] + (COUNT - 1) * UNIT + (PARTS - 1) * TILE_WORDS;
  int turn = 0;
  for (int64_t g = from; g < to; g += COUNT) {
    const int8_t* levels = x.row(g, r0);
    const uint8_t* weight = tiles + (g - first) * group_bytes;
    const int64_t row = g * x.rows + r0;
    for (int64_t r = 0; r < rows; r += TILE_HEIGHT, turn = 1 - turn) {
      int32_t* const now = integers[turn];
      unrolled<COUNT>([&](auto i) HFA_INLINE {
        int32_t* const of_group = now + i * UNIT;
        multiply<STEPS>(levels + i * x_group + r * x.group, x.group, weight + i * group_bytes, steps, last, of_group,
                        [&](auto n) HFA_INLINE {
          before.template add_rows<SHARE>((i * PARTS + n) * SHARE);
          next.fetch();
        });
        last = of_group + (PARTS - 1) * TILE_WORDS;
      });
      before = {now, factors + (g - first), x.scales + row + r, x.sums + row + r, x.rows, sums + r * BLOCK};
    }
  }
  store_tile<PARTS - 1>(last, INTEGERS_ROW);
  before.template add_rows<TILE_HEIGHT>(0);
}

// Computes sums [rows, 64], x times a block of weights, without the scales of outputs and the bias. There is room for
// whole tiles of rows. `next_block`: the weights that this thread will probably need after it.
template <int FORMAT>
void tile_block(const BlockWeights<FORMAT>& weights, const QuantizedRows& x, int64_t r0, int64_t rows,
                const uint8_t* next_block, float* sums) {
  struct Unpacked; struct Factors;
  const int64_t whole = ceil_div(rows, TILE_HEIGHT) * TILE_HEIGHT, steps = ceil_div(x.group, TILE_WIDTH);
  std::memset(sums, 0, static_cast<size_t>(whole * BLOCK) * sizeof(float));
  const int64_t group_bytes = steps * K_BYTES;
  const int64_t pair = steps == 1 ? 2 : 1, most = rows <= STRIP ? pair : at_least(pair, PANEL_BYTES / group_bytes);
  const int64_t groups = most / pair * pair;
  uint8_t* tiles = static_cast<uint8_t*>(scratch<Unpacked>(static_cast<size_t>(groups * group_bytes)));
  typedef PanelFactors<FORMAT> OfGroup;
  OfGroup* factors = static_cast<OfGroup*>(scratch<Factors>(static_cast<size_t>(groups) * sizeof(OfGroup)));
  const Tiles on_this_thread;
  for (int64_t g = 0; g < x.groups; g += groups) {
    const Panel<FORMAT> panel{weights, x, tiles, factors, g, at_most(g + groups, x.groups), steps};
    panel.unpack();
    const int64_t lines = weights.group_bytes * (panel.last - g) / LINE;
    const int64_t parts = whole / TILE_HEIGHT * PARTS * (panel.last - g);
    NextPanel next{panel.last < x.groups ? weights.group(panel.last).weight : next_block, ceil_div(lines, parts)};
    for (int64_t r = 0; r < whole; r += STRIP)
      panel.add_strip(r0 + r, at_most(STRIP, whole - r), next, sums + r * BLOCK);
  }
}

}  // namespace

#endif
