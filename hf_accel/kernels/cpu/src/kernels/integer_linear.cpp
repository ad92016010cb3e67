// Linear layers with weights of 8 bits or fewer and INT8 activations. The sum over a group of inputs is an exact integer.
// The sums of groups are added in order in float32; each lane is an output, and multiplication and addition are rounded
// separately. So the result of a row depends neither on other rows nor on threads or the instruction set.
//
// For each block of 64 outputs and chunk of rows, the outer loop is over groups of inputs. So the weights of a group,
// and the float sums of the chunk, stay in the first-level cache while all rows of the chunk use them.
#include "../kernels.h"
#include "activation.h"
#include "any_dtype.h"
#include "integer_streams.h"
#include "integer_tiles.h"
#include "integer_vectors.h"

namespace {

constexpr int64_t CHUNK = 48;             // the rows of a chunk, whose float sums have 12 KB
constexpr int64_t MOST_ROWS = 512;        // the most rows whose float sums are kept at once when tiles multiply
// Of quantized rows that are kept at once. They stay in the second-level cache while all blocks of weights use them: with
// all 2,048 rows of a prompt at once, 5,632 inputs took 1.3 times as long.
constexpr int64_t QUANTIZED_BYTES = 256 * 1024;

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
    block_chunk(weights, x, r, rows, has_gate(linear) ? up.weight : next, sums, rows > TALL<FORMAT> ? &call : nullptr);
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

// The same for some blocks from b on, and for few rows, whose weights are read side by side.
template <int FORMAT>
void run_streams(const Linear& linear, const Matrix& matrix, const LinearCall& call, const QuantizedRows& x, int64_t b,
                 int64_t count, int64_t first, int64_t last) {
  alignas(64) float sums[STREAMS * STREAM_ROWS * BLOCK];
  const int64_t rows = last - first;
  const Streams<FORMAT> streams(linear, matrix, b, count, call.threads);
  streams.multiply(x, first, rows, sums);
  const int64_t each = rows * BLOCK;
  for (int64_t i = 0; i < count; ++i) {
    const float* const at = sums + i * (has_gate(linear) ? 2 : 1) * each;
    finish(matrix, call, b + i, first, rows, at, has_gate(linear) ? at + each : nullptr);
  }
}
#endif

// The blocks of a task: several, if these are `rows` rows whose weights are read side by side. `blocks`: of all tasks.
int64_t blocks_at_once([[maybe_unused]] const LinearCall& call, [[maybe_unused]] int64_t rows,
                       [[maybe_unused]] int64_t blocks) {
#if defined(HFA_TILES)
  const int64_t most = STREAMS / (has_gate(*call.linear) ? 2 : 1);
  if (rows <= STREAM_ROWS && rows < call.tile_rows) return at_least(1, at_most(most, blocks / (2 * call.threads)));
#endif
  return 1;
}

// Multiplies rows [first, last) by `count` blocks from b on.
template <int FORMAT>
void run_blocks(const Linear& linear, const Matrix& matrix, const LinearCall& call, const QuantizedRows& x, int64_t b,
                int64_t count, int64_t first, int64_t last) {
#if defined(HFA_TILES)
  const int64_t rows = last - first;
  if (count > 1 && rows <= STREAM_ROWS && rows < call.tile_rows)
    return run_streams<FORMAT>(linear, matrix, call, x, b, count, first, last);
  if (rows >= call.tile_rows) {
    for (int64_t i = 0; i < count; ++i) run_block_by_tiles<FORMAT>(linear, matrix, call, x, b + i, first, last);
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) run_block<FORMAT>(linear, matrix, call, x, b + i, first, last);
}

// The tasks of `at_once` blocks of one matrix each.
int64_t count_tasks(const Linear& linear, int64_t at_once) {
  const int32_t count = has_gate(linear) ? 1 : linear.count;
  int64_t tasks = 0;
  for (int32_t m = 0; m < count; ++m) tasks += ceil_div(linear.matrices[m].out_features, at_once * BLOCK);
  return tasks;
}

template <int FORMAT>
void run(const Linear& linear, const LinearCall& call, const QuantizedRows& x) {
  const int64_t at_once = blocks_at_once(call, x.rows, count_tasks(linear, 1)), tasks = count_tasks(linear, at_once);
#if defined(HFA_TILES)
  const int64_t height = x.rows >= call.tile_rows ? PAIR : TALL<FORMAT>;
#else
  const int64_t height = TALL<FORMAT>;
#endif
  // Rows are split over threads only if there are few blocks.
  const int64_t parts = tasks >= 4 * call.threads ? 1 : at_most(ceil_div(x.rows, CHUNK), 4 * call.threads);
  const int64_t part_rows = ceil_div(ceil_div(x.rows, parts), height) * height;
  parallel_for(tasks * parts, call.threads, [&](int64_t task) {
    const int64_t first = task % parts * part_rows, last = at_most(x.rows, first + part_rows);
    if (first >= last) return;
    int64_t t = task / parts;
    int32_t m = 0;
    const auto blocks = [&] { return ceil_div(linear.matrices[m].out_features, BLOCK); };
    for (; t >= ceil_div(blocks(), at_once); ++m) t -= ceil_div(blocks(), at_once);
    const int64_t b = t * at_once, count = at_most(at_once, blocks() - b);
    run_blocks<FORMAT>(linear, linear.matrices[m], call, x, b, count, first, last);
  });
}

// The tasks are blocks of the experts that have rows.
template <int FORMAT>
void run_experts(const Linear& linear, const LinearCall& call, const int64_t* starts, const QuantizedRows& x) {
  struct Chosen;
  int64_t* chosen = static_cast<int64_t*>(scratch<Chosen>(static_cast<size_t>(linear.count) * sizeof(int64_t)));
  int64_t count = 0;
  for (int32_t e = 0; e < linear.count; ++e)
    if (starts[e + 1] > starts[e]) chosen[count++] = e;
  const int64_t blocks = ceil_div(linear.matrices[0].out_features, BLOCK);
  const int64_t at_once = blocks_at_once(call, ceil_div(x.rows, count), count * blocks);
  const int64_t tasks = ceil_div(blocks, at_once);
  parallel_for(count * tasks, call.threads, [&](int64_t task) {
    const int64_t e = chosen[task / tasks], b = task % tasks * at_once;
    run_blocks<FORMAT>(linear, linear.matrices[e], call, x, b, at_most(at_once, blocks - b), starts[e], starts[e + 1]);
  });
}

// The rows that are quantized at once. More threads share more of them, so that all have work.
int64_t rows_at_once(const LinearCall& call) {
  const Linear& linear = *call.linear;
#if defined(HFA_TILES)
  if (call.rows >= call.tile_rows) return call.rows;
#endif
  const int64_t chunks = at_least(QUANTIZED_BYTES / (linear.in_features * CHUNK), 1);
  const int64_t parts = ceil_div(call.rows, CHUNK * at_least(chunks, ceil_div(4 * call.threads, count_tasks(linear, 1))));
  return ceil_div(ceil_div(call.rows, parts), TILE_ROWS) * TILE_ROWS;
}

QuantizedRows quantize_input(const Linear& linear, const LinearCall& call) {
  const bool limited = LIMITED<INT8> && linear.format == INT8;
  const auto rows = [&](const auto* x) {
    return quantize_rows(x, call.x_stride, call.rows, linear.in_features, linear.group, limited, call.threads);
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
