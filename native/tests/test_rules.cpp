// Rules, logprobs and what is wrong with a request: against plain loops, and on numbers that nobody should send.
#include "sampling_fixture.h"

using namespace check;

namespace {

// Lists at random: none, ids that come twice, counts of 0, masks that end early.
struct RandomRules {
  std::vector<int32_t> bias_ids, banned, prompt, output, penalised;
  std::vector<double> bias, penalties;
  std::vector<uint8_t> allowed, mask;
  octavo_rules record{};

  RandomRules(Random& random, int64_t n) {
    const auto some = [&] { return random.below(3) == 0 ? 0 : random.below(8); };
    const auto ids = [&](std::vector<int32_t>* list) { for (int64_t i = some(); i > 0; i--) list->push_back(int32_t(random.below(n))); };
    const auto counts = [&](std::vector<int32_t>* pairs) {
      for (int64_t i = some(); i > 0; i--) pairs->insert(pairs->end(), {int32_t(random.below(n)), int32_t(random.below(3))});
    };
    const auto bits = [&](std::vector<uint8_t>* bytes) {
      for (int64_t i = random.below(2) * random.between(1, n / 8 + 2); i > 0; i--) bytes->push_back(uint8_t(random.below(2) ? 0xff : random.next()));
      return bytes->empty() ? nullptr : bytes->data();
    };
    ids(&bias_ids), ids(&banned), counts(&prompt), counts(&output);
    for (size_t i = 0; i < bias_ids.size(); i++) bias.push_back(9.1 * random.uniform());
    for (int32_t id = 0; id < n && penalised.size() < 6; id++)  // distinct
      if (random.below(4) == 0) penalised.push_back(id), penalties.push_back(5 * random.uniform());
    const double repetition[] = {1.0, 1.3, 0.7}, penalty[] = {0.0, 0.5, -0.3};
    record = {bias_ids.data(), bias.data(), banned.data(), bits(&allowed), bits(&mask), prompt.data(), output.data(), int64_t(allowed.size()),
              int64_t(mask.size()), int32_t(bias.size()), int32_t(banned.size()), int32_t(prompt.size() / 2), int32_t(output.size() / 2),
              repetition[random.below(3)], penalty[random.below(3)], penalty[random.below(3)], penalised.data(), penalties.data(), int64_t(penalised.size())};
  }
};

std::vector<float> plain_rules(std::vector<float> x, const RandomRules& rules) {
  const octavo_rules& r = rules.record;
  for (const auto* mask : {&rules.allowed, &rules.mask})
    for (size_t id = 0; id < x.size() && !mask->empty(); id++)
      if (id / 8 >= mask->size() || !((*mask)[id / 8] >> (id & 7) & 1)) x[id] = -kInf;
  for (size_t i = 0; i < rules.bias.size(); i++) x[size_t(rules.bias_ids[i])] = float(x[size_t(rules.bias_ids[i])] + rules.bias[i]);
  for (const int32_t id : rules.banned) x[size_t(id)] = -kInf;
  std::set<int32_t> seen;
  for (const auto* pairs : {&rules.prompt, &rules.output})
    for (size_t i = 0; i < pairs->size(); i += 2) seen.insert((*pairs)[i]);
  for (const int32_t id : seen) x[size_t(id)] = float(x[size_t(id)] > 0 ? x[size_t(id)] / r.repetition : x[size_t(id)] * r.repetition);
  for (size_t i = 0; i < rules.output.size(); i += 2) {
    const int32_t count = rules.output[i + 1];
    float& v = x[size_t(rules.output[i])];
    v = float(v - (count * r.frequency + (count > 0) * r.presence));
  }
  for (size_t i = 0; i < rules.penalised.size(); i++) x[size_t(rules.penalised[i])] = float(x[size_t(rules.penalised[i])] - rules.penalties[i]);
  return x;
}

void test_rules(const Kernels* k, Random& random) {
  for (int i = 0; i < 300; i++) {
    const int64_t n = random.between(1, 150);
    const std::vector<float> x = row_of(random, n, i);
    const RandomRules rules(random, n);
    Scratch s(n);
    std::vector<float> got(static_cast<size_t>(n));
    apply_rules(*k, x.data(), n, &rules.record, s, got.data());
    CHECK(got == plain_rules(x, rules));
    CHECK(std::count(s.marks, s.marks + n, 0) == n);
    apply_rules(*k, x.data(), n, nullptr, s, got.data());
    CHECK(got == x);
  }
}

void test_logprobs(const Kernels* k, Random& random) {
  for (int i = 0; i < 60; i++) {
    const int64_t n = i % 10 == 5 ? 20000 : random.between(2, 900);
    std::vector<float> x = row_of(random, n, i);
    for (int64_t j = i % 6 == 5 ? random.below(40) : -1; j >= 0; j--) x[size_t(random.below(n - 1))] = kInf;  // no logprob is a number then
    const std::vector<int32_t> order = ordered(x);
    Scratch s(n);
    int32_t top_ids[30];
    double values[40];
    const int32_t chosen[] = {0, int32_t(n - 1)};
    octavo_logprobs p{-1, -1, int32_t(random.below(30)), 2, chosen, top_ids, values, 0, 0, 0};
    octavo_sampling w{0, 0, double(random.below(2)), 1, 0, random.next(), 1, 2, 3, 0, nullptr, &p, {}};
    const int32_t id = sample_row(*k, x.data(), n, w, s);
    double sum = 0;
    for (const int32_t j : order) sum += exp(double(x[size_t(j)]) - x[size_t(order[0])]);
    const double normaliser = x[size_t(order[0])] + log(sum);
    CHECK(p.row == 0 && p.token == id && p.rank == 1 + std::find(order.begin(), order.end(), id) - order.begin());
    CHECK(p.found == std::min<int64_t>(p.top, int64_t(order.size())) && std::equal(top_ids, top_ids + p.found, order.begin()));
    CHECK(close(values[0], x[size_t(id)] - normaliser, 1e-6));
    for (int32_t j = 0; j < p.found; j++) CHECK(close(values[1 + j], x[size_t(top_ids[j])] - normaliser, 1e-6));
    for (int32_t j = 0; j < 2; j++) CHECK(x[size_t(chosen[j])] == -kInf || close(values[1 + p.top + j], x[size_t(chosen[j])] - normaliser, 1e-6));
  }
}

void test_wrong_records() {
  octavo_rules none{};
  none.repetition = 1;
  octavo_rules r = none;
  octavo_sampling w{0, 0, 1, 1, 0, 1, 2, 3, 4, 0, &r, nullptr};
  const auto wrong = [&] { return wrong_sampling(w, 1, 50) != nullptr; };
  CHECK(!wrong());
  for (const auto count : {&octavo_rules::num_bias, &octavo_rules::num_banned, &octavo_rules::num_prompt, &octavo_rules::num_output})
    for (const int32_t value : {-1, 1, INT32_MAX, INT32_MIN}) {
      r = none;
      r.*count = value;
      CHECK(wrong());
    }
  for (const int64_t value : {int64_t{-1}, int64_t{1}, INT64_MAX, INT64_MIN}) {
    r = none;
    r.num_penalised = value;
    CHECK(wrong());
  }
  for (const int32_t id : {-1, 50, INT32_MAX, INT32_MIN}) {
    const int32_t ids[] = {1, 2, id, 1};
    const double bias[] = {1, 1, 1, 1};
    r = none, r.bias_ids = ids, r.bias = bias, r.num_bias = 3;
    CHECK(wrong());
    r = none, r.banned = ids, r.num_banned = 3;
    CHECK(wrong());
    r = none, r.prompt = ids, r.num_prompt = 2;
    CHECK(wrong());
    r = none, r.penalised = ids, r.penalties = bias, r.num_penalised = 3;
    CHECK(wrong());
    r = none, r.output = ids, r.num_output = 2;
    CHECK(wrong());
    r.num_output = 1;
    CHECK(!wrong());
  }
  for (const double value : {0.0, -1.0, double(NAN)}) {
    r = none, r.repetition = value;
    CHECK(wrong());
  }
  for (const auto bytes : {&octavo_rules::allowed_bytes, &octavo_rules::mask_bytes}) {
    r = none, r.*bytes = -1;
    CHECK(wrong());
  }
  const int32_t chosen[] = {50};
  int32_t ids[4];
  double values[6];
  const octavo_logprobs good{0, 49, 4, 0, chosen, ids, values, 0, 0, 0};
  CHECK(wrong_logprobs(good, 1, 50) == nullptr);
  octavo_logprobs without = good;
  without.values = nullptr;
  CHECK(wrong_logprobs(without, 1, 50) != nullptr);
  for (const auto field : {&octavo_logprobs::row, &octavo_logprobs::token, &octavo_logprobs::top, &octavo_logprobs::chosen})
    for (const int32_t value : {-1, INT32_MIN, field == &octavo_logprobs::token ? 50 : 1}) {
      octavo_logprobs p = good;
      p.*field = value;
      if (field == &octavo_logprobs::top && value == 1) continue;
      CHECK(wrong_logprobs(p, 1, 50) != nullptr);
    }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    Random random(5);
    test_rules(k, random);
    test_logprobs(k, random);
  }
  test_wrong_records();
  return finish("test_rules");
}
