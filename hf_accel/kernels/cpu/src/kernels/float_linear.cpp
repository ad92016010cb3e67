// Linear layers with float weights, which are read where the model keeps them.
//
// Inputs are summed in blocks of BLOCK_BYTES, each in vector accumulators (float_tile.h), and the sums of blocks are
// added in order. So the result depends neither on the number of rows nor on threads. With few rows, memory is the
// limit: weights are read in place once, and the next ones are prefetched; those of one row are one stream of memory
// (float_stream.h). With many rows, a block of weights stays in the second-level cache while all rows use it, and is packed
// if it is converted, and with AVX2 (lane_tile.h): on an EPYC with AVX-512, packing it anyway took 1.03 times as long for
// 128 rows.
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"
#include "bf16_tiles.h"
#include "../kernels.h"
#include "column_tile.h"
#include "float_stream.h"
#include "float_tile.h"
#include "lane_tile.h"

namespace {

constexpr int64_t PANEL_ROWS = 32;  // the fewest rows for which weights are read by panels, not by strips
// The most rows for which weights are not prefetched. On an EPYC with AVX2, prefetching makes a row of float32 slower
// (1.1 times from memory, 1.9 times from the caches), and four to sixteen rows from memory faster (1.1 to 1.2 times).
#if defined(HFA_AVX512) && !defined(HFA_TILES)
constexpr int64_t ROWS_WITHOUT_PREFETCH = 0;
#else
constexpr int64_t ROWS_WITHOUT_PREFETCH = 1;
#endif
// Whether the weights of one row are read as one stream. Without AVX-512 a sum adds too few bytes at a time to keep up;
// and an Intel Xeon with AMX reads several streams faster: a row of float32 by one took 1.1 to 1.2 times as long.
#if defined(HFA_AVX512) && !defined(HFA_TILES)
constexpr bool STREAMS_ROW = true;
#else
constexpr bool STREAMS_ROW = false;
#endif
constexpr int64_t MOST_ROWS = 512;    // the most rows of inputs that are packed at once
[[maybe_unused]] constexpr int64_t MOST_EXPERT_ROWS = 2048;  // the same, for experts whose rows tiles multiply

// Rows [first, first + rows) of the input, packed as [blocks][rows][packed_stride].
template <class Dot>
struct Input {
  typedef typename Dot::Number Number;
  Number* packed;
  int64_t first, rows, in_features;
  int threads;  // of the call
  int64_t stride = 0;  // between packed rows

  int64_t blocks() const { return ceil_div(in_features, block_inputs<Dot>()); }
  int64_t count(int64_t b) const { return at_most(block_inputs<Dot>(), in_features - b * block_inputs<Dot>()); }
  Number* row(int64_t b, int64_t r) const { return packed + (b * rows + r) * stride; }
};

inline void copy_numbers(const float* from, int64_t n, float* to) {
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof *to);
}
[[maybe_unused]] inline void copy_numbers(const Bf16* from, int64_t n, Bf16* to) {
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof *to);
}
template <class T>
inline void copy_numbers(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += LANES) store_upto(to + i, load_upto(from + i, n - i), n - i);
}

// Packs one row of a block, with zeros up to a whole vector.
template <class Dot, class T>
inline void pack_row(const T* from, int64_t count, typename Dot::Number* to) {
#if defined(HFA_LANE_TILES)
  if constexpr (BY_LANES<Dot>) return pack_row_by_lanes(from, count, to);
#endif
  copy_numbers(from, count, to);
  const int64_t whole = ceil_div(count, Dot::STEP) * Dot::STEP;
  std::memset(static_cast<void*>(to + count), 0, static_cast<size_t>(whole - count) * sizeof *to);
}

template <class Dot, class X>
Input<Dot> pack_input(const Linear& linear, const LinearCall& call, const X* x, int64_t first) {
  struct Packed;
  Input<Dot> input{nullptr, first, at_most(MOST_ROWS, call.rows - first), linear.in_features, call.threads,
                   packed_stride<Dot>(linear.in_features)};
  const int64_t size = input.blocks() * input.rows * input.stride;
  input.packed = static_cast<typename Dot::Number*>(scratch<Packed>(static_cast<size_t>(size) * sizeof *input.packed));
  const int64_t part = 16;
  parallel_for(ceil_div(input.rows, part), call.threads, [&](int64_t task) {
    for (int64_t r = task * part; r < at_most(input.rows, (task + 1) * part); ++r)
      for (int64_t b = 0; b < input.blocks(); ++b)
        pack_row<Dot>(x + (first + r) * call.x_stride + b * block_inputs<Dot>(), input.count(b), input.row(b, r));
  });
  return input;
}

// The weights of some outputs for one block of inputs, in place or packed.
template <class T>
struct Panel {
  const T* weight;
  int64_t stride, outputs, count;
};

// Multiplies ROWS rows with all outputs of a panel.
template <class Dot, class T, int ROWS>
void row_tile(const typename Dot::Number* x, int64_t x_stride, const Panel<T>& panel, float* sums, Ahead ahead) {
  constexpr int WIDE = wide_for(ROWS);
  const int most = ahead.rows;
  int64_t n = 0;
  for (; n + WIDE <= panel.outputs; n += WIDE) {
    const T* weight = panel.weight + n * panel.stride;
    tile<Dot, T, ROWS, WIDE>(x, x_stride, weight, panel.stride, panel.count, sums + n, Dot::CHUNK, ahead);
    ahead.first += most * ahead.stride;
  }
  for (; n < panel.outputs; ++n)
    tile<Dot, T, ROWS, 1>(x, x_stride, panel.weight + n * panel.stride, panel.stride, panel.count, sums + n, Dot::CHUNK,
                          {});
}

template <class Dot, class T>
void row_tile_of(int64_t rows, const typename Dot::Number* x, int64_t x_stride, const Panel<T>& panel, float* sums,
                 const Ahead& ahead) {
  switch (rows) {
    case 1: return row_tile<Dot, T, 1>(x, x_stride, panel, sums, ahead);
    case 2: return row_tile<Dot, T, 2>(x, x_stride, panel, sums, ahead);
#if defined(HFA_AVX2) || defined(HFA_NEON)
    case 3: return row_tile<Dot, T, 3>(x, x_stride, panel, sums, ahead);
    case 4: return row_tile<Dot, T, 4>(x, x_stride, panel, sums, ahead);
#endif
#if defined(HFA_AVX512)
    case 5: return row_tile<Dot, T, 5>(x, x_stride, panel, sums, ahead);
    case 6: return row_tile<Dot, T, 6>(x, x_stride, panel, sums, ahead);
#endif
  }
}

// The outputs of a task. Those of weights [in, out] are many, so that much of each row of weights is read at once, and
// each thread gets the same number of tasks.
template <class Dot>
inline int64_t task_outputs(int64_t outputs, int threads) {
  if constexpr (BY_COLUMNS<Dot>) {
    const int64_t tasks = threads * ceil_div(outputs, threads * Dot::CHUNK);
    return ceil_div(at_least(ceil_div(outputs, tasks), LEAST_TASK_OUTPUTS), PANEL_OUTPUTS) * PANEL_OUTPUTS;
  }
  return Dot::CHUNK;
}

// Where the results of some rows will be written. If they are many, that is in no cache near by, and writing them would
// wait for it: a tenth of the time of 512 rows of 768 inputs.
struct Results {
  const char* first = nullptr;
  int64_t stride = 0, bytes = 0;  // of a row; no bytes: they are not prefetched

  static Results of(const LinearCall& call, const Matrix& matrix, int64_t row, int64_t output, int64_t outputs) {
    const int64_t size = call.out_dtype == F32 ? 4 : 2;
    return {static_cast<const char*>(call.out) + (row * call.out_stride + matrix.column + output) * size,
            call.out_stride * size, outputs * size};
  }
  void fetch(int64_t row, int64_t rows) const {
    for (int64_t r = row; r < row + rows; ++r)
      for (int64_t at = 0; at < bytes; at += 64) prefetch_l2(first + r * stride + at);
  }
};

// The task of a thread: outputs [n, n + outputs) of a matrix for rows [first, last) of the packed input.
struct Chunk {
  const Matrix* matrix;
  int64_t n, outputs, first, last;
  const void* next = nullptr;  // weights that the thread reads behind these, if they are not the next ones in memory
  int64_t tile = 0;            // the first of the packed tiles of these rows, if tiles multiply
  Results results = {};
};

// The weights of an output, if there are as many.
template <class T>
inline const T* weights_of(const Matrix& matrix, int64_t output, int64_t in_features) {
  return output < matrix.out_features ? static_cast<const T*>(matrix.weight) + output * in_features : nullptr;
}

// For few rows. Weights are read once; while the row tiles use a strip of them, the next strip is prefetched, unless
// the rows are so few that the CPU's own prefetching keeps up.
template <class Dot, class T>
void sum_strips(const Input<Dot>& input, const Chunk& chunk, float* sums) {
  const bool prefetches = chunk.last - chunk.first > ROWS_WITHOUT_PREFETCH;
  const int64_t K = input.in_features, tiles = ceil_div(chunk.last - chunk.first, TILE_ROWS);
  const int64_t wide = wide_for(static_cast<int>(ceil_div(chunk.last - chunk.first, tiles)));
  const T* weight = static_cast<const T*>(chunk.matrix->weight);
  for (int64_t n = 0; n < chunk.outputs; n += wide) {
    const T* strip = weight + (chunk.n + n) * K;
    for (int64_t b = 0; b < input.blocks(); ++b) {
      const Panel<T> panel{strip + b * block_inputs<Dot>(), K, at_most(wide, chunk.outputs - n), input.count(b)};
      const T* next = b + 1 < input.blocks() ? panel.weight + block_inputs<Dot>() : strip + wide * K;
      const int64_t share = prefetches ? ceil_div(wide, tiles) : 0;  // rows of the next strip for each row tile
      for_row_tiles<TILE_ROWS>(chunk.first, chunk.last, [&](int64_t t, int64_t r, int64_t rows) {
        const Ahead ahead{reinterpret_cast<const char*>(next + t * share * K), K * static_cast<int64_t>(sizeof(T)),
                          static_cast<int>(at_least(0, at_most(share, wide - t * share)))};
        row_tile_of<Dot>(rows, input.row(b, r), input.stride, panel, sums + (r - chunk.first) * Dot::CHUNK + n, ahead);
      });
    }
  }
}

// For one row.
template <class Dot, class T>
[[maybe_unused]] void sum_stream(const Input<Dot>& input, const Chunk& chunk, float* sums) {
  stream_row<Dot>(input.row(0, chunk.first), input.rows * input.stride,
                  static_cast<const T*>(chunk.matrix->weight) + chunk.n * input.in_features, chunk.outputs,
                  input.in_features, chunk.next, sums);
}

// Converts a block of weights of another type than products have.
template <class Dot, class T>
Panel<typename Dot::Number> pack_panel(const Input<Dot>& input, const T* block, int64_t b, int64_t outputs) {
  typedef typename Dot::Number Number;
  struct Packed;
  const size_t size = static_cast<size_t>(Dot::CHUNK * input.stride) * sizeof(Number);
  Number* const packed = static_cast<Number*>(scratch<Packed>(size));
  for (int64_t n = 0; n < outputs; ++n)
    pack_row<Dot>(block + n * input.in_features, input.count(b), packed + n * input.stride);
  return {packed, input.stride, outputs, ceil_div(input.count(b), Dot::STEP) * Dot::STEP};
}

// For many rows. Each block of the chunk's weights is used by all rows. While the last of them use it, the next weights are
// prefetched, and before, the next inputs, which are too many for the second-level cache: 512 rows take 0.9 of the time on
// a Xeon (Emerald Rapids).
template <class Dot, class T>
void sum_panels(const Input<Dot>& input, const Chunk& chunk, float* sums) {
  const int64_t K = input.in_features, tiles = ceil_div(chunk.last - chunk.first, TILE_ROWS);
  const T* const weight = static_cast<const T*>(chunk.matrix->weight) + chunk.n * K;
  const T* const next_chunk = weight + input.threads * Dot::CHUNK * K;
  for (int64_t b = 0; b < input.blocks(); ++b) {
    const T* const block = weight + b * block_inputs<Dot>();
    const T* const next = b + 1 < input.blocks() ? block + block_inputs<Dot>() : next_chunk;
    const auto multiply = [&](const auto& panel) {
      for_row_tiles<TILE_ROWS>(chunk.first, chunk.last, [&](int64_t t, int64_t r, int64_t rows) {
        // Each tile of outputs fetches one row: of the next weights, and before, of the next inputs.
        const int64_t across = chunk.outputs / wide_for(static_cast<int>(rows)), row = (tiles - 1 - t) * across;
        const Ahead inputs{reinterpret_cast<const char*>(input.row(b, r + rows)),
                           input.stride * static_cast<int64_t>(sizeof(typename Dot::Number)), 1};
        const Ahead weights{reinterpret_cast<const char*>(next + row * K), K * static_cast<int64_t>(sizeof(T)), 1};
        const Ahead ahead = row < chunk.outputs ? weights : inputs;
        row_tile_of<Dot>(rows, input.row(b, r), input.stride, panel, sums + (r - chunk.first) * Dot::CHUNK, ahead);
      });
    };
    if constexpr (std::is_same<T, typename Dot::Number>::value) multiply(Panel<T>{block, K, chunk.outputs, input.count(b)});
    else multiply(pack_panel(input, block, b, chunk.outputs));
  }
}

#if defined(HFA_LANE_TILES)
// For more rows.
template <class T>
void sum_lanes(const Input<LaneDot>& input, const Chunk& chunk, float* sums) {
  struct Panels;
  constexpr int64_t BLOCK_INPUTS = block_inputs<LaneDot>();
  const int64_t K = input.in_features, panels = ceil_div(chunk.outputs, PANEL_OUTPUTS);
  const int64_t tiles = panels * ceil_div(chunk.last - chunk.first, COLUMN_ROWS), share = ceil_div(chunk.outputs, tiles);
  const T* const weight = static_cast<const T*>(chunk.matrix->weight) + chunk.n * K;
  float* const packed = static_cast<float*>(scratch<Panels>(LaneDot::CHUNK * BLOCK_INPUTS * sizeof(float)));
  for (int64_t b = 0; b < input.blocks(); ++b) {
    const T* const block = weight + b * BLOCK_INPUTS;
    const T* const next = b + 1 < input.blocks() ? block + BLOCK_INPUTS : weight + input.threads * LaneDot::CHUNK * K;
    const int64_t inputs = lane_inputs(input.count(b)), bytes = input.count(b) * static_cast<int64_t>(sizeof(T));
    pack_weights_by_lanes(block, K, chunk.outputs, input.count(b), packed);
    for_row_tiles<COLUMN_ROWS>(chunk.first, chunk.last, [&](int64_t t, int64_t r, int64_t rows) {
      if (b + 1 == input.blocks()) chunk.results.fetch(r - chunk.first, rows);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t row = (t * panels + p) * share;
        const Ahead ahead{reinterpret_cast<const char*>(next + row * K), K * static_cast<int64_t>(sizeof(T)),
                          static_cast<int>(at_least(0, at_most(share, chunk.outputs - row)))};
        lane_tile_of<COLUMN_ROWS>(rows, input.row(b, r), input.stride, packed + p * inputs * LANES * PANEL_OUTPUTS,
                                  inputs, sums + (r - chunk.first) * LaneDot::CHUNK + p * PANEL_OUTPUTS,
                                  LaneDot::CHUNK, ahead, bytes);
      }
    });
  }
}
#endif

// For weights [in, out].
template <class Dot, class T>
void sum_columns(const Input<Dot>& input, const Chunk& chunk, float* sums) {
  const int64_t stride = chunk.matrix->out_features, block = block_inputs<Dot>();
  const T* weight = static_cast<const T*>(chunk.matrix->weight) + chunk.n;
  for (int64_t b = 0; b < input.blocks(); ++b)
    add_columns<Dot, T>(input.row(b, chunk.first), input.stride, chunk.last - chunk.first,
                        {weight + b * block * stride, stride, input.count(b), chunk.outputs}, sums, Dot::CHUNK);
}

template <class Dot, class T>
void sum_chunk(const Input<Dot>& input, const Chunk& chunk, float* sums) {
  const int64_t rows = chunk.last - chunk.first;
  std::memset(sums, 0, static_cast<size_t>(rows * Dot::CHUNK) * sizeof(float));
  if constexpr (STREAMS_ROW && !BY_COLUMNS<Dot>)
    if (rows == 1) return sum_stream<Dot, T>(input, chunk, sums);
#if defined(HFA_LANE_TILES)
  if constexpr (BY_LANES<Dot>) return sum_lanes<T>(input, chunk, sums);
#endif
  if constexpr (BY_COLUMNS<Dot>) sum_columns<Dot, T>(input, chunk, sums);
  else if (rows < PANEL_ROWS) sum_strips<Dot, T>(input, chunk, sums);
  else sum_panels<Dot, T>(input, chunk, sums);
}

// Writes epilogue(sums + bias), which is rounded once.
template <class Dot>
void finish(const Linear& linear, const LinearCall& call, const Chunk& chunk, int64_t row, const float* sums,
            const float* up_sums) {
  const Matrix& matrix = *chunk.matrix;
  for (int64_t r = 0; r < chunk.last - chunk.first; ++r)
    for (int64_t i = 0; i < chunk.outputs; i += LANES) {
      const int n = static_cast<int>(at_most(LANES, chunk.outputs - i));
      F value = load(sums + r * Dot::CHUNK + i);
      if (matrix.bias) value = add(value, load_dtype(matrix.bias, matrix.bias_dtype, chunk.n + i, n));
      if (has_gate(linear)) {
        const Matrix& other = linear.matrices[1];
        F up = load(up_sums + r * Dot::CHUNK + i);
        if (other.bias) up = add(up, load_dtype(other.bias, other.bias_dtype, chunk.n + i, n));
        value = gated(linear.epilogue, value, up);
      } else if (linear.epilogue != NONE) {
        value = activated(linear.epilogue, value);
      }
      const int64_t column = matrix.column + chunk.n + i;
      store_dtype(call.out, call.out_dtype, (row + r) * call.out_stride + column, value, n);
    }
}

#if defined(HFA_TILES)
// Packs rows [first, last) of the input as tiles [tall][steps].
inline void pack_tiles(const LinearCall& call, int64_t first, int64_t last, int64_t inputs, uint8_t* tiles) {
  const Bf16* x = static_cast<const Bf16*>(call.x);
  for (int64_t r = first; r < last; r += TILE_HEIGHT)
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, tiles += TILE_BYTES)
      pack_rows(x + r * call.x_stride + k, call.x_stride, last - r, inputs - k, tiles);
}

// Memory for so many tiles of rows.
inline uint8_t* tile_scratch(int64_t tall, int64_t inputs) {
  struct Packed;
  return static_cast<uint8_t*>(scratch<Packed>(static_cast<size_t>(tall * ceil_div(inputs, TILE_INPUTS) * TILE_BYTES)));
}

template <>
Input<TileDot> pack_input<TileDot>(const Linear& linear, const LinearCall& call, const Bf16*, int64_t first) {
  Input<TileDot> input{nullptr, first, at_most(MOST_ROWS, call.rows - first), linear.in_features, call.threads};
  const int64_t tall = ceil_div(input.rows, TILE_HEIGHT), inputs = input.in_features, end = first + input.rows;
  uint8_t* const tiles = tile_scratch(tall, inputs);
  input.packed = reinterpret_cast<Bf16*>(tiles);
  parallel_for(tall, call.threads, [&](int64_t t) {
    const int64_t r = first + t * TILE_HEIGHT;
    pack_tiles(call, r, at_most(end, r + TILE_HEIGHT), inputs, tiles + t * ceil_div(inputs, TILE_INPUTS) * TILE_BYTES);
  });
  return input;
}

template <>
void sum_chunk<TileDot, Bf16>(const Input<TileDot>& input, const Chunk& chunk, float* sums) {
  struct Sums;
  const int64_t K = input.in_features, steps = ceil_div(K, TILE_INPUTS);
  const int64_t tall = ceil_div(chunk.last - chunk.first, TILE_HEIGHT), wide = ceil_div(chunk.outputs, PAIR) * 2;
  const size_t bytes = static_cast<size_t>(wide * tall * TILE_SUMS) * sizeof(float);
  float* tiles = static_cast<float*>(scratch<Sums>(bytes));
  std::memset(tiles, 0, bytes);
  const uint8_t* x = reinterpret_cast<const uint8_t*>(input.packed) + chunk.tile * steps * TILE_BYTES;
  const TileSums all{tiles, tall, steps, x};
  const TaskWeights weights{static_cast<const Bf16*>(chunk.matrix->weight) + chunk.n * K, chunk.outputs, K};
  const Tiles on_this_thread;
  const int64_t in_place = tall <= IN_PLACE ? K / TILE_INPUTS : 0;
  if (in_place) all.add_in_place(weights, in_place, input.threads * TileDot::CHUNK);
  all.add_packed(weights, in_place);
  for (int64_t n = 0; n < wide; ++n)
    for (int64_t t = 0; t < tall; ++t)
      transpose_words(tiles + (n * tall + t) * TILE_SUMS, TILE_WORDS,
                      sums + t * TILE_HEIGHT * TileDot::CHUNK + n * TILE_HEIGHT, TileDot::CHUNK);
}
#endif

template <class Dot, class T>
void run_chunk(const Linear& linear, const LinearCall& call, const Input<Dot>& input, Chunk chunk) {
  struct Sums; struct UpSums;
  const int64_t rows = ceil_div(chunk.last - chunk.first, Dot::WHOLE_ROWS) * Dot::WHOLE_ROWS;
  const size_t bytes = static_cast<size_t>(rows * Dot::CHUNK) * sizeof(float);
  float* sums = static_cast<float*>(scratch<Sums>(bytes));
  Chunk up = chunk;
  up.matrix = linear.matrices + 1;
  if (has_gate(linear)) {
    up.next = weights_of<T>(*chunk.matrix, chunk.n + chunk.outputs, linear.in_features);
    chunk.next = weights_of<T>(*up.matrix, chunk.n, linear.in_features);
  }
  if (BY_LANES<Dot>) chunk.results = Results::of(call, *chunk.matrix, input.first + chunk.first, chunk.n, chunk.outputs);
  sum_chunk<Dot, T>(input, chunk, sums);
  float* up_sums = nullptr;
  if (has_gate(linear)) {
    up_sums = static_cast<float*>(scratch<UpSums>(bytes));
    sum_chunk<Dot, T>(input, up, up_sums);
  }
  finish<Dot>(linear, call, chunk, input.first + chunk.first, sums, up_sums);
}

template <class Dot, class T>
void run_rows(const Linear& linear, const LinearCall& call, const Input<Dot>& input) {
  const int32_t count = has_gate(linear) ? 1 : linear.count;
  const auto wide = [&](int32_t m) { return task_outputs<Dot>(linear.matrices[m].out_features, call.threads); };
  const auto chunks_of = [&](int32_t m) { return ceil_div(linear.matrices[m].out_features, wide(m)); };
  int64_t chunks = 0;
  for (int32_t m = 0; m < count; ++m) chunks += chunks_of(m);
  // Rows are split over threads only if there are few chunks. Those of weights [in, out] are one for each thread.
  const int64_t enough = BY_COLUMNS<Dot> ? call.threads : 4 * call.threads;
  // Where the weights of a part are packed, parts are as few as possible.
  const int64_t most_parts = BY_LANES<Dot> ? ceil_div(enough, chunks) : 4 * call.threads;
  const int64_t parts = chunks >= enough ? 1 : at_most(ceil_div(input.rows, PANEL_ROWS), most_parts);
  const int64_t part_rows = ceil_div(ceil_div(input.rows, parts), Dot::WHOLE_ROWS) * Dot::WHOLE_ROWS;
  // One row of vectors is a stream for each thread, in a region of its own as long as threads take tasks in turns.
  const bool streams = STREAMS_ROW && Dot::WHOLE_ROWS == 1 && input.rows == 1;
  const int64_t regions = streams ? call.threads : 1, tasks = ceil_div(chunks * parts, regions);
  parallel_for(tasks * regions, call.threads, [&](int64_t taken) {
    const int64_t task = taken % regions * tasks + taken / regions;
    if (task >= chunks * parts) return;
    int64_t c = task / parts;
    const int64_t first = task % parts * part_rows, last = at_most(input.rows, first + part_rows);
    int32_t m = 0;
    for (; c >= chunks_of(m); ++m) c -= chunks_of(m);
    const int64_t n = c * wide(m), outputs = at_most(wide(m), linear.matrices[m].out_features - n);
    Chunk chunk{linear.matrices + m, n, outputs, first, last};
#if defined(HFA_TILES)
    chunk.tile = first / TILE_HEIGHT;
#endif
    if (first < last) run_chunk<Dot, T>(linear, call, input, chunk);
  });
}

// Multiplies the rows of a packed input by the matrices of their experts, see ExpertsCall.
template <class Dot, class T>
void run_experts(const Linear& linear, const LinearCall& call, const Input<Dot>& input, const int64_t* starts) {
  struct Chosen;
  int64_t* chosen = static_cast<int64_t*>(scratch<Chosen>(static_cast<size_t>(linear.count) * sizeof(int64_t)));
  const int64_t end = input.first + input.rows, outputs = linear.matrices[0].out_features;
  int64_t count = 0;
  for (int32_t e = 0; e < linear.count; ++e)
    if (at_most(starts[e + 1], end) > at_least(starts[e], input.first)) chosen[count++] = e;
  const int64_t wide = task_outputs<Dot>(outputs, call.threads), chunks = ceil_div(outputs, wide);
  parallel_for(count * chunks, call.threads, [&](int64_t task) {
    const int64_t e = chosen[task / chunks], n = task % chunks * wide;
    const Chunk chunk{linear.matrices + e, n, at_most(wide, outputs - n),
                      at_least(starts[e], input.first) - input.first, at_most(starts[e + 1], end) - input.first};
    run_chunk<Dot, T>(linear, call, input, chunk);
  });
}

#if defined(HFA_TILES)
// The same by tiles, of which the rows of each expert have their own. So the results of a row depend neither on the number
// of its expert's rows nor on which they are.
void run_experts_by_tiles(const Linear& linear, const LinearCall& call, const int64_t* starts) {
  struct Parts;
  struct Part { int64_t expert, first, last, tile; };
  const int64_t inputs = linear.in_features, outputs = linear.matrices[0].out_features;
  const int64_t tile_bytes = ceil_div(inputs, TILE_INPUTS) * TILE_BYTES, chunks = ceil_div(outputs, TileDot::CHUNK);
  const size_t most = static_cast<size_t>(linear.count + MOST_EXPERT_ROWS / MOST_ROWS);
  Part* const parts = static_cast<Part*>(scratch<Parts>(most * sizeof(Part)));
  for (int64_t first = 0; first < call.rows; first += MOST_EXPERT_ROWS) {
    const int64_t end = at_most(call.rows, first + MOST_EXPERT_ROWS);
    int64_t count = 0, tall = 0;
    for (int64_t e = 0; e < linear.count; ++e)
      for (int64_t r = at_least(starts[e], first); r < at_most(starts[e + 1], end); r += MOST_ROWS) {
        const int64_t last = at_most(r + MOST_ROWS, at_most(starts[e + 1], end));
        parts[count++] = {e, r, last, tall};
        tall += ceil_div(last - r, TILE_HEIGHT);
      }
    uint8_t* const tiles = tile_scratch(tall, inputs);
    parallel_for(count, call.threads, [&](int64_t p) {
      pack_tiles(call, parts[p].first, parts[p].last, inputs, tiles + parts[p].tile * tile_bytes);
    });
    const Input<TileDot> input{reinterpret_cast<Bf16*>(tiles), 0, end, inputs, call.threads};
    parallel_for(count * chunks, call.threads, [&](int64_t task) {
      const Part& part = parts[task / chunks];
      const int64_t n = task % chunks * TileDot::CHUNK;
      const Chunk chunk{linear.matrices + part.expert, n, at_most(TileDot::CHUNK, outputs - n), part.first, part.last,
                        nullptr, part.tile};
      run_chunk<TileDot, Bf16>(linear, call, input, chunk);
    });
  }
}
#endif

// starts: of the rows of experts; null for a product of all rows by all matrices.
template <class Dot, class T>
void run(const Linear& linear, const LinearCall& call, [[maybe_unused]] const int64_t* starts) {
  const auto multiply = [&](const Input<Dot>& input) {
    if constexpr (Dot::WHOLE_ROWS == 1)
      if (starts) return run_experts<Dot, T>(linear, call, input, starts);
    run_rows<Dot, T>(linear, call, input);
  };
  for (int64_t first = 0; first < call.rows; first += MOST_ROWS)
    for_dtype(call.x_dtype, [&](auto* null) {
      const auto* x = static_cast<decltype(null)>(const_cast<void*>(call.x));
      if constexpr (sizeof(typename Dot::Number) == 4)
        multiply(pack_input<Dot>(linear, call, x, first));
      else if constexpr (sizeof *null == 2)  // both bf16
        multiply(pack_input<Dot>(linear, call, static_cast<const Bf16*>(call.x), first));
    });
}

}  // namespace

void HFA_NAMESPACE::float_linear(const LinearCall& call) {
  const Linear& linear = *call.linear;
  [[maybe_unused]] const bool both_bf16 = linear.format == BF16 && call.x_dtype == BF16;
#if defined(HFA_TILES)
  if (both_bf16 && !linear.by_inputs && call.rows >= call.tile_rows) return run<TileDot, Bf16>(linear, call, nullptr);
#endif
#if defined(HFA_BF16)
  if (both_bf16 && linear.by_inputs) return run<PairColumnDot, Bf16>(linear, call, nullptr);
  if (both_bf16) return run<PairDot, Bf16>(linear, call, nullptr);
#endif
  for_dtype(linear.format, [&](auto* null) {
    typedef std::remove_pointer_t<decltype(null)> T;
    if (linear.by_inputs) return run<ColumnDot, T>(linear, call, nullptr);
#if defined(HFA_LANE_TILES)
    if (call.rows >= LANE_ROWS) return run<LaneDot, T>(linear, call, nullptr);
#endif
    run<FloatDot, T>(linear, call, nullptr);
  });
}

void HFA_NAMESPACE::float_experts(const ExpertsCall& call) {
  const Linear& linear = *call.linear;
  const LinearCall all = {call.linear, call.x, call.x_stride, call.rows, call.out, call.out_stride, call.x_dtype,
                          call.out_dtype, call.threads, call.tile_rows};
  [[maybe_unused]] const bool both_bf16 = linear.format == BF16 && call.x_dtype == BF16;
#if defined(HFA_TILES)
  if (both_bf16 && !linear.by_inputs && call.rows >= call.tile_rows) return run_experts_by_tiles(linear, all, call.starts);
#endif
#if defined(HFA_BF16)
  if (both_bf16 && linear.by_inputs) return run<PairColumnDot, Bf16>(linear, all, call.starts);
  if (both_bf16) return run<PairDot, Bf16>(linear, all, call.starts);
#endif
  for_dtype(linear.format, [&](auto* null) {
    typedef std::remove_pointer_t<decltype(null)> T;
    if (linear.by_inputs) run<ColumnDot, T>(linear, all, call.starts);
    else run<FloatDot, T>(linear, all, call.starts);
  });
}
