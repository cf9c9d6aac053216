// Is a list of records one that can be run without looking back? Every index and size is checked here, once.
#include "program.h"

namespace octavo {
namespace {

constexpr int32_t kMost = 1 << 20;  // records, buffers, layers, rows of a step
constexpr int32_t kMostSinks = 64, kWidest = 1 << 30;

bool in_range(int32_t index, size_t count) { return index >= 0 && static_cast<size_t>(index) < count; }
bool none_or_in_range(int32_t index, size_t count) { return index == OCTAVO_NONE || in_range(index, count); }
bool gated(int32_t epilogue) { return epilogue == EPI_SILU_MUL || epilogue == EPI_GELU_MUL; }

}  // namespace

bool Program::check_spec(const octavo_program_spec& s, std::string* error) const {
  const int32_t counts[] = {s.num_buffers, s.num_ops, s.num_layers, s.num_groups, s.max_tokens, s.max_sequences};
  bool fine = s.size == static_cast<int32_t>(sizeof s) && s.buffers && s.ops && s.layer_group && s.layer_index;
  for (const int32_t count : counts) fine = fine && count > 0 && count <= kMost;
  fine = fine && s.num_ropes >= 0 && s.num_ropes <= 16 && (s.num_ropes == 0 || s.ropes);
  fine = fine && s.num_extra >= 0 && s.num_extra <= kMost && (s.num_extra == 0 || s.extra);
  fine = fine && s.max_logit_rows > 0 && s.max_logit_rows <= kMost && s.max_positions > 0 && s.vocab_size > 0;
  if (!fine) *error = "program: a count or a limit is out of range, or an array is missing";
  return fine && check_tables(s, error);
}

bool Program::check_tables(const octavo_program_spec& s, std::string* error) const {
  bool fine = in_range(s.logits, static_cast<size_t>(s.num_buffers)) && none_or_in_range(s.hidden, static_cast<size_t>(s.num_buffers));
  for (int32_t b = 0; b < s.num_buffers; b++) {
    const octavo_buffer& buffer = s.buffers[b];
    fine = fine && (buffer.rows == OCTAVO_ROWS_T || buffer.rows == OCTAVO_ROWS_R) && buffer.cols > 0 && buffer.cols <= 1 << 24;
  }
  for (int32_t r = 0; r < s.num_ropes; r++) {
    fine = fine && s.ropes[r].inv_freq && s.ropes[r].pairs > 0 && s.ropes[r].pairs <= 1024;
  }
  for (int32_t l = 0; l < s.num_layers; l++) {
    fine = fine && in_range(s.layer_group[l], static_cast<size_t>(s.num_groups)) && in_range(s.layer_index[l], static_cast<size_t>(pages_->layers));
  }
  if (fine) {
    const octavo_buffer& logits = s.buffers[s.logits];
    fine = logits.rows == OCTAVO_ROWS_R && logits.cols == s.vocab_size;
    fine = fine && (s.hidden == OCTAVO_NONE || s.buffers[s.hidden].rows == OCTAVO_ROWS_T);
  }
  if (!fine) *error = "program: a buffer, rope table or layer is out of range";
  return fine;
}

bool Program::indices_exist(const octavo_op& op) const {
  bool fine = op.code >= 0 && op.code < OCTAVO_OPS;
  for (const int32_t b : op.in) fine = fine && none_or_in_range(b, buffers_.size());
  for (const int32_t b : op.out) fine = fine && none_or_in_range(b, buffers_.size());
  for (const int32_t w : op.w) fine = fine && none_or_in_range(w, engine_->weights.size());
  return fine;
}

bool Program::buffer_is(int32_t buffer, int64_t columns, int32_t rows_of) const {
  if (buffer == OCTAVO_NONE) return false;
  const octavo_buffer& b = buffers_[static_cast<size_t>(buffer)];
  return b.cols == columns && b.rows == rows_of;
}

bool Program::vector_is(int32_t number, int64_t n, bool optional) const {
  if (number == OCTAVO_NONE) return optional;
  return !weight(number).is_matrix && weight(number).n == n;
}

// Null, or what is wrong.
const char* Program::wrong(const octavo_op& op) const {
  if (!indices_exist(op)) return "an index is out of range";
  switch (op.code) {
    case OCTAVO_LINEAR: return wrong_linear(op);
    case OCTAVO_ROPE_KV:
    case OCTAVO_ATTENTION: return wrong_pages(op);
    case OCTAVO_MOE: return wrong_mixture(op);
    case OCTAVO_LORA: return wrong_lora(op);
    default: return wrong_shapes(op);
  }
}

const char* Program::wrong_shapes(const octavo_op& op) const {
  if (op.out[0] == OCTAVO_NONE) return "it makes nothing";
  const int64_t n = cols(op.out[0]);
  const int32_t of = buffers_[static_cast<size_t>(op.out[0])].rows;
  if (op.code == OCTAVO_EMBED) {
    if (op.w[0] == OCTAVO_NONE || !weight(op.w[0]).is_matrix || weight(op.w[0]).mat.interleaved) return "w0 is no table";
    const Weight& table = weight(op.w[0]);
    return of == OCTAVO_ROWS_T && table.k == n && table.n == limits_.vocab_size ? nullptr : "w0 has another shape";
  }
  if (op.code == OCTAVO_SELECT) {
    return of == OCTAVO_ROWS_R && buffer_is(op.in[0], n) ? nullptr : "it takes token rows and gives logit rows";
  }
  if (!buffer_is(op.in[0], n, of)) return "in0 has another shape than out0";
  const bool pair = op.code == OCTAVO_ADD || op.code == OCTAVO_GATED;
  if ((pair || op.in[1] != OCTAVO_NONE) && !buffer_is(op.in[1], n, of)) return "in1 has another shape than out0";
  const bool weighted = op.code == OCTAVO_NORM || op.code == OCTAVO_LAYER_NORM;
  if (weighted && !vector_is(op.w[0], n, false)) return "w0 is no vector of that width";
  if (op.code == OCTAVO_LAYER_NORM && !vector_is(op.w[1], n, true)) return "w1 is no vector of that width";
  return op.code == OCTAVO_GATED && !gated(op.i[0]) ? "i0 is no activation" : nullptr;
}

const char* Program::wrong_linear(const octavo_op& op) const {
  if (op.i[1] < 1 || op.i[1] > kMaxMatrices || op.in[0] == OCTAVO_NONE) return "it has 1 to 4 matrices and an input";
  if (op.i[0] < EPI_STORE || op.i[0] > EPI_GELU_MUL) return "i0 is no epilogue";
  const int32_t of = buffers_[static_cast<size_t>(op.in[0])].rows;
  for (int j = 0; j < op.i[1]; j++) {
    if (op.w[j] == OCTAVO_NONE || !weight(op.w[j]).is_matrix) return "a matrix is missing";
    const Weight& w = weight(op.w[j]);
    if (w.k != cols(op.in[0]) || w.mat.fmt != weight(op.w[0]).mat.fmt) return "a matrix has another width or format";
    if (!buffer_is(op.out[j], w.n, of) || op.out[j] == op.in[0]) return "an output has another shape, or is the input";
    if ((w.mat.interleaved != 0) != gated(op.i[0])) return "only a gate/up pair takes a gated epilogue, and it needs one";
    const int64_t biases = w.mat.interleaved ? w.mat.panels * 64 : w.mat.n;  // of a pair: in packed order, padding too
    if (!vector_is(op.w[4 + j], biases, true)) return "a bias has another length";
    for (int other = 0; other < j; other++) {
      if (op.out[other] == op.out[j]) return "two matrices have one output";
    }
  }
  if (op.i[0] != EPI_STORE && op.i[1] != 1) return "this epilogue is for one matrix";
  const bool aside = gated(op.i[0]) && op.out[1] != OCTAVO_NONE;
  if (aside && (!buffer_is(op.out[1], weight(op.w[0]).mat.panels * 64, of) || op.out[1] == op.out[0] || op.out[1] == op.in[0])) return "out1 is not of the pair's width";
  if (op.i[0] == EPI_ADD && !buffer_is(op.in[1], weight(op.w[0]).n, of)) return "in1 has another shape than out0";
  return vector_is(op.w[8], cols(op.in[0]), true) ? nullptr : "w8 is no vector of the input's width";
}

const char* Program::wrong_lora(const octavo_op& op) const {
  const bool pair = gated(op.i[3]);
  if (op.in[0] == OCTAVO_NONE || !vector_is(op.w[8], cols(op.in[0]), true)) return "it lacks its input, or w8 has another width";
  if (!buffer_is(op.in[0], cols(op.in[0])) || (!pair && op.i[3] != EPI_STORE)) return "it takes token rows, and i3 is STORE or a gate";
  if (pair && (op.in[1] == OCTAVO_NONE || op.in[2] == OCTAVO_NONE)) return "a pair lacks an output";
  for (int j = 0; j < 3; j++) {
    const int32_t out = op.in[pair && j < 2 ? 1 : 1 + j];
    if (op.i[j] == OCTAVO_NONE) continue;
    if (out == OCTAVO_NONE || out == op.in[0] || (pair && j == 2)) return "a target has no output";
    if (op.i[j] < 0 || (adapters_ != nullptr && !in_range(op.i[j], adapters_->num_targets()))) return "a target is out of range";
    if (adapters_ == nullptr) continue;
    const octavo_target& target = adapters_->target(op.i[j]);
    const int64_t n = pair ? cols(op.in[2]) : cols(out);
    if (target.k != cols(op.in[0]) || target.n != n || !buffer_is(out, cols(out))) return "a target has another shape";
  }
  if (!pair) return nullptr;
  return buffer_is(op.in[2], cols(op.in[2])) && cols(op.in[1]) >= 2 * cols(op.in[2]) ? nullptr : "a pair's outputs have other shapes";
}

const char* Program::wrong_pages(const octavo_op& op) const {
  const KV& kv = pages_->kv;
  if (!in_range(op.i[1], layer_group_.size()) || op.i[2] != kv.dim) return "a layer or a head size is out of range";
  if (op.in[0] == OCTAVO_NONE) return "in0 is missing";
  const int64_t q = cols(op.in[0]), wide = int64_t{kv.kv_heads} * kv.dim;
  if (!buffer_is(op.in[0], q) || q % wide != 0) return "the queries' width is no multiple of the keys'";
  if (op.code == OCTAVO_ATTENTION) {
    if (!buffer_is(op.out[0], q) || op.out[0] == op.in[0] || op.i[3] < 0) return "out0 has another shape, or a window is negative";
    if (const char* what = wrong_sinks(op)) return what;
    if (kernels_->attn_scratch(static_cast<int32_t>(q / wide), kv.dim) < 0) return "no kernel takes this head size";
    return vector_is(op.w[0], q / kv.dim, true) ? nullptr : "w0 is no vector over heads";
  }
  if (!buffer_is(op.in[1], wide) || !buffer_is(op.in[2], wide)) return "keys or values have another width";
  if (op.in[0] == op.in[1] || op.in[0] == op.in[2] || op.in[1] == op.in[2]) return "q, k and v share a buffer";
  if (!in_range(op.i[0], ropes_.size())) return "a rope table is out of range";
  if (!rope_fits(op.i[0])) return "a rope table is wider than a head";
  const bool norms = vector_is(op.w[0], kv.dim, true) && vector_is(op.w[1], kv.dim, true);
  return norms ? nullptr : "a head norm has another length";
}

const char* Program::wrong_sinks(const octavo_op& op) const {
  if (op.i[4] == 0) return nullptr;
  if (op.i[4] < 0 || op.i[4] > kMostSinks || op.i[3] == 0 || op.i[3] > kWidest) return "sink tokens need a window, and are at most 64";
  const bool turns = in_range(op.i[5], ropes_.size()) && ropes_[static_cast<size_t>(op.i[5])].factor == 1.0;
  return turns && rope_fits(op.i[5]) ? nullptr : "sink tokens need a rope that only turns, no wider than a head";
}

bool Program::rope_fits(int32_t table) const {
  return 2 * static_cast<int64_t>(ropes_[static_cast<size_t>(table)].inv_freq.size()) <= pages_->kv.dim;
}

// Queries are turned back by one number for all of them.
bool Program::sinks_agree() const {
  const octavo_op* first = nullptr;
  for (const Op& op : ops_) {
    if (op.record.code != OCTAVO_ATTENTION || op.record.i[4] == 0) continue;
    if (first == nullptr) first = &op.record;
    if (op.record.i[3] != first->i[3] || op.record.i[4] != first->i[4]) return false;
  }
  return true;
}

const char* Program::wrong_mixture(const octavo_op& op) const {
  const int32_t count = op.i[1];
  if (op.in[0] == OCTAVO_NONE || count < 1 || count > 4096 || op.i[2] < 1 || op.i[2] > count) return "experts out of range";
  if (op.i[0] < 0 || int64_t{op.i[0]} + 2 * int64_t{count} > static_cast<int64_t>(extra_.size())) return "extra is too short";
  const int64_t width = cols(op.in[0]);
  const bool shapes = buffer_is(op.in[0], width) && buffer_is(op.out[0], width) && buffer_is(op.in[2], count);
  if (!shapes || !gated(op.i[4]) || op.out[0] == op.in[0] || op.out[0] == op.in[2]) return "a buffer has another shape";
  if (op.in[1] != OCTAVO_NONE && !buffer_is(op.in[1], width)) return "in1 has another shape";
  if (!vector_is(op.w[8], width, true)) return "w8 is no vector of the input's width";
  int64_t inner = 0;
  int32_t format = 0;
  for (int32_t i = 0; i < 2 * count; i++) {
    const int32_t number = extra_[static_cast<size_t>(op.i[0] + i)];
    if (!in_range(number, engine_->weights.size()) || !weight(number).is_matrix) return "an expert is no matrix";
    const Weight& w = weight(number);
    if (i == 0) inner = w.n, format = w.mat.fmt;
    const bool down = i >= count;
    const bool fits = w.n == (down ? width : inner) && w.k == (down ? inner : width);
    if (!fits || w.mat.fmt != format || (w.mat.interleaved != 0) == down) return "an expert has another shape or format";
  }
  return nullptr;
}

}  // namespace octavo
