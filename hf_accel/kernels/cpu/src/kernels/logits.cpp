// argmax, top-k and draws over rows of logits, in their own dtype.
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

// -- draws -----------------------------------------------------------------------------------------------------------

constexpr int64_t MOST_RIVALS = 16;    // tokens that are compared to say how likely a winner is; k is at most as large
constexpr int64_t TOP_P_TOKENS = 256;  // among which the limit of top_p is looked for


// A number in (0, 1] for a token; the same as noise.exponentials makes.
inline double number_of(uint64_t key, int64_t token) {
  uint64_t bits = key + static_cast<uint64_t>(token + 1) * 0x9E3779B97F4A7C15u;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  bits ^= bits >> 31;
  return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
}

struct Drawing {
  const DrawCall& call;
  int64_t row;

  int64_t id(int64_t index) const { return call.ids ? call.ids[index] : index; }
  void take(int64_t place, int64_t index, double likely) const {
    call.tokens[row * call.k + place] = index < 0 ? -1 : id(index);
    if (call.confidences)  // a child is never likelier than its parent
      call.confidences[row * call.k + place] = likely > 0 ? static_cast<float>(std::log(likely < 1 ? likely : 1)) : -INFINITY;
  }

  // What each logit weighs, exp((x - max) / temperature).
  template <class T>
  void weigh(const T* logits, float* weights) const {
    F largest = set1(-INFINITY);
    for (int64_t i = 0; i < call.size; i += LANES) {
      const int n = static_cast<int>(at_most(LANES, call.size - i));
      largest = max(n == LANES ? load_as(logits + i) : select_range(load_as_n(logits + i, n), largest, 0, n), largest);
    }
    const F top = set1(reduce_max(largest)), factor = set1(1.0f / call.temperature);
    for (int64_t i = 0; i < call.size; i += LANES)
      store_upto(weights + i, exp_nonpositive(mul(sub(load_upto(logits + i, call.size - i), top), factor)),
                 call.size - i);
  }

  static double sum(const float* weights, int64_t size) {
    double parts[4] = {};
    for (int64_t i = 0; i < size; ++i) parts[i & 3] += static_cast<double>(weights[i]);
    return parts[0] + parts[1] + parts[2] + parts[3];
  }

  // Lets only those tokens weigh anything that top_k and top_p keep.
  void filter(float* weights) const {
    const int64_t k = at_most(call.top_k > 0 ? call.top_k : TOP_P_TOKENS, call.size);
    if (call.top_k <= 0 && !(call.top_p < 1)) return;
    struct Values; struct Indices;
    float* values = static_cast<float*>(scratch<Values>(static_cast<size_t>(k) * sizeof(float)));
    topk_of(weights, call.size, k, values, static_cast<int64_t*>(scratch<Indices>(static_cast<size_t>(k) * 8)));
    float limit = call.top_k > 0 ? values[k - 1] : 0.0f;
    if (call.top_p < 1) {
      double left = static_cast<double>(call.top_p) * (call.top_k > 0 ? sum(values, k) : sum(weights, call.size));
      for (int64_t i = 0; i < k; ++i) {
        left -= static_cast<double>(values[i]);
        if (left > 0) continue;
        limit = values[i];
        break;
      }
    }
    for (int64_t i = 0; i < call.size; ++i) weights[i] = weights[i] < limit ? 0.0f : weights[i];
  }

  template <class T>
  void likeliest(const T* logits, const float* weights) const {
    T values[MOST_RIVALS];
    int64_t indices[MOST_RIVALS];
    topk_of(logits, call.size, at_most(call.k, call.size), values, indices);
    const double total = call.confidences ? sum(weights, call.size) : 1;
    for (int64_t i = 0; i < call.k; ++i)
      take(i, i < call.size ? indices[i] : -1, i < call.size && call.confidences ? static_cast<double>(weights[indices[i]]) / total : 0);
  }

  void race(const float* weights) const {
    struct Rival { double time; int64_t index; } rivals[MOST_RIVALS];
    const int64_t most = call.confidences ? MOST_RIVALS : call.k;
    const uint64_t key = static_cast<const uint64_t*>(call.numbers)[row];
    int64_t count = 0;
    double bound = INFINITY;
    for (int64_t i = 0; i < call.size; ++i) {
      const double weight = static_cast<double>(weights[i]);
      if (!(weight > 0)) continue;
      const double number = number_of(key, id(i));
      // -log(x) is at least 1 - x, so that few logarithms are needed.
      if ((1 - number) * (1 - 1e-9) > bound * weight) continue;
      const double time = -std::log(number) / weight;
      if (count == most && !(time < bound)) continue;
      int64_t at = count < most ? count++ : most - 1;
      for (; at && time < rivals[at - 1].time; --at) rivals[at] = rivals[at - 1];
      rivals[at] = {time, i};
      if (count == most) bound = rivals[most - 1].time;
    }
    double all = 0;
    for (int64_t i = 0; i < count; ++i) all += rivals[0].time / rivals[i].time;
    for (int64_t i = 0; i < call.k; ++i)
      take(i, i < count ? rivals[i].index : -1, i < count ? rivals[0].time / rivals[i].time / all : 0);
  }

  void inverse(const float* weights) const {
    const double total = sum(weights, call.size), target = static_cast<const double*>(call.numbers)[row] * total;
    double before = 0;
    int64_t found = -1;
    for (int64_t i = 0; i < call.size && !(before > target); ++i) {
      before += static_cast<double>(weights[i]);
      if (weights[i] > 0) found = i;
    }
    take(0, found, found < 0 ? 0 : static_cast<double>(weights[found]) / total);
    float* probabilities = call.probabilities ? call.probabilities + row * call.probability_stride : nullptr;
    if (!probabilities) return;
    const float scale = static_cast<float>(1 / total);
    for (int64_t i = 0; i < call.size; ++i) probabilities[id(i)] = weights[i] * scale;
  }

  template <class T>
  void run(const T* given) const {
    struct Weights;
    float* weights = nullptr;
    if (!call.is_weights && (call.kind != LIKELIEST || call.confidences)) {
      weights = static_cast<float*>(scratch<Weights>(static_cast<size_t>(call.size) * sizeof(float)));
      weigh(given, weights);
      if (call.kind != LIKELIEST) filter(weights);
    }
    const float* read = call.is_weights ? reinterpret_cast<const float*>(given) : weights;
    if (call.kind == RACE) race(read);
    else if (call.kind == INVERSE) inverse(read);
    else likeliest(given, read);
  }
};

}  // namespace

void HFA_NAMESPACE::draw(const DrawCall& call) {
  for_dtype(call.dtype, [&](auto* null) {
    const auto* rows = static_cast<decltype(null)>(const_cast<void*>(call.rows));
    parallel_for(call.num_rows, call.threads,
                 [&](int64_t r) { Drawing{call, r}.run(rows + r * call.stride); });
  });
}

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
