// act(gate) * up, rounded where torch rounds: after the activation and after the product.
#include "../parallel.h"
#include "activation.h"
#include "any_dtype.h"
#include "declarations.h"

namespace {

template <int ACTIVATION>
inline F activate(F x) {
  return ACTIVATION == SILU_MUL ? silu(x) : ACTIVATION == GELU_MUL ? gelu(x) : gelu_tanh(x);
}

template <class T, int ACTIVATION>
void gate_part(const T* gate, const T* up, T* out, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const F act = round_as(activate<ACTIVATION>(load_upto(gate + i, count - i)), gate);
    store_upto(out + i, mul(act, load_upto(up + i, count - i)), count - i);
  }
}

template <class T>
void gate_part_of(const GatedCall& call, const T* gate, const T* up, T* out, int64_t count) {
  switch (call.activation) {
    case SILU_MUL: return gate_part<T, SILU_MUL>(gate, up, out, count);
    case GELU_MUL: return gate_part<T, GELU_MUL>(gate, up, out, count);
    default: return gate_part<T, GELU_TANH_MUL>(gate, up, out, count);
  }
}

}  // namespace

void HFA_NAMESPACE::gated(const GatedCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    typedef std::remove_pointer_t<decltype(null)> T;
    const int64_t part = 8192, parts = ceil_div(call.size, part);  // numbers a task
    parallel_for(call.rows * parts, call.threads, [&](int64_t task) {
      const int64_t r = task / parts, first = task % parts * part;
      gate_part_of(call, static_cast<const T*>(call.gate) + r * call.gate_stride + first,
                   static_cast<const T*>(call.up) + r * call.up_stride + first,
                   static_cast<T*>(call.out) + r * call.size + first, at_most(part, call.size - first));
    });
  });
}
