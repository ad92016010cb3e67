// Adds two tensors, as torch does.
#include "../parallel.h"
#include "any_dtype.h"
#include "../kernels.h"

namespace {

constexpr int64_t PART = 16384;  // numbers of a task

template <class T>
void add_part(const AddCall& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x);
  const T* y = static_cast<const T*>(call.y);
  T* out = static_cast<T*>(call.out);
  const F factor = set1(call.factor);
  for (int64_t i = begin; i < end; i += LANES) {
    const int64_t n = end - i;
    store_upto(out + i, add(load_upto(x + i, n), round_as(mul(load_upto(y + i, n), factor), x)), n);
  }
}

}  // namespace

void HFA_NAMESPACE::add(const AddCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const int64_t size = call.rows * call.size;
    parallel_for(ceil_div(size, PART), call.threads, [&](int64_t task) {
      add_part<std::remove_pointer_t<decltype(null)>>(call, task * PART, at_most(size, (task + 1) * PART));
    });
  });
}
