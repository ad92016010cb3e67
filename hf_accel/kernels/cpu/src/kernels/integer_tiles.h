// Products of many rows by integer weights, by tiles. The results have the bits of the other products of
// integer_linear.cpp: the sums over a group are the same integers, and are scaled and added in the same order.
//
// The weights of some groups of a block, a panel, are unpacked to signed bytes in the order of the products: tiles side
// by side, which all rows use. With few rows, a panel is one group, in the first-level cache; with many rows,
// it is in the second-level cache. The float sums of a strip of rows stay in the first-level cache. While the tiles
// multiply, the vector units add the products before, and the weights of the next panel are prefetched.
#pragma once

#if defined(HFA_TILES)

#include "../parallel.h"
#include "../simd/tiles.h"
#include "integer_weights.h"
#include "quantized_rows.h"

namespace {

constexpr int64_t STRIP = 64;                   // rows of a strip, whose float sums have 16 KB
constexpr int64_t PANEL_BYTES = 256 * 1024;     // the most bytes of a panel that many rows use
constexpr int64_t FETCH_AHEAD = 8192;           // the fewest bytes from what is used to what is prefetched
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

// Integer sums over one group that are still to be added to the float sums: at most 32 rows of 32 outputs.
struct Products {
  const int32_t* integers;
  int64_t rows;
  GroupTask task;
  int start;              // the first of the outputs in the block
  const float* x_scales;  // of the rows
  const int32_t* x_sums;
  float* sums;            // [rows, 64] of the block
};

template <int FORMAT>
inline HFA_INLINE void add_products(const Products& from, int64_t first, int64_t last) {
  if (first >= last) return;
  constexpr int WIDE = PAIR / LANES;
  GroupFactors<FORMAT> factors[WIDE];
  unrolled<WIDE>([&](auto v) HFA_INLINE { factors[v] = {from.task, from.start + v * LANES}; });
  for (int64_t r = first; r < last; ++r) {
    const F x_scale = set1(from.x_scales[r]);
    float* sums = from.sums + r * BLOCK + from.start;
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      const I sum = load_bytes(from.integers + r * PAIR + v * LANES);
      const F share = factors[v].lowered ? factors[v].lowered_share(sum, from.x_sums[r]) : factors[v].share(sum);
      store(sums + v * LANES, add(load(sums + v * LANES), mul(share, x_scale)));
    });
  }
}

// Multiplies TALL * 16 rows of x with 32 outputs over `steps` tiles of inputs, and calls between(step) after each.
template <int TALL, class Between>
inline HFA_INLINE void multiply(const int8_t* x, int64_t x_stride, const uint8_t* weight, int64_t steps,
                                int32_t* integers, const Between& between) {
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (TALL == 2) zero_tile<2>(), zero_tile<3>();
  for (int64_t s = 0; s < steps; ++s, x += TILE_WIDTH, weight += K_BYTES) {
    load_tile<6>(weight, TILE_WIDTH);
    load_tile<4>(x, x_stride);
    dot_int8<0, 4, 6>();
    load_tile<7>(weight + TILE_BYTES, TILE_WIDTH);
    dot_int8<1, 4, 7>();
    if constexpr (TALL == 2) {
      load_tile<5>(x + TILE_HEIGHT * x_stride, x_stride);
      dot_int8<2, 5, 6>();
      dot_int8<3, 5, 7>();
    }
    between(s);
  }
  constexpr int64_t BYTES = PAIR * 4;  // of a row of integers
  store_tile<0>(integers, BYTES);
  store_tile<1>(integers + TILE_WORDS, BYTES);
  if constexpr (TALL == 2) {
    store_tile<2>(integers + TILE_HEIGHT * PAIR, BYTES);
    store_tile<3>(integers + TILE_HEIGHT * PAIR + TILE_WORDS, BYTES);
  }
}

// What to prefetch: `lines` cache lines during each product. They are spread over its steps: all at once they kept tiles
// waiting that come from the second-level cache, and 16 to 32 rows of INT8 took 1.08 times as long.
struct NextPanel {
  const uint8_t* at;
  int64_t lines;

  void fetch(int64_t step, int64_t steps) {
    for (int64_t i = lines * step / steps; i < lines * (step + 1) / steps; ++i, at += LINE) prefetch_l2(at);
  }
};

// Groups [first, last) of a block, unpacked, and the rows that use them.
template <int FORMAT>
struct Panel {
  const BlockWeights<FORMAT>& weights;
  const QuantizedRows& x;
  uint8_t* tiles;
  int64_t first, last;

  int64_t steps() const { return ceil_div(x.group, TILE_WIDTH); }  // tiles along the inputs of a group
  void unpack() const {
    for (int64_t g = first; g < last; ++g)
      unpack_group<FORMAT>(weights.group(g), tiles + (g - first) * steps() * K_BYTES);
  }
  void add_strip(int64_t r0, int64_t rows, NextPanel& next, float* sums) const;
};

// Adds the products of rows [r0, r0 + rows) to sums [rows, 64].
template <int FORMAT>
void Panel<FORMAT>::add_strip(int64_t r0, int64_t rows, NextPanel& next, float* sums) const {
  alignas(64) int32_t integers[2][PAIR * PAIR];
  Products before{};
  int turn = 0;
  const int64_t count = steps();
  for (int64_t g = first; g < last; ++g) {
    const GroupTask task = weights.group(g);
    for (int64_t r = 0; r < rows; r += PAIR)
      for (int start = 0; start < BLOCK; start += PAIR) {
        const int64_t height = at_most(PAIR, rows - r), share = ceil_div(before.rows, count);
        const auto between = [&](int64_t s) HFA_INLINE {
          next.fetch(s, count);
          add_products<FORMAT>(before, at_most(before.rows, s * share), at_most(before.rows, (s + 1) * share));
        };
        const int8_t* levels = x.row(g, r0 + r);
        const uint8_t* weight = tiles + (g - first) * count * K_BYTES + start / TILE_WORDS * TILE_BYTES;
        turn = 1 - turn;
        if (height > TILE_HEIGHT) multiply<2>(levels, x.group, weight, count, integers[turn], between);
        else multiply<1>(levels, x.group, weight, count, integers[turn], between);
        const int64_t row = g * x.rows + r0 + r;
        before = {integers[turn], height, task, start, x.scales + row, x.sums + row, sums + r * BLOCK};
      }
  }
  add_products<FORMAT>(before, 0, before.rows);
}

// Computes sums [rows, 64], x times a block of weights, without the scales of outputs and the bias. `next_block`: the
// weights that this thread will probably need after it.
template <int FORMAT>
void tile_block(const BlockWeights<FORMAT>& weights, const QuantizedRows& x, int64_t r0, int64_t rows,
                const uint8_t* next_block, float* sums) {
  struct Unpacked;
  std::memset(sums, 0, static_cast<size_t>(rows * BLOCK) * sizeof(float));
  const int64_t group_bytes = ceil_div(x.group, TILE_WIDTH) * K_BYTES;
  const int64_t groups = rows <= STRIP ? 1 : at_least(1, PANEL_BYTES / group_bytes);
  uint8_t* tiles = static_cast<uint8_t*>(scratch<Unpacked>(static_cast<size_t>(groups * group_bytes)));
  const Tiles on_this_thread;
  for (int64_t g = 0; g < x.groups; g += groups) {
    const Panel<FORMAT> panel{weights, x, tiles, g, at_most(g + groups, x.groups)};
    panel.unpack();
    const int64_t lines = weights.group_bytes * (panel.last - g) / LINE;
    const int64_t products = ceil_div(rows, PAIR) * (BLOCK / PAIR) * (panel.last - g);
    // As few rows use small groups up at once, those far enough ahead are fetched: of 32 inputs in 4 bits, 16 rows took
    // 1.15 times as long if the next one was.
    const int64_t end = x.groups * weights.group_bytes;
    const int64_t ahead = panel.last * weights.group_bytes + at_least(0, FETCH_AHEAD - groups * weights.group_bytes);
    NextPanel next{ahead < end ? weights.weight + ahead : next_block + (ahead - end), ceil_div(lines, products)};
    for (int64_t r = 0; r < rows; r += STRIP)
      panel.add_strip(r0 + r, at_most(STRIP, rows - r), next, sums + r * BLOCK);
  }
}

}  // namespace

#endif
