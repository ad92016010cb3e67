// Scores of positions, which depend on the tokens (He et al. 2020, "DeBERTa", arXiv 2006.03654): what attention adds to
// its own scores. The result of a pair of tokens depends on no other token.
#include "../kernels.h"

#include "../parallel.h"
#include "any_dtype.h"

namespace {

constexpr int VECTORS = 4;  // of tokens that are computed together

// One head of a sequence. Numbers of its tokens stand transposed in `queries` and `keys` [dim, stride].
// BOTH: whether positions have queries too.
template <class T, bool BOTH>
struct Head {
  const PositionScoresCall& c;
  int64_t sequence, head;

  int64_t first() const { return c.starts[sequence]; }
  int64_t tokens() const { return c.starts[sequence + 1] - first(); }
  int64_t stride() const { return (tokens() / LANES + VECTORS + 1) * LANES; }  // so that whole vectors may be read

  const float* transposed(const void* x, int64_t token, float* out) const {
    std::memset(out, 0, static_cast<size_t>(c.dim * stride()) * sizeof(float));
    for (int64_t t = 0; t < tokens(); ++t) {
      const T* row = static_cast<const T*>(x) + (first() + t) * token + head * c.dim;
      for (int64_t i = 0; i < c.dim; ++i) out[i * stride() + t] = to_float(row[i]);
    }
    return out;
  }

  const T* position(const void* table, int64_t distance) const {
    return static_cast<const T*>(table) + (c.rows[distance] * c.heads + head) * c.dim;
  }

  // Computes the pairs of query i and key i - distance for COUNT vectors of queries.
  template <int COUNT>
  void pairs(const float* queries, const float* keys, int64_t distance, int64_t i, int64_t count) const {
    const T *a = position(c.keys, distance), *b = BOTH ? position(c.queries, distance) : a;
    F sums[COUNT];
    unrolled<COUNT>([&](auto v) { sums[v] = zero(); });
    for (int64_t n = 0; n < c.dim; ++n) {
      const F x = set1(to_float(a[n])), y = set1(to_float(b[n]));
      const float *q = queries + n * stride() + i, *k = keys + n * stride() + i - distance;
      unrolled<COUNT>([&](auto v) {
        sums[v] = fmadd(load(q + v * LANES), x, sums[v]);
        if constexpr (BOTH) sums[v] = fmadd(load(k + v * LANES), y, sums[v]);
      });
    }
    alignas(64) float scores[COUNT * LANES];
    unrolled<COUNT>([&](auto v) { store(scores + v * LANES, mul(sums[v], set1(c.scale))); });
    float* const out = c.out + (sequence * c.heads + head) * c.size * c.size;
    for (int64_t n = i; n < at_most(i + COUNT * LANES, i + count); ++n) out[n * c.size + n - distance] = scores[n - i];
  }

  void diagonal(const float* queries, const float* keys, int64_t distance) const {
    const int64_t end = at_most(tokens(), tokens() + distance);
    for (int64_t i = at_least(distance, 0); i < end; i += VECTORS * LANES) {
      if (end - i > LANES) pairs<VECTORS>(queries, keys, distance, i, end - i);
      else pairs<1>(queries, keys, distance, i, end - i);
    }
  }

  void run() const {
    struct Queries; struct Keys;
    const size_t bytes = static_cast<size_t>(c.dim * stride()) * sizeof(float);
    const float* const queries = transposed(c.q, c.q_token, static_cast<float*>(scratch<Queries>(bytes)));
    const float* const keys = BOTH ? transposed(c.k, c.k_token, static_cast<float*>(scratch<Keys>(bytes))) : queries;
    for (int64_t distance = 1 - tokens(); distance < tokens(); ++distance) diagonal(queries, keys, distance);
  }
};

}  // namespace

void HFA_NAMESPACE::position_scores(const PositionScoresCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    parallel_for(call.sequences * call.heads, call.threads, [&](int64_t task) {
      using T = std::remove_pointer_t<decltype(null)>;
      const int64_t sequence = task / call.heads, head = task % call.heads;
      if (call.queries) Head<T, true>{call, sequence, head}.run();
      else Head<T, false>{call, sequence, head}.run();
    });
  });
}
