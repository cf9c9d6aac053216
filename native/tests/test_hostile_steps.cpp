// Steps, draws and programs under wrong numbers (see test_hostile.cpp): indices out of range, records that contradict themselves,
// parameters that are no numbers. What is refused has written nothing, and no array is read beyond its end.
#include "hostile_fixture.h"

using namespace check;

namespace {

// A step of three sequences; all of its tokens ask for logits. In a line: the positions of all follow each other.
Step small_step(bool in_line = false) {
  Step step;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 64; i++) tokens.push_back(i * 7 % kVocab);
  const int32_t second = in_line ? 18 : 20, third = in_line ? 19 : 0;
  step.add(tokens, 0, 18, 0);
  step.add(tokens, second, second + 1, 2);
  step.add(tokens, third, third + 5, 1);
  step.width = 3, step.table_rows = 3;
  for (int32_t p = 0; p < 2 * 3 * 3; p++) step.table.push_back(p);
  Random random(3);
  step.draw(random);
  step.hidden.assign(step.ids.size() * kHidden, 0);
  return step;
}

struct Tried {
  Model model;
  Step base = small_step();
  std::vector<float> logits;

  explicit Tried(const char* isa) : model(isa, 2, octavo::FMT_W8G64, octavo::KV_INT8, 16) {
    logits = run_base(model.program.get());
    for (const float v : logits) CHECK(fabsf(v) <= 25);
  }
  octavo_engine* engine() { return model.engine.get(); }
  std::vector<float> run_base(octavo_program* program) {
    Step step = base;
    const octavo_step record = step.record();
    CHECK(octavo_run(program, &record) == 0);
    int64_t stride = 0;
    const float* all = octavo_logits(program, &stride);
    return std::vector<float>(all, all + (record.logit_rows - 1) * stride + kVocab);
  }
  // Keys and values of every slot of a layer.
  std::vector<float> pages() {
    std::vector<float> all(size_t(kPages * 16 * 2 * kKVHeads * kDim), 0);
    for (int64_t slot = 0; slot < kPages * 16; slot++) {
      float* at = &all[size_t(slot * 2 * kKVHeads * kDim)];
      octavo_kv_read(model.kv.get(), 0, slot, at, at + kKVHeads * kDim);
    }
    return all;
  }
  // Runs a step that somebody spoilt: refused and nothing written, or as valid as any.
  bool run(octavo_step record, bool must_fail) {
    const size_t draws = base.rows.size();
    record.token_ids = ids_.copy(record.token_ids), record.positions = positions_.copy(record.positions);
    record.starts = starts_.copy(record.starts), record.table_row = table_row_.copy(record.table_row);
    record.page_table = table_.copy(record.page_table), record.rows = rows_.copy(record.rows);
    record.no_write = no_write_.copy(record.no_write), record.sampling = sampling_.copy(record.sampling);
    record.parent_rows = parents_.copy(record.parent_rows);
    const bool look = tries_++ % 16 == 0;
    const std::vector<float> before = look ? pages() : std::vector<float>();
    if (record.sampled) std::fill_n(record.sampled, draws, -7);
    const int32_t status = octavo_run(model.program.get(), &record);
    CHECK(status == 0 ? !must_fail : refused(engine(), true));
    if (status == 0) return false;
    if (look) CHECK(pages() == before);
    if (record.sampled) CHECK(std::count(record.sampled, record.sampled + draws, -7) == int64_t(draws));
    return true;
  }

 private:
  long tries_ = 0;
  Fenced<int32_t> ids_{base.ids.size()}, positions_{base.positions.size()}, starts_{base.starts.size()}, table_row_{base.table_row.size()};
  Fenced<int32_t> table_{base.table.size()}, rows_{base.rows.size()}, parents_{base.ids.size()};
  Fenced<uint8_t> no_write_{base.no_write.size()};
  Fenced<octavo_sampling> sampling_{base.sampling.size()};
};

void test_counts_of_a_step(Tried* tried) {
  Step step = tried->base;
  const octavo_step good = step.record();
  const int32_t wild[] = {kLeast32, -1000, -1, kMaxTokens + 1, 1 << 20, kMost32};
  using Count = int32_t octavo_step::*;
  for (const Count field : {&octavo_step::size, &octavo_step::tokens, &octavo_step::sequences, &octavo_step::logit_rows, &octavo_step::samples, &octavo_step::table_width})
    for (const int32_t value : wild) {
      if (field == &octavo_step::table_width && value > 0) continue;  // how long an array is, the library must believe
      octavo_step record = good;
      record.*field = value;
      tried->run(record, true);
    }
  for (const Count field : {&octavo_step::size, &octavo_step::tokens, &octavo_step::sequences, &octavo_step::logit_rows, &octavo_step::samples, &octavo_step::table_width})
    for (int32_t value = 0; value < good.*field; value++) {  // less than there is: mostly a contradiction
      octavo_step record = good;
      record.*field = value;
      tried->run(record, value == 0 && field != &octavo_step::logit_rows && field != &octavo_step::samples);
    }
  for (const int64_t value : kSizes) {
    octavo_step record = good;
    record.table_rows = value;
    if (value < 3 || value > 1 << 20) tried->run(record, true);
  }
  using Address = const int32_t* octavo_step::*;
  for (const Address field : {&octavo_step::token_ids, &octavo_step::positions, &octavo_step::starts, &octavo_step::table_row, &octavo_step::page_table, &octavo_step::rows}) {
    octavo_step record = good;
    record.*field = nullptr;
    tried->run(record, true);
  }
  octavo_step record = good;
  record.sampling = nullptr;
  tried->run(record, true);
  record = good, record.sampled = nullptr;
  tried->run(record, true);
  record = good, record.scores = step.hidden.data();
  tried->run(record, true);
  record = good, record.grammar_masks = step.no_write.data();
  tried->run(record, true);
  CHECK(refused(tried->engine(), octavo_run(tried->model.program.get(), nullptr) < 0));
}

// One number of one array becomes another one. It may be right by chance, but out of bounds it never is.
void test_numbers_of_a_step(Tried* tried) {
  Random random(9);
  const int32_t wild[] = {kLeast32, kLeast32 + 1, -2, -1, 0, 1, 2, 3, 15, 16, 17, 23, 24, 48, kPages, kVocab, kMaxPositions, kMaxPositions + 1, 1 << 20, kMost32 - 1, kMost32};
  long failed = 0;
  for (int i = 0; i < 900; i++) {
    Step step = tried->base;
    std::vector<int32_t>* arrays[] = {&step.ids, &step.positions, &step.starts, &step.table_row, &step.table, &step.rows};
    std::vector<int32_t>& spoilt = *arrays[i % 6];
    spoilt[size_t(random.below(int64_t(spoilt.size())))] = wild[random.below(int64_t(std::size(wild)))];
    failed += tried->run(step.record(), false);
  }
  CHECK(failed > 400);
  for (const int32_t value : {kLeast32, -1, kVocab, kMost32})
    for (size_t at = 0; at < tried->base.ids.size(); at++) {
      Step step = tried->base;
      step.ids[at] = value;
      tried->run(step.record(), true);
      step = tried->base;
      step.rows[at] = value;
      tried->run(step.record(), true);
    }
  for (const int32_t value : {kLeast32, -1, kPages, kMost32}) {
    Step step = tried->base;
    step.table[0] = value;
    tried->run(step.record(), true);
    step = tried->base;
    step.table_row[1] = value;
    tried->run(step.record(), true);
  }
}

// The row before each changes nothing; any other number does not go with the positions, or is no earlier row.
void test_parents(Tried* tried) {
  Step step = tried->base;
  for (size_t s = 0; s + 1 < step.starts.size(); s++)
    for (int32_t t = step.starts[s]; t < step.starts[s + 1]; t++) step.parents.push_back(t - step.starts[s] - 1);
  const octavo_step good = step.record();
  CHECK(!tried->run(good, false));
  for (size_t at = 0; at < step.parents.size(); at++)
    for (const int32_t value : {kLeast32, -2, -1, 0, 1, 4, 17, 24, 1 << 20, kMost32}) {
      Step wrong = step;
      wrong.parents[at] = value;
      tried->run(wrong.record(), value != step.parents[at]);
    }
}

// Where sequences begin says how far arrays are read, even where another number gives the step away.
void test_starts(Tried* tried) {
  for (const bool in_line : {false, true})
    for (size_t at = 0; at < tried->base.starts.size(); at++)
      for (int32_t value = -3; value <= kMaxPositions + 3; value++) {
        Step step = small_step(in_line);
        const int32_t old = step.starts[at];
        step.starts[at] = value;
        const bool rising = std::is_sorted(step.starts.begin(), step.starts.end(), std::less_equal<int32_t>());
        const bool whole = step.starts.front() == 0 && step.starts.back() == int32_t(step.ids.size());
        tried->run(step.record(), !(rising && whole && (in_line || value == old)));
      }
}

// Tokens [from, to) of one sequence with `width` pages in each of both groups, of which the second has lost its first `gone`.
bool runs(Tried* tried, octavo_program* program, int32_t from, int32_t to, int32_t width, int32_t gone) {
  Step step;
  step.add(std::vector<int32_t>(size_t(to), 5), from, to, 0);
  step.width = width;
  for (int32_t p = 0; p < 2 * width; p++) step.table.push_back(p < width || p >= width + gone ? p : -1);
  const octavo_step record = step.record();
  const bool ran = octavo_run(program, &record) == 0;
  if (!ran) CHECK(refused(tried->engine(), true));
  return ran;
}

// The last number that is right and the first that is not.
void test_edges(Tried* tried) {
  octavo_program* const program = tried->model.program.get();
  constexpr int32_t kEnd = kMaxPositions, kAll = kMaxPositions / 16;
  CHECK(runs(tried, program, kEnd - 3, kEnd, kAll, 0) && !runs(tried, program, kEnd - 3, kEnd + 1, kAll + 1, 0));
  CHECK(runs(tried, program, 20, 32, 2, 0) && !runs(tried, program, 20, 33, 2, 0));
  CHECK(runs(tried, program, kWindow + 15, kWindow + 17, 3, 1) && !runs(tried, program, kWindow + 14, kWindow + 17, 3, 1));

  Records records = tried->model.records;  // without the attention of the second group: what it wrote before is not read
  const auto reads = [](const octavo_op& op) { return op.code == OCTAVO_ATTENTION && op.i[1] == 1; };
  records.ops.erase(std::find_if(records.ops.begin(), records.ops.end(), reads));
  records.limits.num_ops--, records.limits.hidden = OCTAVO_NONE;
  const octavo_program_spec spec = records.spec();
  ProgramPtr writer(octavo_program_open(tried->engine(), tried->model.kv.get(), &spec));
  if (!CHECK(writer != nullptr)) return;
  CHECK(runs(tried, writer.get(), 32, 40, 3, 2) && !runs(tried, writer.get(), 31, 40, 3, 2));
  Step step = tried->base;
  octavo_step record = step.record();
  CHECK(record.hidden != nullptr && refused(tried->engine(), octavo_run(writer.get(), &record) < 0));
  record.hidden = nullptr;
  CHECK(octavo_run(writer.get(), &record) == 0);

  records = tried->model.records;  // a layer with a window and, behind it, one without in the same group: nothing of that may be gone
  std::vector<octavo_op*> attention;
  for (octavo_op& op : records.ops)
    if (op.code == OCTAVO_ATTENTION) attention.push_back(&op);
  attention[0]->i[3] = kWindow, attention[1]->i[3] = 0, records.layer_group = {1, 1};
  const octavo_program_spec mixed = records.spec();
  ProgramPtr both(octavo_program_open(tried->engine(), tried->model.kv.get(), &mixed));
  if (CHECK(both != nullptr)) CHECK(runs(tried, both.get(), kWindow + 15, kWindow + 17, 3, 0) && !runs(tried, both.get(), kWindow + 15, kWindow + 17, 3, 1));
}

void test_shapes(Tried* tried) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  using Number = double octavo_shape::*;
  for (const Number field : {&octavo_shape::typical_p, &octavo_shape::top_n_sigma, &octavo_shape::xtc_probability,
                             &octavo_shape::xtc_threshold, &octavo_shape::dynatemp_range, &octavo_shape::dynatemp_exponent})
    for (const double value : {-inf, -1.0, -1e-300, 0.0, 1e-320, 0.5, 1.0, 1e38, 1e39, 1e308, inf, nan})
      for (const int32_t top_k : {0, 1, 50}) {
        octavo_sampling s{1, top_k, top_k ? 0.0 : 1.0, 1, top_k ? 0.2 : 0, 5, 6, 7, 8, 0, nullptr, nullptr, {0, 0, 1, 0.1, 0.2, 1}};
        s.shape.*field = value;
        int32_t id = -7;
        const int32_t status = octavo_sample(tried->engine(), tried->logits.data(), 3, kVocab, kVocab, &s, 1, &id);
        const bool wrong = !(value >= 0 && value < 1e39);
        CHECK(wrong ? refused(tried->engine(), status < 0) && id == -7 : status == 0 && id >= 0 && id < kVocab);
      }
  for (const float value : {-HUGE_VALF, -1e38f, -1.0f, -1e-40f, 0.0f, 1e-40f, 0.5f, 1e38f, HUGE_VALF, NAN}) {
    octavo_sampling s{1, 0, 1, 1, 0.2, 5, 6, 7, 8, value, nullptr, nullptr, {}};
    int32_t id = -7;
    const int32_t status = octavo_sample(tried->engine(), tried->logits.data(), 3, kVocab, kVocab, &s, 1, &id);
    const bool wrong = !(fabsf(value) < HUGE_VALF);
    CHECK(wrong ? refused(tried->engine(), status < 0) && id == -7 : status == 0 && id >= 0 && id < kVocab);
  }
}

void test_draws(Tried* tried) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const double numbers[] = {-inf, -1e308, -1, -1e-300, -0.0, 0, 1e-320, 1e-300, 0.5, 1, 2, 1e308, inf, nan};
  const std::vector<float>& logits = tried->logits;
  const int64_t rows = 3, stride = kVocab;
  using Number = double octavo_sampling::*;
  for (const Number field : {&octavo_sampling::temperature, &octavo_sampling::top_p, &octavo_sampling::min_p})
    for (const double value : numbers)
      for (const int32_t top_k : {0, 1, 50, kMost32}) {
        octavo_sampling s{1, top_k, 1, top_k == 1 ? 0.5 : 1, 0, 5, 6, 7, 8, 0, nullptr, nullptr, {}};
        s.*field = value;
        int32_t id = -7;
        const int32_t status = octavo_sample(tried->engine(), logits.data(), rows, stride, kVocab, &s, 1, &id);
        if (value < 0 || value != value) {
          CHECK(refused(tried->engine(), status < 0) && id == -7);
        } else {
          CHECK(status == 0 && id >= -1 && id < kVocab);
          if (value < 2) CHECK(id >= 0);
        }
        Step step = tried->base;
        step.sampling[2] = s;
        tried->run(step.record(), value < 0 || value != value);
      }
  octavo_sampling s{0, 0, 1, 1, 0, 5, 6, 7, 8, 0, nullptr, nullptr, {}};
  int32_t id = -7;
  for (const int32_t row : {kLeast32, -1, 3, kMost32}) {
    octavo_sampling other = s;
    other.row = row;
    REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, stride, kVocab, &other, 1, &id));
  }
  for (const int32_t top_k : {kLeast32, -1}) {
    octavo_sampling other = s;
    other.top_k = top_k;
    REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, stride, kVocab, &other, 1, &id));
  }
  for (const int64_t n : kSizes) {
    if (n < 1) REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), n, stride, kVocab, &s, 1, &id));
    if (n < kVocab || n > kMost32) REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, n, kVocab, &s, 1, &id));
    if (n < 1 || n > stride) REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, stride, n, &s, 1, &id));
    if (n < 0) REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, stride, kVocab, &s, int32_t(std::max<int64_t>(n, kLeast32)), &id));
    if (n > kMost32) REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, n, n, &s, 1, &id));
  }
  REFUSED(tried->engine(), octavo_sample(tried->engine(), nullptr, rows, stride, kVocab, &s, 1, &id));
  REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, stride, kVocab, nullptr, 1, &id));
  REFUSED(tried->engine(), octavo_sample(tried->engine(), logits.data(), rows, stride, kVocab, &s, 1, nullptr));
  CHECK(id == -7);
}

// Opens a spoilt program; one that is still valid runs within its memory.
bool open_fails(Tried* tried, const octavo_program_spec& spec) {
  ProgramPtr program(octavo_program_open(tried->engine(), tried->model.kv.get(), &spec));
  if (program == nullptr) return CHECK(refused(tried->engine(), true));
  Step step = tried->base;
  if (spec.hidden == OCTAVO_NONE) step.hidden.clear();
  if (spec.hidden >= 0) step.hidden.assign(step.ids.size() * size_t(spec.buffers[spec.hidden].cols), 0);
  for (octavo_sampling& s : step.sampling) s.temperature = 0.7;
  const octavo_step record = step.record();
  const int32_t status = octavo_run(program.get(), &record);
  if (status != 0) CHECK(refused(tried->engine(), true));
  return false;
}

void test_counts_of_a_program(Tried* tried) {
  Records records = tried->model.records;
  const octavo_program_spec good = records.spec();
  using Count = int32_t octavo_program_spec::*;
  const Count counts[] = {&octavo_program_spec::size, &octavo_program_spec::num_buffers, &octavo_program_spec::num_ops, &octavo_program_spec::num_ropes,
                          &octavo_program_spec::num_layers, &octavo_program_spec::num_groups, &octavo_program_spec::max_tokens,
                          &octavo_program_spec::max_sequences, &octavo_program_spec::max_logit_rows, &octavo_program_spec::max_positions,
                          &octavo_program_spec::vocab_size, &octavo_program_spec::logits, &octavo_program_spec::hidden, &octavo_program_spec::num_extra};
  for (const Count field : counts) {
    for (const int32_t value : {kLeast32, -1000, -2}) {
      octavo_program_spec spec = good;
      spec.*field = value;
      CHECK(open_fails(tried, spec));
    }
    for (int32_t value = -1; value < std::min(good.*field, 40); value++) {
      octavo_program_spec spec = good;
      spec.*field = value;
      open_fails(tried, spec);
    }
    octavo_program_spec spec = good;
    spec.*field = kMost32;
    const bool limit = field == &octavo_program_spec::max_positions;  // no memory goes by it
    CHECK(open_fails(tried, spec) || limit);
  }
  octavo_program_spec large = good;
  large.max_tokens = large.max_logit_rows = 1 << 20;
  open_fails(tried, large);
  for (int i = 0; i < 6; i++) {
    octavo_program_spec spec = good;
    if (i == 0) spec.buffers = nullptr;
    if (i == 1) spec.ops = nullptr;
    if (i == 2) spec.ropes = nullptr;
    if (i == 3) spec.layer_group = nullptr;
    if (i == 4) spec.layer_index = nullptr;
    if (i == 5) spec.extra = nullptr;
    CHECK(open_fails(tried, spec));
  }
  NO_HANDLE(tried->engine(), octavo_program_open(tried->engine(), tried->model.kv.get(), nullptr));
  NO_HANDLE(tried->engine(), octavo_program_open(tried->engine(), nullptr, &good));
}

void spoil_tables(Random& random, Records* records) {
  const int32_t wild[] = {kLeast32, -2, -1, 0, 1, 2, 3, 9, 40, 1 << 20, kMost32};
  const int32_t value = wild[random.below(int64_t(std::size(wild)))];
  std::vector<int32_t>* arrays[] = {&records->layer_group, &records->layer_index, &records->extra};
  switch (const int64_t which = random.below(6)) {
    case 0: records->buffers[size_t(random.below(BUFFERS))].rows = value; break;
    case 1: records->buffers[size_t(random.below(BUFFERS))].cols = kSizes[random.below(int64_t(std::size(kSizes)))]; break;
    case 2: records->ropes[0].pairs = value > 8 ? 1025 : value; break;
    default: (*arrays[which - 3])[size_t(random.below(int64_t(arrays[which - 3]->size())))] = value;
  }
}

void spoil_record(Random& random, Records* records) {
  const int32_t wild[] = {kLeast32, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 17, 20, 40, 1 << 20, kMost32};
  octavo_op& op = records->ops[size_t(random.below(int64_t(records->ops.size())))];
  const int32_t value = wild[random.below(int64_t(std::size(wild)))];
  switch (random.below(6)) {
    case 0: op.code = value; break;
    case 1: op.in[random.below(4)] = value; break;
    case 2: op.out[random.below(4)] = value; break;
    case 3: op.w[random.below(9)] = value; break;
    case 4: op.i[random.below(6)] = value; break;
    default: op.f[random.below(4)] = random.below(2) ? NAN : INFINITY;
  }
}

void test_records(Tried* tried) {
  Random random(4);
  long failed[2] = {};
  for (int i = 0; i < 1200; i++) {
    Records records = tried->model.records;
    i % 4 == 0 ? spoil_tables(random, &records) : spoil_record(random, &records);
    if (i % 3 == 0) spoil_record(random, &records);
    const octavo_program_spec spec = records.spec();
    failed[i % 4 == 0] += open_fails(tried, spec);
  }
  CHECK(failed[0] > 300 && failed[0] < 850 && failed[1] > 120);  // and some are programs that run
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<const octavo::Kernels*> all = tables(argc > 1 ? argv[1] : nullptr);
  for (const octavo::Kernels* k : {all.front(), all.back()}) {
    Tried tried(k->name);
    test_counts_of_a_step(&tried);
    test_numbers_of_a_step(&tried);
    test_parents(&tried);
    test_starts(&tried);
    test_edges(&tried);
    test_draws(&tried);
    test_shapes(&tried);
    test_counts_of_a_program(&tried);
    test_records(&tried);
    if (all.size() == 1) break;
  }
  CHECK(refusals > 1000);
  return finish("test_hostile_steps");
}
