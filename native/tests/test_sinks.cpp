// Programs whose windows leave the first tokens in sight: a position's logits are the same bytes however its sequence is cut, whatever
// runs beside it, on 1 to 4 threads, once the pages between the first tokens and the window are gone. And what is refused.
#include <string>

#include "program_fixture.h"

using namespace check;

namespace {

// A model whose attention has the same window and the same sink tokens everywhere.
struct Sunk {
  Model model;
  Records records;
  ProgramPtr program;
  int32_t window, sinks;

  Sunk(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t size, int32_t seen, int32_t tokens)
      : model(isa, threads, format, kv_type, size), records(model.records), window(seen), sinks(tokens) {
    for (octavo_op& op : records.ops)
      if (op.code == OCTAVO_ATTENTION) op.i[3] = window, op.i[4] = sinks, op.i[5] = 0;
    program = open();
    if (!CHECK(program != nullptr)) printf("  %s\n", octavo_error()), exit(1);
  }
  ProgramPtr open() {
    const octavo_program_spec spec = records.spec();
    return ProgramPtr(octavo_program_open(model.engine.get(), model.kv.get(), &spec));
  }
};

std::vector<float> alone(const char* isa, int32_t format, int32_t kv_type, const Sunk& as, const std::vector<int32_t>& tokens) {
  Sunk other(isa, 1, format, kv_type, 16, as.window, as.sinks);
  Random random(1);
  const Advance all(other.program.get(), 16, 1, random);
  Step step;
  step.add(tokens, 0, int32_t(tokens.size()), 0);
  all.place(&step);
  return all.run(&step);
}

void test_bytes(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t size, uint64_t seed) {
  Random random(seed);
  const int32_t windows[] = {1, 8, 20, 33, 64}, sinks[] = {1, 4, 4, 16, 17, 64}, count = 3;
  Sunk sunk(isa, threads, format, kv_type, size, windows[random.below(5)], sinks[random.below(6)]);
  Advance all(sunk.program.get(), size, count, random);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::vector<float>> answers;
  for (int32_t s = 0; s < count; s++) {
    prompts.push_back(random_tokens(random, random.between(90, 180)));
    answers.push_back(alone(isa, format, kv_type, sunk, prompts.back()));
  }
  for (bool more = true; more;) {
    more = false;
    Step step;
    all.place(&step);
    all.free_behind(0, sunk.window, sunk.sinks, &step), all.free_behind(1, sunk.window, sunk.sinks, &step);
    std::vector<const float*> expected;
    for (int32_t s = 0; s < count; s++) {
      const int64_t left = int64_t(prompts[size_t(s)].size()) - all.begun[size_t(s)], chunks[] = {1, 1, 2, random.between(1, 30), 80};
      more = more || left > 0;
      if (left == 0 || random.below(4) == 0) continue;
      const int32_t from = all.begun[size_t(s)], to = from + int32_t(std::min(left, chunks[random.below(5)]));
      step.add(prompts[size_t(s)], from, to, s);
      for (int32_t p = from; p < to; p++) expected.push_back(&answers[size_t(s)][size_t(p) * kVocab]);
      all.begun[size_t(s)] = to;
    }
    if (step.ids.empty()) continue;
    if (random.below(3) == 0) sunk.program = sunk.open(), all.program = sunk.program.get();  // which has turned nothing yet
    const std::vector<float> logits = all.run(&step);
    bool same = true;
    for (size_t r = 0; r < expected.size(); r++) same = same && !memcmp(&logits[r * kVocab], expected[r], kVocab * sizeof(float));
    if (!CHECK(same)) printf("  %s threads %d format %d kv %d page %d window %d sinks %d\n", isa, threads, format, kv_type, size, sunk.window, sunk.sinks);
  }
}

// They are seen: beyond the window its first position is another with them, up to there it is not.
void test_difference(const char* isa, int32_t kv_type) {
  Random random(9);
  const Sunk with(isa, 1, octavo::FMT_FP32, kv_type, 16, kWindow, 4);
  Sunk without(isa, 1, octavo::FMT_FP32, kv_type, 16, kWindow, 0);
  const std::vector<int32_t> tokens = random_tokens(random, 60);
  const std::vector<float> a = alone(isa, octavo::FMT_FP32, kv_type, with, tokens), b = alone(isa, octavo::FMT_FP32, kv_type, without, tokens);
  for (size_t p = 0; p < tokens.size(); p++) {
    float away = 0;
    for (size_t i = p * kVocab; i < (p + 1) * kVocab; i++) away = std::max(away, fabsf(a[i] - b[i]));
    if (!CHECK(p < size_t(kWindow) ? away < 1 : away > 0)) printf("  %s kv %d position %zu: %g\n", isa, kv_type, p, double(away));
  }
}

void refuse(Sunk* sunk, const char* sentence, void (*spoil)(Records&)) {
  const Records good = sunk->records;
  spoil(sunk->records);
  octavo_read_row(sunk->model.engine.get(), -1, 0, nullptr);  // the text of another call
  const bool refused = CHECK(sunk->open() == nullptr) && CHECK(std::string(octavo_error()).find(sentence) != std::string::npos);
  if (!refused) printf("  instead of \"%s\": \"%s\"\n", sentence, octavo_error());
  sunk->records = good;
}

octavo_op& first_attention(Records& r) {
  return *std::find_if(r.ops.begin(), r.ops.end(), [](const octavo_op& op) { return op.code == OCTAVO_ATTENTION; });
}

void test_refusals() {
  Sunk sunk("generic", 1, octavo::FMT_W8G64, octavo::KV_INT8, 16, kWindow, 4);
  CHECK(sunk.open() != nullptr);
  const char *const count = "sink tokens need a window", *const rope = "sink tokens need a rope", *const others = "another window or other sink tokens";
  refuse(&sunk, count, [](Records& r) { first_attention(r).i[4] = -1; });
  refuse(&sunk, count, [](Records& r) { first_attention(r).i[4] = 65; });
  refuse(&sunk, count, [](Records& r) { first_attention(r).i[3] = 0; });
  refuse(&sunk, count, [](Records& r) { for (octavo_op& op : r.ops) if (op.code == OCTAVO_ATTENTION) op.i[3] = INT32_MAX; });
  refuse(&sunk, rope, [](Records& r) { first_attention(r).i[5] = -1; });
  refuse(&sunk, rope, [](Records& r) { first_attention(r).i[5] = 1; });
  refuse(&sunk, rope, [](Records& r) { r.ropes[0].factor = 1.5; });
  refuse(&sunk, rope, [](Records& r) {  // wider than a head
    r.frequencies.resize(1024), r.ropes.push_back({r.frequencies.data(), 1.0, kDim / 2 + 1}), r.limits.num_ropes = 2;
    first_attention(r).i[5] = 1;
  });
  refuse(&sunk, others, [](Records& r) { first_attention(r).i[3]++; });
  refuse(&sunk, others, [](Records& r) { first_attention(r).i[4]++; });
  first_attention(sunk.records).i[4] = 0;  // that one is free
  CHECK(sunk.open() != nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  int32_t table = 0;
  for (const octavo::Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    const int32_t formats[] = {octavo::FMT_W8G64, octavo::FMT_BF16, octavo::FMT_W4G32}, sizes[] = {16, 32, 64};
    for (int32_t kv_type = 0; kv_type < octavo::KV_COUNT; kv_type++)
      test_bytes(k->name, (table + kv_type) % 4 + 1, formats[(table + kv_type) % 3], kv_type, sizes[kv_type], uint64_t(table * 3 + kv_type));
    test_difference(k->name, table % octavo::KV_COUNT);
    table++;
  }
  test_refusals();
  return finish("test_sinks");
}
