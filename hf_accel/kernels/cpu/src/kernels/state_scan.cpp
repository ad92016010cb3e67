// State spaces that select what they keep, token by token: Mamba (Gu and Dao 2023, arXiv 2312.00752) and Mamba 2 (Dao
// and Gu 2024, arXiv 2405.21060).
//   delta = softplus(dt + bias), within the limits
//   S = exp(-exp(log_rate) delta) S + B (delta x);  out = C S + skip x
// dt, bias, log_rate and skip are of a head, which is Mamba 2. With each_rate they are of each column of the one head, and
// log_rate is also of each row, which is Mamba. A token's numbers do not depend on which other tokens are computed with it.
#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
#include "softplus.h"
#include "past_cache.h"

namespace {

constexpr int VECTORS = 4;  // of columns that a task computes

// A token's state: columns of [state_size, head_dim], and the elements from one row to the next.
struct Part {
  float* numbers;
  int64_t stride;
};

// What the columns of a task have: `left` of them, from `column` of `head` on.
struct Place {
  int64_t head, column, left;
};

template <int WIDTH>
struct Columns {
  F of[WIDTH];
};

template <int WIDTH>
inline HFA_INLINE Columns<WIDTH> read(const float* p, int64_t left) {
  Columns<WIDTH> x;
  unrolled<WIDTH>([&](auto j) { x.of[j] = WIDTH > 1 ? load(p + j * LANES) : load_upto(p, left); });
  return x;
}

template <int WIDTH>
inline HFA_INLINE void write(float* p, const Columns<WIDTH>& x, int64_t left) {
  unrolled<WIDTH>([&](auto j) { WIDTH > 1 ? store(p + j * LANES, x.of[j]) : store_upto(p, x.of[j], left); });
}

inline float number(const void* p, int32_t dtype, int64_t i) {
  float result = 0.0f;
  for_dtype(dtype, [&](auto* null) { result = to_float(static_cast<const std::remove_pointer_t<decltype(null)>*>(p)[i]); });
  return result;
}

// The numbers of columns, from number i on; zeros where there are none.
template <int WIDTH>
inline HFA_INLINE Columns<WIDTH> read_dtype(const void* p, int32_t dtype, int64_t i, int64_t left) {
  Columns<WIDTH> x;
  if (!p) unrolled<WIDTH>([&](auto j) { x.of[j] = zero(); });
  else
    for_dtype(dtype, [&](auto* null) {
      const auto* from = static_cast<const std::remove_pointer_t<decltype(null)>*>(p) + i;
      unrolled<WIDTH>([&](auto j) { x.of[j] = WIDTH > 1 ? load_as(from + j * LANES) : load_upto(from, left); });
    });
  return x;
}

inline float within(float x, float lowest, float highest) { return x < lowest ? lowest : x > highest ? highest : x; }

// rates: those of a head, or [state_size, WIDTH * LANES] with EACH. PAST: whether nobody reads the state after the
// token in this pass.
template <int WIDTH, bool EACH, bool PAST>
inline HFA_INLINE void token(const ScanCall& c, int64_t t, Place at, const float* rates, Part from, Part to) {
  const int64_t first = at.head * c.head_dim + at.column, group = at.head / (c.heads / c.groups) * c.state_size;
  const bool limited = !c.limited || c.limited[t];
  const float lowest = limited ? c.lowest : 0.0f, highest = limited ? c.highest : INFINITY;
  const auto x = read<WIDTH>(c.x + t * c.x_stride + first, at.left);
  Columns<WIDTH> delta, decay, skip, sum, input;
  if constexpr (EACH) {
    const auto dt = read_dtype<WIDTH>(c.dt, c.dt_dtype, t * c.dt_stride + at.column, at.left);
    const auto bias = read_dtype<WIDTH>(c.bias, c.bias_dtype, at.column, at.left);
    skip = read_dtype<WIDTH>(c.skip, c.skip_dtype, at.column, at.left);
    unrolled<WIDTH>([&](auto j) {
      // max and min return their second operand if it is NaN.
      delta.of[j] = min(set1(highest), max(set1(lowest), softplus(add(dt.of[j], bias.of[j]))));
    });
  } else {
    const float dt = number(c.dt, c.dt_dtype, t * c.dt_stride + at.head);
    const float own = within(softplus(dt + number(c.bias, c.bias_dtype, at.head)), lowest, highest);
    const float skipped = number(c.skip, c.skip_dtype, at.head);
    const float kept = std::exp(-*rates * own);
    unrolled<WIDTH>([&](auto j) {
      delta.of[j] = set1(own), decay.of[j] = set1(kept), skip.of[j] = set1(skipped);
    });
  }
  unrolled<WIDTH>([&](auto j) { input.of[j] = mul(delta.of[j], x.of[j]), sum.of[j] = zero(); });
  const float *b = c.b + t * c.b_stride + group, *own = c.c + t * c.c_stride + group;
  for (int64_t i = 0; i < c.state_size; ++i) {
    const auto state = read<WIDTH>(from.numbers + i * from.stride, at.left);
    if constexpr (EACH) {
      unrolled<WIDTH>([&](auto j) {
        decay.of[j] = exp_as_torch(sub(zero(), mul(load(rates + (i * WIDTH + j) * LANES), delta.of[j])));
      });
    }
    const F in = set1(b[i]), out = set1(own[i]);
    Columns<WIDTH> next;
    unrolled<WIDTH>([&](auto j) {
      next.of[j] = fmadd(in, input.of[j], mul(decay.of[j], state.of[j]));
      sum.of[j] = fmadd(out, next.of[j], sum.of[j]);
    });
    float* place = to.numbers + i * to.stride;
    if (PAST) unrolled<WIDTH>([&](auto j) { store_past_cache(place + j * LANES, next.of[j]); });
    else write<WIDTH>(place, next, at.left);
  }
  unrolled<WIDTH>([&](auto j) { sum.of[j] = fmadd(skip.of[j], x.of[j], sum.of[j]); });
  write<WIDTH>(c.out + t * c.heads * c.head_dim + first, sum, at.left);
  if (PAST) finish_past_cache();
}

// Columns of a head of a sequence. part: room for state_size rows of them; rates: for as much, see `token`. past_cache:
// whether the last state may be stored past the caches.
template <int WIDTH, bool EACH>
void columns(const ScanCall& c, int64_t sequence, Place at, float* part, float* rates, bool past_cache) {
  constexpr int64_t SIZE = WIDTH * LANES;
  if constexpr (EACH) {
    for_dtype(c.rate_dtype, [&](auto* null) {
      const auto* own = static_cast<const std::remove_pointer_t<decltype(null)>*>(c.log_rate) + at.column * c.state_size;
      for (int64_t i = 0; i < c.state_size; ++i)
        for (int64_t j = 0; j < SIZE; ++j)
          rates[i * SIZE + j] = j < at.left ? to_float(own[j * c.state_size + i]) : 0.0f;
    });
    for (int64_t i = 0; i < c.state_size * SIZE; i += LANES) store(rates + i, exp_as_torch(load(rates + i)));
  } else {
    *rates = std::exp(number(c.log_rate, c.rate_dtype, at.head));
  }
  const auto page = [&](int64_t slot) {
    return Part{c.states + (slot * c.heads + at.head) * c.state_size * c.head_dim + at.column, c.head_dim};
  };
  const Part free{part, SIZE};
  Part state = free;
  if (c.before[sequence] >= 0) state = page(c.before[sequence]);
  else
    for (int64_t i = 0; i < c.state_size * SIZE; ++i) part[i] = 0.0f;
  for (int64_t t = c.starts[sequence]; t < c.starts[sequence + 1]; ++t) {
    const Part next = c.slots[t] >= 0 ? page(c.slots[t]) : free;
    const bool last = WIDTH > 1 && past_cache && c.slots[t] >= 0 && t + 1 == c.starts[sequence + 1];
    (last ? token<WIDTH, EACH, WIDTH != 1> : token<WIDTH, EACH, false>)(c, t, at, rates, state, next);
    state = next;
  }
}

template <bool EACH>
void scan(const ScanCall& call) {
  constexpr int64_t WIDTH = VECTORS * LANES;
  const int64_t parts = ceil_div(call.head_dim, WIDTH), numbers = call.state_size * call.head_dim;
  const bool past_cache = goes_past_cache(call.states, call.head_dim, call.sequences * call.heads * numbers);
  parallel_for(call.sequences * call.heads * parts, call.threads, [&](int64_t task) {
    const int64_t column = task % parts * WIDTH, head = task / parts % call.heads;
    struct Own;
    const int64_t size = call.state_size * WIDTH;
    float* part = static_cast<float*>(scratch<Own>(static_cast<size_t>(2 * size) * sizeof(float)));
    const int64_t sequence = task / parts / call.heads, end = at_most(call.head_dim, column + WIDTH);
    if (end - column == WIDTH) return columns<VECTORS, EACH>(call, sequence, {head, column, WIDTH}, part, part + size, past_cache);
    for (int64_t each = column; each < end; each += LANES)
      columns<1, EACH>(call, sequence, {head, each, end - each}, part, part + size, past_cache);
  });
}

}  // namespace

void HFA_NAMESPACE::state_scan(const ScanCall& call) { call.each_rate ? scan<true>(call) : scan<false>(call); }
