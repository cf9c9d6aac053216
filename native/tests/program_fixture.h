// A tiny model through the C ABI for the tests of whole programs: two layers in two KV groups (the second one windowed, with
// head norms, attention sinks and a mixture of experts), hidden states, and steps whose arrays end where their contents do.
#pragma once
#include <algorithm>
#include <memory>

#include "check.h"
#include "octavo_native.h"

namespace check {

constexpr int32_t kHidden = 80, kHeads = 4, kKVHeads = 2, kDim = 16, kInner = 100, kVocab = 131, kExperts = 3, kWindow = 20;
constexpr int32_t kMaxTokens = 256, kMaxSequences = 8, kMaxPositions = 192, kLongest = 1088, kPages = 128;
enum Buffer_ : int32_t { X, Q, K, V, O, GATE, ROUTER, Y, LAST, LOGITS, BUFFERS };

// The records of a program; `spec()` points into them.
struct Records {
  std::vector<octavo_buffer> buffers;
  std::vector<octavo_op> ops;
  std::vector<octavo_rope> ropes;
  std::vector<double> frequencies;
  std::vector<int32_t> layer_group{0, 1}, layer_index{0, 0}, extra;
  octavo_program_spec limits{};

  octavo_program_spec spec() {
    octavo_program_spec s = limits;
    ropes[0].inv_freq = frequencies.data();
    s.buffers = buffers.data(), s.ops = ops.data(), s.ropes = ropes.data();
    s.layer_group = layer_group.data(), s.layer_index = layer_index.data(), s.extra = extra.data();
    return s;
  }
};

struct Closer {
  void operator()(octavo_engine* engine) const { octavo_close(engine); }
  void operator()(octavo_kv* kv) const { octavo_kv_close(kv); }
  void operator()(octavo_program* program) const { octavo_program_close(program); }
};
using EnginePtr = std::unique_ptr<octavo_engine, Closer>;
using KVPtr = std::unique_ptr<octavo_kv, Closer>;
using ProgramPtr = std::unique_ptr<octavo_program, Closer>;

struct Model {
  EnginePtr engine;
  KVPtr kv;
  ProgramPtr program;
  Records records;
  int32_t page_size, window, positions;

  Model(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t pages_of, int32_t seen = kWindow, int32_t most = kMaxPositions)
      : engine(octavo_open(isa, threads)), page_size(pages_of), window(seen), positions(most) {
    if (!CHECK(engine != nullptr)) exit(1);
    kv.reset(octavo_kv_open(engine.get(), kv_type, page_size, kKVHeads, kDim, 1, kPages));
    CHECK(kv != nullptr);
    random_ = Random(77);
    format_ = format;
    record();
    octavo_program_spec spec = records.spec();
    program.reset(octavo_program_open(engine.get(), kv.get(), &spec));
    if (!CHECK(program != nullptr)) printf("  %s\n", octavo_error());
  }

 private:
  Random random_{77};
  int32_t format_ = 0;

  std::vector<float> values(int64_t n, float scale) {
    std::vector<float> all(static_cast<size_t>(n));
    random_.fill(all, scale);
    return all;
  }
  int32_t matrix(int64_t n, int64_t k, bool pair = false, int32_t format = -1) {
    const std::vector<float> data = values(n * k, 0.2f), up = values(pair ? n * k : 0, 0.2f);
    octavo_matrix m{};
    m.format = format < 0 ? format_ : format, m.interleaved = pair, m.n = n, m.k = k;
    m.data = data.data(), m.up = pair ? up.data() : nullptr;
    const int64_t number = octavo_add_matrix(engine.get(), &m);
    CHECK(number >= 0);
    return int32_t(number);
  }
  int32_t vector(int64_t n, float middle) {
    std::vector<float> data = values(n, 0.3f);
    for (float& v : data) v += middle;
    return int32_t(octavo_add_vector(engine.get(), data.data(), n));
  }
  octavo_op& op(int32_t code) {
    octavo_op o{};
    o.code = code;
    std::fill_n(o.in, 4, OCTAVO_NONE), std::fill_n(o.out, 4, OCTAVO_NONE), std::fill_n(o.w, 9, OCTAVO_NONE);
    records.ops.push_back(o);
    return records.ops.back();
  }
  void linear(int32_t in, std::vector<int32_t> outs, std::vector<int32_t> weights, int32_t norm, int32_t epilogue = octavo::EPI_STORE, int32_t add = OCTAVO_NONE) {
    octavo_op& o = op(OCTAVO_LINEAR);
    o.in[0] = in, o.in[1] = add, o.w[8] = norm, o.i[0] = epilogue, o.i[1] = int32_t(outs.size()), o.f[0] = 1e-5f;
    for (size_t j = 0; j < outs.size(); j++) o.out[j] = outs[j], o.w[j] = weights[j];
  }
  void attend(int32_t layer) {
    octavo_op& rope = op(OCTAVO_ROPE_KV);
    rope.in[0] = Q, rope.in[1] = K, rope.in[2] = V, rope.i[1] = layer, rope.i[2] = kDim, rope.f[0] = 1e-6f;
    if (layer == 1) rope.w[0] = vector(kDim, 1), rope.w[1] = vector(kDim, 1);
    octavo_op& attention = op(OCTAVO_ATTENTION);
    attention.in[0] = Q, attention.out[0] = O, attention.i[1] = layer, attention.i[2] = kDim, attention.f[0] = 0.25f;
    if (layer == 1) attention.i[3] = window, attention.w[0] = vector(kHeads, 0), attention.f[1] = 30;
  }
  void layer(int32_t number) {
    const int32_t before = vector(kHidden, 1);  // not within the call: the order of arguments is the compiler's
    linear(X, {Q, K, V}, {matrix(kHeads * kDim, kHidden), matrix(kKVHeads * kDim, kHidden), matrix(kKVHeads * kDim, kHidden)}, before);
    records.ops.back().w[4] = vector(kHeads * kDim, 0);
    attend(number);
    linear(O, {X}, {matrix(kHidden, kHeads * kDim)}, OCTAVO_NONE, octavo::EPI_ADD, X);
    if (number == 1) return;
    const int32_t between = vector(kHidden, 1);
    linear(X, {GATE}, {matrix(kInner, kHidden, true)}, between, octavo::EPI_SILU_MUL);
    linear(GATE, {X}, {matrix(kHidden, kInner)}, OCTAVO_NONE, octavo::EPI_ADD, X);
  }
  void mixture() {
    const int32_t before = vector(kHidden, 1);
    linear(X, {ROUTER}, {matrix(kExperts, kHidden, false, octavo::FMT_FP32)}, before);
    octavo_op& moe = op(OCTAVO_MOE);
    moe.in[0] = X, moe.in[1] = X, moe.in[2] = ROUTER, moe.out[0] = Y, moe.w[8] = vector(kHidden, 1), moe.f[0] = 1e-5f;
    moe.i[1] = kExperts, moe.i[2] = 2, moe.i[3] = 1, moe.i[4] = octavo::EPI_GELU_MUL;
    for (int e = 0; e < kExperts; e++) records.extra.push_back(matrix(kInner, kHidden, true));
    for (int e = 0; e < kExperts; e++) records.extra.push_back(matrix(kHidden, kInner));
  }
  void record() {
    for (const int64_t columns : {kHidden, kHeads * kDim, kKVHeads * kDim, kKVHeads * kDim, kHeads * kDim, kInner, kExperts, kHidden})
      records.buffers.push_back({OCTAVO_ROWS_T, 0, columns});
    records.buffers.push_back({OCTAVO_ROWS_R, 0, kHidden});
    records.buffers.push_back({OCTAVO_ROWS_R, 0, kVocab});
    for (int j = 0; j < kDim / 2; j++) records.frequencies.push_back(pow(100.0, -2.0 * j / kDim));
    records.ropes.push_back({nullptr, 1.0, kDim / 2});
    octavo_op& embed = op(OCTAVO_EMBED);
    embed.w[0] = matrix(kVocab, kHidden), embed.out[0] = X, embed.f[0] = 3;
    layer(0);
    layer(1);
    mixture();
    octavo_op& select = op(OCTAVO_SELECT);
    select.in[0] = Y, select.out[0] = LAST;
    const int32_t last = vector(kHidden, 1);
    linear(LAST, {LOGITS}, {matrix(kVocab, kHidden)}, last);
    records.ops.back().f[1] = 25;
    octavo_program_spec& s = records.limits;
    s.size = int32_t(sizeof s), s.num_buffers = BUFFERS, s.num_ops = int32_t(records.ops.size()), s.num_ropes = 1, s.num_layers = 2;
    s.num_groups = 2, s.max_tokens = kMaxTokens, s.max_sequences = kMaxSequences, s.max_logit_rows = kMaxTokens;
    s.max_positions = positions, s.vocab_size = kVocab, s.logits = LOGITS, s.hidden = Y, s.num_extra = int32_t(records.extra.size());
  }
};

// One step as plain arrays; every token asks for logits and is drawn where `draws` is set.
struct Step {
  std::vector<int32_t> ids, positions, starts{0}, table_row, table, rows, sampled, parents, places;
  std::vector<uint8_t> no_write;
  std::vector<octavo_sampling> sampling;
  std::vector<float> hidden;
  int32_t width = 1;
  int64_t table_rows = 1;

  // Tokens [from, to) of a sequence whose pages stand in row `row` of the tables.
  void add(const std::vector<int32_t>& tokens, int32_t from, int32_t to, int32_t row, bool silent = false) {
    for (int32_t p = from; p < to; p++) ids.push_back(tokens[size_t(p)]), positions.push_back(p), rows.push_back(int32_t(rows.size()));
    starts.push_back(int32_t(ids.size()));
    table_row.push_back(row);
    no_write.push_back(silent);
  }
  void draw(Random& random) {
    for (const int32_t row : rows) {
      octavo_sampling s{row, int32_t(random.below(3) * 5), float(random.below(3)) / 2.0, 0.9, 0, random.next(), 0, uint32_t(row), 0, 0, nullptr, nullptr, {}};
      if (random.below(3) == 0) s.mirostat = random.below(2) ? 4 : -4;
      if (random.below(3) == 0) s.shape = {0.9 * double(random.below(2)), double(random.below(2)), 0.5, 0.1, 0.3 * double(random.below(2)), 1};
      sampling.push_back(s);
    }
    sampled.assign(rows.size(), -7);
  }
  octavo_step record() {
    octavo_step s{};
    s.size = int32_t(sizeof s), s.tokens = int32_t(ids.size()), s.sequences = int32_t(table_row.size()), s.logit_rows = int32_t(rows.size());
    s.samples = int32_t(sampling.size()), s.table_width = width, s.table_rows = table_rows;
    s.token_ids = ids.data(), s.positions = positions.data(), s.starts = starts.data(), s.table_row = table_row.data();
    s.page_table = table.data(), s.no_write = no_write.empty() ? nullptr : no_write.data(), s.rows = rows.data(), s.sampling = sampling.data(), s.sampled = sampled.data();
    s.hidden = hidden.empty() ? nullptr : hidden.data();
    s.parent_rows = parents.empty() ? nullptr : parents.data();
    s.adapters = places.empty() ? nullptr : places.data();
    return s;
  }
};

// The logits of the last step, behind what `out` has.
inline void copy_rows(const octavo_program* program, int64_t rows, std::vector<float>* out) {
  int64_t stride = 0;
  const float* logits = octavo_logits(program, &stride);
  for (int64_t r = 0; r < rows; r++) out->insert(out->end(), logits + r * stride, logits + r * stride + kVocab);
}

// Pages of every (group, sequence), shuffled.
inline std::vector<int32_t> page_tables(Random& random, int64_t sequences, int32_t width) {
  std::vector<int32_t> pages(size_t(kPages), 0), table(size_t(2 * sequences * width));
  for (int32_t p = 0; p < kPages; p++) pages[size_t(p)] = p;
  for (int32_t p = kPages - 1; p > 0; p--) std::swap(pages[size_t(p)], pages[size_t(random.below(p + 1))]);
  if (!CHECK(table.size() <= pages.size())) exit(1);
  std::copy_n(pages.begin(), table.size(), table.begin());
  return table;
}

inline std::vector<int32_t> random_tokens(Random& random, int64_t n) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < n; i++) tokens.push_back(int32_t(random.below(kVocab)));
  return tokens;
}

// Sequences that advance on pages of their own, in both groups.
struct Advance {
  octavo_program* program;
  int32_t page_size, width, sequences;
  std::vector<int32_t> table, begun;  // begun: [sequences] the first position of each in the next step

  Advance(octavo_program* of, int32_t size, int32_t count, Random& random, int32_t most = kMaxPositions)
      : program(of), page_size(size), width(most / size), sequences(count), table(page_tables(random, count, width)), begun(size_t(count), 0) {}

  int64_t slot(int32_t group, int32_t sequence, int32_t position) const {
    return int64_t{table[size_t((group * sequences + sequence) * width + position / page_size)]} * page_size + position % page_size;
  }
  // Without the pages of `group` behind a window, but for those of the first tokens.
  void free_behind(int32_t group, int32_t window, int32_t sinks, Step* step) const {
    for (int32_t s = 0; s < sequences; s++)
      for (int32_t p = (sinks + page_size - 1) / page_size; (p + 1) * page_size <= begun[size_t(s)] - window + 1; p++)
        step->table[size_t((group * sequences + s) * width + p)] = -1;
  }
  void place(Step* step) const { step->width = width, step->table_rows = sequences, step->table = table; }
  std::vector<float> run(Step* step) const {
    const octavo_step record = step->record();
    const int64_t allocations = octavo_allocations();
    if (!CHECK(octavo_run(program, &record) == 0)) printf("  %s\n", octavo_error()), exit(1);
    CHECK(octavo_allocations() == allocations);
    std::vector<float> logits;
    copy_rows(program, record.logit_rows, &logits);
    return logits;
  }
};

}  // namespace check
