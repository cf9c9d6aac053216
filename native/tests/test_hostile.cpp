// The C ABI under wrong numbers: sizes that are negative, huge or just beyond, indices out of range, arrays and records that are
// missing, parameters that are no numbers. Everything is refused with a sentence and nothing has been written, or it was another
// valid request. Most of what this looks for the sanitizers see (`make sanitize`).
#include <limits>
#include <string>

#include "program_fixture.h"

using namespace check;

namespace {

constexpr int32_t kLeast32 = INT32_MIN, kMost32 = INT32_MAX;
constexpr int64_t kLeast64 = INT64_MIN, kMost64 = INT64_MAX;
const int64_t kSizes[] = {kLeast64, kLeast64 / 2, int64_t{kLeast32} - 1, kLeast32, -2, -1, 0, 1, 2, 3, 7, 1 << 20, (1 << 24) + 1, kMost32, int64_t{1} << 32, int64_t{1} << 46, kMost64 / 2, kMost64};

long refusals = 0;

// Every refusal says something of its own: the text of another call does not stand.
void forget_error(octavo_engine* engine) { octavo_read_row(engine, -1, 0, nullptr); }
bool refused(octavo_engine* engine, bool failed) {
  if (!failed) return false;
  refusals++;
  const std::string said = octavo_error();
  forget_error(engine);
  return said.size() > 10 && said != octavo_error();
}
#define REFUSED(engine, call) CHECK(refused(engine, (call) < 0))
#define NO_HANDLE(engine, call) CHECK(refused(engine, (call) == nullptr))

void test_engine(octavo_engine* engine) {
  const std::string endless(100000, 'x');
  for (const char* isa : {"sse9", "AMX", " ", "generic ", endless.c_str()}) NO_HANDLE(engine, octavo_open(isa, 1));
  for (const int32_t threads : {kLeast32, -1, 0}) {
    EnginePtr opened(octavo_open("generic", threads));
    CHECK(opened != nullptr && octavo_threads(opened.get()) == octavo_cpus());
  }
  EnginePtr many(octavo_open("generic", kMost32));
  CHECK(many != nullptr && octavo_threads(many.get()) == 255);
  octavo_close(nullptr), octavo_kv_close(nullptr), octavo_program_close(nullptr);
}

void test_matrices(octavo_engine* engine) {
  const std::vector<float> data(64 * 8, 0.5f);
  const std::vector<int8_t> codes(64 * 8, 3);
  const int64_t before = octavo_weight_bytes(engine);
  for (const int32_t format : {kLeast32, -1, int32_t(octavo::FMT_COUNT), kMost32})
    for (const bool coded : {false, true}) {
      octavo_matrix m{format, 0, 8, 64, data.data(), nullptr, coded ? codes.data() : nullptr, data.data(), nullptr, 0};
      REFUSED(engine, octavo_add_matrix(engine, &m));
      REFUSED(engine, octavo_matrix_bytes(engine, &m));
    }
  for (int32_t format = 0; format < octavo::FMT_COUNT; format++)
    for (const int32_t pair : {0, 1})
      for (const int64_t n : kSizes)
        for (const int64_t k : kSizes) {
          octavo_matrix m{format, pair, n, k, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
          REFUSED(engine, octavo_add_matrix(engine, &m));  // no data at all
          const bool inside = n > 0 && k > 0 && n <= 1 << 24 && k <= 1 << 24;
          const int64_t bytes = octavo_matrix_bytes(engine, &m);
          const bool absurd = bytes < 0;  // a size within the limits that no memory has
          CHECK(inside && !absurd ? bytes >= n * k / 2 && bytes < int64_t{1} << 53 : refused(engine, bytes < 0));
          if (inside && k <= 130000) CHECK(!absurd);
          m.data = m.up = data.data();
          if (!inside) REFUSED(engine, octavo_add_matrix(engine, &m));
        }
  for (const int64_t group : {kLeast64, int64_t{-1}, int64_t{65}, int64_t{1} << 40, kMost64}) {
    octavo_matrix m{octavo::FMT_W4G32, 0, 8, 64, nullptr, nullptr, codes.data(), data.data(), data.data(), group};
    REFUSED(engine, octavo_add_matrix(engine, &m));
  }
  octavo_matrix half{octavo::FMT_BF16, 1, 4, 64, data.data(), nullptr, nullptr, nullptr, nullptr, 0};
  REFUSED(engine, octavo_add_matrix(engine, &half));
  octavo_matrix unscaled{octavo::FMT_W8G64, 0, 8, 64, nullptr, nullptr, codes.data(), nullptr, nullptr, 0};
  REFUSED(engine, octavo_add_matrix(engine, &unscaled));
  octavo_matrix whole{octavo::FMT_BF16, 0, 8, 64, nullptr, nullptr, codes.data(), data.data(), nullptr, 0};
  REFUSED(engine, octavo_add_matrix(engine, &whole));
  REFUSED(engine, octavo_add_matrix(engine, nullptr));
  REFUSED(engine, octavo_matrix_bytes(engine, nullptr));
  CHECK(octavo_weight_bytes(engine) == before);
}

// What a file holds: its type, its length and its heads are what somebody else wrote.
void test_stored(octavo_engine* engine) {
  std::vector<uint8_t> data(8 * 64 * 4, 0);
  const int64_t before = octavo_weight_bytes(engine);
  const int32_t types[] = {kLeast32, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 29, 30, 31, kMost32};
  for (const int32_t type : types)
    for (const int64_t bytes : kSizes)
      for (const int64_t k : {int64_t{1}, int64_t{31}, int64_t{64}, int64_t{256}, int64_t{1} << 24, kMost64}) {
        octavo_stored half{type, 0, 0, 0, data.data(), bytes};
        REFUSED(engine, octavo_add_stored(engine, octavo::FMT_W4G32, 8, k, &half, 1));
        half.data = nullptr;
        REFUSED(engine, octavo_add_stored(engine, octavo::FMT_W4G32, 8, k, &half, 1));
      }
  octavo_stored halves[2] = {{30, 0, 0, 0, data.data(), 8 * 64 * 2}, {30, 0, 0, 0, data.data(), 8 * 64 * 2}};
  for (const int32_t count : {kLeast32, -1, 0, 3, kMost32}) REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, count));
  REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, nullptr, 1));
  for (const int64_t n : kSizes) {
    REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, n, 64, halves, 1));
    REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, n, halves, 2));
  }
  for (const int32_t format : {kLeast32, -1, int32_t(octavo::FMT_COUNT), kMost32}) REFUSED(engine, octavo_add_stored(engine, format, 8, 64, halves, 1));
  for (const int32_t heads : {kLeast32, -1, 3, 8, kMost32}) {
    halves[0].heads = heads;
    REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, 1));
  }
  halves[0].heads = 2;
  REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, 2));  // a pair has no heads
  CHECK(octavo_weight_bytes(engine) == before && octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, 1) >= 0);
}

void test_vectors_and_rows(octavo_engine* engine) {
  const std::vector<float> data(64 * 8, 0.5f);
  for (const int64_t n : kSizes)
    if (n <= 0 || n > 1 << 24) REFUSED(engine, octavo_add_vector(engine, data.data(), n));
  REFUSED(engine, octavo_add_vector(engine, nullptr, 4));
  const int64_t vector = octavo_add_vector(engine, data.data(), 64);
  octavo_matrix m{octavo::FMT_W8G64, 1, 4, 64, data.data(), data.data(), nullptr, nullptr, nullptr, 0};
  const int64_t matrix = octavo_add_matrix(engine, &m);
  std::vector<float> row(64, -1);
  CHECK(vector >= 0 && matrix > vector && octavo_read_row(engine, matrix, 7, row.data()) == 0);
  for (const int64_t n : kSizes) {
    if (n < 0 || n >= 8) REFUSED(engine, octavo_read_row(engine, matrix, n, row.data()));
    REFUSED(engine, octavo_read_row(engine, vector, n, row.data()));
  }
  REFUSED(engine, octavo_read_row(engine, matrix, 0, nullptr));
  for (const int64_t weight : {kLeast64, int64_t{-1}, matrix + 1, kMost64}) {  // the text that refused() takes for no answer
    CHECK(octavo_read_row(engine, weight, 0, row.data()) < 0);
  }
}

void test_pages(octavo_engine* engine) {
  const int32_t type = octavo::KV_BF16;
  for (const int64_t wide : kSizes) {
    const int32_t n = int32_t(std::clamp<int64_t>(wide, kLeast32, kMost32));
    if (n < 0 || n >= octavo::KV_COUNT) {
      NO_HANDLE(engine, octavo_kv_open(engine, n, 16, 2, 16, 1, 4));
      REFUSED(engine, octavo_kv_bytes(engine, n, 16, 2, 16, 1));
    }
    NO_HANDLE(engine, octavo_kv_open(engine, type, n, 2, 16, 1, 4));  // no size of the list is one of a page
    REFUSED(engine, octavo_kv_bytes(engine, type, n, 2, 16, 1));
    if (n < 1 || n > 4096) {
      NO_HANDLE(engine, octavo_kv_open(engine, type, 16, n, 16, 1, 4));
      NO_HANDLE(engine, octavo_kv_open(engine, type, 16, 2, n, 1, 4));
      NO_HANDLE(engine, octavo_kv_open(engine, type, 16, 2, 16, n, 4));
      REFUSED(engine, octavo_kv_bytes(engine, type, 16, n, n, n));
    }
    if (wide < 1 || wide > kMost32) NO_HANDLE(engine, octavo_kv_open(engine, type, 16, 2, 16, 1, wide));
  }
  NO_HANDLE(engine, octavo_kv_open(engine, type, 4096, 1024, 1024, 4096, kMost32));  // more than any memory
  CHECK(octavo_kv_bytes(engine, octavo::KV_FP32, 512, 1024, 256, 4096) >= int64_t{1} << 40);  // the largest
}

void test_slots(octavo_engine* engine, int32_t type) {
  KVPtr kv(octavo_kv_open(engine, type, 16, 2, 24, 3, 4));
  std::vector<float> k(48, 1), v(48, 2);
  CHECK(octavo_kv_write(kv.get(), 2, 63, k.data(), v.data()) == 0);
  for (const int64_t n : kSizes) {
    if (n < 0 || n >= 64) {
      REFUSED(engine, octavo_kv_write(kv.get(), 0, n, k.data(), v.data()));
      REFUSED(engine, octavo_kv_read(kv.get(), 0, n, k.data(), v.data()));
      const int64_t moves[] = {0, 1, 1, n, n, 2};
      REFUSED(engine, octavo_kv_move_slots(kv.get(), moves, 2));
      REFUSED(engine, octavo_kv_move_slots(kv.get(), moves, 3));
    }
    const int32_t at = int32_t(std::clamp<int64_t>(n, kLeast32, kMost32));
    if (at < 0 || at > 3) {
      REFUSED(engine, octavo_kv_write(kv.get(), at, 0, k.data(), v.data()));
      REFUSED(engine, octavo_kv_read(kv.get(), at, 0, k.data(), v.data()));
      const int32_t pairs[] = {0, 1, 1, at, at, 2};
      REFUSED(engine, octavo_kv_copy_pages(kv.get(), pairs, 2));
      REFUSED(engine, octavo_kv_copy_pages(kv.get(), pairs, 3));
    }
    const int64_t move[] = {63, 0};
    const int32_t pair[] = {3, 0};
    if (n < 0 || n > kMost32) {
      REFUSED(engine, octavo_kv_copy_pages(kv.get(), pair, n));
      REFUSED(engine, octavo_kv_move_slots(kv.get(), move, n));
    }
  }
  REFUSED(engine, octavo_kv_copy_pages(kv.get(), nullptr, 1));
  REFUSED(engine, octavo_kv_move_slots(kv.get(), nullptr, 1));
  REFUSED(engine, octavo_kv_write(kv.get(), 0, 0, nullptr, v.data()));
  REFUSED(engine, octavo_kv_read(kv.get(), 0, 0, k.data(), nullptr));
  CHECK(octavo_kv_copy_pages(kv.get(), nullptr, 0) == 0 && octavo_kv_move_slots(kv.get(), nullptr, 0) == 0);
  octavo_kv_read(kv.get(), 2, 63, k.data(), v.data());
  CHECK(fabsf(k[47] - 1) < 0.01f && fabsf(v[47] - 2) < 0.02f);
  octavo_kv_read(kv.get(), 2, 15, k.data(), v.data());
  CHECK(k[47] == 0 && v[47] == 0);
}

// ---- programs

// A step of three sequences; all of its tokens ask for logits.
Step small_step() {
  Step step;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 64; i++) tokens.push_back(i * 7 % kVocab);
  step.add(tokens, 0, 18, 0);
  step.add(tokens, 20, 21, 2);
  step.add(tokens, 0, 5, 1);
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
  bool run(const octavo_step& record, bool must_fail) {
    const size_t draws = base.rows.size();
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
  record = good, record.parent_rows = step.rows.data();
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

void test_draws(Tried* tried) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const double numbers[] = {-inf, -1e308, -1, -1e-300, -0.0, 0, 1e-320, 1e-300, 0.5, 1, 2, 1e308, inf, nan};
  const std::vector<float>& logits = tried->logits;
  const int64_t rows = 3, stride = kVocab;
  using Number = double octavo_sampling::*;
  for (const Number field : {&octavo_sampling::temperature, &octavo_sampling::top_p, &octavo_sampling::min_p})
    for (const double value : numbers)
      for (const int32_t top_k : {0, 1, 50, kMost32}) {
        octavo_sampling s{1, top_k, 1, top_k == 1 ? 0.5 : 1, 0, 5, 6, 7, 8, 9, nullptr, nullptr};
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
  octavo_sampling s{0, 0, 1, 1, 0, 5, 6, 7, 8, 9, nullptr, nullptr};
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

void test_measurements(octavo_engine* engine) {
  for (const int32_t wrong : {kLeast32, -1, 0}) {
    REFUSED(engine, octavo_measure_read(engine, wrong, 4096, 1));
    REFUSED(engine, octavo_measure_read(engine, 1, wrong, 1));
    REFUSED(engine, octavo_measure_read(engine, 1, 4096, wrong));
    REFUSED(engine, octavo_measure_dots(engine, wrong, 0, 1, 1));
    REFUSED(engine, octavo_measure_dots(engine, 1, 0, wrong, 1));
    REFUSED(engine, octavo_measure_dots(engine, 1, 0, 1, wrong));
    REFUSED(engine, octavo_measure_barrier(engine, wrong, 1, 1));
    REFUSED(engine, octavo_measure_barrier(engine, 1, wrong, 1));
    REFUSED(engine, octavo_measure_barrier(engine, 1, 1, wrong));
  }
  for (const int32_t kind : {kLeast32, -1, 3, kMost32}) REFUSED(engine, octavo_measure_dots(engine, 1, kind, 1, 1));
  REFUSED(engine, octavo_measure_read(engine, 256, 4096, 1));
  REFUSED(engine, octavo_measure_read(engine, 1, kMost64, 1));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<const octavo::Kernels*> all = tables(argc > 1 ? argv[1] : nullptr);
  for (const octavo::Kernels* k : all) {
    EnginePtr engine(octavo_open(k->name, 2));
    if (k == all.front()) test_engine(engine.get()), test_measurements(engine.get());
    test_matrices(engine.get());
    test_stored(engine.get());
    test_vectors_and_rows(engine.get());
    test_pages(engine.get());
    for (int32_t type = 0; type < octavo::KV_COUNT; type++) test_slots(engine.get(), type);
    if (k != all.front() && k != all.back()) continue;
    Tried tried(k->name);
    test_counts_of_a_step(&tried);
    test_numbers_of_a_step(&tried);
    test_draws(&tried);
    test_counts_of_a_program(&tried);
    test_records(&tried);
  }
  CHECK(refusals > 10000);
  return finish("test_hostile");
}
