// Reads numbers that are spread over many tensors, so that one call sees whether any of them was written to.
#include <cstring>

#include "../kernels.h"

namespace {

template <class T>
uint8_t* read(const SampledTensor& tensor, uint8_t* out) {
  const uint8_t* const from = static_cast<const uint8_t*>(tensor.numbers);
  for (int64_t i = 0; i < tensor.count; ++i) std::memcpy(out + i * sizeof(T), from + i * tensor.step, sizeof(T));
  return out + tensor.count * sizeof(T);
}

}  // namespace

void HFA_NAMESPACE::samples(const SamplesCall& call) {
  uint8_t* out = static_cast<uint8_t*>(call.out);
  for (int64_t t = 0; t < call.count; ++t) {
    const SampledTensor& tensor = call.tensors[t];
    switch (tensor.size) {
      case 1: out = read<uint8_t>(tensor, out); break;
      case 2: out = read<uint16_t>(tensor, out); break;
      case 4: out = read<uint32_t>(tensor, out); break;
      default: out = read<uint64_t>(tensor, out); break;
    }
  }
}
