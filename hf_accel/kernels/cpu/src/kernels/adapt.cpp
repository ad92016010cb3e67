// What adapters add to the products of linear layers: a x and b (a x) of low rank, in float32.
//
// The weights of an adapter are read once for the rows of a group. Where there are enough of them for all threads, a
// thread reads b behind a, which is the order of their memory. The lanes of a vector are consecutive inputs in a x, and
// consecutive outputs in b (a x); each sum has one accumulator, or a vector of them, so that the bits of a row depend
// neither on other rows nor on threads.
#include "../parallel.h"
#include "any_dtype.h"
#include "../kernels.h"
#include "float_tile.h"
#include "stream.h"

namespace {

constexpr int64_t PART_BLOCKS = 8;  // blocks of outputs of a task
#if defined(HFA_AVX512)
constexpr int MOST_SUMS = 16;  // that fit the registers
#elif defined(HFA_AVX2) || defined(HFA_NEON)
constexpr int MOST_SUMS = 8;
#else
constexpr int MOST_SUMS = 4;  // more took the compiler minutes
#endif

struct GroupRows {
  const int32_t* numbers;
  int64_t count;
};

// sums[r * stride + k] = a[k] x[r] of RANKS rows of a, from `first` on, and ROWS rows of x.
template <class Dot, int ROWS, int RANKS, class T, class W>
void inner_tile(const AdaptCall& c, const int32_t* rows, const LowRank& part, int64_t first, float* sums,
                int64_t stride) {
  constexpr int PIECES = BLOCK / Dot::STEP;
  const int64_t inputs = c.linear->in_features;
  const T* x[ROWS];
  F acc[ROWS][RANKS];
  unrolled<ROWS>([&](auto r) HFA_INLINE {
    x[r] = static_cast<const T*>(c.x) + rows[r] * c.x_stride;
    unrolled<RANKS>([&](int k) HFA_INLINE { acc[r][k] = zero(); });
  });
  const int64_t size = part.rank * BLOCK;  // of a block of inputs
  const int64_t ahead = ceil_div(LINES_AHEAD, size * static_cast<int64_t>(sizeof(W))) * size;  // the same rows of a
  const W* a = static_cast<const W*>(part.a) + first * BLOCK;
  int64_t i = 0;
  for (; i + BLOCK <= inputs; i += BLOCK, a += size) {
    unrolled<RANKS>([&](auto k) HFA_INLINE {
      unrolled<PIECES>([&](auto piece) HFA_INLINE {
        constexpr int64_t at = piece * Dot::STEP;
        const W* const from = a + k * BLOCK + at;
        if constexpr (at * sizeof(W) % 64 == 0) prefetch_l2(from + ahead);
        const auto weight = Dot::load(from);
        unrolled<ROWS>([&](int r) HFA_INLINE { acc[r][k] = Dot::dot(acc[r][k], weight, Dot::load(x[r] + i + at)); });
      });
    });
  }
  for (; i < inputs; i += Dot::STEP, a += Dot::STEP) {
    const int n = static_cast<int>(at_most(Dot::STEP, inputs - i));
    unrolled<RANKS>([&](auto k) HFA_INLINE {
      const auto weight = Dot::load(a + k * BLOCK);
      unrolled<ROWS>([&](int r) HFA_INLINE { acc[r][k] = Dot::dot(acc[r][k], weight, Dot::load_n(x[r] + i, n)); });
    });
  }
  unrolled<ROWS>([&](auto r) HFA_INLINE {
    unrolled<RANKS>([&](int k) HFA_INLINE { sums[r * stride + k] = reduce_add(acc[r][k]); });
  });
}

// RANKS: of a tile at most.
template <class Dot, int ROWS, int RANKS, class T, class W>
void inner_ranks(const AdaptCall& c, const int32_t* rows, const LowRank& part, int64_t k, float* sums, int64_t stride) {
  for (; k + RANKS <= part.rank; k += RANKS)
    inner_tile<Dot, ROWS, RANKS, T, W>(c, rows, part, k, sums + k, stride);
  if constexpr (RANKS > 1)
    if (k < part.rank) inner_ranks<Dot, ROWS, RANKS / 2, T, W>(c, rows, part, k, sums, stride);
}

template <class Dot, class T, class W>
void inner(const AdaptCall& c, const GroupRows& rows, const LowRank& part, float* sums, int64_t stride) {
  int64_t r = 0;
  for (; r + 4 <= rows.count; r += 4)
    inner_ranks<Dot, 4, MOST_SUMS / 4, T, W>(c, rows.numbers + r, part, 0, sums + r * stride, stride);
  for (; r < rows.count; ++r)
    inner_ranks<Dot, 1, MOST_SUMS, T, W>(c, rows.numbers + r, part, 0, sums + r * stride, stride);
}

// Adds scale * sums b to ROWS rows of WIDE vectors of outputs, which begin at `column`.
template <int ROWS, int WIDE, class T, class W>
void outer_tile(const AdaptCall& c, const int32_t* rows, const LowRank& part, const W* b, const float* sums,
                int64_t stride, int64_t column, int64_t outputs) {
  F acc[ROWS][WIDE];
  unrolled<ROWS>([&](auto r) HFA_INLINE { unrolled<WIDE>([&](int w) HFA_INLINE { acc[r][w] = zero(); }); });
  const int64_t rank = part.rank;
  for (int64_t k = 0; k < rank; ++k)
    unrolled<WIDE>([&](auto w) HFA_INLINE {
      const F weight = load_as(b + k * BLOCK + w * LANES);
      unrolled<ROWS>([&](int r) HFA_INLINE { acc[r][w] = fmadd(weight, set1(sums[r * stride + k]), acc[r][w]); });
    });
  for (int r = 0; r < ROWS; ++r) {
    T* out = static_cast<T*>(c.out) + rows[r] * c.out_stride + column;
    for (int w = 0; w < WIDE && w * LANES < outputs; ++w) {
      const int n = static_cast<int>(at_most(LANES, outputs - w * LANES));
      const F base = round_as(load_dtype(c.base, c.base_dtype, rows[r] * c.base_stride + column + w * LANES, n), out);
      store_upto(out + w * LANES, add(base, mul(acc[r][w], set1(part.scale))), n);
    }
  }
}

template <class T, class W>
void outer_block(const AdaptCall& c, const GroupRows& rows, const LowRank& part, const W* b, const float* sums,
                 int64_t stride, int64_t column, int64_t outputs) {
  constexpr int WIDE = MOST_SUMS / 4;
  for (int64_t n = 0; n < outputs; n += WIDE * LANES) {
    int64_t r = 0;
    for (; r + 4 <= rows.count; r += 4)
      outer_tile<4, WIDE, T>(c, rows.numbers + r, part, b + n, sums + r * stride, stride, column + n, outputs - n);
    for (; r < rows.count; ++r)
      outer_tile<1, WIDE, T>(c, rows.numbers + r, part, b + n, sums + r * stride, stride, column + n, outputs - n);
  }
}

// Rounds `outputs` numbers of the base.
template <class T>
void round_base(const AdaptCall& c, const GroupRows& rows, int64_t column, int64_t outputs) {
  for (int64_t r = 0; r < rows.count; ++r) {
    T* out = static_cast<T*>(c.out) + rows.numbers[r] * c.out_stride + column;
    for (int64_t i = 0; i < outputs; i += LANES) {
      const int n = static_cast<int>(at_most(LANES, outputs - i));
      store_upto(out + i, load_dtype(c.base, c.base_dtype, rows.numbers[r] * c.base_stride + column + i, n), n);
    }
  }
}

template <class T>
void run(const AdaptCall& c) {
  struct Sums;
  const Adapters& given = c.adapters;
  const int64_t matrices = c.linear->count;
  const auto part_of = [&](int64_t g, int64_t m) -> const LowRank& {
    return given.parts[given.groups[g].adapter * given.stride + m];
  };
  int64_t most = 1, rows = 0, blocks = 0;
  for (int64_t g = 0; g < given.count; ++g) {
    rows = at_least(rows, given.groups[g].first + given.groups[g].count);
    for (int64_t m = 0; m < matrices; ++m) most = at_least(most, part_of(g, m).a ? part_of(g, m).rank : 0);
  }
  for (int64_t m = 0; m < matrices; ++m) blocks = at_least(blocks, ceil_div(c.linear->matrices[m].out_features, BLOCK));
  float* sums = static_cast<float*>(scratch<Sums>(static_cast<size_t>(rows * matrices * most) * sizeof(float)));
  const auto sums_of = [&](int64_t g, int64_t m) { return sums + (m * rows + given.groups[g].first) * most; };
  const auto multiply = [&](int64_t g, int64_t m) {
    const LowRank& part = part_of(g, m);
    const GroupRows own{given.rows + given.groups[g].first, given.groups[g].count};
    if (part.a)
      for_dtype(part.dtype, [&](auto* null) {
        typedef std::remove_pointer_t<decltype(null)> W;
#if defined(HFA_BF16)
        if constexpr (std::is_same_v<T, Bf16> && std::is_same_v<W, Bf16>)
          return inner<PairDot, T, W>(c, own, part, sums_of(g, m), most);
#endif
        inner<FloatDot, T, W>(c, own, part, sums_of(g, m), most);
      });
  };
  const auto add_blocks = [&](int64_t g, int64_t m, int64_t first, int64_t last) {
    const LowRank& part = part_of(g, m);
    const Matrix& matrix = c.linear->matrices[m];
    const GroupRows own{given.rows + given.groups[g].first, given.groups[g].count};
    for (int64_t block = first; block < last; ++block) {
      const int64_t column = matrix.column + block * BLOCK;
      const int64_t outputs = at_most(BLOCK, matrix.out_features - block * BLOCK);
      if (outputs <= 0) return;
      if (!part.a && c.base != c.out) round_base<T>(c, own, column, outputs);
      if (part.a)
        for_dtype(part.dtype, [&](auto* null) {
          const auto* b = static_cast<decltype(null)>(const_cast<void*>(part.b)) + block * part.rank * BLOCK;
          outer_block<T>(c, own, part, b, sums_of(g, m), most, column, outputs);
        });
    }
  };
  const int64_t products = given.count * matrices;
  const bool enough = products >= 4 * c.threads;
  parallel_for(products, c.threads, [&](int64_t task) {
    multiply(task / matrices, task % matrices);
    if (enough) add_blocks(task / matrices, task % matrices, 0, blocks);
  });
  if (enough) return;
  const int64_t tasks = ceil_div(blocks, PART_BLOCKS);
  parallel_for(products * tasks, c.threads, [&](int64_t task) {
    const int64_t product = task / tasks, first = task % tasks * PART_BLOCKS;
    add_blocks(product / matrices, product % matrices, first, first + PART_BLOCKS);
  });
}

}  // namespace

void HFA_NAMESPACE::adapt(const AdaptCall& call) {
  for_dtype(call.dtype, [&](auto* null) { run<std::remove_pointer_t<decltype(null)>>(call); });
}
