// Programs with adapters: a sequence has the bytes that it has alone, whatever adapters stand beside it, however it is cut, on 1 to 4
// threads; one without an adapter has those of a step without any.
#include "adapters_fixture.h"

using namespace check;

namespace {

constexpr int32_t kPlaces = 5, kRank = 20;

struct Asked {
  std::vector<int32_t> tokens;
  int32_t place;
  std::vector<float> logits, hidden;  // alone
};

void alone(Adapted* adapted, Asked* asked) {
  Random random(1);
  const Advance all(adapted->program.get(), adapted->model.page_size, 1, random);
  Step step;
  step.add(asked->tokens, 0, int32_t(asked->tokens.size()), 0);
  if (asked->place >= 0) step.places = {asked->place};
  all.place(&step);
  step.hidden.resize(asked->tokens.size() * kHidden);
  asked->logits = all.run(&step);
  asked->hidden = step.hidden;
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

// As many sequences that a step of a token of each goes in an order of its own, each at another place of its text; between those,
// steps that must not: rows asked for in another order or not all, hidden states, keys that are there already.
void test_order(const char* isa, int32_t format, int32_t kv_type, bool half) {
  Adapted single(isa, 1, format, kv_type, 64, kPlaces, kRank, half), adapted(isa, 2, format, kv_type, 64, kPlaces, kRank, half);
  Random same(3), again(3), random(4);
  single.fill(same), adapted.fill(again);
  std::vector<Asked> asked(kMany);
  for (Asked& a : asked) a.tokens = random_tokens(random, 12), a.place = int32_t(random.below(kPlaces + 1)) - 1, alone(&single, &a);
  Advance all(adapted.program.get(), 64, kMany, random, 64);
  enum Way { kFirst, kPlain, kReversed, kSome, kHiddenToo, kSilent };
  for (const Way way : {kFirst, kPlain, kReversed, kPlain, kSome, kHiddenToo, kSilent, kPlain}) {
    Step step;
    all.place(&step);
    std::vector<std::pair<int32_t, int32_t>> of;  // sequence and position of a row
    for (int32_t s = 0; s < kMany; s++) {
      const bool silent = way == kSilent && random.below(2) == 0;
      const int32_t from = all.begun[size_t(s)] - silent, to = from + (way == kFirst ? 1 + s % 4 : 1);
      step.add(asked[size_t(s)].tokens, from, to, s, silent);
      step.places.push_back(asked[size_t(s)].place);
      for (int32_t p = from; p < to; p++) of.push_back({s, p});
      all.begun[size_t(s)] = to;
    }
    if (way == kReversed) std::reverse(step.rows.begin(), step.rows.end());
    if (way == kSome) step.rows = std::vector<int32_t>(step.rows.begin(), step.rows.end() - 5);  // nothing behind them
    if (way == kHiddenToo) step.hidden.resize(kMany * kHidden);
    if (way != kSilent) step.no_write.clear();
    const std::vector<float> logits = all.run(&step);
    bool right = true;
    for (size_t r = 0; r < step.rows.size(); r++) {
      const auto [s, p] = of[size_t(step.rows[r])];
      right = right && !memcmp(&logits[r * kVocab], &asked[size_t(s)].logits[size_t(p) * kVocab], kVocab * sizeof(float));
    }
    for (size_t t = 0; t < step.hidden.size() / kHidden; t++) {
      const auto [s, p] = of[t];
      right = right && !memcmp(&step.hidden[t * kHidden], &asked[size_t(s)].hidden[size_t(p) * kHidden], kHidden * sizeof(float));
    }
    if (!CHECK(right)) printf("  %s format %d kv %d half %d way %d\n", isa, format, kv_type, half, way);
  }
}

// More rows of a thread than it makes operands of at a time.
void test_many_rows(const char* isa, int32_t threads, bool half) {
  Adapted adapted(isa, threads, octavo::FMT_BF16, octavo::KV_BF16, 64, kPlaces, kRank, half);
  Random random(8);
  adapted.fill(random);
  std::vector<Asked> asked(10);
  Step step;
  for (Asked& a : asked) {
    const int32_t number = int32_t(&a - asked.data());
    a.tokens = random_tokens(random, 60), a.place = number % kPlaces, alone(&adapted, &a);
    step.add(a.tokens, 0, 60, number), step.places.push_back(a.place);
  }
  const Advance all(adapted.program.get(), 64, 10, random, 64);
  all.place(&step);
  const std::vector<float> logits = all.run(&step);
  bool right = true;
  for (size_t s = 0; s < asked.size(); s++) right = right && std::equal(asked[s].logits.begin(), asked[s].logits.end(), logits.begin() + int64_t(s) * 60 * kVocab);
  if (!CHECK(right)) printf("  %s threads %d half %d\n", isa, threads, half);
}

}  // namespace

int main(int argc, char** argv) {
  int32_t table = 0;
  for (const octavo::Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    const int32_t formats[] = {octavo::FMT_W8G64, octavo::FMT_BF16, octavo::FMT_W4G32};
    for (const bool half : {false, true}) {
      test_bytes(k->name, (table + half) % 4 + 1, formats[table % 3], table % octavo::KV_COUNT, half, 6, uint64_t(table));
      test_bytes(k->name, 2, formats[(table + 1) % 3], (table + half) % octavo::KV_COUNT, half, kMany, uint64_t(table + 9));
      test_order(k->name, formats[(table + half) % 3], table % octavo::KV_COUNT, half);
      test_many_rows(k->name, half ? 2 : 1, half);
    }
    table++;
  }
  return finish("test_adapters");
}
