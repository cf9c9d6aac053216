// A whole program: the logits and hidden states of a position, and what is drawn there, are the same bytes however its sequence is
// cut, whatever runs beside it, on 1 to 4 threads, on pages of any size and order; and a step that fails has written nothing.
#include "program_fixture.h"

using namespace check;

namespace {

struct Answer {
  std::vector<float> logits, hidden;  // [positions, columns]
};

Answer alone(const char* isa, int32_t format, int32_t kv_type, const std::vector<int32_t>& tokens) {
  Model model(isa, 1, format, kv_type, 16);
  Step step;
  step.add(tokens, 0, int32_t(tokens.size()), 0);
  step.width = kMaxPositions / 16;
  for (int32_t p = 0; p < 2 * step.width; p++) step.table.push_back(p);
  step.hidden.assign(tokens.size() * kHidden, -5);
  const octavo_step record = step.record();
  if (!CHECK(octavo_run(model.program.get(), &record) == 0)) printf("  %s\n", octavo_error()), exit(1);
  Answer answer;
  copy_rows(model.program.get(), int64_t(tokens.size()), &answer.logits);
  answer.hidden = step.hidden;
  return answer;
}

// Sequences advance by random chunks until all are done, a random part of them in each step.
struct Schedule {
  Model model;
  Random random;
  const std::vector<std::vector<int32_t>>& prompts;
  const std::vector<Answer>& answers;
  std::vector<int32_t> done, table;
  int32_t width;

  Schedule(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t page_size, uint64_t seed,
           const std::vector<std::vector<int32_t>>& all, const std::vector<Answer>& expected)
      : model(isa, threads, format, kv_type, page_size), random(seed), prompts(all), answers(expected), done(all.size(), 0) {
    width = kMaxPositions / page_size;
    table = page_tables(random, int64_t(all.size()), width);
  }
  void play() {
    bool more = true;
    while (more) {
      more = false;
      Step step;
      std::vector<std::pair<size_t, int32_t>> owners;  // (sequence, position) of each row
      for (size_t s = 0; s < prompts.size(); s++) {
        const int32_t left = int32_t(prompts[s].size()) - done[s];
        more = more || left > 0;
        if (left > 0 && random.below(4) != 0) take(&step, s, left, &owners);
      }
      if (!step.ids.empty()) run(&step, owners);
    }
  }
  void take(Step* step, size_t s, int32_t left, std::vector<std::pair<size_t, int32_t>>* owners) {
    const int64_t sizes[] = {1, 1, 2, random.between(1, 40), 150};
    const int32_t from = done[s], count = int32_t(std::min<int64_t>(std::min<int64_t>(left, sizes[random.below(5)]), kMaxTokens - int64_t(step->ids.size())));
    if (count == 0) return;
    step->add(prompts[s], from, from + count, int32_t(s));
    for (int32_t p = from; p < from + count; p++) owners->push_back({s, p});
    done[s] += count;
  }
  void run(Step* step, const std::vector<std::pair<size_t, int32_t>>& owners) {
    step->width = width, step->table_rows = int64_t(prompts.size()), step->table = table;
    for (size_t s = 0; s < prompts.size(); s++)  // pages behind the window of the second group are gone
      for (int32_t p = 0; (p + 1) * model.page_size <= done[s] - int32_t(step->ids.size()) - kWindow; p++)
        step->table[(prompts.size() + s) * size_t(width) + size_t(p)] = -1;
    if (random.below(2)) step->hidden.assign(step->ids.size() * kHidden, -5);
    if (random.below(2)) step->draw(random);
    if (random.below(3) == 0) run_once(step, owners, true);  // the next one writes the same keys and values again
    run_once(step, owners, false);
    if (random.below(3) == 0) {  // what is stored need not be written again
      step->no_write.assign(step->no_write.size(), 1);
      run_once(step, owners, false);
    }
  }
  void run_once(Step* step, const std::vector<std::pair<size_t, int32_t>>& owners, bool timed) {
    const octavo_step record = step->record();
    std::vector<double> seconds(model.records.ops.size(), -1);
    const int64_t allocations = octavo_allocations();
    const int32_t status = timed ? octavo_run_timed(model.program.get(), &record, seconds.data()) : octavo_run(model.program.get(), &record);
    if (!CHECK(status == 0)) return (void)printf("  %s\n", octavo_error());
    CHECK(octavo_allocations() == allocations);
    if (timed) CHECK(*std::min_element(seconds.begin(), seconds.end()) >= 0);
    std::vector<float> logits;
    copy_rows(model.program.get(), record.logit_rows, &logits);
    bool same = true, same_hidden = true;
    for (size_t r = 0; r < owners.size(); r++) {
      const auto [s, p] = owners[r];
      same = same && !memcmp(&logits[r * kVocab], &answers[s].logits[size_t(p) * kVocab], kVocab * sizeof(float));
      if (!step->hidden.empty())
        same_hidden = same_hidden && !memcmp(&step->hidden[r * kHidden], &answers[s].hidden[size_t(p) * kHidden], kHidden * sizeof(float));
    }
    CHECK(same);
    CHECK(same_hidden);
    if (!step->sampling.empty()) check_draws(*step, logits);
  }
  // The step and octavo_sample draw alike from the same logits.
  void check_draws(const Step& step, const std::vector<float>& logits) {
    std::vector<int32_t> ids(step.sampling.size(), -9);
    CHECK(octavo_sample(model.engine.get(), logits.data(), int64_t(step.rows.size()), kVocab, kVocab, step.sampling.data(), int32_t(ids.size()), ids.data()) == 0);
    CHECK(ids == step.sampled);
    for (const int32_t id : ids) CHECK(id >= 0 && id < kVocab);
  }
};

void test_format(const char* isa, int32_t format, int32_t kv_type) {
  Random random(uint64_t(10 * format + kv_type));
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Answer> answers;
  for (const int64_t length : {random.between(100, 160), random.between(1, 40), random.between(33, 70)}) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < length; i++) tokens.push_back(int32_t(random.below(kVocab)));
    prompts.push_back(tokens);
    answers.push_back(alone(isa, format, kv_type, tokens));
    for (const float v : answers.back().logits) if (!(fabsf(v) <= 25)) CHECK(!"a logit that is not finite");
  }
  const int32_t sizes[] = {16, 32, 64, 32};
  for (int32_t threads = 1; threads <= 4; threads++) {
    Schedule schedule(isa, threads, format, kv_type, sizes[(threads + format) % 4], uint64_t(threads), prompts, answers);
    schedule.play();
  }
}

// ---- pages that several sequences name

// Sequences of several chunks of 512 positions, each on pages of its own to begin with.
struct Long {
  Model model;
  int32_t width, sequences;
  std::vector<int32_t> table;

  Long(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t window, int32_t count)
      : model(isa, threads, format, kv_type, 64, window, kLongest), width(kLongest / 64), sequences(count) {
    for (int32_t p = 0; p < 2 * count * width; p++) table.push_back(p);
  }
  void add(Step* step, const std::vector<int32_t>& tokens, int32_t s, int32_t from, int32_t to) { step->add(tokens, from, to, s); }
  std::vector<float> run(Step* step) {
    step->width = width, step->table_rows = sequences, step->table = table;
    const octavo_step record = step->record();
    if (!CHECK(octavo_run(model.program.get(), &record) == 0)) printf("  %s\n", octavo_error()), exit(1);
    std::vector<float> logits;
    copy_rows(model.program.get(), record.logit_rows, &logits);
    return logits;
  }
  std::vector<float> prefill(const std::vector<int32_t>& tokens, int32_t s, int32_t end) {
    std::vector<float> last;
    for (int32_t from = 0; from < end; from += kMaxTokens) {
      Step step;
      add(&step, tokens, s, from, std::min(end, from + kMaxTokens));
      last = run(&step);
    }
    return std::vector<float>(last.end() - kVocab, last.end());
  }
};

// Sequences that begin alike, first on pages of their own, then on those of the first one: in the first group of pages alone, which
// must not make the second one read what it does not name.
void test_shared(const char* isa, int32_t format, int32_t kv_type, int32_t window) {
  constexpr int32_t kCommon = 1024 + 9, kCount = 3;
  Random random(uint64_t(format + window));
  std::vector<int32_t> common;
  for (int32_t i = 0; i < kCommon; i++) common.push_back(int32_t(random.below(kVocab)));
  std::vector<std::vector<int32_t>> prompts(kCount, common);
  std::vector<std::vector<float>> expected;  // of each: at the position before the last 4, and at the last
  for (std::vector<int32_t>& tokens : prompts) {
    for (int64_t i = 0, n = random.between(5, 20); i < n; i++) tokens.push_back(int32_t(random.below(kVocab)));
    expected.push_back(Long(isa, 1, format, kv_type, window, kCount).prefill(tokens, 0, int32_t(tokens.size()) - 4));
    expected.push_back(Long(isa, 1, format, kv_type, window, kCount).prefill(tokens, 0, int32_t(tokens.size())));
  }
  for (int32_t threads = 1; threads <= 4; threads++) {
    Long all(isa, threads, format, kv_type, window, kCount);
    for (int32_t s = 0; s < kCount; s++) all.prefill(prompts[size_t(s)], s, int32_t(prompts[size_t(s)].size()) - 5);
    for (int32_t s = 1; s < kCount; s++) std::copy_n(all.table.begin(), 1024 / 64, all.table.begin() + s * all.width);
    // where both layers see everything, the first sequence has another past in the second one: the others must not read that
    const int32_t checked = window == 0 ? 1 : 0;
    if (window == 0) std::fill_n(all.table.begin() + kCount * all.width, 1024 / 64, kPages - 1);
    Step decode, several;
    for (int32_t s = 0; s < kCount; s++) all.add(&decode, prompts[size_t(s)], s, int32_t(prompts[size_t(s)].size()) - 5, int32_t(prompts[size_t(s)].size()) - 4);
    std::vector<float> found = all.run(&decode);
    for (int32_t s = checked; s < kCount; s++) CHECK(!memcmp(&found[size_t(s) * kVocab], expected[size_t(2 * s)].data(), kVocab * sizeof(float)));
    for (int32_t s = 0; s < kCount; s++) all.add(&several, prompts[size_t(s)], s, int32_t(prompts[size_t(s)].size()) - 4, int32_t(prompts[size_t(s)].size()));
    found = all.run(&several);
    for (int32_t s = checked; s < kCount; s++) CHECK(!memcmp(&found[size_t(4 * s + 3) * kVocab], expected[size_t(2 * s + 1)].data(), kVocab * sizeof(float)));
  }
}

// Keys and values of every slot.
std::vector<std::vector<float>> slots_of(const Model& model) {
  std::vector<std::vector<float>> slots(size_t(kPages * model.page_size), std::vector<float>(2 * kKVHeads * kDim));
  for (size_t slot = 0; slot < slots.size(); slot++) octavo_kv_read(model.kv.get(), 0, int64_t(slot), slots[slot].data(), &slots[slot][kKVHeads * kDim]);
  return slots;
}

// Tokens that are computed again without writing leave their slots as they are, whatever these hold; those beside them write.
void test_no_write(const char* isa, int32_t kv_type) {
  constexpr int32_t kSize = 16, kWidth = 3, kEnd = 40;
  const std::vector<float> other(kKVHeads * kDim, 0.75f);
  for (const int32_t count : {1, 5}) {
    Model model(isa, 2, octavo::FMT_W8G64, kv_type, kSize);
    Step before, step;
    for (Step* one : {&before, &step}) {
      one->width = kWidth, one->table_rows = 2;
      for (int32_t p = 0; p < 2 * 2 * kWidth; p++) one->table.push_back(p);
    }
    const std::vector<int32_t> tokens(kEnd + 5, 3);
    before.add(tokens, 0, kEnd, 0), before.add(tokens, 0, kEnd, 1);
    step.add(tokens, kEnd - count, kEnd, 0, true), step.add(tokens, kEnd, kEnd + count, 1);
    octavo_step record = before.record();
    CHECK(octavo_run(model.program.get(), &record) == 0);
    for (int32_t p = kEnd - count; p < kEnd; p++)
      for (const int32_t group : {0, 1}) CHECK(octavo_kv_write(model.kv.get(), 0, group * 2 * kWidth * kSize + p, other.data(), other.data()) == 0);
    const std::vector<std::vector<float>> was = slots_of(model);
    record = step.record();
    CHECK(octavo_run(model.program.get(), &record) == 0);
    const std::vector<std::vector<float>> is = slots_of(model);
    bool right = true;
    for (int32_t slot = 0; slot < int32_t(is.size()); slot++) {
      const int32_t row = slot / (kWidth * kSize), position = slot % (kWidth * kSize);
      const bool written = (row == 1 || row == 3) && position >= kEnd && position < kEnd + count;
      right = right && (was[size_t(slot)] != is[size_t(slot)]) == written;
    }
    CHECK(right);
  }
}

// What a product adds is read by panels, of which each thread has its own: they meet once somebody else has made it.
void test_meetings(const char* isa) {
  Model model(isa, 2, octavo::FMT_W8G64, octavo::KV_BF16, 16);
  Records records = model.records;
  const int32_t sum = int32_t(records.buffers.size());
  records.buffers.push_back({OCTAVO_ROWS_T, 0, kHidden});
  const auto from_o = [](const octavo_op& op) { return op.code == OCTAVO_LINEAR && op.in[0] == O; };
  octavo_op product = *std::find_if(records.ops.begin(), records.ops.end(), from_o);
  product.i[0] = octavo::EPI_STORE, product.in[1] = OCTAVO_NONE, product.out[0] = Y;
  octavo_op adding = product;
  adding.out[0] = sum;
  int32_t meetings[2];
  for (const int32_t adds : {0, 1}) {
    if (adds) adding.i[0] = octavo::EPI_ADD, adding.in[1] = Y;
    records.ops = {product, adding};
    records.limits.num_ops = 2, records.limits.num_buffers = sum + 1;
    const octavo_program_spec spec = records.spec();
    ProgramPtr program(octavo_program_open(model.engine.get(), model.kv.get(), &spec));
    if (!CHECK(program != nullptr)) return (void)printf("  %s\n", octavo_error());
    meetings[adds] = octavo_program_barriers(program.get(), 1, 1);
  }
  CHECK(meetings[0] == 0 && meetings[1] == 1);
}

}  // namespace

int main(int argc, char** argv) {
  int32_t table = 0;
  for (const octavo::Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    test_format(k->name, octavo::FMT_W8G64, table % octavo::KV_COUNT);
    for (int32_t format = table % 3; format < octavo::FMT_COUNT; format += 3) test_format(k->name, format, (format + table) % octavo::KV_COUNT);
    if (table == 0 || !strcmp(k->name, "generic")) {
      test_shared(k->name, octavo::FMT_BF16, octavo::KV_INT8, 0);
      test_shared(k->name, octavo::FMT_W8G64, octavo::KV_BF16, kWindow);
    }
    test_no_write(k->name, table % octavo::KV_COUNT);
    table++;
  }
  test_meetings("generic");
  return finish("test_program");
}
