// argmax and top-k over rows of logits, in their own dtype.
#include <cmath>

#include "../parallel.h"
#include "any_dtype.h"
#include "../kernels.h"

namespace {

constexpr int64_t STRETCH = 256;  // so many logits are compared one by one only if their largest is in the result

// Returns an integer with the order of x. NaN is above all numbers, and both zeros are equal.
inline int32_t rank_of(float x) {
  if (x != x) return INT32_MAX;
  const int32_t bits = static_cast<int32_t>(float_to_bits(x + 0.0f));
  return bits < 0 ? static_cast<int32_t>(0x80000000u - static_cast<uint32_t>(bits)) : bits;
}

template <class T>
inline int32_t largest_rank(const T* logits, int64_t count) {
  F largest = set1(-INFINITY), poison = zero();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const F value = load_as(logits + i);
    largest = max(value, largest);
    poison = keep_nan(poison, value);
  }
  const float broken = reduce_add(poison);
  int32_t rank = broken != broken ? INT32_MAX : rank_of(reduce_max(largest));
  for (; i < count; ++i) {
    const int32_t other = rank_of(to_float(logits[i]));
    if (other > rank) rank = other;
  }
  return rank;
}

template <class T>
int64_t argmax_of(const T* logits, int64_t size) {
  int64_t stretch = 0;
  int32_t best = largest_rank(logits, at_most(STRETCH, size));
  for (int64_t first = STRETCH; first < size; first += STRETCH) {
    const int32_t rank = largest_rank(logits + first, at_most(STRETCH, size - first));
    if (rank > best) {
      best = rank;
      stretch = first;
    }
  }
  while (rank_of(to_float(logits[stretch])) != best) ++stretch;
  return stretch;
}

struct Candidate {
  int32_t rank;
  int64_t index;
};

inline bool before(const Candidate& a, const Candidate& b) {  // whether `a` comes before `b` in the result
  return a.rank != b.rank ? a.rank > b.rank : a.index < b.index;
}

// Replaces the front of a heap, which is the last in the result, by `candidate`. (The heap of the standard library is
// not used, because the linker would share its functions between instruction sets.)
inline void replace_front(Candidate* heap, int64_t size, Candidate candidate) {
  if (size == 0) return;
  int64_t hole = 0;
  for (int64_t child = 1; child < size; child = 2 * hole + 1) {
    if (child + 1 < size && before(heap[child], heap[child + 1])) ++child;
    if (!before(candidate, heap[child])) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = candidate;
}

template <class T>
void topk_of(const T* logits, int64_t size, int64_t k, T* values, int64_t* indices) {
  struct Heap;
  Candidate* heap = static_cast<Candidate*>(scratch<Heap>(static_cast<size_t>(k) * sizeof(Candidate)));
  for (int64_t i = 0; i < k; ++i) heap[i] = {INT32_MIN, size};  // these come after all logits
  for (int64_t first = 0; first < size; first += STRETCH) {
    const int64_t last = at_most(size, first + STRETCH);
    if (largest_rank(logits + first, last - first) <= heap[0].rank) continue;
    for (int64_t i = first; i < last; ++i) {
      const Candidate candidate{rank_of(to_float(logits[i])), i};
      if (before(candidate, heap[0])) replace_front(heap, k, candidate);
    }
  }
  for (int64_t left = k; left > 0; --left) {  // from the last to the first
    indices[left - 1] = heap[0].index;
    values[left - 1] = logits[heap[0].index];
    replace_front(heap, left - 1, heap[left - 1]);
  }
}

}  // namespace

void HFA_NAMESPACE::argmax(const LogitsCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const auto* logits = static_cast<decltype(null)>(const_cast<void*>(call.logits));
    parallel_for(call.rows, call.threads,
                 [&](int64_t r) { call.indices[r] = argmax_of(logits + r * call.stride, call.size); });
  });
}

void HFA_NAMESPACE::topk(const LogitsCall& call) {
  if (call.k == 0) return;
  for_dtype(call.dtype, [&](auto* null) {
    const auto* logits = static_cast<decltype(null)>(const_cast<void*>(call.logits));
    auto* values = static_cast<decltype(null)>(call.values);
    parallel_for(call.rows, call.threads, [&](int64_t r) {
      topk_of(logits + r * call.stride, call.size, call.k, values + r * call.k, call.indices + r * call.k);
    });
  });
}
