// Runs the operations of a layer one after the other: the kernels that Python would call one by one, so that
// the result has the same bits. What this saves is the time between them.
#include "layer.h"

#include <algorithm>

#include "kernels/page_dtype.h"
#include "parallel.h"

const int64_t LAYER_OP_SIZE = sizeof(LayerOp);

namespace {

struct Layer {
  const Kernels& kernels;
  const LayerCall& call;
  int64_t size;  // bytes of a number
  char* memory;

  char* buffer(int64_t number) const {
    if (number == 0) return static_cast<char*>(const_cast<void*>(call.x));
    if (number == 1) return static_cast<char*>(call.out);
    const int64_t start = call.starts[number];
    if (start == GIVEN) return static_cast<char*>(const_cast<void*>(call.given));
    return start < 0 ? static_cast<char*>(call.out) + ~start * call.tokens * size : memory + start * call.tokens * size;
  }
  char* at(const Columns& place) const { return buffer(place.buffer) + place.offset * size; }
  // Of numbers that may be halves of those of the call.
  char* at(const Columns& place, bool halves) const { return buffer(place.buffer) + place.offset * dtype_size(halves); }
  int64_t dtype_size(bool halves) const { return halves ? static_cast<int64_t>(sizeof(Bf16)) : size; }
  int32_t dtype(bool halves) const { return halves ? static_cast<int32_t>(BF16) : call.dtype; }

  static bool multiplies(const LayerOp& op) { return op.kind == INTEGER_LINEAR || op.kind == FLOAT_LINEAR; }

  void product(const LayerOp& op, const Linear& linear, void* out, int64_t out_stride, int32_t out_dtype) const {
    const LinearCall product = {&linear, at(op.x, op.halves_in), op.x.stride, call.tokens, out, out_stride,
                                dtype(op.halves_in), out_dtype, call.threads, op.tile_rows};
    (op.kind == INTEGER_LINEAR ? kernels.integer_linear : kernels.float_linear)(product);
  }

  void linear(const LayerOp& op) const {
    const Linear& linear = *static_cast<const Linear*>(op.weight);
    const Adapters adapters = adapters_of(op, linear);
    if (adapters.count && linear.epilogue != NONE) return adapted_activation(op, linear, adapters);
    product(op, linear, at(op.out, op.halves_out), op.out.stride, dtype(op.halves_out));
    if (adapters.count)
      kernels.adapt({adapters, &linear, at(op.x), at(op.out), at(op.out), op.x.stride, op.out.stride, op.out.stride,
                     call.dtype, call.dtype, call.threads});
  }

  // The adapters of the matrices of an operation; none if no adapter of the pass changes one.
  Adapters adapters_of(const LayerOp& op, const Linear& linear) const {
    if (!call.adapters) return {};
    Adapters found = *call.adapters;
    for (const LayerOp* before = call.ops; before != &op; ++before)
      if (multiplies(*before)) found.parts += static_cast<const Linear*>(before->weight)->count;
    for (int64_t g = 0; g < found.count; ++g)
      for (int32_t m = 0; m < linear.count; ++m)
        if (found.parts[found.groups[g].adapter * found.stride + m].a) return found;
    return {};
  }

  // Says which rows an adapter changes in one of these matrices. Returns whether it is all of them.
  bool mark_adapted(const Adapters& adapters, int64_t matrices, bool* adapted) const {
    std::memset(adapted, 0, static_cast<size_t>(call.tokens));
    for (int64_t g = 0; g < adapters.count; ++g) {
      const AdaptedRows& group = adapters.groups[g];
      const LowRank* parts = adapters.parts + group.adapter * adapters.stride;
      if (std::any_of(parts, parts + matrices, [](const LowRank& part) { return part.a != nullptr; }))
        for (int64_t i = 0; i < group.count; ++i) adapted[adapters.rows[group.first + i]] = true;
    }
    return std::all_of(adapted, adapted + call.tokens, [](bool row) { return row; });
  }

  // The sums of rows that no adapter changes are rounded once, behind the activation. Those of other rows are rounded
  // ahead of it, as the modules of such a layer round them one by one; if all are such, by the product.
  void adapted_activation(const LayerOp& op, const Linear& fused, const Adapters& adapters) const {
    struct Sums; struct Rounded; struct Matrices; struct Adapted;
    const bool gates = fused.epilogue <= GELU_TANH_MUL;
    const int64_t outputs = fused.matrices[0].out_features;
    Matrix* matrices = static_cast<Matrix*>(scratch<Matrices>(static_cast<size_t>(fused.count) * sizeof(Matrix)));
    int64_t width = 0;
    for (int32_t m = 0; m < fused.count; ++m) {
      matrices[m] = fused.matrices[m];
      matrices[m].column = width;
      width += matrices[m].out_features;
    }
    Linear plain = fused;
    plain.epilogue = NONE;
    plain.matrices = matrices;
    bool* adapted = static_cast<bool*>(scratch<Adapted>(static_cast<size_t>(call.tokens)));
    const bool all = mark_adapted(adapters, fused.count, adapted);
    const size_t numbers = static_cast<size_t>(call.tokens * width);
    char* rounded = static_cast<char*>(scratch<Rounded>(numbers * static_cast<size_t>(size)));
    char* sums = all ? rounded : static_cast<char*>(scratch<Sums>(numbers * sizeof(float)));
    const int32_t sums_dtype = all ? call.dtype : F32;
    product(op, plain, sums, width, sums_dtype);
    const int32_t kind = gates ? fused.epilogue + (SILU - SILU_MUL) : fused.epilogue;
    const int64_t columns = gates ? outputs : width;
    kernels.adapt({adapters, &plain, at(op.x), sums, rounded, op.x.stride, width, width, call.dtype, sums_dtype, call.threads});
    for (int64_t row = 0, end; row < call.tokens; row = end) {
      for (end = row + 1; end < call.tokens && adapted[end] == adapted[row]; ++end) {}
      const int64_t bytes = adapted[row] ? size : 4;
      const char* from = (adapted[row] ? rounded : sums) + row * width * bytes;
      kernels.activate({from, gates ? from + outputs * bytes : nullptr, at(op.out) + row * op.out.stride * size, width,
                        width, op.out.stride, end - row, columns, kind, adapted[row] ? call.dtype : F32, call.dtype,
                        call.threads});
    }
  }

  void norm(const LayerOp& op) const {
    NormCall norm = {at(op.x), at(op.out), op.weight, op.x.stride, call.tokens, op.dim, op.eps, op.offset,
                     op.round_first, call.dtype, op.weight_dtype, call.dtype, call.threads};
    if (op.heads == 1 && op.out.stride == op.dim) return kernels.norm(norm);
    // The heads of the next token need not follow those of a token.
    norm.x_stride = head_stride(op.x, op.dim);
    norm.rows = op.heads;
    for (int64_t n = 0; n < call.tokens; ++n) {
      norm.x = at(op.x) + n * op.x.stride * size;
      norm.out = at(op.out) + n * op.out.stride * size;
      kernels.norm(norm);
    }
  }

  static int64_t head_stride(const Columns& place, int64_t dim) { return place.head ? place.head : dim; }

  Rotated rotated(const LayerOp& op, const Columns& x, const Columns& out, int64_t heads) const {
    const int64_t row = call.tokens / call.batch, dim = op.dim;
    return {at(x, op.halves_in), at(out, op.halves_out), row * x.stride, head_stride(x, dim), x.stride,
            row * out.stride, head_stride(out, dim), out.stride, heads};
  }

  void rope(const LayerOp& op) const {
    kernels.rope({rotated(op, op.x, op.out, op.heads), rotated(op, op.y, op.out2, op.kv_heads), call.cos, call.sin,
                  call.table_batch, call.table_token, call.batch, call.tokens / call.batch, op.dim, op.interleaved,
                  op.round_each, dtype(op.halves_in), call.table_dtype, call.threads});
  }

  void write(const LayerOp& op) const {
    const int64_t key = head_stride(op.x, op.dim), value = head_stride(op.y, op.value_dim);
    kernels.write_pages({{at(op.x), key, op.x.stride, call.k_pages, call.k_scales, op.dim},
                         {at(op.y), value, op.y.stride, call.v_pages, call.v_scales, op.value_dim},
                         call.slots, call.written, call.written ? call.num_written : call.tokens, op.kv_heads,
                         call.block_size, call.dtype, call.page_dtype, call.threads});
  }

  static Rows pages(const void* data, int32_t dtype, int64_t block_size, int64_t heads, int64_t dim) {
    const int64_t columns = dtype == INT4 ? dim / 2 : dim;
    return {data, heads * block_size * columns, block_size * columns, columns};
  }

  // What all kinds of attention share.
  AttentionCall attention(const LayerOp& op) const {
    AttentionCall attention = {};
    attention.q = {at(op.x, op.halves_in), 0, head_stride(op.x, op.dim), op.x.stride};
    attention.out = at(op.out, op.halves_out);
    attention.heads = op.heads;
    attention.kv_heads = op.kv_heads;
    attention.head_dim = op.dim;
    attention.value_dim = op.value_dim;
    attention.window = op.window;
    attention.ahead = op.ahead;
    attention.scale = op.scale;
    attention.softcap = op.softcap;
    attention.q_dtype = dtype(op.halves_in);
    attention.threads = call.threads;
    return attention;
  }

  void attend_rows(const LayerOp& op) const {
    AttentionCall rows = attention(op);
    const int64_t count = call.kv_len ? call.cu_q[1] : 0;  // of each sequence, if it has fewer keys than rows
    rows.k = {at(op.y, op.halves_in), count * op.y.stride, op.dim, op.y.stride};
    rows.v = {at(op.z, op.halves_in), count * op.z.stride, op.value_dim, op.z.stride};
    rows.cu_q = call.cu_q;
    rows.cu_k = call.kv_len ? nullptr : call.cu_q;
    rows.kv_len = call.kv_len;
    rows.bias = call.score_bias;
    if (op.out2.stride) rows.gates = floats(op.out2);
    rows.k_dtype = rows.v_dtype = rows.q_dtype;
    rows.sequences = call.sequences;
    rows.table_stride = call.table_stride;
    rows.block_size = call.block_size;
    kernels.attention(rows);
  }

  // P: the call itself, for the keys of its tokens, or its SourcePages.
  template <class P>
  void attend_pages(const LayerOp& op, const P& held) const {
    AttentionCall pages = attention(op);
    pages.k = this->pages(held.k_pages, key_dtype(call.page_dtype), held.block_size, op.kv_heads, op.dim);
    pages.v = this->pages(held.v_pages, value_dtype(call.page_dtype), held.block_size, op.kv_heads, op.value_dim);
    pages.k_scales = held.k_scales;
    pages.v_scales = held.v_scales;
    pages.block_table = held.block_table;
    pages.cu_q = held.cu_q;
    pages.kv_len = held.kv_len;
    pages.k_dtype = key_dtype(call.page_dtype);
    pages.v_dtype = value_dtype(call.page_dtype);
    pages.scale_dtype = call.scale_dtype;
    pages.sequences = held.sequences;
    pages.table_stride = held.table_stride;
    pages.block_size = held.block_size;
    if (op.kind == ATTEND) {
      pages.bias = call.score_bias;
      pages.sinks = op.weight;
      pages.sink_dtype = op.weight_dtype;
      if (op.gate_first) {
        pages.v = pages.k;
        pages.v_scales = pages.k_scales;
        pages.v_dtype = pages.k_dtype;
      }
    }
    kernels.attention(pages);
  }

  char* at_or_null(const Columns& place) const { return place.stride ? at(place) : nullptr; }

  void layer_norm(const LayerOp& op) const {
    LayerNormCall norm = {at(op.x), at_or_null(op.y), at_or_null(op.out2), at(op.out), op.weight, op.bias, op.x.stride,
                          op.y.stride, op.out2.stride, op.out.stride, call.tokens, op.dim, op.eps, op.offset, call.dtype,
                          op.weight_dtype, op.bias_dtype, call.threads};
    if (op.heads <= 1) return kernels.layer_norm(norm);
    const int64_t weight_size = op.weight_dtype == F32 ? 4 : 2, bias_size = op.bias_dtype == F32 ? 4 : 2;
    for (int64_t h = 0; h < op.heads; ++h) {
      norm.x = at(op.x) + h * head_stride(op.x, op.dim) * size;
      norm.out = at(op.out) + h * op.dim * size;
      if (op.weight) norm.weight = static_cast<const char*>(op.weight) + h * op.ahead * weight_size;
      if (op.bias) norm.bias = static_cast<const char*>(op.bias) + h * op.ahead * bias_size;
      kernels.layer_norm(norm);
    }
  }

  void add(const LayerOp& op) const {
    const bool affine = op.bias != nullptr;
    kernels.add({affine ? op.bias : at(op.x), at(affine ? op.x : op.y), op.weight, at(op.out), call.tokens, op.dim,
                 affine ? 0 : op.dim, op.scale, op.round_first ? F32 : call.dtype, call.dtype, call.threads, 0});
  }

  void multiply(const LayerOp& op) const {
    kernels.add({nullptr, at(op.x), op.weight, at(op.out), call.tokens, op.dim, 0, op.scale,
                 op.round_first ? F32 : call.dtype, op.round_each ? F32 : call.dtype, call.threads,
                 op.value_dim == 1 && op.dim > 1});
  }

  void gate(const LayerOp& op) const {
    const int64_t heads = op.heads ? op.heads : 1;  // of what does not stand end to end
    const int64_t in_size = dtype_size(op.halves_in), out_size = dtype_size(op.halves_out);
    for (int64_t h = 0; h < heads; ++h)
      kernels.activate({at(op.x, op.halves_in) + h * head_stride(op.x, op.dim) * in_size,
                        op.y.stride ? at(op.y, op.halves_in) + h * head_stride(op.y, op.dim) * in_size : nullptr,
                        at(op.out, op.halves_out) + h * op.dim * out_size, op.x.stride, op.y.stride, op.out.stride,
                        call.tokens, op.dim, op.activation, dtype(op.halves_in), dtype(op.halves_out), call.threads});
  }

  // The parts of a head side by side: what was rotated, and the rest.
  void join(const LayerOp& op) const {
    const int64_t first = op.dim * size, second = op.value_dim * size;
    const int64_t x_head = head_stride(op.x, op.dim) * size, y_head = head_stride(op.y, op.value_dim) * size;
    for (int64_t n = 0; n < call.tokens; ++n) {
      const char *x = at(op.x) + n * op.x.stride * size, *y = at(op.y) + n * op.y.stride * size;
      char* out = at(op.out) + n * op.out.stride * size;
      for (int64_t h = 0; h < op.heads; ++h, x += x_head, y += y_head, out += first + second) {
        std::memcpy(out, x, static_cast<size_t>(first));
        std::memcpy(out + first, y, static_cast<size_t>(second));
      }
    }
  }

  // A product for each head; what stands behind the numbers that are multiplied is copied.
  void head_products(const LayerOp& op) const {
    const int64_t x_head = head_stride(op.x, op.dim + op.ahead), out_head = op.value_dim + op.ahead;
    const int64_t row = op.interleaved ? op.value_dim : op.dim;
    kernels.head_products({at(op.x), op.weight, static_cast<const float*>(op.skip), at(op.out), op.x.stride, x_head,
                           op.out.stride, out_head, op.window * row, row, op.interleaved == 1 ? op.dim : op.value_dim,
                           call.tokens, op.heads, op.dim,
                           op.value_dim, op.interleaved, call.dtype, op.weight_dtype, call.threads});
    if (!op.ahead) return;
    for (int64_t n = 0; n < call.tokens; ++n)
      for (int64_t h = 0; h < op.heads; ++h)
        std::memcpy(at(op.out) + (n * op.out.stride + h * out_head + op.value_dim) * size,
                    at(op.x) + (n * op.x.stride + h * x_head + op.dim) * size, static_cast<size_t>(op.ahead * size));
  }

  // The factor of each token is the bytes of a float behind its cos.
  void by_position(const LayerOp& op) const {
    const int64_t row = call.tokens / call.batch, bytes = call.table_dtype == F32 ? 4 : 2;
    for (int64_t n = 0; n < call.tokens; ++n) {
      const int64_t place = n / row * call.table_batch + n % row * call.table_token + op.ahead;
      float factor;
      std::memcpy(&factor, static_cast<const char*>(call.cos) + place * bytes, sizeof factor);
      kernels.add({nullptr, at(op.x) + n * op.x.stride * size, nullptr, at(op.out) + n * op.out.stride * size, 1, op.dim,
                   0, factor, call.dtype, call.dtype, call.threads, 0});
    }
  }

  float* floats(const Columns& place) const { return reinterpret_cast<float*>(at(place)); }
  int64_t float_stride(const Columns& place) const { return place.stride * size / 4; }

  void short_conv(const LayerOp& op) const {
    const StatePages& own = call.states;
    kernels.short_conv({at(op.x), op.weight, op.bias, floats(op.out), own.kept, own.starts, own.before, own.slots,
                        op.x.stride, own.sequences, op.dim, op.value_dim, op.activation, call.dtype, op.weight_dtype,
                        call.threads});
  }

  void delta_rule(const LayerOp& op) const {
    const StatePages& own = call.states;
    const float *q = floats(op.x), *k = q + op.kv_heads * op.dim, *v = k + op.kv_heads * op.dim;
    const int64_t stride = float_stride(op.x);
    kernels.delta_rule({q, k, v, at(op.y), at(op.z), op.weight, op.bias, nullptr, floats(op.out), own.states,
                        own.starts, own.before, own.slots, stride, stride, stride, op.y.stride, op.z.stride,
                        own.sequences, op.kv_heads, op.heads, op.dim, op.value_dim, op.scale, call.dtype,
                        op.weight_dtype, op.bias_dtype, call.threads});
  }

  void state_scan(const LayerOp& op) const {
    const StatePages& own = call.states;
    const bool apart = op.z.stride != 0;
    const float *x = floats(op.x), *b = apart ? floats(op.z) : x + op.heads * op.dim, *c = b + op.kv_heads * op.value_dim;
    const int64_t stride = float_stride(op.x), others = apart ? float_stride(op.z) : stride;
    kernels.state_scan({x, at(op.y), b, c, op.weight, op.bias, op.skip, floats(op.out), own.states, own.starts,
                        own.before, own.slots, own.limited, stride, op.y.stride, others, others, own.sequences,
                        op.heads, op.kv_heads, op.dim, op.value_dim, op.eps, op.offset, apart, call.dtype,
                        op.weight_dtype, op.bias_dtype, op.skip_dtype, call.threads});
  }

  void gated_norm(const LayerOp& op) const {
    kernels.gated_norm({floats(op.x), at(op.y), op.weight, at(op.out), float_stride(op.x), op.y.stride, op.out.stride,
                        call.tokens, op.heads, op.dim, op.value_dim, op.eps, op.round_first, op.gate_first,
                        op.activation, call.dtype, op.weight_dtype, call.dtype, call.threads});
  }

  void position_scores(const LayerOp& op) const {
    kernels.position_scores({at(op.x), at(op.y), call.position_keys, call.position_queries, call.position_rows, call.cu_q,
                             const_cast<float*>(call.score_bias.data), op.x.stride, op.y.stride, call.sequences,
                             op.heads, op.dim, call.score_bias.query, op.scale, call.dtype, call.threads});
  }

  void bias_gates(const LayerOp& op) const {
    kernels.bias_gates({at(op.x), op.weight, op.bias, op.skip, floats(op.out), op.x.stride, call.tokens, op.heads, op.dim,
                        op.value_dim, call.dtype, op.weight_dtype, call.threads});
  }

  // `ahead` is the rows before a row that count; `window` says whether rows behind the keys of a sequence are zeros.
  void row_conv(const LayerOp& op) const {
    kernels.row_conv({at(op.x), op.weight, op.bias, static_cast<const RowNorm*>(op.skip), at(op.out), call.cu_q,
                      op.window ? call.kv_len : nullptr, op.x.stride, op.out.stride, call.sequences, op.dim, op.value_dim,
                      op.ahead, op.activation, call.dtype, call.threads});
  }

  // A convolution reads the inputs that WRITE has put into the pages, one half as keys and one as values of one head.
  void page_conv(const LayerOp& op) const {
    kernels.page_conv({op.weight, op.bias, at(op.out), call.k_pages, call.v_pages, call.block_table, call.cu_q, call.kv_len,
                       op.out.stride, call.table_stride, call.sequences, call.block_size, op.dim / 2, op.value_dim,
                       call.dtype, op.weight_dtype, call.threads});
  }

  void run(const LayerOp& op) const {
    switch (op.kind) {
      case INTEGER_LINEAR:
      case FLOAT_LINEAR: return linear(op);
      case NORM: return norm(op);
      case ROPE: return rope(op);
      case WRITE: return write(op);
      case ATTEND: return attend_pages(op, call);
      case ATTEND_SOURCE: return attend_pages(op, call.source);
      case ATTEND_ROWS: return attend_rows(op);
      case LAYER_NORM: return layer_norm(op);
      case GATE: return gate(op);
      case JOIN: return join(op);
      case POSITION_SCORES: return position_scores(op);
      case SHORT_CONV: return short_conv(op);
      case DELTA_RULE: return delta_rule(op);
      case STATE_SCAN: return state_scan(op);
      case GATED_NORM: return gated_norm(op);
      case BIAS_GATES: return bias_gates(op);
      case ROW_CONV: return row_conv(op);
      case MULTIPLY: return multiply(op);
      case PAGE_CONV: return page_conv(op);
      case HEAD_PRODUCTS: return head_products(op);
      case BY_POSITION: return by_position(op);
      default: return add(op);
    }
  }
};

}  // namespace

void run_layer(const Kernels& kernels, const LayerCall& call) {
  const int64_t size = call.dtype == F32 ? 4 : 2;
  const size_t bytes = static_cast<size_t>(call.width * call.tokens * size);
  const Layer layer = {kernels, call, size, static_cast<char*>(scratch<LayerCall>(bytes))};
  for (int64_t i = 0; i < call.count; ++i) layer.run(call.ops[i]);
}
