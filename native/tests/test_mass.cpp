// Attention mass, shifted positions, and keys that stay: the same bytes on any threads and pages, and nothing read or written that
// was not given.
#include "hostile_fixture.h"

using namespace check;

namespace {

constexpr int32_t kLength = 150, kLook = 40;

std::vector<int32_t> tokens_of(int32_t count) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; i++) tokens.push_back(i * 29 % kVocab);
  return tokens;
}

Step step_of(const Model& model, int32_t from, int32_t to, bool silent) {
  Step step;
  step.add(tokens_of(to), from, to, 0, silent);
  step.width = (kLength + model.page_size - 1) / model.page_size;
  for (int32_t p = 0; p < 2 * step.width; p++) step.table.push_back(kPages - 1 - p);
  return step;
}

// [layers, kv heads, kLength] that the last kLook rows look at.
std::vector<float> mass_of(const char* isa, int32_t threads, int32_t kv_type, int32_t page_size) {
  Model model(isa, threads, octavo::FMT_FP32, kv_type, page_size, 0);
  Step all = step_of(model, 0, kLength, false);
  const octavo_step whole = all.record();
  CHECK(octavo_run(model.program.get(), &whole) == 0);
  Step last = step_of(model, kLength - kLook, kLength, true);
  octavo_step record = last.record();
  Fenced<float> mass(2 * kKVHeads * kLength);
  const std::vector<float> nothing(2 * kKVHeads * kLength, -1);
  record.scores = const_cast<float*>(mass.copy(nothing.data()));
  if (!CHECK(octavo_run(model.program.get(), &record) == 0)) printf("  %s\n", octavo_error());
  return std::vector<float>(record.scores, record.scores + nothing.size());
}

void test_mass(const char* isa, int32_t kv_type) {
  const std::vector<float> mass = mass_of(isa, 1, kv_type, 16);
  CHECK(mass == mass_of(isa, 3, kv_type, 32));
  for (int32_t head = 0; head < 2 * kKVHeads; head++) {
    double all = 0;
    bool fits = true;
    for (int32_t j = 0; j < kLength; j++) {
      const float value = mass[size_t(head * kLength + j)];
      all += value;
      fits = fits && value >= 0 && value <= float(std::min(kLook, kLength - j) * kHeads / kKVHeads) + 1e-3f;  // rows before it do not see it
    }
    CHECK(fits);
    CHECK(fabs(all - kLook * kHeads / kKVHeads) < 1e-2);
  }
}

// Of a layer whose queries and keys can be read, the sums in double precision. Scores may all lie far below zero, or rise by
// hundreds from one block of keys to the next.
void test_sums(const char* isa, int32_t kv_type, float scale, float soft_cap) {
  Model model(isa, 2, octavo::FMT_FP32, kv_type, 32, 0);
  for (octavo_op& op : model.records.ops)
    if (op.code == OCTAVO_ATTENTION && op.i[1] == 1) op.f[0] = scale, op.f[1] = soft_cap;
  octavo_program_spec spec = model.records.spec();
  model.program.reset(octavo_program_open(model.engine.get(), model.kv.get(), &spec));
  if (!CHECK(model.program != nullptr)) return;
  std::vector<float> mass(2 * kKVHeads * kLength, -1);
  Step step = step_of(model, 0, kLength, false);
  octavo_step record = step.record();
  record.scores = mass.data();
  if (!CHECK(octavo_run(model.program.get(), &record) == 0)) return;
  int64_t stride = 0;
  const float* queries = octavo_values(model.program.get(), Q, &stride);
  std::vector<float> keys(kLength * kKVHeads * kDim), value(kKVHeads * kDim);
  for (int32_t j = 0; j < kLength; j++) {
    const int64_t slot = int64_t{step.table[size_t(step.width + j / 32)]} * 32 + j % 32;
    CHECK(octavo_kv_read(model.kv.get(), 0, slot, &keys[size_t(j * kKVHeads * kDim)], value.data()) == 0);
  }
  std::vector<double> expected(kKVHeads * kLength, 0);
  bool below = false, rises = false;
  for (int32_t row = 0; row < kLength; row++) {
    for (int32_t head = 0; head < kHeads; head++) {
      const int32_t of = head * kKVHeads / kHeads;
      std::vector<double> scores;
      for (int32_t j = 0; j <= row; j++) {
        double sum = 0;
        for (int32_t d = 0; d < kDim; d++) sum += double(queries[row * stride + head * kDim + d]) * keys[size_t((j * kKVHeads + of) * kDim + d)];
        scores.push_back(soft_cap > 0 ? soft_cap * tanh(scale * sum / soft_cap) : scale * sum);
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      below = below || top < -200;
      rises = rises || (row >= 64 && top > 200 + *std::max_element(scores.begin(), scores.begin() + 64));
      double all = 0;
      for (const double score : scores) all += exp(score - top);
      for (int32_t j = 0; j <= row; j++) expected[size_t(of * kLength + j)] += exp(scores[size_t(j)] - top) / all;
    }
  }
  CHECK(scale < 10 || (below && rises));
  bool near = true;
  for (size_t i = 0; i < expected.size(); i++)
    near = near && fabs(mass[kKVHeads * kLength + i] - expected[i]) <= (scale < 10 ? 2e-5 : 2e-3) * (1 + expected[i]);
  if (!CHECK(near)) printf("  %s kv %d scale %g soft cap %g\n", isa, kv_type, double(scale), double(soft_cap));
}

// Rope is relative: all turned further by as much is the same text, up to rounding.
void test_shifts(const char* isa) {
  std::vector<float> plain, moved;
  for (const int32_t shift : {0, 9}) {
    Model model(isa, 2, octavo::FMT_FP32, octavo::KV_FP32, 16, 0);
    Step step = step_of(model, 0, 60, false);
    octavo_step record = step.record();
    record.shifts = &shift;
    if (!CHECK(octavo_run(model.program.get(), &record) == 0)) return;
    int64_t stride = 0;
    const float* logits = octavo_logits(model.program.get(), &stride);
    (shift ? moved : plain).assign(logits + 59 * stride, logits + 59 * stride + kVocab);
  }
  bool near = true;
  for (size_t i = 0; i < plain.size(); i++) near = near && fabsf(plain[i] - moved[i]) < 2e-3f;
  CHECK(near);
  CHECK(plain != moved);
}

void test_refusals() {
  Model model(nullptr, 2, octavo::FMT_FP32, octavo::KV_FP32, 16, 0), windowed(nullptr, 2, octavo::FMT_FP32, octavo::KV_FP32, 16);
  std::vector<float> room(2 * kKVHeads * kLength);
  Step step = step_of(model, 0, 20, false), two = step_of(model, 0, 20, false);
  two.add(tokens_of(5), 0, 5, 0);
  octavo_step of_two = two.record(), seen = step.record();
  of_two.scores = seen.scores = room.data();
  REFUSED(model.engine.get(), octavo_run(model.program.get(), &of_two));
  REFUSED(windowed.engine.get(), octavo_run(windowed.program.get(), &seen));
  for (const int32_t shift : {-1, kLeast32, kMaxPositions - 19, kMost32, 3}) {
    octavo_step record = step.record();
    record.shifts = &shift;
    Model& of = shift == 3 ? windowed : model;
    REFUSED(of.engine.get(), octavo_run(of.program.get(), &record));
  }
}

void test_keep(int32_t kv_type) {
  Model model(nullptr, 1, octavo::FMT_FP32, kv_type, 16, 0);
  octavo_engine* engine = model.engine.get();
  octavo_kv* kv = model.kv.get();
  Random random(5);
  const auto read = [&](int64_t slot) {
    std::vector<float> both(2 * kKVHeads * kDim);
    CHECK(octavo_kv_read(kv, 0, slot, both.data(), both.data() + kKVHeads * kDim) == 0);
    return both;
  };
  for (int64_t slot = 0; slot < 3 * 16; slot++) {
    std::vector<float> k(kKVHeads * kDim), v(kKVHeads * kDim);
    random.fill(k, 2), random.fill(v, 2);
    CHECK(octavo_kv_write(kv, 0, slot, k.data(), v.data()) == 0);
  }
  const int32_t sources[] = {2, 0, 1}, targets[] = {7, 5};
  std::vector<int32_t> kept;  // of each head other ones
  for (int32_t head = 0; head < kKVHeads; head++)
    for (int32_t i = 0; i < 20; i++) kept.push_back(2 * i + head + (i > 9));
  CHECK(octavo_kv_keep(kv, sources, 3, targets, 2, kept.data(), 20) == 0);
  for (int32_t i = 0; i < 20; i++) {
    const std::vector<float> to = read(targets[i / 16] * 16 + i % 16);
    for (int32_t head = 0; head < kKVHeads; head++) {
      const int32_t at = kept[size_t(head * 20 + i)];
      const std::vector<float> from = read(sources[at / 16] * 16 + at % 16);
      for (const int32_t half : {0, kKVHeads * kDim})
        CHECK(std::equal(to.begin() + half + head * kDim, to.begin() + half + (head + 1) * kDim, from.begin() + half + head * kDim));
    }
  }
  for (const int32_t wrong : {-1, 48, kLeast32, kMost32}) {
    std::vector<int32_t> spoilt = kept;
    spoilt[25] = wrong;
    REFUSED(engine, octavo_kv_keep(kv, sources, 3, targets, 2, spoilt.data(), 20));
  }
  for (const int32_t page : {-1, kPages, kMost32}) {
    const int32_t pages[] = {2, page, 1};
    REFUSED(engine, octavo_kv_keep(kv, pages, 3, targets, 2, kept.data(), 20));
    REFUSED(engine, octavo_kv_keep(kv, sources, 3, pages, 2, kept.data(), 20));
  }
  for (const int32_t count : {-1, 33, kMost32}) REFUSED(engine, octavo_kv_keep(kv, sources, 3, targets, 2, kept.data(), count));
  REFUSED(engine, octavo_kv_keep(kv, nullptr, 3, targets, 2, kept.data(), 20));
  REFUSED(engine, octavo_kv_keep(kv, sources, -3, targets, 2, kept.data(), 20));
}

}  // namespace

int main(int argc, char** argv) {
  for (const octavo::Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    for (int32_t type = 0; type < octavo::KV_COUNT; type++) {
      test_mass(k->name, type);
      test_sums(k->name, type, 0.25f, type == octavo::KV_FP32 ? 0.0f : 2.0f);
      test_sums(k->name, type, 100, 0);
    }
    test_shifts(k->name);
  }
  for (int32_t type = 0; type < octavo::KV_COUNT; type++) test_keep(type);
  test_refusals();
  return finish("test_mass");
}
