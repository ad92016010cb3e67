// The gated delta rule, token by token (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464). With k and q
// divided by their lengths, and q by the root of key_dim:
//   decay = exp(-exp(log_rate) softplus(a + bias)),  beta = beta_factor sigmoid(b)
//   S = decay S;  S = S + k (beta (v - k S));  out = q S
// Where each number of a key has a decay of its own (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692), they are given.
// A token's numbers do not depend on which other tokens are computed with it, so that chunks of a prompt and drafts
// change no bit.
#include <cmath>

#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
#include "softplus.h"
#include "past_cache.h"

namespace {

constexpr int VECTORS = 4;                    // of columns that a task computes
constexpr int MANY = LANES > 8 ? 8 : VECTORS;  // where there are tasks enough: memory is read in longer pieces

// The factor that divides x by its length.
inline float inverse_length(const float* x, int64_t n) {
  F sum = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    const F part = load_upto(x + i, n - i);
    sum = fmadd(part, part, sum);
  }
  return 1.0f / std::sqrt(reduce_add(sum) + 1e-6f);
}

inline float at(const void* p, int32_t dtype, int64_t i) {
  float result = 0.0f;
  for_dtype(dtype, [&](auto* null) { result = to_float(static_cast<const std::remove_pointer_t<decltype(null)>*>(p)[i]); });
  return result;
}

inline float rounded(float x, int32_t dtype) {
  float result = x;
  for_dtype(dtype, [&](auto* null) {
    std::remove_pointer_t<decltype(null)> stored;
    from_float(x, stored);
    result = to_float(stored);
  });
  return result;
}

// A token's state: `width` columns of [key_dim, value_dim], and the elements from one row to the next.
struct Part {
  float* numbers;
  int64_t stride;
};

// decays: of the numbers of a key; null if all have the same decay.
// PAST: whether nobody reads the state after the token in this pass.
template <int WIDTH, bool EACH, bool PAST>
inline HFA_INLINE void token(const DeltaCall& c, Part from, Part to, const float* k, const float* q, const float* v,
                             float* out, const float* decays, float decay, float beta, int64_t left) {
  F memory[WIDTH], delta[WIDTH], sum[WIDTH];
  const auto read = [&](const float* p, int j) { return WIDTH > 1 ? load(p + j * LANES) : load_upto(p, left); };
  const auto write = [&](float* p, int j, F x) { WIDTH > 1 ? store(p + j * LANES, x) : store_upto(p, x, left); };
  unrolled<WIDTH>([&](auto j) { memory[j] = sum[j] = zero(); });
  for (int64_t i = 0; i < c.key_dim; ++i) {
    const float* row = from.numbers + i * from.stride;
    const F key = set1(EACH ? k[i] * decays[i] : k[i]);
    unrolled<WIDTH>([&](auto j) { memory[j] = fmadd(read(row, j), key, memory[j]); });
  }
  const F kept = set1(decay), rate = set1(beta);
  unrolled<WIDTH>([&](auto j) { delta[j] = mul(rate, sub(read(v, j), EACH ? memory[j] : mul(kept, memory[j]))); });
  for (int64_t i = 0; i < c.key_dim; ++i) {
    const float* row = from.numbers + i * from.stride;
    float* result = to.numbers + i * to.stride;
    const F key = set1(k[i]), query = set1(q[i]), held = EACH ? set1(decays[i]) : kept;
    unrolled<WIDTH>([&](auto j) {
      const F state = fmadd(key, delta[j], mul(held, read(row, j)));
      PAST ? store_past_cache(result + j * LANES, state) : write(result, j, state);
      sum[j] = fmadd(query, state, sum[j]);
    });
  }
  unrolled<WIDTH>([&](auto j) { write(out, j, sum[j]); });
  if (PAST) finish_past_cache();
}

// Columns column.. of a head of a sequence. part: room for key_dim rows of them; k, q: for key_dim numbers. past_cache:
// whether the last state may be stored past the caches.
template <int WIDTH>
void columns(const DeltaCall& c, int64_t sequence, int64_t head, int64_t column, float* part, float* k, float* q,
             bool past_cache) {
  const int64_t own = head / (c.value_heads / c.key_heads), size = c.key_dim * c.value_dim;
  const auto page = [&](int64_t slot) {
    return Part{c.states + (slot * c.value_heads + head) * size + column, c.value_dim};
  };
  const Part free{part, WIDTH * LANES};
  const float rate = c.decays ? 0.0f : std::exp(at(c.log_rate, c.rate_dtype, head));
  Part state = free;
  if (c.before[sequence] >= 0) state = page(c.before[sequence]);
  else
    for (int64_t i = 0; i < c.key_dim * WIDTH * LANES; ++i) part[i] = 0.0f;
  for (int64_t t = c.starts[sequence]; t < c.starts[sequence + 1]; ++t) {
    const float *key = c.k + t * c.k_stride + own * c.key_dim, *query = c.q + t * c.q_stride + own * c.key_dim;
    const float key_factor = inverse_length(key, c.key_dim);
    const float query_factor = inverse_length(query, c.key_dim) / std::sqrt(static_cast<float>(c.key_dim));
    for (int64_t i = 0; i < c.key_dim; ++i) k[i] = key[i] * key_factor, q[i] = query[i] * query_factor;
    const Part next = c.slots[t] >= 0 ? page(c.slots[t]) : free;
    const int64_t own_token = t * c.value_heads + head;
    const float beta = rounded(1.0f / (1.0f + std::exp(-at(c.b, c.dtype, t * c.b_stride + head))), c.dtype) * c.beta_factor;
    const float* value = c.v + t * c.v_stride + head * c.value_dim + column;
    float* out = c.out + own_token * c.value_dim + column;
    if (c.decays) {
      token<WIDTH, true, false>(c, state, next, k, q, value, out, c.decays + own_token * c.key_dim, 0.0f, beta, c.value_dim - column);
    } else {
      const float step = at(c.a, c.dtype, t * c.a_stride + head) + at(c.bias, c.bias_dtype, head);
      const float decay = std::exp(-rate * softplus(step));
      const bool last = WIDTH > 1 && past_cache && c.slots[t] >= 0 && t + 1 == c.starts[sequence + 1];
      (last ? token<WIDTH, false, WIDTH != 1> : token<WIDTH, false, false>)(
          c, state, next, k, q, value, out, nullptr, decay, beta, c.value_dim - column);
    }
    state = next;
  }
}

// WIDTH: the vectors of columns of a task.
template <int WIDTH>
void rule(const DeltaCall& call) {
  constexpr int64_t SIZE = WIDTH * LANES;
  const int64_t parts = ceil_div(call.value_dim, SIZE), numbers = call.key_dim * call.value_dim;
  const bool past_cache = goes_past_cache(call.states, call.value_dim, call.sequences * call.value_heads * numbers);
  parallel_for(call.sequences * call.value_heads * parts, call.threads, [&](int64_t task) {
    const int64_t column = task % parts * SIZE, head = task / parts % call.value_heads;
    struct Own;
    float* part = static_cast<float*>(scratch<Own>(static_cast<size_t>(call.key_dim * (SIZE + 2)) * sizeof(float)));
    float *k = part + call.key_dim * SIZE, *q = k + call.key_dim;
    const int64_t sequence = task / parts / call.value_heads, end = at_most(call.value_dim, column + SIZE);
    if (end - column == SIZE) return columns<WIDTH>(call, sequence, head, column, part, k, q, past_cache);
    for (int64_t each = column; each < end; each += LANES)
      columns<1>(call, sequence, head, each, part, k, q, past_cache);
  });
}

}  // namespace

void HFA_NAMESPACE::delta_rule(const DeltaCall& call) {
  const bool many = call.value_dim % (MANY * LANES) == 0 && call.sequences * call.value_heads >= 4 * call.threads;
  many ? rule<MANY>(call) : rule<VECTORS>(call);
}
