// Linear layers with weights of 8 bits or fewer and INT8 activations. The sum over a group of inputs is an exact integer.
// The sums of groups are added in order in float32; each lane is an output, and multiplication and addition are rounded
// separately. So the result of a row depends neither on other rows nor on threads or the instruction set.
//
// For each block of 64 outputs and chunk of rows, the outer loop is over groups of inputs. So the weights of a group,
// and the float sums of the chunk, stay in the first-level cache while all rows of the chunk use them.
#include "../kernels.h"
#include "activation.h"
#include "any_dtype.h"
#include "integer_tiles.h"
#include "integer_weights.h"
#include "quantized_rows.h"

namespace {

constexpr int64_t CHUNK = 48;             // the rows of a chunk, whose float sums have 12 KB
constexpr int64_t MOST_ROWS = 512;        // the most rows whose float sums are kept at once when tiles multiply
// Of quantized rows that are kept at once. They stay in the second-level cache while all blocks of weights use them: with
// all 2,048 rows of a prompt at once, 5,632 inputs took 1.3 times as long.
constexpr int64_t QUANTIZED_BYTES = 256 * 1024;

// The rows and vectors of a tile, whose sums are in registers.
#if defined(HFA_AVX512)
constexpr int TILE_ROWS = 6;
constexpr int wide_for(int) { return 4; }
#else
constexpr int TILE_ROWS = 4;
constexpr int wide_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

// What a tile prefetches: so many lines in each step. The tiles of a chunk, of which all but the first find their weights
// in a cache, share the weights of the next group among them, so that memory is read while they multiply: with AVX-512
// 24 rows took 1.33 times as long without, with AVX2 4 rows 1.8 times. One or two tiles of few rows prefetch nothing: on
// EPYCs with AVX2 and with AVX-512 the CPU's own prefetching is better, and one row of INT4 took up to 1.4 times as long
// with ours.
struct Ahead {
  const uint8_t* at;
  int64_t lines;

  inline HFA_INLINE void fetch() {
    for (int64_t i = 0; i < lines; ++i, at += LINE) prefetch_l2(at);
  }
};
struct NothingAhead {
  inline HFA_INLINE void fetch() {}
};

template <int ROWS, int WIDE, class Next>
inline HFA_INLINE void sum_int8(const uint8_t* weight, int64_t steps, const int8_t* x, int64_t x_stride, Next next,
                                I (&sums)[ROWS][WIDE]) {
  for (int64_t k = 0; k < steps; ++k, weight += STEP, x += 4) {
    next.fetch();
    I w[WIDE];
    unrolled<WIDE>([&](int v) HFA_INLINE { w[v] = load_bytes(weight + v * LANES * 4); });
    unrolled<ROWS>([&](auto r) HFA_INLINE {
      const I a = broadcast4(x + r * x_stride);
      unrolled<WIDE>([&](int v) HFA_INLINE { sums[r][v] = dot4(sums[r][v], w[v], a); });
    });
  }
}

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

// Adds the sums over one group to `out`, which holds nothing before the first one, for ROWS rows and outputs [start,
// start + WIDE * LANES) of the block.
template <int FORMAT, int ROWS, int WIDE, class Next>
inline void group_tile(const GroupTask& group, int start, const QuantizedRows& x, int64_t g, int64_t r0, Next next,
                       float* out) {
  const GroupTask task = group;  // in registers: what is written to `out` cannot change it
  I sums[ROWS][WIDE];
  const int32_t* x_sums = x.sums + g * x.rows + r0;
  const float* x_scales = x.scales + g * x.rows + r0;
  // Weights are stored with an offset, so the sums start from -offset * sum(x).
  unrolled<ROWS>([&](auto r) HFA_INLINE {
    unrolled<WIDE>([&](auto v) HFA_INLINE {
      if constexpr (IN_BYTES<FORMAT>) sums[r][v] = iset1((DOT4_OFFSET - 128) * x_sums[r]);
      else if (task.minima) sums[r][v] = iset1(0);
      else if (!task.zeros) sums[r][v] = iset1(-Levels<FORMAT>::MIDDLE * x_sums[r]);
      else sums[r][v] = mul_i32(load_u8_as_i32(task.zeros + start + v * LANES), iset1(-x_sums[r]));
    });
  });
  const uint8_t* weight = task.weight + lane_offset<FORMAT>(start);
  if constexpr (IN_BYTES<FORMAT>) sum_int8<ROWS, WIDE>(weight, task.steps, x.row(g, r0), x.group, next, sums);
#if defined(HFA_AVX512)
  else if constexpr (IN_PLACE<FORMAT, ROWS>) sum_in_place<FORMAT, WIDE>(weight, task.steps, x.row(g, r0), sums);
#endif
  else sum_levels<FORMAT, ROWS, WIDE>(weight, task.steps, x.row(g, r0), x.group, next, sums);
  unrolled<WIDE>([&](auto v) HFA_INLINE {
    const GroupFactors<FORMAT> factors(task, start + v * LANES);
    unrolled<ROWS>([&](int r) HFA_INLINE {
      float* sum = out + r * BLOCK + start + v * LANES;
      const F before = g == 0 ? zero() : load(sum);
      store(sum, add(before, mul(factors.share(sums[r][v], x_sums[r]), set1(x_scales[r]))));
    });
  });
}

// The same for all outputs of the block.
template <int FORMAT, int ROWS>
inline void group_rows(const GroupTask& task, const QuantizedRows& x, int64_t g, int64_t r0, Ahead ahead, float* out) {
  constexpr int WIDE = wide_for(ROWS);
  for (int start = 0; start < BLOCK; start += WIDE * LANES) {
    if constexpr (2 * ROWS >= TILE_ROWS) {  // the height of one of several tiles
      if (ahead.lines) {
        group_tile<FORMAT, ROWS, WIDE>(task, start, x, g, r0, ahead, out);
        ahead.at += task.steps / Levels<FORMAT>::WORDS * ahead.lines * LINE;
        continue;
      }
    }
    group_tile<FORMAT, ROWS, WIDE>(task, start, x, g, r0, NothingAhead(), out);
  }
}

template <int FORMAT>
inline void group_tile_of(int64_t rows, const GroupTask& task, const QuantizedRows& x, int64_t g, int64_t r0,
                          Ahead ahead, float* out) {
  switch (rows) {
    case 1: return group_rows<FORMAT, 1>(task, x, g, r0, ahead, out);
    case 2: return group_rows<FORMAT, 2>(task, x, g, r0, ahead, out);
    case 3: return group_rows<FORMAT, 3>(task, x, g, r0, ahead, out);
    case 4: return group_rows<FORMAT, 4>(task, x, g, r0, ahead, out);
#if defined(HFA_AVX512)
    case 5: return group_rows<FORMAT, 5>(task, x, g, r0, ahead, out);
    case 6: return group_rows<FORMAT, 6>(task, x, g, r0, ahead, out);
#endif
  }
}

// next: the weights of the group that comes after this one.
template <int FORMAT>
void group_chunk(const GroupTask& task, const QuantizedRows& x, int64_t g, int64_t r0, int64_t rows,
                 const uint8_t* next, float* out) {
  constexpr int64_t UNIT = Levels<FORMAT>::PLANES * STEP / LINE;  // the lines of a step
  // Tiles have nearly equal height. For example, 7 rows are tiles of 4 and 3, not of 6 and 1.
  const int64_t tiles = ceil_div(rows, TILE_ROWS);
  const int64_t wide = BLOCK / LANES / wide_for(tiles > 1 ? TILE_ROWS : static_cast<int>(rows));  // tiles side by side
  const int64_t lines = ceil_div(UNIT, tiles * wide), share = wide * lines;
  const int64_t bytes = task.steps / Levels<FORMAT>::WORDS * share * LINE;
  for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
    const int64_t height = ceil_div(rows - r, tiles - tile);
    const Ahead ahead = {next + tile * bytes, (tiles > 1 || wide > 2) && tile * share < UNIT ? lines : 0};
    group_tile_of<FORMAT>(height, task, x, g, r0 + r, ahead, out + r * BLOCK);
    r += height;
  }
}

// Prefetches what a block of results will be written to. If they are many, that is not in a cache near by, and writing
// them would wait for it.
void fetch_results(const LinearCall& call, int64_t column, int64_t first, int64_t last) {
  const int64_t size = call.out_dtype == F32 ? 4 : 2;
  for (int64_t r = first; r < last; ++r) {
    const char* at = static_cast<const char*>(call.out) + (r * call.out_stride + column) * size;
    for (int64_t i = 0; i < BLOCK * size; i += LINE) prefetch_l2(at + i);
  }
}

// Computes sums [rows, 64], x times a block of weights, without the scales of outputs and the bias. next: the weights that
// are read next. results: the call to prefetch them for, or null.
template <int FORMAT>
void block_chunk(const BlockWeights<FORMAT>& weights, const QuantizedRows& x, int64_t r0, int64_t rows,
                 const uint8_t* next, float* sums, const LinearCall* results) {
  for (int64_t g = 0; g < x.groups; ++g) {
    const int64_t first = rows * g / x.groups, last = rows * (g + 1) / x.groups;
    if (results) fetch_results(*results, weights.matrix.column + weights.b * BLOCK, r0 + first, r0 + last);
    const GroupTask task = weights.group(g);
    group_chunk<FORMAT>(task, x, g, r0, rows, g + 1 < x.groups ? task.weight + weights.group_bytes : next, sums);
  }
}

// Writes epilogue(result + bias), which is rounded once. `values` gives LANES results of a row, from an output of the
// block on.
template <class T, class Values>
void store_results(const LinearCall& call, const Matrix& matrix, int64_t b, int64_t r0, int64_t rows,
                   const Values& values) {
  const int64_t first = b * BLOCK, outputs = at_most(BLOCK, matrix.out_features - first);
  for (int64_t r = 0; r < rows; ++r) {
    T* const out = static_cast<T*>(call.out) + (r0 + r) * call.out_stride + matrix.column + first;
    for (int64_t i = 0; i < outputs; i += LANES) store_upto(out + i, values(r, i), outputs - i);
  }
}

// Writes the results of block b. up_sums: of the block that the gate's is multiplied by, or null.
void finish(const Matrix& matrix, const LinearCall& call, int64_t b, int64_t r0, int64_t rows, const float* sums,
            const float* up_sums) {
  const int32_t epilogue = call.linear->epilogue, format = call.linear->format;
  const OutputFactors factors(format, matrix, b);
  for_dtype(call.out_dtype, [&](auto* null) {
    const auto store_all = [&](const auto& values) {
      store_results<std::remove_pointer_t<decltype(null)>>(call, matrix, b, r0, rows, values);
    };
    const auto result = [&](int64_t r, int64_t i) HFA_INLINE { return factors.results(sums + r * BLOCK, i); };
    if (up_sums) {
      const OutputFactors up_factors(format, call.linear->matrices[1], b);
      store_all([&](int64_t r, int64_t i) HFA_INLINE {
        return gated(epilogue, result(r, i), up_factors.results(up_sums + r * BLOCK, i));
      });
    } else if (epilogue == NONE) {
      store_all(result);
    } else {
      store_all([&](int64_t r, int64_t i) HFA_INLINE { return activated(epilogue, result(r, i)); });
    }
  });
}

template <int FORMAT>
void run_block(const Linear& linear, const Matrix& matrix, const LinearCall& call, const QuantizedRows& x, int64_t b,
               int64_t first, int64_t last) {
  alignas(64) float sums[CHUNK * BLOCK], up_sums[CHUNK * BLOCK];
  const BlockWeights<FORMAT> weights(linear, matrix, b), up(linear, linear.matrices[has_gate(linear)], b);
  const uint8_t* const next_block = weights.weight + call.threads * weights.bytes(weights.inputs);
  for (int64_t r = first; r < last; r += CHUNK) {
    const int64_t rows = at_most(CHUNK, last - r);
    const uint8_t* const next = r + CHUNK < last ? weights.weight : next_block;
    block_chunk(weights, x, r, rows, has_gate(linear) ? up.weight : next, sums, rows > TILE_ROWS ? &call : nullptr);
    if (has_gate(linear)) block_chunk(up, x, r, rows, next, up_sums, nullptr);
    finish(matrix, call, b, r, rows, sums, has_gate(linear) ? up_sums : nullptr);
  }
}

#if defined(HFA_TILES)
// The same by tiles.
template <int FORMAT>
void run_block_by_tiles(const Linear& linear, const Matrix& matrix, const LinearCall& call, const QuantizedRows& x,
                        int64_t b, int64_t first, int64_t last) {
  struct Sums; struct UpSums;
  const BlockWeights<FORMAT> weights(linear, matrix, b);
  const uint8_t* next = weights.weight + call.threads * weights.bytes(weights.inputs);
  for (int64_t r = first; r < last; r += MOST_ROWS) {
    const int64_t rows = at_most(MOST_ROWS, last - r);
    const size_t bytes = static_cast<size_t>(rows * BLOCK) * sizeof(float);
    float* sums = static_cast<float*>(scratch<Sums>(bytes));
    if (!has_gate(linear)) {
      tile_block(weights, x, r, rows, next, sums);
      finish(matrix, call, b, r, rows, sums, nullptr);
    } else {
      const BlockWeights<FORMAT> up(linear, linear.matrices[1], b);
      float* up_sums = static_cast<float*>(scratch<UpSums>(bytes));
      tile_block(weights, x, r, rows, up.weight, sums);
      tile_block(up, x, r, rows, next, up_sums);
      finish(matrix, call, b, r, rows, sums, up_sums);
    }
  }
}
#endif

int64_t count_blocks(const Linear& linear) {
  const int32_t count = has_gate(linear) ? 1 : linear.count;
  int64_t blocks = 0;
  for (int32_t m = 0; m < count; ++m) blocks += ceil_div(linear.matrices[m].out_features, BLOCK);
  return blocks;
}

template <int FORMAT>
void run(const Linear& linear, const LinearCall& call, const QuantizedRows& x) {
  const int64_t blocks = count_blocks(linear);
#if defined(HFA_TILES)
  const bool by_tiles = x.rows >= call.tile_rows;
  const int64_t height = by_tiles ? PAIR : TILE_ROWS;
#else
  const int64_t height = TILE_ROWS;
#endif
  // Rows are split over threads only if there are few blocks.
  const int64_t parts = blocks >= 4 * call.threads ? 1 : at_most(ceil_div(x.rows, CHUNK), 4 * call.threads);
  const int64_t part_rows = ceil_div(ceil_div(x.rows, parts), height) * height;
  parallel_for(blocks * parts, call.threads, [&](int64_t task) {
    int64_t b = task / parts;
    const int64_t first = task % parts * part_rows, last = at_most(x.rows, first + part_rows);
    int32_t m = 0;
    for (; b >= ceil_div(linear.matrices[m].out_features, BLOCK); ++m)
      b -= ceil_div(linear.matrices[m].out_features, BLOCK);
    if (first >= last) return;
#if defined(HFA_TILES)
    if (by_tiles) return run_block_by_tiles<FORMAT>(linear, linear.matrices[m], call, x, b, first, last);
#endif
    run_block<FORMAT>(linear, linear.matrices[m], call, x, b, first, last);
  });
}

// The tasks are the blocks of the experts that have rows.
template <int FORMAT>
void run_experts(const Linear& linear, const LinearCall& call, const int64_t* starts, const QuantizedRows& x) {
  struct Chosen;
  int64_t* chosen = static_cast<int64_t*>(scratch<Chosen>(static_cast<size_t>(linear.count) * sizeof(int64_t)));
  int64_t count = 0;
  for (int32_t e = 0; e < linear.count; ++e)
    if (starts[e + 1] > starts[e]) chosen[count++] = e;
  const int64_t blocks = ceil_div(linear.matrices[0].out_features, BLOCK);
  parallel_for(count * blocks, call.threads, [&](int64_t task) {
    const int64_t e = chosen[task / blocks], b = task % blocks;
#if defined(HFA_TILES)
    if (starts[e + 1] - starts[e] >= call.tile_rows)
      return run_block_by_tiles<FORMAT>(linear, linear.matrices[e], call, x, b, starts[e], starts[e + 1]);
#endif
    run_block<FORMAT>(linear, linear.matrices[e], call, x, b, starts[e], starts[e + 1]);
  });
}

// The rows that are quantized at once. More threads share more of them, so that all have work.
int64_t rows_at_once(const LinearCall& call) {
  const Linear& linear = *call.linear;
#if defined(HFA_TILES)
  if (call.rows >= call.tile_rows) return call.rows;
#endif
  const int64_t chunks = at_least(QUANTIZED_BYTES / (linear.in_features * CHUNK), 1);
  const int64_t parts = ceil_div(call.rows, CHUNK * at_least(chunks, ceil_div(4 * call.threads, count_blocks(linear))));
  return ceil_div(ceil_div(call.rows, parts), TILE_ROWS) * TILE_ROWS;
}

QuantizedRows quantize_input(const Linear& linear, const LinearCall& call) {
  const auto rows = [&](const auto* x) {
    return quantize_rows(x, call.x_stride, call.rows, linear.in_features, linear.group, call.threads);
  };
  switch (call.x_dtype) {
    case BF16: return rows(static_cast<const Bf16*>(call.x));
    case F16: return rows(static_cast<const F16_*>(call.x));
    default: return rows(static_cast<const float*>(call.x));
  }
}

}  // namespace

void HFA_NAMESPACE::integer_linear(const LinearCall& call) {
  if (call.rows == 0) return;
  const Linear& linear = *call.linear;
  const int64_t most = rows_at_once(call), x_size = call.x_dtype == F32 ? 4 : 2, out_size = call.out_dtype == F32 ? 4 : 2;
  LinearCall part = call;
  for (int64_t r = 0; r < call.rows; r += most) {
    part.rows = at_most(most, call.rows - r);
    part.x = static_cast<const char*>(call.x) + r * call.x_stride * x_size;
    part.out = static_cast<char*>(call.out) + r * call.out_stride * out_size;
    const QuantizedRows x = quantize_input(linear, part);
    for_format(linear.format, [&](auto format) { run<format>(linear, part, x); });
  }
}

void HFA_NAMESPACE::integer_experts(const ExpertsCall& call) {
  if (call.rows == 0) return;
  const Linear& linear = *call.linear;
  const LinearCall all = {call.linear, call.x, call.x_stride, call.rows, call.out, call.out_stride, call.x_dtype,
                          call.out_dtype, call.threads, call.tile_rows};
  const QuantizedRows x = quantize_input(linear, all);
  for_format(linear.format, [&](auto format) { run_experts<format>(linear, all, call.starts, x); });
}
