// Sampling: noise bit by bit as the Python definition gives it, each kernel against plain loops, draws against a plain contest,
// on hostile numbers, too. Rules and logprobs: test_rules.cpp.
#include <float.h>

#include "gumbel_values.h"
#include "sampling_fixture.h"

using namespace check;
using namespace octavo;

namespace {

void test_noise(const Kernels* k, Random& random) {
  for (const GumbelRow& row : kGumbelRows) {
    std::vector<int32_t> ids(kGumbelLength);
    std::vector<uint32_t> words(kGumbelLength + 1, 5), some(40);
    for (int32_t i = 0; i < kGumbelLength; i++) ids[size_t(i)] = i;
    const Noise at{row.seed, row.choice, row.index, row.purpose};
    k->noise_words(words.data(), ids.data(), kGumbelLength, &at);
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < kGumbelLength; i++) {
      const float value = gumbel(words[size_t(i)]);
      uint32_t word;
      memcpy(&word, &value, 4);
      if (i < 8) CHECK(word == row.first[i]);
      hash = (hash ^ word) * 0x100000001b3u;
    }
    CHECK(hash == row.hash);
    CHECK(words[kGumbelLength] == 5);
    for (int32_t& id : ids) id = int32_t(random.below(kGumbelLength));
    k->noise_words(some.data(), ids.data(), 37, &at);
    for (size_t i = 0; i < 37; i++) CHECK(some[i] == words[size_t(ids[i])]);
  }
}

// Nobody who could win is passed over: by word and distance, at random and right at the edge.
void test_hopes(const Kernels* k, Random& random) {
  const int64_t n = 1000;
  Scratch s(n);
  for (int i = 0; i < 40; i++) {
    std::vector<float> x = row_of(random, n, i);
    std::vector<int32_t> all(n), which(n + 1);
    std::vector<uint32_t> words(n);
    for (int32_t j = 0; j < n; j++) all[size_t(j)] = j;
    Hopes h{s.blocks, (n + kBlock - 1) / kBlock, k->maxima(x.data(), n, s.blocks), 0.7f, 0, -FLT_MAX, {random.next(), 1, 2, 3}};
    h.bar = 12 * random.uniform();
    k->noise_words(words.data(), all.data(), n, &h.at);
    std::set<int32_t> able, found;
    for (int32_t j = 0; j < n; j++)
      if (double(x[size_t(j)] - h.top) * h.inverse + double(gumbel(words[size_t(j)])) > h.bar + 1e-3) able.insert(j);
    const int64_t left = k->hopeful(&h, x.data(), words.data(), n, which.data());
    found.insert(which.begin(), which.begin() + left);
    CHECK(std::includes(found.begin(), found.end(), able.begin(), able.end()));
    CHECK(found.size() <= 2 * able.size() + 60);
    uint32_t block[kBlock];
    std::set<int64_t> blocks;
    for (int64_t b = k->next_hopeful(&h, 0, block); b < h.count; b = k->next_hopeful(&h, b + 1, block)) {
      blocks.insert(b);
      CHECK(!memcmp(block, &words[size_t(b * kBlock)], size_t(std::min<int64_t>(kBlock, n - b * kBlock)) * 4));
    }
    for (int32_t id : able) CHECK(blocks.count(id / kBlock) == 1);
  }
  for (float needed = -3; needed < 22.8f; needed += 0.037f) {  // the word that just suffices, and its neighbours
    uint32_t low = 0, high = 0xffffffffu;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      gumbel(middle) < needed ? low = middle + 1 : high = middle;
    }
    const uint32_t words[] = {low, low + (low < 0xffffffffu), uint32_t(low - std::min(low, low / 8 + 1))};
    const float x[] = {-needed, -needed, -needed};
    int32_t which[4];
    const Hopes h{nullptr, 0, 0, 1, -1e-3f, -FLT_MAX, {}};
    const int64_t left = k->hopeful(&h, x, words, 3, which);
    CHECK(left >= 2 && which[0] == 0 && which[1] == 1);
    if (needed > 3) CHECK(left == 2);
  }
}

void test_maxima(const Kernels* k, Random& random) {
  for (int i = 0; i < 200; i++) {
    const int64_t n = random.between(1, 300);
    std::vector<float> x = row_of(random, n, i);
    if (i % 6 == 0) x[size_t(random.below(n))] = NAN;
    if (i % 11 == 0) x.assign(size_t(n), -kInf);
    Scratch s(n);
    const float top = k->maxima(x.data(), n, s.blocks);
    bool nan = false;
    float want = -kInf;
    for (float v : x) nan = nan || v != v, want = v > want ? v : want;
    CHECK(nan ? top != top : top == want);
    for (int64_t b = 0; b * kBlock < n && !nan; b++)
      CHECK(s.blocks[b] == *std::max_element(x.begin() + b * kBlock, x.begin() + std::min(n, (b + 1) * kBlock)));
  }
}

void test_masses(const Kernels* k, Random& random) {
  for (int64_t n : {1, 7, 64, 65, 1000, 49152}) {
    std::vector<float> x = row_of(random, n, n), from(kFrom);
    Scratch s(n);
    const float top = k->maxima(x.data(), n, s.blocks);
    const double total = k->sum_exp(x.data(), n, top, 0.8f, s.weights, from.data());
    CHECK(total == k->sum_exp(x.data(), n, top, 0.8f, nullptr, nullptr));
    double sum = 0, above = 0;
    for (size_t i = 0; i < x.size(); i++) {
      const double w = exp(0.8 * (double(x[i]) - top));
      sum += w;
      if (0.8 * (double(x[i]) - top) >= -2 * kOctaves * log(2.0)) above += w;
      CHECK(fabs(s.weights[i] - w) < 3e-6);
    }
    CHECK(close(total, sum, 1e-6) && close(from[1], above, 1e-3));
    float limits[kLimits];
    double sums[kLimits], counts[kLimits];
    for (int j = 0; j < kLimits; j++) limits[j] = top - float(j);
    k->mass_from(x.data(), s.weights, n, limits, sums);
    k->mass_from(x.data(), nullptr, n, limits, counts);
    for (int j = 0; j < kLimits; j++) {
      double mass = 0, count = 0;
      for (size_t i = 0; i < x.size(); i++) if (x[i] >= limits[j]) mass += s.weights[i], count++;
      CHECK(close(sums[j], mass, 1e-6) && counts[j] == count);
    }
  }
}

void test_ids(const Kernels* k, Random& random) {
  for (int i = 0; i < 100; i++) {
    const int64_t n = random.between(1, 700);
    std::vector<float> x = row_of(random, n, i);
    if (i % 9 == 0) x[size_t(random.below(n))] = kInf;
    Scratch s(n);
    k->maxima(x.data(), n, s.blocks);
    const float least = x[size_t(random.below(n))], most = random.below(2) ? kInf : least + 2;
    std::vector<int32_t> want;
    for (int32_t j = 0; j < n; j++) if (x[size_t(j)] >= least && x[size_t(j)] <= most) want.push_back(j);
    const int64_t count = k->gather(x.data(), n, s.blocks, least, most, s.ids);
    CHECK(std::vector<int32_t>(s.ids, s.ids + count) == want);
    const int32_t id = int32_t(random.below(n));
    int64_t rank = 1;
    for (int32_t j = 0; j < n; j++) rank += before(x, j, id);
    CHECK(k->rank_of(x.data(), n, id) == rank);
    std::vector<uint8_t> mask(size_t(random.between(0, n / 8 + 2)));
    for (uint8_t& m : mask) m = uint8_t(random.next());
    k->mask_row(s.values, x.data(), n, mask.data(), int64_t(mask.size()));
    bool same = true;
    for (size_t j = 0; j < x.size(); j++) same = same && s.values[j] == (j / 8 < mask.size() && (mask[j / 8] >> (j & 7) & 1) ? x[j] : -kInf);
    CHECK(same);
  }
}

// What is kept, as a sorted list says; what the order leaves open at the edge of top_p is where sums are rounded.
void test_selection(const Kernels* k, Random& random) {
  for (int i = 0; i < 150; i++) {
    const int64_t n = i % 10 == 0 ? 20000 : random.between(1, 3000);
    const std::vector<float> x = row_of(random, n, i);
    const std::vector<int32_t> order = ordered(x);
    Scratch s(n);
    const LogitRow row(*k, x.data(), n, s);
    const int64_t top_k = std::vector<int64_t>{1, 5, 40, 300, n}[size_t(random.below(5))];
    Kept kept = keep_top_k(row, top_k);
    std::sort(s.ids, s.ids + kept.count, [&](int32_t a, int32_t b) { return before(x, a, b); });
    CHECK(kept.count == std::min<int64_t>(top_k, int64_t(order.size())) && std::equal(s.ids, s.ids + kept.count, order.begin()));
    const double top_p = std::vector<double>{1e-9, 0.3, 0.9, 0.9999}[size_t(random.below(4))];
    const bool cut = random.below(2);
    kept = keep_top_p(row, cut ? top_k : 0, top_p, 0.5f);
    std::sort(s.ids, s.ids + kept.count, [&](int32_t a, int32_t b) { return before(x, a, b); });
    CHECK(kept.count > 0 && std::equal(s.ids, s.ids + kept.count, order.begin()));
    CHECK(kept.last.covers(x[size_t(s.ids[kept.count - 1])], s.ids[kept.count - 1]));
    const size_t some = cut ? std::min(order.size(), size_t(top_k)) : order.size();
    double total = 0, reached = 0, last = 0;
    for (size_t j = 0; j < some; j++) total += exp(0.5 * (double(x[size_t(order[j])]) - row.top));
    for (int64_t j = 0; j < kept.count; j++) reached += last = exp(0.5 * (double(x[size_t(order[size_t(j)])]) - row.top));
    CHECK(reached >= (top_p - 1e-6) * total && (kept.count == 1 || reached - last < (top_p + 1e-6) * total));
  }
}

void test_draws(const Kernels* k, Random& random) {
  for (int i = 0; i < 240; i++) {
    const int64_t n = random.between(1, 2000);
    const std::vector<float> x = row_of(random, n, i);
    Scratch s(n);
    octavo_sampling w{0, int32_t(random.below(3) * 30), 0.2 + double(random.below(3)), 1, 0.2 * double(random.below(2)), random.next(), 1, 2, 3, 0, nullptr, nullptr, {}};
    if (random.below(2)) w.top_p = 0.6;
    const LogitRow row(*k, x.data(), n, s);
    std::set<int32_t> kept;
    const auto keep = [&](const Kept& which) { kept = std::set<int32_t>(s.ids, s.ids + which.count); };
    if (w.top_p < 1) keep(keep_top_p(row, w.top_k, w.top_p, float(1 / w.temperature)));
    else if (w.top_k > 0) keep(keep_top_k(row, w.top_k));
    else for (const int32_t id : ordered(x)) kept.insert(id);
    CHECK(sample_row(*k, x.data(), n, w, s) == plain_draw(k, x, w, kept));
    w.temperature = 0;
    CHECK(sample_row(*k, x.data(), n, w, s) == ordered(x)[0]);
  }
}

// Two whose keys are equal to the last bit: the lower id wins, whichever has the larger logit and is met first.
void test_ties(const Kernels* k, Random& random) {
  int first_wins = 0, tried = 0;
  while (tried < 60) {
    const int64_t n = random.between(2, 900);
    octavo_sampling w{0, int32_t(random.below(2) * 2), 1, random.below(2) ? 1 : 1 - 1e-9, 0, random.next(), 1, 2, 3, 0, nullptr, nullptr, {}};
    const Noise at{w.seed, w.choice, w.index, w.purpose};
    int32_t ids[] = {int32_t(random.below(n)), int32_t(random.below(n))};
    uint32_t words[2];
    k->noise_words(words, ids, 2, &at);
    const bool swap = words[0] > words[1];  // the larger logit has the lesser noise, by as much
    const double gap = fabs(double(gumbel(words[0])) - double(gumbel(words[1])));
    if (ids[0] == ids[1] || gap == 0 || double(float(gap)) != gap) continue;
    std::vector<float> x(size_t(n), random.below(2) ? -kInf : -100.0f);
    x[size_t(ids[swap])] = 0, x[size_t(ids[!swap])] = float(-gap);
    Scratch s(n);
    CHECK(sample_row(*k, x.data(), n, w, s) == std::min(ids[0], ids[1]));
    first_wins += ids[swap] < ids[!swap], tried++;
  }
  CHECK(first_wins > 10 && first_wins < 50);
}

void test_rows_without_a_draw(const Kernels* k) {
  const int64_t n = 130;
  Scratch s(n);
  for (const double temperature : {0.0, 1.0})
    for (const int32_t top_k : {0, 3})
      for (const double top_p : {1.0, 0.5}) {
        octavo_sampling w{0, top_k, temperature, top_p, 0, 1, 2, 3, 4, 0, nullptr, nullptr, {}};
        std::vector<float> x(n, -kInf);
        CHECK(sample_row(*k, x.data(), n, w, s) == -1);
        x[100] = kInf;
        CHECK(sample_row(*k, x.data(), n, w, s) == 100);
        x[3] = NAN;
        CHECK(sample_row(*k, x.data(), n, w, s) == -1);
        x.assign(n, kInf);
        CHECK(sample_row(*k, x.data(), n, w, s) == -1);
      }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    Random random(5);
    test_noise(k, random);
    test_hopes(k, random);
    test_maxima(k, random);
    test_masses(k, random);
    test_ids(k, random);
    test_selection(k, random);
    test_draws(k, random);
    test_ties(k, random);
    test_rows_without_a_draw(k);
  }
  return finish("test_sampling");
}
