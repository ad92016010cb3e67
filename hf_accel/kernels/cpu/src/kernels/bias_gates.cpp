// The numbers that a bias of attention scores is multiplied by, of each query and head. Sums are in float32.
#include "../kernels.h"
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"

namespace {

constexpr int64_t PART = 64;  // rows of a task

template <class T>
float gate(const BiasGatesCall& c, const T* x, int64_t head) {
  float gates[2];
  for (int64_t side = 0; side < 2; ++side) {
    F sums = zero();
    float total = 0.0f;
    for (int64_t n = side * c.terms; n < (side + 1) * c.terms; ++n) {
      for (int64_t i = 0; i < c.dim; i += LANES) {
        const int count = static_cast<int>(at_most(LANES, c.dim - i));
        sums = fmadd(load_upto(x + i, count), load_dtype(c.weight, c.weight_dtype, n * c.dim + i, count), sums);
      }
      if (c.bias) total += reduce_add(load_dtype(c.bias, c.weight_dtype, n, 1));
    }
    alignas(64) float lanes[LANES];
    store(lanes, sigmoid(set1(total + reduce_add(sums))));
    gates[side] = lanes[0];
  }
  return gates[0] * (gates[1] * reduce_add(load_dtype(c.factors, c.weight_dtype, head, 1)) - 1.0f) + 2.0f;
}

}  // namespace

void HFA_NAMESPACE::bias_gates(const BiasGatesCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    parallel_for(ceil_div(call.rows, PART), call.threads, [&](int64_t task) {
      for (int64_t row = task * PART; row < at_most(call.rows, (task + 1) * PART); ++row)
        for (int64_t head = 0; head < call.heads; ++head)
          call.out[row * call.heads + head] =
              gate(call, static_cast<const T*>(call.x) + row * call.x_stride + head * call.dim, head);
    });
  });
}
