// Adapters, and programs with adapters or sink tokens, under wrong numbers (see test_hostile.cpp): sizes, places and ranks out of
// range, records that contradict themselves. What is refused has written nothing; what opens runs within its memory.
#include "adapters_fixture.h"
#include "hostile_fixture.h"

using namespace check;

namespace {

#if defined(OCTAVO_EMULATED)
constexpr int kTries = 100;  // emulators are slow
#else
constexpr int kTries = 800;
#endif

bool refused_open(octavo_engine* engine, int32_t places, int32_t rank, const octavo_target* targets, int32_t count) {
  const AdaptersPtr opened(octavo_adapters_open(places, rank, targets, count, places % 2));
  return opened == nullptr && refused(engine, true);
}

void test_sizes(octavo_engine* engine) {
  const octavo_target good[] = {{20, 40}, {40, 20}};
  CHECK(!refused_open(engine, 2, 3, good, 2) && !refused_open(engine, 1024, 512, good, 1));
  for (const int64_t wide : kSizes) {
    const int32_t n = int32_t(std::clamp<int64_t>(wide, kLeast32, kMost32));
    if (n < 1 || n > 1024) CHECK(refused_open(engine, n, 4, good, 2));
    if (n < 1 || n > 512) CHECK(refused_open(engine, 2, n, good, 2));
    if (n < 1 || n > 1 << 16) CHECK(refused_open(engine, 2, 4, good, n));
    if (wide >= 1 && wide <= 1 << 24) continue;
    const octavo_target tall[] = {{20, 40}, {20, wide}}, broad[] = {{20, 40}, {wide, 20}};
    CHECK(refused_open(engine, 2, 4, tall, 2) && refused_open(engine, 2, 4, broad, 2));
  }
  CHECK(refused_open(engine, 2, 4, nullptr, 2));
  const std::vector<octavo_target> many(1 << 16, octavo_target{1, 1});
  CHECK(refused_open(engine, 1024, 1, many.data(), 1 << 16));
}

void test_places(octavo_engine* engine) {
  const octavo_target targets[] = {{20, 40}, {40, 20}};
  for (const int32_t half : {0, 1}) {
    const AdaptersPtr adapters(octavo_adapters_open(2, 5, targets, 2, half));
    const std::vector<float> a(40 * 16, 0.5f), b(48 * 5, 0.5f);
    const int64_t bytes = octavo_adapters_bytes(adapters.get());
    for (const int64_t wide : kSizes) {
      const int32_t n = int32_t(std::clamp<int64_t>(wide, kLeast32, kMost32));
      if (n < 0 || n > 1) REFUSED(engine, octavo_adapters_set(adapters.get(), n, 0, 5, a.data(), b.data()));
      if (n < 0 || n > 1) REFUSED(engine, octavo_adapters_set(adapters.get(), 0, n, 5, a.data(), b.data()));
      if (n < 1 || n > 5) REFUSED(engine, octavo_adapters_set(adapters.get(), 0, 0, n, a.data(), b.data()));
      if (n < 0 || n > 1) REFUSED(engine, octavo_adapters_clear(adapters.get(), n));
    }
    REFUSED(engine, octavo_adapters_set(adapters.get(), 0, 0, 5, nullptr, b.data()));
    REFUSED(engine, octavo_adapters_set(adapters.get(), 0, 0, 5, a.data(), nullptr));
    for (const int32_t rank : {1, 4, 5}) CHECK(octavo_adapters_set(adapters.get(), 1, 1, rank, a.data(), b.data()) == 0);
    CHECK(octavo_adapters_clear(adapters.get(), 1) == 0 && octavo_adapters_bytes(adapters.get()) == bytes);
  }
}

// Four sequences, one of them with several tokens.
struct Tried {
  Advance all;
  Random random{11};
  std::vector<int32_t> tokens = random_tokens(random, 40);
  Fenced<int32_t> places{4};

  explicit Tried(octavo_program* program) : all(program, 16, 4, random) {}
  Step step() {
    Step s;
    all.place(&s);
    for (int32_t n = 0; n < 4; n++) s.add(tokens, n, n + (n == 2 ? 23 : 1), n);
    Random draws(3);
    s.draw(draws);
    return s;
  }
  int32_t run(octavo_program* program, const std::vector<int32_t>& of) {
    Step s = step();
    octavo_step record = s.record();
    if (!of.empty()) record.adapters = places.copy(of.data());
    const int32_t status = octavo_run(program, &record);
    if (status != 0) CHECK(std::count(s.sampled.begin(), s.sampled.end(), -7) == int64_t(s.sampled.size()));
    return status;
  }
};

void test_steps(const char* isa, bool half) {
  Adapted adapted(isa, 2, octavo::FMT_W8G64, octavo::KV_INT8, 16, 3, 9, half);
  Random random(5);
  adapted.fill(random);
  octavo_engine* const engine = adapted.model.engine.get();
  Tried tried(adapted.program.get());
  for (size_t at = 0; at < 4; at++)
    for (const int64_t wide : kSizes) {
      const int32_t n = int32_t(std::clamp<int64_t>(wide, kLeast32, kMost32));
      std::vector<int32_t> of{0, OCTAVO_NONE, 2, 1};
      of[at] = n;
      const int32_t status = tried.run(adapted.program.get(), of);
      CHECK((n >= 0 && n < 3) || n == OCTAVO_NONE ? status == 0 : refused(engine, status < 0));
    }
}

void spoil(Random& random, Records* records) {
  const int32_t wild[] = {kLeast32, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 17, 20, 40, 64, 65, 1 << 20, 1 << 30, kMost32};
  std::vector<octavo_op*> some;
  for (octavo_op& op : records->ops)
    if (op.code == OCTAVO_LORA || op.code == OCTAVO_ATTENTION || random.below(6) == 0) some.push_back(&op);
  octavo_op& op = *some[size_t(random.below(int64_t(some.size())))];
  const int32_t value = wild[random.below(int64_t(std::size(wild)))];
  switch (random.below(6)) {
    case 0: op.code = value; break;
    case 1: op.in[random.below(4)] = value; break;
    case 2: op.out[random.below(4)] = value; break;
    case 3: op.w[random.below(9)] = value; break;
    case 4: op.i[random.below(6)] = value; break;
    default: records->buffers[size_t(random.below(int64_t(records->buffers.size())))].cols = kSizes[random.below(int64_t(std::size(kSizes)))];
  }
}

void test_records(const char* isa, bool half) {
  Adapted adapted(isa, 2, octavo::FMT_W8G64, octavo::KV_BF16, 16, 3, 20, half);
  Random random(half ? 6 : 7);
  adapted.fill(random);
  const Records plain = adapted.records;
  octavo_engine* const engine = adapted.model.engine.get();
  long failed = 0, ran = 0;
  for (int i = 0; i < kTries; i++) {
    adapted.records = plain;
    const bool sinks = i % 3 == 0;
    for (octavo_op& op : adapted.records.ops)
      if (sinks && op.code == OCTAVO_ATTENTION) op.i[3] = 20, op.i[4] = 4;
    spoil(random, &adapted.records);
    if (i % 5 == 0) spoil(random, &adapted.records);
    const ProgramPtr program = adapted.open();
    if (program == nullptr) {
      failed += CHECK(refused(engine, true));
      continue;
    }
    Tried tried(program.get());
    const int32_t status = tried.run(program.get(), {0, OCTAVO_NONE, 2, 1});
    if (status != 0) CHECK(refused(engine, true));
    ran += status == 0;
  }
  CHECK(failed > kTries / 3 && ran > kTries / 8);
}

// A place that a program does not have, targets of other shapes, none at all.
void test_programs(const char* isa) {
  Adapted adapted(isa, 1, octavo::FMT_BF16, octavo::KV_FP32, 16, 2, 4, false);
  octavo_engine* const engine = adapted.model.engine.get();
  for (const size_t at : {size_t{0}, size_t{4}, adapted.targets.size() - 1})
    for (const bool tall : {false, true}) {
      std::vector<octavo_target> others = adapted.targets;
      (tall ? others[at].k : others[at].n)++;
      adapted.adapters.reset(octavo_adapters_open(2, 4, others.data(), int32_t(others.size()), 0));
      NO_HANDLE(engine, adapted.open());
    }
  adapted.adapters.reset(octavo_adapters_open(2, 4, adapted.targets.data(), int32_t(adapted.targets.size()) - 1, 0));
  NO_HANDLE(engine, adapted.open());
  adapted.adapters.reset();
  const ProgramPtr without = adapted.open();
  Tried tried(without.get());
  CHECK(without != nullptr && tried.run(without.get(), {-1, -1, -1, -1}) == 0);
  REFUSED(engine, tried.run(without.get(), {-1, 0, -1, -1}));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<const octavo::Kernels*> all = tables(argc > 1 ? argv[1] : nullptr);
  EnginePtr engine(octavo_open(all.front()->name, 1));
  test_sizes(engine.get());
  test_places(engine.get());
  for (const octavo::Kernels* k : {all.front(), all.back()}) {
    for (const bool half : {false, true}) test_steps(k->name, half), test_records(k->name, half);
    test_programs(k->name);
    if (all.size() == 1) break;
  }
  CHECK(refusals > 200 + kTries);
  return finish("test_hostile_kinds");
}
