// Trees of drafts in whole programs: each row's logits are those of the chain of its ancestors, bit by bit, whatever stands beside it,
// on 1 to 4 threads; and once the accepted rows have moved to where a chain would have them, so is everything that follows.
#include "program_fixture.h"

using namespace check;

namespace {

#if defined(OCTAVO_EMULATED)
constexpr int kRounds = 1;
#else
constexpr int kRounds = 3;
#endif

// What a sequence has, and the drafts that it tries: token and parent of each row.
struct Drafted {
  std::vector<int32_t> history, tokens, parents;

  // The rows from the history to `row`.
  std::vector<int32_t> path(int32_t row) const {
    std::vector<int32_t> rows;
    for (; row >= 0; row = parents[size_t(row)]) rows.insert(rows.begin(), row);
    return rows;
  }
  std::vector<int32_t> chain(int32_t row) const {
    std::vector<int32_t> all = history;
    for (const int32_t r : path(row)) all.push_back(tokens[size_t(r)]);
    return all;
  }
};

struct Forest {
  Model model, alone;
  Random random;
  Advance all, single;
  std::vector<Drafted> drafted;

  Forest(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t size, int32_t count, uint64_t seed)
      : model(isa, threads, format, kv_type, size), alone(isa, 1, format, kv_type, 16), random(seed), all(model.program.get(), size, count, random),
        single(alone.program.get(), 16, 1, random), drafted(size_t(count)) {}

  // Logits of the last token of a chain that is computed at once.
  std::vector<float> expected(const std::vector<int32_t>& tokens) {
    Step step;
    step.add(tokens, 0, int32_t(tokens.size()), 0);
    single.place(&step);
    const std::vector<float> logits = single.run(&step);
    return std::vector<float>(logits.end() - kVocab, logits.end());
  }
  void play(int rounds) {
    Step step;
    for (size_t s = 0; s < drafted.size(); s++) {
      drafted[s].history = random_tokens(random, random.between(1, 50));
      step.add(drafted[s].history, 0, int32_t(drafted[s].history.size()), int32_t(s));
    }
    all.place(&step);
    all.run(&step);
    for (int round = 0; round < rounds; round++) grow();
  }
  void grow() {
    Step step;
    all.place(&step);
    for (size_t s = 0; s < drafted.size(); s++) {
      Drafted& d = drafted[s];
      const int32_t begin = int32_t(d.history.size()), count = int32_t(random.between(1, 9));
      const bool tree = random.below(4) > 0;  // beside chains
      d.tokens = random_tokens(random, count), d.parents.clear();
      for (int32_t r = 0; r < count; r++) {
        d.parents.push_back(tree ? int32_t(random.below(r + 1)) - 1 : r - 1);
        step.parents.push_back(d.parents.back());
        step.rows.push_back(int32_t(step.ids.size()));
        step.ids.push_back(d.tokens[size_t(r)]);
        step.positions.push_back(begin + int32_t(d.path(r).size()) - 1);
      }
      step.starts.push_back(int32_t(step.ids.size()));
      step.table_row.push_back(int32_t(s)), step.no_write.push_back(0);
      all.begun[s] = begin;
    }
    all.free_behind(1, kWindow, 0, &step);
    const std::vector<float> logits = all.run(&step);
    const float* row = logits.data();
    for (const Drafted& d : drafted)
      for (int32_t r = 0; r < int32_t(d.tokens.size()); r++, row += kVocab) CHECK(!memcmp(row, expected(d.chain(r)).data(), kVocab * sizeof(float)));
    for (size_t s = 0; s < drafted.size(); s++) accept(int32_t(s));
  }
  // Some path stays; its keys and values lie one after the other then.
  void accept(int32_t s) {
    Drafted& d = drafted[size_t(s)];
    const int32_t begin = int32_t(d.history.size()), leaf = int32_t(random.below(int64_t(d.tokens.size())));
    std::vector<int64_t> moves;
    const std::vector<int32_t> rows = d.path(leaf);
    for (const int32_t group : {0, 1})
      for (int32_t i = 0; i < int32_t(rows.size()); i++) moves.insert(moves.end(), {all.slot(group, s, begin + rows[size_t(i)]), all.slot(group, s, begin + i)});
    CHECK(octavo_kv_move_slots(model.kv.get(), moves.data(), int64_t(moves.size() / 2)) == 0);
    d.history = d.chain(leaf);
  }
};

}  // namespace

int main(int argc, char** argv) {
  int32_t table = 0;
  for (const octavo::Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    const int32_t formats[] = {octavo::FMT_W8G64, octavo::FMT_BF16, octavo::FMT_W4G32}, sizes[] = {16, 32, 64};
    for (int32_t kv_type = 0; kv_type < octavo::KV_COUNT; kv_type++) {
      const int32_t threads = (table + kv_type) % 4 + 1;
      Forest(k->name, threads, formats[(table + kv_type) % 3], kv_type, sizes[(kv_type + threads) % 3], 3, uint64_t(table * 3 + kv_type)).play(kRounds);
    }
    table++;
  }
  return finish("test_trees");
}
