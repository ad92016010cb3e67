// Rotary position embedding (Su et al., RoFormer), with the roundings of transformers' apply_rotary_pos_emb.
#include <initializer_list>

#include "../parallel.h"
#include "any_dtype.h"
#include "../kernels.h"

namespace {

constexpr int32_t APART = 3;  // pairs of neighbours, which come to stand in both halves
constexpr int32_t HALF_TABLES = 4;  // pairs of the halves, of which a table has one number each

// Converts a row of a table to floats, one for each number of a head.
template <class T>
void read_table(const RopeCall& call, const T* row, float* table) {
  const int64_t pair = call.interleaved == 2 ? 2 : 1;  // the numbers of a head that have one of the table
  const int64_t held = call.interleaved >= APART ? call.size / 2 : call.size;
  for (int64_t i = 0; i < call.size; ++i) table[i] = to_float(row[i % held / pair]);
}

// Copies x with each pair (a, b) replaced by (-b, a).
void rotate(const RopeCall& call, const float* x, float* rotated) {
  const int64_t half = call.size / 2;
  if (call.interleaved && call.interleaved < APART)
    for (int64_t i = 0; i < half; ++i) {
      rotated[2 * i] = -x[2 * i + 1];
      rotated[2 * i + 1] = x[2 * i];
    }
  else
    for (int64_t i = 0; i < half; ++i) {
      rotated[i] = -x[i + half];
      rotated[i + half] = x[i];
    }
}

// Buffers of a token: a row of both tables, and a head before and after its rotation.
struct Floats {
  float *cos, *sin, *values, *rotated;
};

template <class T>
void rotate_head(const RopeCall& call, const T* x, T* out, const Floats& floats) {
  if (call.interleaved == APART)
    for (int64_t i = 0; i < call.size; ++i) floats.values[i % 2 * (call.size / 2) + i / 2] = to_float(x[i]);
  else
    for (int64_t i = 0; i < call.size; i += LANES)
      store_upto(floats.values + i, load_upto(x + i, call.size - i), call.size - i);
  rotate(call, floats.values, floats.rotated);
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int64_t left = call.size - i;
    F straight = mul(load_upto(floats.values + i, left), load_upto(floats.cos + i, left));
    F turned = mul(load_upto(floats.rotated + i, left), load_upto(floats.sin + i, left));
    if (call.round_each) {
      straight = round_as(straight, x);
      turned = round_as(turned, x);
    }
    store_upto(out + i, add(straight, turned), left);
  }
}

template <class T>
void rotate_token(const RopeCall& call, int64_t b, int64_t t) {
  struct Buffer;
  float* buffer = static_cast<float*>(scratch<Buffer>(static_cast<size_t>(4 * call.size) * sizeof(float)));
  const Floats floats{buffer, buffer + call.size, buffer + 2 * call.size, buffer + 3 * call.size};
  const int64_t entry = b * call.table_batch + t * call.table_token;
  for_dtype(call.table_dtype, [&](auto* null) {
    typedef const std::remove_pointer_t<decltype(null)>* Table;
    read_table(call, static_cast<Table>(call.cos) + entry, floats.cos);
    read_table(call, static_cast<Table>(call.sin) + entry, floats.sin);
  });
  for (const Rotated* tensor : {&call.q, &call.k})
    for (int64_t h = 0; h < tensor->heads; ++h) {
      const int64_t from = b * tensor->x_batch + h * tensor->x_head + t * tensor->x_token;
      const int64_t to = b * tensor->out_batch + h * tensor->out_head + t * tensor->out_token;
      rotate_head(call, static_cast<const T*>(tensor->x) + from, static_cast<T*>(tensor->out) + to, floats);
    }
}

}  // namespace

void HFA_NAMESPACE::rope(const RopeCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t work = (call.q.heads + call.k.heads) * call.size;
    const int64_t part = at_least(1, 16384 / at_least(1, work)), all = call.batch * call.tokens;  // part: tokens of a task
    parallel_for(ceil_div(all, part), call.threads, [&](int64_t task) {
      for (int64_t i = task * part; i < at_most(all, (task + 1) * part); ++i)
        rotate_token<std::remove_pointer_t<decltype(null)>>(call, i / call.tokens, i % call.tokens);
    });
  });
}
