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
  int64_t sequences() const { return call.layer.sequences; }
  int64_t held(int64_t i) const { return call.layer.kv_len[i]; }  // the tokens in the pages behind the first step

  const int32_t* spare(int64_t step, const Row& row) const {
    return call.spare + (((step & 1) * sequences() + row.sequence) * call.width + row.branch) * call.num_spare;
  }

  // Chooses what the next step reads, from what this one has drawn: `drawn` rows of `width` tokens each.
  void choose(int64_t step, int64_t drawn, const int64_t* tokens, const float* confidences) {
    const int64_t going = step + 1 < call.steps ? call.going[step + 1] : 0;
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
  void copy_branches(int64_t step) const {
    const LayerCall& layer = call.layer;
    const LayerOp* write = layer.ops;
    while (write->kind != WRITE) ++write;
    const int64_t numbers = layer.block_size * write->kv_heads;
    const int64_t keys = numbers * write->dim * size_of(key_dtype(layer.page_dtype));
    const int64_t values = numbers * write->value_dim * size_of(value_dtype(layer.page_dtype));
    for (const Row& row : next) {
      const int64_t filled = held(row.sequence) % layer.block_size + step;
      const int32_t* to = spare(step + 1, row);
      const int32_t* from = layer.block_table + row.sequence * layer.table_stride + held(row.sequence) / layer.block_size;
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
      best_of(all, 0, call.nodes[i], best);
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
    LayerCall fuse = call.fuse, layer = call.layer, head = call.head;
    const int64_t size = size_of(layer.dtype), hidden = call.hidden * size, out = hidden + call.tokens * size;
    const int64_t table = call.table_size * size_of(layer.table_dtype);
    const int64_t branches = sequences() * call.width, most = at_least(layer.tokens, branches);
    const int64_t columns = layer.table_stride + (is_tree() ? call.num_spare : 0);
    char* memory = static_cast<char*>(scratch<Memory>(static_cast<size_t>(
        most * (4 * hidden + 2 * table + 8) + branches * (hidden + 8 + 4 + call.width * 12) + 12 * 64)));
    const auto take = [&](int64_t bytes) {
      char* taken = memory;
      memory += (bytes + 63) / 64 * 64;
      return taken;
    };
    char *pairs = take(most * 2 * hidden), *input = take(most * hidden), *output = take(most * hidden);
    char *ends = take(branches * hidden), *cos = take(most * table), *sin = take(most * table);
    int64_t* slots = reinterpret_cast<int64_t*>(take(most * 8));
    int64_t* numbers = reinterpret_cast<int64_t*>(take(branches * 8));
    int64_t* drawn = reinterpret_cast<int64_t*>(take(branches * call.width * 8));
    float* confidences = reinterpret_cast<float*>(take(branches * call.width * 4));
    int32_t* lengths = reinterpret_cast<int32_t*>(take(branches * 4));
    int32_t* tables = static_cast<int32_t*>(scratch<Tables>(static_cast<size_t>(is_tree() ? branches * columns * 4 : 0)));
    candidates.resize(static_cast<size_t>(is_tree() ? sequences() : 0));
    newest.resize(candidates.size());
    fuse.x = pairs;
    fuse.out = input;
    layer.x = input;
    layer.out = output;
    layer.cos = cos;
    layer.sin = sin;
    layer.batch = 1;
    layer.table_token = call.table_size;
    head.x = ends;
    const char *embeddings = static_cast<const char*>(call.embeddings), *made = static_cast<const char*>(head.out);
    for (int64_t step = 0; step < call.steps; ++step) {
      const int64_t count = step ? static_cast<int64_t>(rows.size()) : layer.tokens, own = step ? count : sequences();
      if (!count) break;
      for (int64_t r = 0; r < count; ++r) {
        const Row row = step ? rows[static_cast<size_t>(r)] : Row{call.ids[r], 0, -1, 0, 0};
        const char* state = step ? made + row.from * out : static_cast<const char*>(call.states) + r * call.state_stride * size;
        const int64_t position = step ? call.positions[call.ends[row.sequence]] + step : call.positions[r];
        std::memcpy(pairs + 2 * r * hidden, embeddings + row.token * hidden, static_cast<size_t>(hidden));
        std::memcpy(pairs + (2 * r + 1) * hidden, state, static_cast<size_t>(hidden));
        if (table) {
          std::memcpy(cos + r * table, static_cast<const char*>(call.cos) + position * table, static_cast<size_t>(table));
          std::memcpy(sin + r * table, static_cast<const char*>(call.sin) + position * table, static_cast<size_t>(table));
        }
        if (step) {
          const int64_t place = held(row.sequence) + step - 1, first = held(row.sequence) / layer.block_size;
          const int32_t* blocks = call.layer.block_table + row.sequence * call.layer.table_stride;
          if (is_tree()) {
            int32_t* mine = tables + r * columns;
            std::memcpy(mine, blocks, static_cast<size_t>(first) * 4);
            std::memcpy(mine + first, spare(step, row), static_cast<size_t>(call.num_spare) * 4);
            blocks = mine;
          }
          slots[r] = blocks[place / layer.block_size] * layer.block_size + place % layer.block_size;
          lengths[r] = static_cast<int32_t>(place + 1);
        }
      }
      if (step) {
        layer.slots = slots;
        layer.kv_len = lengths;
        layer.cu_q = call.singles;
        if (is_tree()) {
          layer.block_table = tables;
          layer.table_stride = columns;
        }
      }
      fuse.tokens = layer.tokens = count;
      head.tokens = layer.sequences = own;
      run_layer(kernels, fuse);
      run_layer(kernels, layer);
      for (int64_t i = 0; i < own; ++i)
        std::memcpy(ends + i * hidden, output + (step ? i : call.ends[i]) * hidden, static_cast<size_t>(hidden));
      run_layer(kernels, head);
      for (int64_t i = 0; call.numbers && i < own; ++i)
        numbers[i] = call.numbers[step * sequences() + (step ? rows[static_cast<size_t>(i)].sequence : i)];
      float* probabilities = call.probabilities ? call.probabilities + step * sequences() * call.vocabulary : nullptr;
      kernels.draw({made + hidden, call.known, numbers, drawn, is_tree() ? confidences : nullptr, probabilities,
                    out / size, own, call.tokens, call.width, call.vocabulary, call.top_k, call.temperature, call.top_p,
                    call.draw, 0, layer.dtype, layer.threads});
      choose(step, own, drawn, confidences);
      if (is_tree()) copy_branches(step);
      rows.swap(next);
    }
    if (is_tree()) write_trees();
  }
};

}  // namespace

void run_draft(const Kernels& kernels, const DraftCall& call) { Drafting{kernels, call, {}, {}, {}, {}}.run(); }
