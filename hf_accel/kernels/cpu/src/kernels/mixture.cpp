// The experts of a mixture: tokens are sorted by the experts that they chose, multiplied, and added up.
#include "../kernels.h"
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"

namespace {

constexpr int64_t PART = 8;  // rows of a task between the products

// Finds the place of each (token, choice) among the rows, which are in the order of experts and then of tokens.
// Returns whether all experts are there.
bool sort_rows(const MixtureCall& c, int64_t* starts, int64_t* places) {
  const int64_t experts = c.up->count, choices = c.tokens * c.top_k;
  std::memset(starts, 0, static_cast<size_t>(experts + 1) * sizeof *starts);
  for (int64_t i = 0; i < choices; ++i) {
    if (c.chosen[i] < 0 || c.chosen[i] >= experts) return false;
    ++starts[c.chosen[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
  for (int64_t i = 0; i < choices; ++i) places[i] = starts[c.chosen[i]]++;
  for (int64_t e = experts; e > 0; --e) starts[e] = starts[e - 1];
  starts[0] = 0;
  return true;
}

void multiply(const Linear& linear, const MixtureCall& c, const void* x, void* out, const int64_t* starts) {
  const ExpertsCall call = {&linear, x, linear.in_features, c.tokens * c.top_k, out, linear.matrices[0].out_features,
                            starts, c.dtype, c.dtype, c.threads, c.tile_rows};
  if (linear.format > F16) HFA_NAMESPACE::integer_experts(call);
  else HFA_NAMESPACE::float_experts(call);
}

template <class T>
inline F clamped_gate(const MixtureCall& c, F gate, F up, const T* type) {
  gate = keep_nan(min(gate, set1(c.limit)), gate);
  up = keep_nan(max(min(up, set1(c.limit)), set1(-c.limit)), up);
  const F open = round_as(sigmoid(round_as(mul(gate, set1(c.alpha)), type)), type);
  const F shifted = round_as(add(up, set1(1.0f)), type);
  return mul(shifted, round_as(mul(gate, open), type));
}

template <class T>
void clamped_row(const MixtureCall& c, const T* x, T* out, int64_t size) {
  alignas(64) float gate[LANES], up[LANES];
  for (int64_t i = 0; i < size; i += LANES) {
    const int n = static_cast<int>(at_most(LANES, size - i));
    for (int j = 0; j < n; ++j) gate[j] = to_float(x[2 * (i + j)]), up[j] = to_float(x[2 * (i + j) + 1]);
    store_upto(out + i, clamped_gate(c, load_n(gate, n), load_n(up, n), x), n);
  }
}

// Makes the inputs of the second weights from the results of the first ones.
template <class T>
void activate_rows(const MixtureCall& c, const T* x, T* out, int64_t wide, int64_t size) {
  const int64_t rows = c.tokens * c.top_k;
  if (c.gate != GATE_CLAMPED)
    return HFA_BASE::activate({x, c.gate == GATE_HALVES ? x + size : nullptr, out, wide, wide, size, rows, size,
                               c.activation, c.dtype, c.dtype, c.threads});
  parallel_for(ceil_div(rows, PART), c.threads, [&](int64_t part) {
    for (int64_t r = part * PART; r < at_most(rows, (part + 1) * PART); ++r)
      clamped_row(c, x + r * wide, out + r * size, size);
  });
}

// Adds up what the experts of a token say.
template <class T>
void add_up(const MixtureCall& c, const T* rows, const int64_t* places, int64_t token, int64_t size) {
  T* const out = static_cast<T*>(c.out) + token * size;
  const bool rounds = c.score_dtype == c.dtype;
  for (int64_t i = 0; i < size; i += LANES) {
    const int64_t n = at_most(LANES, size - i);
    F sum = zero();
    for (int64_t k = token * c.top_k; k < (token + 1) * c.top_k; ++k) {
      alignas(64) float score[LANES];
      store(score, load_dtype(c.scores, c.score_dtype, k, 1));
      const F product = mul(load_upto(rows + places[k] * size + i, n), set1(score[0]));
      sum = add(sum, rounds ? round_as(product, rows) : product);
    }
    store_upto(out + i, sum, n);
  }
}

template <class T>
void run(const MixtureCall& c, const int64_t* starts, const int64_t* places) {
  struct Inputs; struct Wide; struct Hidden; struct Outputs;
  const int64_t rows = c.tokens * c.top_k, inputs = c.up->in_features, wide = c.up->matrices[0].out_features;
  const int64_t size = c.down->in_features, outputs = c.down->matrices[0].out_features;
  T* const gathered = static_cast<T*>(scratch<Inputs>(static_cast<size_t>(rows * inputs) * sizeof(T)));
  T* const first = static_cast<T*>(scratch<Wide>(static_cast<size_t>(rows * wide) * sizeof(T)));
  T* const hidden = static_cast<T*>(scratch<Hidden>(static_cast<size_t>(rows * size) * sizeof(T)));
  T* const second = static_cast<T*>(scratch<Outputs>(static_cast<size_t>(rows * outputs) * sizeof(T)));
  const T* const x = static_cast<const T*>(c.x);
  parallel_for(ceil_div(rows, PART), c.threads, [&](int64_t part) {
    for (int64_t i = part * PART; i < at_most(rows, (part + 1) * PART); ++i)
      std::memcpy(static_cast<void*>(gathered + places[i] * inputs), x + i / c.top_k * c.x_stride,
                  static_cast<size_t>(inputs) * sizeof(T));
  });
  multiply(*c.up, c, gathered, first, starts);
  activate_rows(c, first, hidden, wide, size);
  multiply(*c.down, c, hidden, second, starts);
  parallel_for(ceil_div(c.tokens, PART), c.threads, [&](int64_t part) {
    for (int64_t t = part * PART; t < at_most(c.tokens, (part + 1) * PART); ++t) add_up(c, second, places, t, outputs);
  });
}

}  // namespace

void HFA_NAMESPACE::mixture(const MixtureCall& c) {
  struct Starts; struct Places;
  int64_t* const starts = static_cast<int64_t*>(scratch<Starts>(static_cast<size_t>(c.up->count + 1) * sizeof(int64_t)));
  int64_t* const places =
      static_cast<int64_t*>(scratch<Places>(static_cast<size_t>(c.tokens * c.top_k) * sizeof(int64_t)));
  *c.known = sort_rows(c, starts, places);
  if (!*c.known) return;
  for_dtype(c.dtype, [&](auto* null) { run<std::remove_pointer_t<decltype(null)>>(c, starts, places); });
}
