// Programs with adapters: a sequence has the bytes that it has alone, whatever adapters stand beside it, however it is cut, on 1 to 4
// threads; one without an adapter has those of a step without any.
#include "adapters_fixture.h"

using namespace check;

namespace {

constexpr int32_t kPlaces = 5, kRank = 20;

struct Asked {
  std::vector<int32_t> tokens;
  int32_t place;
  std::vector<float> logits;  // alone
};

void alone(Adapted* adapted, Asked* asked) {
  Random random(1);
  const Advance all(adapted->program.get(), adapted->model.page_size, 1, random);
  Step step;
  step.add(asked->tokens, 0, int32_t(asked->tokens.size()), 0);
  if (asked->place >= 0) step.places = {asked->place};
  all.place(&step);
  asked->logits = all.run(&step);
}

// `count` sequences go on by `chunk` tokens at most, in every step some of them.
void test_bytes(const char* isa, int32_t threads, int32_t format, int32_t kv_type, bool half, int32_t count, uint64_t seed) {
  Adapted single(isa, 1, format, kv_type, 64, kPlaces, kRank, half), adapted(isa, threads, format, kv_type, 64, kPlaces, kRank, half);
  Random same(seed), again(seed), random(seed + 1);
  single.fill(same), adapted.fill(again);
  std::vector<Asked> asked(static_cast<size_t>(count));
  for (Asked& a : asked) {
    a.tokens = random_tokens(random, count > 8 ? 6 : random.between(20, 60)), a.place = int32_t(random.below(kPlaces + 2)) - 1;
    if (a.place == kPlaces) a.place = 0;  // one of them is asked for more often
    alone(&single, &a);
  }
  Advance all(adapted.program.get(), 64, count, random, 64);
  bool right = true;
  for (bool more = true; more;) {
    more = false;
    Step step;
    all.place(&step);
    std::vector<const float*> expected;
    for (int32_t s = 0; s < count; s++) {
      const Asked& a = asked[size_t(s)];
      const int64_t left = int64_t(a.tokens.size()) - all.begun[size_t(s)], chunks[] = {1, 1, 2, random.between(1, 30)};
      more = more || left > 0;
      if (left == 0 || (count <= 8 && random.below(4) == 0)) continue;
      const int32_t from = all.begun[size_t(s)], to = from + int32_t(count > 8 ? 1 : std::min(left, chunks[random.below(4)]));
      step.add(a.tokens, from, to, s);
      step.places.push_back(a.place);
      for (int32_t p = from; p < to; p++) expected.push_back(&a.logits[size_t(p) * kVocab]);
      all.begun[size_t(s)] = to;
    }
    if (step.ids.empty()) continue;
    const std::vector<float> logits = all.run(&step);
    for (size_t r = 0; r < expected.size(); r++) right = right && !memcmp(&logits[r * kVocab], expected[r], kVocab * sizeof(float));
  }
  if (!CHECK(right)) printf("  %s threads %d format %d kv %d half %d sequences %d\n", isa, threads, format, kv_type, half, count);
}

}  // namespace

int main(int argc, char** argv) {
  int32_t table = 0;
  for (const octavo::Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    const int32_t formats[] = {octavo::FMT_W8G64, octavo::FMT_BF16, octavo::FMT_W4G32};
    for (const bool half : {false, true}) {
      test_bytes(k->name, (table + half) % 4 + 1, formats[table % 3], table % octavo::KV_COUNT, half, 6, uint64_t(table));
      test_bytes(k->name, 2, formats[(table + 1) % 3], (table + half) % octavo::KV_COUNT, half, kMany, uint64_t(table + 9));
    }
    table++;
  }
  return finish("test_adapters");
}
