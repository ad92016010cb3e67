// Rotary position embedding (Su et al., RoFormer), with the roundings of transformers' apply_rotary_pos_emb.
#include "../parallel.h"
#include "any_dtype.h"
#include "declarations.h"

namespace {

// One row of a table as floats, a number for each of the rotary_dim
template <class T>
void read_table(const RopeCall& call, const T* row, float* table) {
  const int64_t columns = call.half_tables ? call.rotary_dim / 2 : call.rotary_dim;
  for (int64_t i = 0; i < call.rotary_dim; ++i)
    table[i] = to_float(row[!call.half_tables ? i : call.interleaved ? i / 2 : i % columns]);
}

// x with each pair (a, b) replaced by (-b, a)
void rotate(const RopeCall& call, const float* x, float* rotated) {
  const int64_t half = call.rotary_dim / 2;
  if (call.interleaved)
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

template <class T>
void rotate_head(const RopeCall& call, const T* x, T* out, int64_t size, const float* cos, const float* sin,
                 float* values, float* rotated) {
  for (int64_t i = 0; i < call.rotary_dim; i += LANES)
    store_upto(values + i, load_upto(x + i, call.rotary_dim - i), call.rotary_dim - i);
  rotate(call, values, rotated);
  for (int64_t i = 0; i < call.rotary_dim; i += LANES) {
    const int64_t left = call.rotary_dim - i;
    F straight = mul(load_upto(values + i, left), load_upto(cos + i, left));
    F turned = mul(load_upto(rotated + i, left), load_upto(sin + i, left));
    if (call.round_each) {
      straight = round_as(straight, x);
      turned = round_as(turned, x);
    }
    store_upto(out + i, add(straight, turned), left);
  }
  if (out != x)
    for (int64_t i = call.rotary_dim; i < size; ++i) out[i] = x[i];
}

template <class T>
void rotate_token(const RopeCall& call, int64_t b, int64_t t) {
  struct Floats;
  float* cos = static_cast<float*>(scratch<Floats>(static_cast<size_t>(4 * call.rotary_dim) * sizeof(float)));
  float *sin = cos + call.rotary_dim, *values = sin + call.rotary_dim, *rotated = values + call.rotary_dim;
  const int64_t entry = b * call.table_batch + t * call.table_token;
  for_dtype(call.table_dtype, [&](auto* null) {
    typedef const std::remove_pointer_t<decltype(null)>* Table;
    read_table(call, static_cast<Table>(call.cos) + entry, cos);
    read_table(call, static_cast<Table>(call.sin) + entry, sin);
  });
  for (const Rotated& tensor : call.tensors)
    for (int64_t h = 0; h < tensor.heads; ++h)
      rotate_head(call, static_cast<const T*>(tensor.x) + b * tensor.x_batch + h * tensor.x_head + t * tensor.x_token,
                  static_cast<T*>(tensor.out) + b * tensor.out_batch + h * tensor.out_head + t * tensor.out_token,
                  tensor.size, cos, sin, values, rotated);
}

}  // namespace

void HFA_NAMESPACE::rope(const RopeCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t work = (call.tensors[0].heads + call.tensors[1].heads) * call.rotary_dim;
    const int64_t part = at_least(1, 16384 / at_least(1, work)), all = call.batch * call.tokens;  // tokens a task
    parallel_for(ceil_div(all, part), call.threads, [&](int64_t task) {
      for (int64_t i = task * part; i < at_most(all, (task + 1) * part); ++i)
        rotate_token<std::remove_pointer_t<decltype(null)>>(call, i / call.tokens, i % call.tokens);
    });
  });
}
