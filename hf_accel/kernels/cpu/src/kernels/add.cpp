// Adds two tensors, or multiplies one, or rounds it, as torch does.
#include "../parallel.h"
#include "any_dtype.h"
#include "../kernels.h"

namespace {

constexpr int64_t PART = 16384;  // numbers of a task

template <class T, class Y>
void add_part(const AddCall& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x);
  const Y* y = static_cast<const Y*>(call.y);
  T* out = static_cast<T*>(call.out);
  const F factor = set1(call.factor);
  for (int64_t i = begin; i < end; i += LANES) {
    const int64_t n = end - i;
    const F product = round_as(mul(load_upto(y + i, n), factor), x);
    store_upto(out + i, x ? add(load_upto(x + i, n), product) : product, n);
  }
}

// A part of rows: y is multiplied by the number of its column, or by the one that there is.
template <class T>
void add_scaled_rows(const AddCall& call, int64_t begin, int64_t end) {
  const T* scale = static_cast<const T*>(call.scale);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = call.x ? static_cast<const T*>(call.x) + row * call.x_stride : nullptr;
    const T* y = static_cast<const T*>(call.y) + row * call.size;
    T* out = static_cast<T*>(call.out) + row * call.size;
    for (int64_t i = 0; i < call.size; i += LANES) {
      const int64_t n = call.size - i;
      const F factors = call.one_scale ? set1(to_float(*scale)) : load_upto(scale + i, n);
      const F product = round_as(mul(load_upto(y + i, n), factors), x);
      store_upto(out + i, x ? add(load_upto(x + i, n), product) : product, n);
    }
  }
}

}  // namespace

void HFA_NAMESPACE::add(const AddCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (call.scale) {
      const int64_t part = call.size < PART ? PART / call.size : 1;
      return parallel_for(ceil_div(call.rows, part), call.threads, [&](int64_t task) {
        add_scaled_rows<T>(call, task * part, at_most(call.rows, (task + 1) * part));
      });
    }
    const int64_t size = call.rows * call.size;
    for_dtype(call.y_dtype, [&](auto* of_y) {
      using Y = std::remove_pointer_t<decltype(of_y)>;
      parallel_for(ceil_div(size, PART), call.threads, [&](int64_t task) {
        add_part<T, Y>(call, task * PART, at_most(size, (task + 1) * PART));
      });
    });
  });
}
