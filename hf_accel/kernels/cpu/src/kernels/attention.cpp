// Attention by splits of the keys, as in Flash-Decoding (Dao 2023, arXiv 2307.08691). Each split gives a partial
// result: the largest score, the sum of weights, and the weighted sum of values. They are merged in the order of the
// keys. The result of a row does not depend on other rows. So prefill and decode, any batch, and any number of threads
// give the same bits.
//
// A tile is a few tokens of a sequence with the query heads of one key head. Its task packs the keys and values of a
// split once; they stay in the second-level cache while all rows of the tile use them. Rows are computed in groups,
// whose scores stay in the first-level cache.
#include "../kernels.h"

#include "../parallel.h"
#include "attention/softmax.h"
#include "attention/unpacked.h"
#include "rotate.h"

namespace {

constexpr int64_t TILE_ROWS = 128;
constexpr int64_t SCORE_STRIDE = SPLIT + 16;  // with a power of two, all rows would be in the same cache sets

// What is done with keys and with values of one storage type: see pack.h and unpacked.h.
struct KeyFunctions {
  void (*pack)(const KeyRows&, int64_t, int64_t, int64_t, int64_t, float*);
  void (*scores)(int64_t, Words, const KeyRows&, int64_t, int64_t, int64_t, float*, int64_t);
};
struct ValueFunctions {
  void (*pack)(const KeyRows&, Range, int64_t, int64_t, float*);
  void (*values)(int64_t, Words, const KeyRows&, Range, int64_t, float*, int64_t);
};

// Tokens [first, last) of sequence b, and the query heads of one key head. part: the index among the call's partial
// results for this split, if the tile's other splits are other tasks; or -1 if the task computes all splits.
struct Tile {
  int64_t b, head, first, last, split, part;
};

// Where keys are rotated, as those of int4 are, queries are rotated before; where values are, results are after.
template <class W>
struct Attention {
  const AttentionCall& c;
  KeyFunctions for_keys;
  ValueFunctions for_values;
  // The query heads of a key head, the words of a query row, and the floats of an output row.
  int64_t group, words, padded;

  int64_t queries(int64_t b) const { return c.cu_q ? c.cu_q[b + 1] - c.cu_q[b] : c.num_queries; }
  int64_t first_query(int64_t b) const { return c.cu_q ? c.cu_q[b] : b * c.num_queries; }
  int64_t keys(int64_t b) const {
    return c.kv_len ? c.kv_len[b] : c.cu_k ? c.cu_k[b + 1] - c.cu_k[b] : c.num_keys;
  }
  int64_t position_of(int64_t b, int64_t i) const { return keys(b) - queries(b) + i; }
  int64_t tokens_in_tile() const { return at_least(TILE_ROWS / group, 1); }

  // Returns the keys that token i of sequence b sees, up to its own position and around it.
  Range seen(int64_t b, int64_t i) const {
    const int64_t count = keys(b), position = position_of(b, i);
    const int64_t last = c.ahead == EVERY_KEY ? count : at_least(at_most(position + c.ahead + 1, count), 0);
    return {c.window ? at_most(at_least(position - c.window + 1, 0), last) : 0, last};
  }
  Range seen(const Tile& t) const { return {seen(t.b, t.first).first, seen(t.b, t.last - 1).last}; }
  static Range splits(Range keys) {
    return keys.empty() ? Range{0, 0} : Range{keys.first / SPLIT, ceil_div(keys.last, SPLIT)};
  }

  // -- one task -----------------------------------------------------------------------------------------------

  float* pack_queries(const Tile& t) const {
    struct Queries;
    typedef typename W::Number Number;
    const int64_t rows = (t.last - t.first) * group + GROUP<W>;
    float* const out = static_cast<float*>(scratch<Queries>(static_cast<size_t>(rows * (words + LANES)) * sizeof(float)));
    const int64_t start = c.cu_q ? c.cu_q[t.b] * c.q.token : t.b * c.q.batch;
    for (int64_t r = 0; r < (t.last - t.first) * group; ++r) {
      const int64_t at = start + (t.first + r / group) * c.q.token + (t.head * group + r % group) * c.q.head;
      Number* const to = reinterpret_cast<Number*>(out + r * words);
      if (c.k_dtype == INT4) rotate_query(at, to);
      else for (int64_t i = 0; i < c.head_dim; i += LANES) copy_query(at + i, c.head_dim - i, to + i);
      for (int64_t i = c.head_dim; i < words * W::STEP; ++i) to[i] = Number();
    }
    return out;
  }
  void rotate_query(int64_t at, typename W::Number* to) const {
    struct Rotated;
    float* const x = static_cast<float*>(scratch<Rotated>(static_cast<size_t>(c.head_dim + LANES) * sizeof(float)));
    for (int64_t i = 0; i < c.head_dim; i += LANES) copy_query(at + i, c.head_dim - i, x + i);
    rotate(x, c.head_dim);
    for (int64_t i = 0; i < c.head_dim; i += LANES) W::store_weights(to + i, load(x + i));
  }
  void copy_query(int64_t at, int64_t n, float* to) const {
    F x;
    switch (c.q_dtype) {
      case BF16: x = FloatWords::load(static_cast<const Bf16*>(c.q.data) + at, n); break;
      case F16: x = FloatWords::load(static_cast<const F16_*>(c.q.data) + at, n); break;
      default: x = FloatWords::load(static_cast<const float*>(c.q.data) + at, n);
    }
    store(to, x);
  }
  void copy_query(int64_t at, int64_t n, Bf16* to) const {
    std::memcpy(to, static_cast<const Bf16*>(c.q.data) + at, sizeof(Bf16) * static_cast<size_t>(at_most(n, LANES)));
  }

  // Returns what is added to the scores of row r of the tile, of which the first is that of key `start`.
  const float* bias_of(const Tile& t, int64_t r, int64_t start) const {
    const int64_t head = t.head * group + r % group, before = at_least(keys(t.b) - queries(t.b), 0);
    return c.bias.data + t.b * c.bias.sequence + head * c.bias.head + (before + t.first + r / group) * c.bias.query + start;
  }

  // Returns what the bias of row r of the tile is multiplied by.
  float gate_of(const Tile& t, int64_t r) const {
    if (!c.gates) return 1.0f;
    return c.gates[(first_query(t.b) + t.first + r / group) * c.heads + t.head * group + r % group];
  }

  // Computes the partial results of `count` rows of the tile over one split, in `parts` and `sums` [GROUP, padded].
  // Returns false if they see none of its keys. Sets visible [GROUP], the keys that each row sees, as indices in the
  // split. k and v: what pack_split packed; null if the rows are few, and keys and values are read where they are.
  bool group_of_rows(const Tile& t, int64_t r0, int64_t count, int64_t start, const float* q, const KeyRows& rows,
                     const float* k, const float* v, Range* visible, Partial* parts, float* sums) const {
    alignas(64) float scores[GROUP<W> * SCORE_STRIDE];
    Range any = {SPLIT, 0};
    for (int64_t r = 0; r < count; ++r) {
      const Range all = seen(t.b, t.first + (r0 + r) / group);
      visible[r] = Range{all.first - start, all.last - start}.within({0, SPLIT});
      if (!visible[r].empty()) any = {at_most(any.first, visible[r].first), at_least(any.last, visible[r].last)};
    }
    if (any.empty()) return false;
    const Range all = whole_keys(any), summed = BY_TILES<W> ? all : any;
    const int64_t from = all.first / LANES, to = all.last / LANES;
    const Words queries = {q + r0 * words, words};
    if (k)
      multiply<W>(count, queries, k + from * words * LANES, LANES, words * LANES, 0, words, to - from,
                  scores + from * LANES, SCORE_STRIDE);
    else for_keys.scores(count, queries, rows, from, to, c.head_dim, scores, SCORE_STRIDE);
    for (int64_t r = 0; r < count; ++r) {
      const Range mine = visible[r].empty() ? Range{all.first, all.first} : visible[r];
      float* const row = scores + r * SCORE_STRIDE;
      parts[r] = c.bias.data ? to_weights<W, true>(c, rows, mine, all, bias_of(t, r0 + r, start), gate_of(t, r0 + r), row)
                             : to_weights<W, false>(c, rows, mine, all, nullptr, 1.0f, row);
    }
    if (v)
      multiply<W>(count, {scores, SCORE_STRIDE}, v, padded, LANES, summed.first / W::STEP,
                  ceil_div(summed.last, W::STEP), padded / LANES, sums, padded);
    else for_values.values(count, {scores, SCORE_STRIDE}, rows, any, c.value_dim, sums, padded);
    return true;
  }

  static_assert(!BY_TILES<W> || WHOLE_KEYS<W> == WHOLE, "find_rows must know all keys whose values are packed");
  static Range whole_keys(Range keys) {
    return {keys.first / WHOLE_KEYS<W> * WHOLE_KEYS<W>, ceil_div(keys.last, WHOLE_KEYS<W>) * WHOLE_KEYS<W>};
  }

  // Finds the keys and the values of a split, and packs them if more rows than those of one product use them.
  void pack_split(const Tile& t, int64_t start, KeyRows& rows, float*& k, float*& v) const {
    struct Keys; struct Values;
    const Range keys = seen(t).within({start, start + SPLIT}), mine = {keys.first - start, keys.last - start};
    find_rows(c, t.b, t.head, start, keys, rows);
    k = v = nullptr;
    if ((t.last - t.first) * group <= most_unpacked<W>()) return;
    k = static_cast<float*>(scratch<Keys>(static_cast<size_t>(SPLIT * words) * sizeof(float)));
    v = static_cast<float*>(scratch<Values>(static_cast<size_t>(SPLIT / W::STEP * padded) * sizeof(float)));
    for_keys.pack(rows, mine.first / LANES, ceil_div(mine.last, LANES), c.head_dim, words, k);
    for_values.pack(rows, BY_TILES<W> ? whole_keys(mine) : mine, c.value_dim, padded, v);
  }

  // Computes all rows of a tile over one split, and merges the results into `states` and `sums` [rows, padded].
  void add_split(const Tile& t, int64_t split, const float* q, Partial* states, float* sums) const {
    struct Part;
    float* const part_sums = static_cast<float*>(scratch<Part>(static_cast<size_t>(GROUP<W> * padded) * sizeof(float)));
    const int64_t count = (t.last - t.first) * group, start = split * SPLIT;
    KeyRows rows;
    float *k, *v;
    pack_split(t, start, rows, k, v);
#if defined(HFA_TILES)
    const Tiles on_this_thread;
#endif
    for (int64_t r0 = 0; r0 < count; r0 += GROUP<W>) {
      Partial parts[GROUP<W>];
      Range visible[GROUP<W>];
      const int64_t height = at_most(GROUP<W>, count - r0);
      if (!group_of_rows(t, r0, height, start, q, rows, k, v, visible, parts, part_sums)) continue;
      for (int64_t r = 0; r < height; ++r)
        if (!visible[r].empty())
          merge(states[r0 + r], sums + (r0 + r) * padded, parts[r], part_sums + r * padded, padded);
    }
  }

  void finish(const Tile& t, const Partial* states, float* sums) const {
    for (int64_t r = 0; r < (t.last - t.first) * group; ++r) {
      if (c.v_dtype == INT4) rotate(sums + r * padded, c.value_dim);
      finish_row(c, first_query(t.b) + t.first + r / group, t.head * group + r % group, states[r], sums + r * padded);
    }
  }

  void run_whole(const Tile& t) const {
    struct States; struct Sums;
    const size_t count = static_cast<size_t>((t.last - t.first) * group);
    Partial* const states = static_cast<Partial*>(scratch<States>(count * sizeof(Partial)));
    float* const sums = static_cast<float*>(scratch<Sums>(count * static_cast<size_t>(padded) * sizeof(float)));
    clear(states, sums, count);
    const float* const q = pack_queries(t);
    const Range all = splits(seen(t));
    for (int64_t split = all.first; split < all.last; ++split) add_split(t, split, q, states, sums);
    finish(t, states, sums);
  }

  void clear(Partial* states, float* sums, size_t count) const {
    for (size_t r = 0; r < count; ++r) states[r] = Partial();
    std::memset(sums, 0, count * static_cast<size_t>(padded) * sizeof(float));
  }

  // -- the call -----------------------------------------------------------------------------------------------

  // The bytes of a partial result: its states, then its sums. The partial results of a tile are consecutive.
  size_t part_bytes() const {
    return static_cast<size_t>(tokens_in_tile() * group) * (sizeof(Partial) + static_cast<size_t>(padded) * sizeof(float));
  }
  Partial* part_states(uint8_t* parts, int64_t part) const {
    return reinterpret_cast<Partial*>(parts + static_cast<size_t>(part) * part_bytes());
  }
  float* part_sums(uint8_t* parts, int64_t part) const {
    return reinterpret_cast<float*>(part_states(parts, part) + tokens_in_tile() * group);
  }

  void run_part(const Tile& t, uint8_t* parts) const {
    Partial* const states = part_states(parts, t.part);
    float* const sums = part_sums(parts, t.part);
    clear(states, sums, static_cast<size_t>((t.last - t.first) * group));
    add_split(t, t.split, pack_queries(t), states, sums);
  }

  // Merges the partial results of a tile, of which `t` is the first, in the order in which run_whole merges them.
  void merge_parts(const Tile& t, uint8_t* parts) const {
    struct States; struct Sums;
    const size_t count = static_cast<size_t>((t.last - t.first) * group);
    Partial* const states = static_cast<Partial*>(scratch<States>(count * sizeof(Partial)));
    float* const sums = static_cast<float*>(scratch<Sums>(count * static_cast<size_t>(padded) * sizeof(float)));
    clear(states, sums, count);
    const Range all = splits(seen(t));
    for (int64_t split = all.first; split < all.last; ++split)
      for (size_t r = 0; r < count; ++r) {
        const Range keys = seen(t.b, t.first + static_cast<int64_t>(r) / group);
        if (keys.within({split * SPLIT, (split + 1) * SPLIT}).empty()) continue;
        const int64_t part = t.part + split - all.first;
        merge(states[r], sums + r * static_cast<size_t>(padded), part_states(parts, part)[r],
              part_sums(parts, part) + r * static_cast<size_t>(padded), padded);
      }
    finish(t, states, sums);
  }

  // Returns whether the splits of sequence b are separate tasks. That is so if its queries are one tile; otherwise
  // there are enough tiles for the threads.
  bool is_split(int64_t b) const {
    if (queries(b) > tokens_in_tile()) return false;
    const Range all = splits(seen(Tile{b, 0, 0, queries(b), 0, -1}));
    return all.last - all.first > 1;
  }

  int64_t count_tasks(int64_t b) const {
    if (queries(b) == 0) return 0;
    const Range all = is_split(b) ? splits(seen(Tile{b, 0, 0, queries(b), 0, -1})) : Range{0, 1};
    return c.kv_heads * ceil_div(queries(b), tokens_in_tile()) * (all.last - all.first);
  }

  // Adds the tasks of a sequence. The last tiles of a prompt come first, because they see the most keys.
  Tile* add_tasks(int64_t b, int64_t& parts, Tile* task) const {
    const int64_t height = tokens_in_tile(), count = queries(b);
    for (int64_t i = ceil_div(count, height) - 1; i >= 0; --i)
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        Tile tile = {b, h, i * height, at_most(count, (i + 1) * height), 0, -1};
        const Range all = is_split(b) ? splits(seen(tile)) : Range{0, 1};
        for (tile.split = all.first; tile.split < all.last; ++tile.split) {
          if (is_split(b)) tile.part = parts++;
          *task++ = tile;
        }
      }
    return task;
  }

  void run() const {
    struct Tasks; struct Parts;
    int64_t count = 0, num_parts = 0;
    for (int64_t b = 0; b < c.sequences; ++b) count += count_tasks(b);
    Tile* const tasks = static_cast<Tile*>(scratch<Tasks>(static_cast<size_t>(count) * sizeof(Tile)));
    Tile* end = tasks;
    for (int64_t b = 0; b < c.sequences; ++b) end = add_tasks(b, num_parts, end);
    uint8_t* const parts = static_cast<uint8_t*>(scratch<Parts>(static_cast<size_t>(num_parts) * part_bytes()));
    parallel_for(count, c.threads, [&](int64_t i) {
      if (tasks[i].part < 0) run_whole(tasks[i]);
      else run_part(tasks[i], parts);
    });
    if (num_parts)
      parallel_for(count, c.threads, [&](int64_t i) {
        const Tile& t = tasks[i];
        if (t.part >= 0 && t.split == splits(seen(t)).first) merge_parts(t, parts);
      });
  }
};

// Calls f with a null pointer of the storage type of keys or values, of those that W takes.
template <class W, class Function>
auto for_storage(int32_t dtype, const Function& f) {
  if constexpr (W::STEP == 1) {
    if (dtype == F16) return f(static_cast<F16_*>(nullptr));
    if (dtype == F32) return f(static_cast<float*>(nullptr));
  }
  switch (dtype) {
    case INT8: return f(static_cast<int8_t*>(nullptr));
    case FP8: return f(static_cast<Fp8*>(nullptr));
    case INT4: return f(static_cast<Int4*>(nullptr));
    default: return f(static_cast<Bf16*>(nullptr));
  }
}

template <class W>
KeyFunctions key_functions(int32_t dtype) {
  return for_storage<W>(dtype, [](auto* null) {
    typedef std::remove_pointer_t<decltype(null)> T;
    return KeyFunctions{Packing<W, T>::keys, Unpacked<W, T>::scores};
  });
}

template <class W>
ValueFunctions value_functions(int32_t dtype) {
  return for_storage<W>(dtype, [](auto* null) {
    typedef std::remove_pointer_t<decltype(null)> T;
    return ValueFunctions{Packing<W, T>::values, Unpacked<W, T>::values};
  });
}

template <class W>
void run(const AttentionCall& c) {
  const int64_t vector = LANES * W::STEP;
  Attention<W>{c, key_functions<W>(c.k_dtype), value_functions<W>(c.v_dtype), c.heads / c.kv_heads,
               ceil_div(c.head_dim, W::STEP * WHOLE_WORDS<W>) * WHOLE_WORDS<W>, ceil_div(c.value_dim, vector) * vector}
      .run();
}

#if defined(HFA_BF16)
bool fits_pairs(int32_t dtype) { return dtype == BF16 || dtype == INT8 || dtype == FP8 || dtype == INT4; }
#endif

}  // namespace

void HFA_NAMESPACE::attention(const AttentionCall& c) {
#if defined(HFA_BF16)
  if (c.q_dtype == BF16 && fits_pairs(c.k_dtype) && fits_pairs(c.v_dtype))
    return run<PairWords>(c);
#endif
  run<FloatWords>(c);
}
