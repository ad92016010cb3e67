// Products of bf16 rows by bf16 weights, by tiles, for the linear layers of float_linear.cpp.
//
// A tile of sums has 16 outputs by 16 rows: weights are the first factor, so that tiles of them can be read where the
// model keeps them, and rows of the input are the second, which is packed once for all outputs. A sum runs over the
// inputs in order, 32 at a time, whatever the number of rows: it may rest in memory in between.
#pragma once

#if defined(HFA_TILES)

#include "../parallel.h"
#include "../simd/simd.h"
#include "../simd/tiles.h"

namespace {

constexpr int64_t TILE_INPUTS = TILE_WIDTH / 2;  // inputs of a tile
constexpr int64_t TILE_SUMS = TILE_HEIGHT * TILE_WORDS;
constexpr int64_t IN_PLACE = 8;                  // the most tiles of rows that read weights where the model keeps them
// Of outputs whose weights are prefetched as one stream where they are read in place. With a stream for each of 32 outputs
// one row, and 16, took 1.05 to 1.1 times as long on an Intel Xeon; with one stream of all, up to 1.15 times.
constexpr int64_t TOGETHER = 4;
constexpr int64_t PACKED_STEPS = 8;              // tiles along the inputs that are packed at once: 8 KB of each

// As FloatDot of float_tile.h, by the registers of simd/tiles.h.
struct TileDot {
  typedef Bf16 Number;
  static constexpr int64_t CHUNK = 128, WHOLE_ROWS = 32;
};

// Transposes 16 x 16 words. The strides are in words.
inline void transpose_words(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int64_t i = 0; i < TILE_WORDS; i += LANES)
    for (int64_t j = 0; j < TILE_HEIGHT; j += LANES) {
      F block[LANES];
      for (int64_t l = 0; l < LANES; ++l) block[l] = load(from + (j + l) * from_stride + i);
      transpose(block);
      for (int64_t l = 0; l < LANES; ++l) store(to + (i + l) * to_stride + j, block[l]);
    }
}

// Copies a tile of at most 16 rows and 32 inputs, and fills it up with zeros.
inline void copy_tile(const Bf16* from, int64_t stride, int64_t rows, int64_t count, void* tile) {
  uint8_t* const to = static_cast<uint8_t*>(tile);
  if (rows >= TILE_HEIGHT && count >= TILE_INPUTS) {  // of a constant size, which is no call
    for (int64_t r = 0; r < TILE_HEIGHT; ++r) std::memcpy(to + r * TILE_WIDTH, from + r * stride, TILE_WIDTH);
    return;
  }
  std::memset(to, 0, TILE_BYTES);
  const size_t bytes = static_cast<size_t>(at_most(count, TILE_INPUTS)) * sizeof *from;
  for (int64_t r = 0; r < at_most(rows, TILE_HEIGHT); ++r) std::memcpy(to + r * TILE_WIDTH, from + r * stride, bytes);
}

// Packs a tile of the input as a second factor: word [k, r] has inputs 2 k and 2 k + 1 of row r.
inline void pack_rows(const Bf16* x, int64_t stride, int64_t rows, int64_t count, void* tile) {
  alignas(64) float words[TILE_SUMS];
  copy_tile(x, stride, rows, count, words);
  transpose_words(words, TILE_WORDS, static_cast<float*>(tile), TILE_WORDS);
}

// Two tiles of weights for each step along the inputs. All strides are in bytes.
struct WeightTiles {
  const uint8_t* first;
  int64_t row;         // between the outputs of a tile
  int64_t other;       // from a tile to that of the next 16 outputs
  int64_t step;        // to the tiles of the next inputs
  const uint8_t* next; // what to prefetch: the weights of the next pair of tiles
  int64_t next_row;    // between its outputs
  int64_t together;    // of these outputs, whose weights are prefetched as one stream: their rows follow each other
};

// Adds the products of 32 outputs with TALL * 16 rows to sums [2][sums_stride], over `steps` tiles of inputs.
// Meanwhile outputs [first, last) of the next weights are prefetched.
template <int TALL>
inline void multiply_bf16(const WeightTiles& weights, const uint8_t* x, int64_t x_stride, int64_t steps, float* sums,
                          int64_t sums_stride, int64_t first, int64_t last) {
  load_tile<0>(sums, TILE_WIDTH);
  load_tile<1>(sums + sums_stride, TILE_WIDTH);
  if constexpr (TALL == 2) {
    load_tile<2>(sums + TILE_SUMS, TILE_WIDTH);
    load_tile<3>(sums + sums_stride + TILE_SUMS, TILE_WIDTH);
  }
  const uint8_t* weight = weights.first;
  for (int64_t s = 0; s < steps; ++s, weight += weights.step, x += TILE_BYTES) {
    load_tile<4>(weight, weights.row);
    load_tile<6>(x, TILE_WIDTH);
    dot_bf16<0, 4, 6>();
    load_tile<5>(weight + weights.other, weights.row);
    dot_bf16<1, 5, 6>();
    if constexpr (TALL == 2) {
      load_tile<7>(x + x_stride, TILE_WIDTH);
      dot_bf16<2, 4, 7>();
      dot_bf16<3, 5, 7>();
    }
    for (int64_t n = first; n < last; n += weights.together) {
      const uint8_t* next = weights.next + n * weights.next_row + s * weights.together * TILE_WIDTH;
      for (int64_t i = 0; i < weights.together; ++i) prefetch_l2(next + i * TILE_WIDTH);
    }
  }
  store_tile<0>(sums, TILE_WIDTH);
  store_tile<1>(sums + sums_stride, TILE_WIDTH);
  if constexpr (TALL == 2) {
    store_tile<2>(sums + TILE_SUMS, TILE_WIDTH);
    store_tile<3>(sums + sums_stride + TILE_SUMS, TILE_WIDTH);
  }
}

// The weights [outputs, inputs] of a task, row-major where the model keeps them.
struct TaskWeights {
  const Bf16* first;
  int64_t outputs, inputs;
};

// The sums of an even number of output tiles, for `tall` tiles of packed rows [tall][steps].
struct TileSums {
  float* sums;  // [outputs / 16][tall] tiles
  int64_t tall, steps;
  const uint8_t* x;

  // Adds steps [s, s + count) of the pair of output tiles that begins at output n.
  void add(int64_t n, const WeightTiles& weights, int64_t s, int64_t count) const {
    const int64_t x_stride = steps * TILE_BYTES, stride = tall * TILE_SUMS, share = ceil_div(PAIR, ceil_div(tall, 2));
    float* to = sums + n / TILE_HEIGHT * stride;
    for (int64_t t = 0, next = 0; t < tall; t += 2, next += share) {
      const uint8_t* rows = x + t * x_stride + s * TILE_BYTES;
      const int64_t last = at_most(next + share, PAIR);
      if (t + 1 < tall) multiply_bf16<2>(weights, rows, x_stride, count, to + t * TILE_SUMS, stride, next, last);
      else multiply_bf16<1>(weights, rows, x_stride, count, to + t * TILE_SUMS, stride, next, last);
    }
  }

  // For up to IN_PLACE tiles of rows. Adds the first `count` steps of all whole pairs of output tiles, whose weights are
  // read in place. `next_task`: the number of outputs from the first one to the first of this thread's next task, probably.
  void add_in_place(const TaskWeights& weights, int64_t count, int64_t next_task) const {
    const int64_t row = weights.inputs * static_cast<int64_t>(sizeof(Bf16));
    for (int64_t n = 0; n + PAIR <= weights.outputs; n += PAIR) {
      const uint8_t* first = reinterpret_cast<const uint8_t*>(weights.first) + n * row;
      const int64_t next = n + 2 * PAIR <= weights.outputs ? PAIR : next_task - n;
      add(n, {first, row, TILE_HEIGHT * row, TILE_WIDTH, first + next * row, row, TOGETHER}, 0, count);
    }
  }

  // Adds all other steps. The weights of 32 outputs and 256 inputs are copied to the first-level cache, from which all
  // rows use them, while the next ones are prefetched. The same inputs of the rows stay in the second-level cache while
  // all outputs use them: with 512 inputs and 64 outputs, 512 rows took 1.3 times as long.
  void add_packed(const TaskWeights& weights, int64_t in_place) const {
    struct Packed;
    constexpr int64_t BYTES = PACKED_STEPS * TILE_BYTES;
    uint8_t* packed = static_cast<uint8_t*>(scratch<Packed>(2 * BYTES));
    for (int64_t s = 0; s < steps; s += PACKED_STEPS)
      for (int64_t n = 0; n < weights.outputs; n += PAIR) {
        const int64_t first = n + PAIR <= weights.outputs ? at_least(s, in_place) : s;
        const int64_t count = at_most(steps, s + PACKED_STEPS) - first;
        for (int64_t half = 0; half < 2; ++half)
          for (int64_t i = 0; i < count; ++i) {
            const int64_t output = at_most(weights.outputs, n + half * TILE_HEIGHT), k = (first + i) * TILE_INPUTS;
            copy_tile(weights.first + output * weights.inputs + k, weights.inputs, weights.outputs - output,
                      weights.inputs - k, packed + half * BYTES + i * TILE_BYTES);
          }
        const int64_t next = n + PAIR < weights.outputs ? (n + PAIR) * weights.inputs : PACKED_STEPS * TILE_INPUTS;
        const Bf16* const at = weights.first + next + s * TILE_INPUTS;
        const int64_t row = weights.inputs * static_cast<int64_t>(sizeof(Bf16));
        const WeightTiles tiles{packed, TILE_WIDTH, BYTES, TILE_BYTES, reinterpret_cast<const uint8_t*>(at), row, 1};
        if (count > 0) add(n, tiles, first, count);
      }
  }
};

}  // namespace

#endif
