// What a program may not be: each thing that program_check.cpp refuses, alone in a program that is right otherwise, and the sentence
// that says so. At random: test_hostile_steps.cpp.
#include <functional>
#include <string>

#include "program_fixture.h"

using namespace check;

namespace {

constexpr int32_t kQ = kHeads * kDim, kKV = kKVHeads * kDim;
using Spoil = std::function<void(Records&)>;

// Programs of one engine: a model's records, and a few ops that it lacks.
struct Programs {
  Model model{"generic", 1, octavo::FMT_W8G64, octavo::KV_BF16, 16};
  Records good = model.records;
  long refused = 0;

  int32_t matrix(int64_t n, int64_t k, bool pair = false, int32_t format = octavo::FMT_W8G64) {
    const std::vector<float> data(size_t(n * k), 0.1f);
    octavo_matrix m{};
    m.format = format, m.interleaved = pair, m.n = n, m.k = k, m.data = data.data(), m.up = pair ? data.data() : nullptr;
    return int32_t(octavo_add_matrix(model.engine.get(), &m));
  }
  int32_t vector(int64_t n) {
    const std::vector<float> data(size_t(n), 1.0f);
    return int32_t(octavo_add_vector(model.engine.get(), data.data(), n));
  }
  Programs() {
    const int32_t wide = vector(kHidden);
    for (const int32_t code : {OCTAVO_NORM, OCTAVO_LAYER_NORM, OCTAVO_ADD, OCTAVO_SCALE, OCTAVO_GATED}) {
      octavo_op op = good.ops.front();
      op.code = code, op.in[0] = X, op.out[0] = X, op.i[0] = octavo::EPI_SILU_MUL, op.w[0] = OCTAVO_NONE;
      if (code == OCTAVO_ADD || code == OCTAVO_GATED) op.in[1] = Y;
      if (code == OCTAVO_NORM || code == OCTAVO_LAYER_NORM) op.w[0] = wide;
      good.ops.push_back(op);
    }
    good.limits.num_ops = int32_t(good.ops.size());
    CHECK(opens([](Records&) {}));
  }
  bool opens(const Spoil& spoil) {
    Records records = good;
    spoil(records);
    const octavo_program_spec spec = records.spec();
    return ProgramPtr(octavo_program_open(model.engine.get(), model.kv.get(), &spec)) != nullptr;
  }
  void refuse(const char* sentence, const Spoil& spoil) {
    octavo_read_row(model.engine.get(), -1, 0, nullptr);  // the text of another call
    const bool fine = CHECK(!opens(spoil)) && CHECK(std::string(octavo_error()).find(sentence) != std::string::npos);
    if (!fine) printf("  instead of \"%s\": \"%s\"\n", sentence, octavo_error());
    refused++;
  }
};

// The record of a code, counted from 0.
octavo_op& nth(Records& r, int32_t code, int number = 0) {
  for (octavo_op& op : r.ops)
    if (op.code == code && number-- == 0) return op;
  abort();
}
octavo_op& qkv(Records& r) { return nth(r, OCTAVO_LINEAR, 0); }
octavo_op& from_o(Records& r) { return nth(r, OCTAVO_LINEAR, 1); }
octavo_op& gate_up(Records& r) { return nth(r, OCTAVO_LINEAR, 2); }

// A field of the record to which `find` leads becomes another value.
template <class Find, class Field, class Value>
Spoil set(const Find& find, const Field& field, Value value) {
  return [=](Records& r) { field(find(r)) = value; };
}
const auto in = [](int j) { return [=](octavo_op& op) -> int32_t& { return op.in[j]; }; };
const auto out = [](int j) { return [=](octavo_op& op) -> int32_t& { return op.out[j]; }; };
const auto w = [](int j) { return [=](octavo_op& op) -> int32_t& { return op.w[j]; }; };
const auto i = [](int j) { return [=](octavo_op& op) -> int32_t& { return op.i[j]; }; };
const auto of = [](int32_t code) { return [=](Records& r) -> octavo_op& { return nth(r, code); }; };

void test_tables(Programs* p) {
  const char* const count = "a count or a limit is out of range";
  p->refuse(count, [](Records& r) { r.ropes.resize(17, r.ropes[0]), r.limits.num_ropes = 17; });
  const char* const table = "a buffer, rope table or layer is out of range";
  p->refuse(table, [](Records& r) { r.buffers[GATE].cols = (1 << 24) + 1; });
  p->refuse(table, [](Records& r) { r.buffers[GATE].cols = 0; });
  p->refuse(table, [](Records& r) { r.buffers[GATE].rows = 2; });
  for (const int64_t pairs : {int64_t{0}, int64_t{-1}, int64_t{1025}}) p->refuse(table, [=](Records& r) { r.frequencies.resize(1025), r.ropes[0].pairs = pairs; });
  for (const int32_t number : {-1, 2}) {
    p->refuse(table, [=](Records& r) { r.layer_group[1] = number; });
    p->refuse(table, [=](Records& r) { r.layer_index[1] = number; });
  }
  for (const int32_t logits : {int32_t{OCTAVO_NONE}, int32_t{X}, int32_t{LAST}, int32_t{BUFFERS}}) p->refuse(table, [=](Records& r) { r.limits.logits = logits; });
  p->refuse(table, [](Records& r) { r.buffers[LOGITS].rows = OCTAVO_ROWS_T; });
  for (const int32_t hidden : {int32_t{LAST}, int32_t{BUFFERS}, -2}) p->refuse(table, [=](Records& r) { r.limits.hidden = hidden; });
}

void test_rows(Programs* p) {
  for (const int32_t number : {-2, 1 << 20}) {
    p->refuse("an index is out of range", set(of(OCTAVO_ADD), in(3), number));
    p->refuse("an index is out of range", set(of(OCTAVO_ADD), out(3), number));
    p->refuse("an index is out of range", set(of(OCTAVO_ADD), w(8), number));
  }
  for (const int32_t code : {-1, int32_t{OCTAVO_OPS}}) p->refuse("an index is out of range", [=](Records& r) { r.ops[3].code = code; });
  const int32_t vector = p->vector(kHidden), narrow = p->vector(kHidden - 1), square = p->matrix(kHidden, kHidden);
  for (const int32_t number : {int32_t{OCTAVO_NONE}, vector, p->matrix(kVocab, kHidden, true)}) p->refuse("w0 is no table", set(of(OCTAVO_EMBED), w(0), number));
  for (const int32_t number : {p->matrix(kVocab - 1, kHidden), p->matrix(kVocab, kHidden + 1)}) p->refuse("w0 has another shape", set(of(OCTAVO_EMBED), w(0), number));
  p->refuse("w0 has another shape", set(of(OCTAVO_EMBED), out(0), LAST));
  p->refuse("it makes nothing", set(of(OCTAVO_EMBED), out(0), OCTAVO_NONE));
  for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{Q}, int32_t{LAST}}) p->refuse("it takes token rows", set(of(OCTAVO_SELECT), in(0), buffer));
  p->refuse("it takes token rows", set(of(OCTAVO_SELECT), out(0), X));
  for (const int32_t code : {OCTAVO_NORM, OCTAVO_LAYER_NORM, OCTAVO_ADD, OCTAVO_SCALE, OCTAVO_GATED}) {
    for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{Q}, int32_t{LAST}}) p->refuse("in0 has another shape", set(of(code), in(0), buffer));
    for (const int32_t buffer : {int32_t{Q}, int32_t{LAST}}) p->refuse("in1 has another shape", set(of(code), in(1), buffer));
    const bool pair = code == OCTAVO_ADD || code == OCTAVO_GATED, weighted = code == OCTAVO_NORM || code == OCTAVO_LAYER_NORM;
    if (pair) p->refuse("in1 has another shape", set(of(code), in(1), OCTAVO_NONE));
    for (const int32_t number : {int32_t{OCTAVO_NONE}, narrow, square})
      if (weighted) p->refuse("w0 is no vector", set(of(code), w(0), number));
  }
  for (const int32_t number : {narrow, square}) p->refuse("w1 is no vector", set(of(OCTAVO_LAYER_NORM), w(1), number));
  for (const int32_t kind : {int32_t{octavo::EPI_STORE}, int32_t{octavo::EPI_ADD}, 99}) p->refuse("i0 is no activation", set(of(OCTAVO_GATED), i(0), kind));
}

void test_products(Programs* p) {
  for (const int32_t count : {0, 5, -1}) p->refuse("it has 1 to 4 matrices", set(qkv, i(1), count));
  p->refuse("it has 1 to 4 matrices", set(qkv, in(0), OCTAVO_NONE));
  for (const int32_t kind : {int32_t{octavo::EPI_STORE} - 1, int32_t{octavo::EPI_GELU_MUL} + 1}) p->refuse("i0 is no epilogue", set(qkv, i(0), kind));
  const int32_t vector = p->vector(kHidden), narrow = p->vector(kHidden - 1), square = p->matrix(kHidden, kHidden);
  for (const int32_t number : {int32_t{OCTAVO_NONE}, vector}) p->refuse("a matrix is missing", set(qkv, w(1), number));
  p->refuse("another width or format", set(qkv, w(1), p->matrix(kKV, kHidden + 1)));
  p->refuse("another width or format", set(qkv, w(1), p->matrix(kKV, kHidden, false, octavo::FMT_BF16)));
  for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{K}, int32_t{LAST}}) p->refuse("an output has another shape", set(qkv, out(0), buffer));
  p->refuse("or is the input", [=](Records& r) { from_o(r).in[0] = X, from_o(r).w[0] = square; });
  p->refuse("two matrices have one output", set(qkv, out(2), K));
  p->refuse("only a gate/up pair", set(from_o, i(0), octavo::EPI_SILU_MUL));
  p->refuse("only a gate/up pair", set(gate_up, i(0), octavo::EPI_STORE));
  for (const int32_t number : {narrow, square}) p->refuse("a bias has another length", set(from_o, w(4), number));
  p->refuse("a bias has another length", set(gate_up, w(4), p->vector(kInner)));  // not in packed order
  p->refuse("this epilogue is for one matrix", [](Records& r) { qkv(r).i[0] = octavo::EPI_ADD, qkv(r).in[1] = Q; });
  for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{Q}, int32_t{LAST}}) p->refuse("in1 has another shape", set(from_o, in(1), buffer));
  for (const int32_t number : {narrow, square}) p->refuse("w8 is no vector", set(qkv, w(8), number));
}

void test_pages(Programs* p) {
  for (const int32_t code : {OCTAVO_ROPE_KV, OCTAVO_ATTENTION}) {
    for (const int32_t layer : {-1, 2}) p->refuse("a layer or a head size", set(of(code), i(1), layer));
    p->refuse("a layer or a head size", set(of(code), i(2), 2 * kDim));
    p->refuse("in0 is missing", set(of(code), in(0), OCTAVO_NONE));
    for (const int32_t buffer : {int32_t{X}, int32_t{LAST}}) p->refuse("no multiple of the keys'", set(of(code), in(0), buffer));
  }
  for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{Q}, int32_t{K}}) p->refuse("out0 has another shape", set(of(OCTAVO_ATTENTION), out(0), buffer));
  p->refuse("a window is negative", set(of(OCTAVO_ATTENTION), i(3), -1));
  p->refuse("no kernel takes this head size", [](Records& r) {
    for (int32_t& buffer : {std::ref(nth(r, OCTAVO_ATTENTION).in[0]), std::ref(nth(r, OCTAVO_ATTENTION).out[0])}) {
      buffer = r.limits.num_buffers++;
      r.buffers.push_back({OCTAVO_ROWS_T, 0, int64_t{4097} * kKV});
    }
  });
  p->refuse("w0 is no vector over heads", set(of(OCTAVO_ATTENTION), w(0), p->vector(kHeads + 1)));
  for (const int j : {1, 2})
    for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{Q}, int32_t{LAST}}) p->refuse("keys or values have another width", set(of(OCTAVO_ROPE_KV), in(j), buffer));
  p->refuse("q, k and v share a buffer", set(of(OCTAVO_ROPE_KV), in(2), K));
  for (const int32_t table : {-1, 1}) p->refuse("a rope table is out of range", set(of(OCTAVO_ROPE_KV), i(0), table));
  p->refuse("wider than a head", [](Records& r) { r.frequencies.resize(kDim), r.ropes[0].pairs = kDim / 2 + 1; });
  for (const int j : {0, 1}) p->refuse("a head norm has another length", set(of(OCTAVO_ROPE_KV), w(j), p->vector(kDim + 1)));
}

void test_mixture(Programs* p) {
  const auto moe = of(OCTAVO_MOE);
  for (const int32_t count : {-1, 0, 4097}) p->refuse("experts out of range", set(moe, i(1), count));
  for (const int32_t count : {0, kExperts + 1}) p->refuse("experts out of range", set(moe, i(2), count));
  for (const int32_t first : {-1, 1, INT32_MAX}) p->refuse("extra is too short", set(moe, i(0), first));
  for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{Q}, int32_t{LAST}, int32_t{X}}) p->refuse("a buffer has another shape", set(moe, out(0), buffer));
  for (const int32_t buffer : {int32_t{OCTAVO_NONE}, int32_t{X}}) p->refuse("a buffer has another shape", set(moe, in(2), buffer));
  p->refuse("a buffer has another shape", set(moe, i(4), octavo::EPI_ADD));
  for (const int32_t buffer : {int32_t{Q}, int32_t{LAST}}) p->refuse("in1 has another shape", set(moe, in(1), buffer));
  p->refuse("w8 is no vector", set(moe, w(8), p->vector(kHidden - 1)));
  const auto expert = [](size_t at, int32_t number) { return [=](Records& r) { r.extra[at] = number; }; };
  for (const int32_t number : {-1, int32_t{OCTAVO_NONE}, 1 << 20, p->vector(kHidden)}) p->refuse("an expert is no matrix", expert(1, number));
  const char* const shape = "an expert has another shape or format";
  for (const size_t at : {size_t{0}, size_t{1}}) p->refuse(shape, expert(at, p->matrix(kInner, kHidden)));  // no pair
  p->refuse(shape, expert(1, p->matrix(kInner + 1, kHidden, true)));
  p->refuse(shape, expert(1, p->matrix(kInner, kHidden + 1, true)));
  p->refuse(shape, expert(1, p->matrix(kInner, kHidden, true, octavo::FMT_BF16)));
  p->refuse(shape, expert(kExperts + 1, p->matrix(kHidden + 1, kInner)));
  p->refuse(shape, expert(kExperts + 1, p->matrix(kHidden, kInner, true)));
}

}  // namespace

int main() {
  Programs programs;
  test_tables(&programs);
  test_rows(&programs);
  test_products(&programs);
  test_pages(&programs);
  test_mixture(&programs);
  CHECK(programs.refused > 100);
  return finish("test_records");
}
