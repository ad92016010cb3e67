// Products of few rows by integer weights of several blocks, which are read side by side.
//
// Blocks lie one after the other, so a thread that takes one at a time reads one stream of memory. An EPYC reads that
// fastest; an Intel Xeon with AMX reads four streams faster: by bare loads two of its threads read 34 GB/s so, and 28 GB/s
// by one stream each. There one row of INT8 took 0.85 times as long as by single blocks and one of INT4 0.76 times, and 4
// rows 0.67 and 0.75 times. The results have the bits of the other products: the sums over a group are the same integers,
// and are scaled and added in the same order.
#pragma once

#if defined(HFA_TILES)

#include "integer_vectors.h"
#include "stream.h"

namespace {

constexpr int64_t STREAMS = 4;
constexpr int64_t STREAM_ROWS = 8;      // the most rows
constexpr int64_t PART_BYTES = 512;     // read of a stream in its turn
constexpr int64_t PARTS_AHEAD = 4096;   // bytes ahead of a part that are prefetched
constexpr int VECTORS = BLOCK / LANES;  // of a block

// The integer sums over a group for the rows of one block, which wait in memory for their next turn.
typedef I StreamSums[STREAM_ROWS][VECTORS];

// Calls f(start, sums) for tiles of ROWS rows, from row r on, and some outputs, from `start` on.
template <int ROWS, class Function>
inline HFA_INLINE void for_sums(StreamSums& of_rows, int64_t r, const Function& f) {
  constexpr int WIDE = wide_for(ROWS);
  for (int start = 0; start < BLOCK; start += WIDE * LANES) {
    I sums[ROWS][WIDE];
    unrolled<ROWS>([&](int i) HFA_INLINE {
      unrolled<WIDE>([&](int v) HFA_INLINE { sums[i][v] = of_rows[r + i][start / LANES + v]; });
    });
    f(start, sums);
    unrolled<ROWS>([&](int i) HFA_INLINE {
      unrolled<WIDE>([&](int v) HFA_INLINE { of_rows[r + i][start / LANES + v] = sums[i][v]; });
    });
  }
}

// The weights that are read side by side: of one matrix, or of a gate's blocks and those that they are multiplied by.
template <int FORMAT>
struct Streams {
  const BlockWeights<FORMAT> blocks[STREAMS];
  const int64_t count, next;  // next: the bytes from each to what this thread probably reads behind it

  Streams(const Linear& linear, const Matrix& matrix, int64_t b, int64_t of_matrix, int threads)
      : Streams(linear, matrix, b, of_matrix, has_gate(linear) ? 2 : 1, threads) {}

  // Computes sums [count][rows][64], x times the blocks, without the scales of outputs and the bias.
  void multiply(const QuantizedRows& x, int64_t r0, int64_t rows, float* sums) const {
    StreamSums integers[STREAMS];
    for (int64_t g = 0; g < x.groups; ++g) {
      GroupTask tasks[STREAMS];
      for (int64_t i = 0; i < count; ++i) tasks[i] = blocks[i].group(g);
      for_tiles<FORMAT>(rows, [&](int64_t, int64_t r, int64_t height) {
        for_height<FORMAT>(height, [&](auto constant) {
          for (int64_t i = 0; i < count; ++i)
            for_sums<constant>(integers[i], r, [&](int start, auto& of_tile) HFA_INLINE {
              begin_sums<FORMAT>(tasks[i], start, x.sums + g * x.rows + r0 + r, of_tile);
            });
        });
      });
      add_parts(tasks, x, g, r0, rows, integers);
      for_tiles<FORMAT>(rows, [&](int64_t, int64_t r, int64_t height) {
        for_height<FORMAT>(height, [&](auto constant) {
          for (int64_t i = 0; i < count; ++i)
            for_sums<constant>(integers[i], r, [&](int start, const auto& of_tile) HFA_INLINE {
              add_group<FORMAT>(tasks[i], start, x, g, r0 + r, of_tile, sums + (i * rows + r) * BLOCK);
            });
        });
      });
    }
  }

 private:
  Streams(const Linear& linear, const Matrix& matrix, int64_t b, int64_t of_matrix, int64_t each, int threads)
      : blocks{at(linear, matrix, b, of_matrix, each, 0), at(linear, matrix, b, of_matrix, each, 1),
               at(linear, matrix, b, of_matrix, each, 2), at(linear, matrix, b, of_matrix, each, 3)},
        count(of_matrix * each), next(threads * of_matrix * blocks[0].bytes(blocks[0].inputs)) {
    static_assert(STREAMS == 4, "blocks has four");
  }
  // The last one again, if there are fewer.
  static BlockWeights<FORMAT> at(const Linear& linear, const Matrix& matrix, int64_t b, int64_t of_matrix, int64_t each,
                                 int64_t i) {
    const int64_t stream = at_most(i, of_matrix * each - 1);
    return {linear, stream % each ? linear.matrices[1] : matrix, b + stream / each};
  }

  void add_parts(const GroupTask (&tasks)[STREAMS], const QuantizedRows& x, int64_t g, int64_t r0, int64_t rows,
                 StreamSums (&integers)[STREAMS]) const {
    constexpr int64_t UNIT = Levels<FORMAT>::PLANES * STEP, UNITS = PART_BYTES > UNIT ? PART_BYTES / UNIT : 1;
    constexpr int64_t WORDS = UNITS * Levels<FORMAT>::WORDS;
    const int64_t steps = tasks[0].steps, all = blocks[0].bytes(blocks[0].inputs);
    const uint8_t* weights[STREAMS];
    for (int64_t i = 0; i < count; ++i) weights[i] = tasks[i].weight;
    for (int64_t k = 0; k < steps; k += WORDS) {
      const int64_t words = at_most(WORDS, steps - k);
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* const weight = weights[i];
        const Stream stream{blocks[i].weight + all, blocks[i].weight + next};
        const char* const ahead = stream.ahead(weight, PARTS_AHEAD);
        for (int64_t line = 0; line < UNITS * UNIT; line += LINE) prefetch_l2(ahead + line);
        for_tiles<FORMAT>(rows, [&](int64_t, int64_t r, int64_t height) {
          const int8_t* const levels = x.row(g, r0 + r) + 4 * k;
          for_height<FORMAT>(height, [&](auto constant) {
            for_sums<constant>(integers[i], r, [&](int start, auto& sums) HFA_INLINE {
              add_steps<FORMAT>(weight + lane_offset<FORMAT>(start), words, levels, x.group, NothingAhead(), sums, [] {});
            });
          });
        });
        weights[i] += UNITS * UNIT;
      }
    }
  }
};

}  // namespace

#endif
