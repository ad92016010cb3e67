// Drafts by a head: see draft.h.
#include "draft.h"

#include <cmath>
#include <vector>

#include "kernels/page_dtype.h"
#include "layer.h"
#include "parallel.h"

namespace {

int64_t size_of(int32_t dtype) { return dtype == F32 ? 4 : 2; }

// A token that may be drafted for a sequence. parent: the candidate that it follows, or -1. confidence: the logarithm of
// how likely it and all before it are to be accepted.
struct Candidate {
  int64_t token;
  int32_t parent;
  float confidence;
};

// A row of a step. from: the row of the step before whose state it reads, and `branch` the place of its last blocks.
struct Row {
  int64_t token;
  int32_t sequence, candidate, from, branch;
};

// The places of the most confident of `candidates` from `first` on, at most `count`, the best first.
void best_of(const std::vector<Candidate>& candidates, size_t first, int64_t count, std::vector<int32_t>& found) {
  found.clear();
  for (size_t i = first; i < candidates.size() && count > 0; ++i) {
    const float own = candidates[i].confidence;
    const bool full = static_cast<int64_t>(found.size()) == count;
    if (candidates[i].token < 0 || (full && !(own > candidates[static_cast<size_t>(found.back())].confidence))) continue;
    if (full) found.pop_back();
    size_t at = found.size();
    for (; at && own > candidates[static_cast<size_t>(found[at - 1])].confidence; --at) {}
    found.insert(found.begin() + static_cast<std::ptrdiff_t>(at), static_cast<int32_t>(i));
  }
}

struct Drafting {
  const Kernels& kernels;
  const DraftCall& call;
  std::vector<Row> rows, next;                     // of a step from the second on
  std::vector<std::vector<Candidate>> candidates;  // of each sequence
  std::vector<size_t> newest;                      // the first of the last step

  bool is_tree() const { return call.parents != nullptr; }
  int64_t sequences() const { return call.num_sequences; }
  const int32_t* blocks(int64_t i) const { return call.block_table + i * call.table_stride; }
  int64_t held(int64_t i) const { return call.sequences[i].before + call.sequences[i].rows; }  // tokens, behind the first step

  const int32_t* spare(int64_t step, const Row& row) const {
    return call.spare + (((step & 1) * sequences() + row.sequence) * call.width + row.branch) * call.num_spare;
  }

  // Chooses what the next step reads, from what this one has drawn: `drawn` rows of `width` tokens each.
  void choose(int64_t step, int64_t drawn, const int64_t* tokens, const float* confidences) {
    int64_t going = 0;
    while (going < sequences() && call.sequences[going].steps > step + 1) ++going;
    next.clear();
    if (!is_tree()) {
      for (int64_t r = 0; r < drawn; ++r) call.drafted[step * sequences() + r] = at_least(tokens[r], 0);  // none where logits are no numbers
      for (int32_t r = 0; r < going; ++r) next.push_back({at_least(tokens[r], 0), r, -1, r, 0});
      return;
    }
    for (int64_t i = 0; i < sequences(); ++i) newest[static_cast<size_t>(i)] = candidates[static_cast<size_t>(i)].size();
    std::vector<std::vector<int32_t>> makers(static_cast<size_t>(sequences()));  // the row of each newest candidate
    for (int64_t r = 0; r < drawn; ++r) {
      const Row own = step ? rows[static_cast<size_t>(r)] : Row{0, static_cast<int32_t>(r), -1, 0, 0};
      std::vector<Candidate>& all = candidates[static_cast<size_t>(own.sequence)];
      const float before = own.candidate < 0 ? 0.0f : all[static_cast<size_t>(own.candidate)].confidence;
      for (int64_t k = 0; k < call.width; ++k) {
        all.push_back({tokens[r * call.width + k], own.candidate, before + confidences[r * call.width + k]});
        makers[static_cast<size_t>(own.sequence)].push_back(static_cast<int32_t>(r));
      }
    }
    std::vector<int32_t> best;
    for (int32_t i = 0; i < going; ++i) {
      const size_t at = static_cast<size_t>(i);
      best_of(candidates[at], newest[at], call.width, best);
      int32_t branch = 0;
      for (const int32_t each : best)
        next.push_back({candidates[at][static_cast<size_t>(each)].token, i, each,
                        makers[at][static_cast<size_t>(each) - newest[at]], branch++});
    }
  }

  // Copies the blocks that hold the last tokens of each branch, for the branches of the next step.
  void copy_branches(int64_t step, const LayerCall& layer) const {
    const LayerOp* write = layer.ops;
    while (write->kind != WRITE) ++write;
    const int64_t numbers = layer.block_size * write->kv_heads;
    const int64_t keys = numbers * write->dim * size_of(key_dtype(layer.page_dtype));
    const int64_t values = numbers * write->value_dim * size_of(value_dtype(layer.page_dtype));
    for (const Row& row : next) {
      const int64_t filled = held(row.sequence) % layer.block_size + step;
      const int32_t* to = spare(step + 1, row);
      const int32_t* from = blocks(row.sequence) + held(row.sequence) / layer.block_size;
      if (step) from = spare(step, rows[static_cast<size_t>(row.from)]);
      for (int64_t b = 0; b * layer.block_size < filled; ++b) {
        char *k = static_cast<char*>(layer.k_pages), *v = static_cast<char*>(layer.v_pages);
        std::memcpy(k + to[b] * keys, k + from[b] * keys, static_cast<size_t>(keys));
        std::memcpy(v + to[b] * values, v + from[b] * values, static_cast<size_t>(values));
      }
    }
  }

  // Writes the likeliest candidates of each sequence as its tree.
  void write_trees() const {
    std::vector<int32_t> best;
    for (int64_t i = 0; i < sequences(); ++i) {
      const std::vector<Candidate>& all = candidates[static_cast<size_t>(i)];
      best_of(all, 0, call.sequences[i].nodes, best);
      std::vector<int64_t> places(all.size(), -1);
      int64_t* tokens = call.drafted + i * call.most_nodes;
      int64_t* parents = call.parents + i * call.most_nodes;
      call.counts[i] = static_cast<int64_t>(best.size());
      for (size_t n = 0; n < best.size(); ++n) {
        const Candidate& own = all[static_cast<size_t>(best[n])];
        places[static_cast<size_t>(best[n])] = static_cast<int64_t>(n);
        tokens[n] = own.token;
        parents[n] = own.parent < 0 ? -1 : places[static_cast<size_t>(own.parent)];
      }
    }
  }

  void run() {
    struct Memory; struct Tables;
    LayerCall narrow = call.parts[0], fuse = call.parts[1], layer = call.parts[2], head = call.parts[3];
    for (LayerCall* part : {&narrow, &fuse, &layer, &head}) part->threads = call.threads;
    int64_t read = 0;
    for (int64_t i = 0; i < sequences(); ++i) read += call.sequences[i].rows;
    const int64_t size = size_of(layer.dtype), hidden = call.hidden * size, out = hidden + call.tokens * size;
    const int64_t table = call.table_size * size_of(layer.table_dtype);
    const int64_t branches = sequences() * call.width, most = at_least(read, branches);
    const int64_t wide = call.is_own ? hidden : narrow.ops->x.stride * size;
    const int64_t columns = call.table_stride + (is_tree() ? call.num_spare : 0);
    char* memory = static_cast<char*>(scratch<Memory>(static_cast<size_t>(
        read * (hidden + wide) + branches * (call.out ? 0 : out) + most * (4 * hidden + 2 * table + 8) + branches * (hidden + 8 + 8 + 8 + call.width * 12) + 18 * 64)));
    const auto take = [&](int64_t bytes) {
      char* taken = memory;
      memory += (bytes + 63) / 64 * 64;
      return taken;
    };
    char *pairs = take(most * 2 * hidden), *input = take(most * hidden), *output = take(most * hidden);
    char *ends = take(branches * hidden), *cos = take(most * table), *sin = take(most * table);
    int64_t* slots = reinterpret_cast<int64_t*>(take(most * 8));
    int64_t* last = reinterpret_cast<int64_t*>(take(sequences() * 8));  // the last row of each sequence in the first step
    int64_t* numbers = reinterpret_cast<int64_t*>(take(branches * 8));
    int64_t* drawn = reinterpret_cast<int64_t*>(take(branches * call.width * 8));
    float* confidences = reinterpret_cast<float*>(take(branches * call.width * 4));
    int32_t* lengths = reinterpret_cast<int32_t*>(take(branches * 4));
    int32_t* starts = reinterpret_cast<int32_t*>(take((branches + 1) * 4));
    int32_t* tables = static_cast<int32_t*>(scratch<Tables>(static_cast<size_t>(is_tree() ? branches * columns * 4 : 0)));
    candidates.resize(static_cast<size_t>(is_tree() ? sequences() : 0));
    newest.resize(candidates.size());
    char* states = take(read * wide);
    for (int64_t r = 0; r < read; ++r)
      for (int64_t p = 0; p < call.pieces; ++p)
        std::memcpy(states + r * wide + p * (wide / call.pieces), reinterpret_cast<const void*>(call.states[r * call.pieces + p]),
                    static_cast<size_t>(wide / call.pieces));
    if (!call.is_own) {
      char* narrowed = take(read * hidden);
      narrow.x = states;
      narrow.out = narrowed;
      narrow.tokens = read;
      run_layer(kernels, narrow);
      states = narrowed;
    }
    fuse.x = pairs;
    fuse.out = input;
    layer.x = input;
    layer.out = output;
    layer.cos = cos;
    layer.sin = sin;
    layer.batch = 1;
    layer.table_token = call.table_size;
    layer.k_pages = call.k_pages;
    layer.v_pages = call.v_pages;
    layer.k_scales = call.k_scales;
    layer.v_scales = call.v_scales;
    layer.page_dtype = call.page_dtype;
    layer.scale_dtype = call.scale_dtype;
    layer.block_table = call.block_table;
    layer.table_stride = call.table_stride;
    layer.block_size = call.block_size;
    layer.slots = slots;
    layer.kv_len = lengths;
    layer.cu_q = starts;
    head.x = ends;
    head.out = call.out ? call.out : take(branches * out);
    const char *embeddings = static_cast<const char*>(call.embeddings), *made = static_cast<const char*>(head.out);
    const auto fill = [&](int64_t r, int64_t token, const char* state, int64_t position, const int32_t* blocks, int64_t place) {
      std::memcpy(pairs + 2 * r * hidden, embeddings + token * hidden, static_cast<size_t>(hidden));
      std::memcpy(pairs + (2 * r + 1) * hidden, state, static_cast<size_t>(hidden));
      if (table) {
        std::memcpy(cos + r * table, static_cast<const char*>(call.cos) + position * table, static_cast<size_t>(table));
        std::memcpy(sin + r * table, static_cast<const char*>(call.sin) + position * table, static_cast<size_t>(table));
      }
      slots[r] = blocks[place / layer.block_size] * layer.block_size + place % layer.block_size;
    };
    starts[0] = 0;
    for (int64_t step = 0; step < call.steps; ++step) {
      const int64_t count = step ? static_cast<int64_t>(rows.size()) : read, own = step ? count : sequences();
      if (!count) break;
      for (int64_t i = 0; i < own; ++i) {
        if (step) {
          const Row& row = rows[static_cast<size_t>(i)];
          const int64_t place = held(row.sequence) + step - 1, first = held(row.sequence) / layer.block_size;
          const DraftedSequence& sequence = call.sequences[row.sequence];
          const int32_t* mine = blocks(row.sequence);
          if (is_tree()) {
            int32_t* joined = tables + i * columns;
            std::memcpy(joined, mine, static_cast<size_t>(first) * 4);
            std::memcpy(joined + first, spare(step, row), static_cast<size_t>(call.num_spare) * 4);
            mine = joined;
          }
          fill(i, row.token, made + row.from * out, sequence.position + sequence.rows - 1 + step, mine, place);
          lengths[i] = static_cast<int32_t>(place + 1);
          starts[i + 1] = static_cast<int32_t>(i + 1);
        } else {
          const DraftedSequence& sequence = call.sequences[i];
          const int64_t begin = starts[i];
          for (int64_t n = 0; n < sequence.rows; ++n)
            fill(begin + n, call.ids[begin + n], states + (begin + n) * hidden, sequence.position + n, blocks(i),
                 sequence.before + n);
          lengths[i] = static_cast<int32_t>(held(i));
          starts[i + 1] = static_cast<int32_t>(begin + sequence.rows);
          last[i] = begin + sequence.rows - 1;
        }
      }
      if (step && is_tree()) {
        layer.block_table = tables;
        layer.table_stride = columns;
      }
      fuse.tokens = layer.tokens = count;
      head.tokens = layer.sequences = own;
      run_layer(kernels, fuse);
      run_layer(kernels, layer);
      for (int64_t i = 0; i < own; ++i)
        std::memcpy(ends + i * hidden, output + (step ? i : last[i]) * hidden, static_cast<size_t>(hidden));
      run_layer(kernels, head);
      for (int64_t i = 0; call.numbers && i < own; ++i)
        numbers[i] = call.numbers[step * sequences() + (step ? rows[static_cast<size_t>(i)].sequence : i)];
      float* probabilities = call.probabilities ? call.probabilities + step * sequences() * call.vocabulary : nullptr;
      kernels.draw({made + hidden, call.known, numbers, drawn, is_tree() ? confidences : nullptr, probabilities,
                    out / size, own, call.tokens, call.width, call.vocabulary, call.top_k, call.temperature, call.top_p,
                    call.draw, 0, layer.dtype, layer.threads});
      choose(step, own, drawn, confidences);
      if (is_tree()) copy_branches(step, layer);
      rows.swap(next);
    }
    if (is_tree()) write_trees();
  }
};

}  // namespace

void run_draft(const Kernels& kernels, const DraftCall& call) { Drafting{kernels, call, {}, {}, {}, {}}.run(); }
