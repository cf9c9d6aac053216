// The rarer samplers: each alone against a plain loop over all tokens, all together against one after the other, and what is drawn of
// what they leave. Where a boundary lies as near to a token as sums are rounded, either answer is right.
#include <float.h>

#include "sampling_fixture.h"

using namespace check;

namespace {

constexpr double kNear = 1e-5;

octavo_sampling plain(Random& random, double temperature) { return {0, 0, temperature, 1, 0, random.next(), 1, 2, 3, 0, nullptr, nullptr, {}}; }

// What is left of a row.
struct Shaped {
  std::vector<float> x;
  std::set<int32_t> ids;
  octavo_sampling w;

  Shaped(const Kernels* k, const std::vector<float>& row, const octavo_sampling& wanted) : w(wanted) {
    const int64_t n = int64_t(row.size());
    Scratch s(n);
    const LogitRow raw(*k, row.data(), n, s);
    w = shape_row(raw, wanted);
    x.assign(s.shaped, s.shaped + n);
    bool untouched = true;
    for (int32_t id = 0; id < n; id++) {
      if (x[size_t(id)] == -kInf) continue;
      ids.insert(ids.end(), id);
      untouched = untouched && x[size_t(id)] == row[size_t(id)];
    }
    CHECK(untouched && !ids.empty() && w.top_k == 0 && w.top_p == 1);
  }
};

// Chances at a temperature.
std::vector<double> chances(const std::vector<float>& x, double temperature) {
  const double top = *std::max_element(x.begin(), x.end());
  std::vector<double> p;
  double total = 0;
  for (const float v : x) p.push_back(exp((double(v) - top) / temperature)), total += p.back();
  for (double& v : p) v /= total;
  return p;
}

bool near(double a, double b) { return fabs(a - b) <= kNear * (fabs(b) + 1e-12); }

void test_temperature(const Kernels* k, const std::vector<float>& x, octavo_sampling w, Random& random) {
  const double ranges[] = {0.3, 0.7, 5}, exponents[] = {0, 0.5, 1, 3};
  w.shape.dynatemp_range = ranges[random.below(3)], w.shape.dynatemp_exponent = exponents[random.below(4)];
  const double low = std::max(0.0, w.temperature - w.shape.dynatemp_range), high = w.temperature + w.shape.dynatemp_range;
  double entropy = 0, tokens = 0;
  for (const double p : chances(x, 1)) entropy -= p > 0 ? p * log(p) : 0;
  for (const float v : x) tokens += v != -kInf;
  const double share = tokens > 1 ? std::clamp(entropy / log(tokens), 0.0, 1.0) : 0;
  const double exponent = w.shape.dynatemp_exponent, slack = exponent > 0 && exponent < 1 ? 2e-2 : 1e-4;  // of entropies near 0
  CHECK(fabs(Shaped(k, x, w).w.temperature - (low + (high - low) * pow(share, exponent))) <= slack * high);
}

void test_sigma(const Kernels* k, const std::vector<float>& x, octavo_sampling w, Random& random) {
  const double sigmas[] = {0.05, 0.5, 1, 2.5};
  w.shape.top_n_sigma = sigmas[random.below(4)];
  long double sum = 0, squares = 0, count = 0;
  const double top = *std::max_element(x.begin(), x.end());
  for (const float v : x)
    if (v != -kInf) sum += v - top, squares += (long double)(v - top) * (v - top), count++;
  const long double mean = sum / count, variance = squares / count - mean * mean;
  const double below = variance > 0 ? w.shape.top_n_sigma * sqrt(double(variance)) : 0;
  const Shaped left(k, x, w);
  bool right = true;
  for (int32_t id = 0; id < int32_t(x.size()); id++) {
    const double away = top - x[size_t(id)];
    if (!near(away, below) || away == 0) right = right && (left.x[size_t(id)] != -kInf) == (away <= below);
  }
  CHECK(right);
}

void test_typical(const Kernels* k, const std::vector<float>& x, octavo_sampling w, Random& random) {
  const double shares[] = {1e-6, 0.2, 0.7, 0.99};
  w.shape.typical_p = shares[random.below(4)];
  const std::vector<double> p = chances(x, w.temperature);
  double entropy = 0;
  for (const double v : p) entropy -= v > 0 ? v * log(v) : 0;
  const Shaped left(k, x, w);
  double farthest = 0, nearest = HUGE_VAL, mass = 0, last = 0;
  for (int32_t id = 0; id < int32_t(x.size()); id++) {
    if (x[size_t(id)] == -kInf || p[size_t(id)] < 1e-300) continue;  // whose surprise is no number
    const double away = fabs(-log(p[size_t(id)]) - entropy);
    if (left.x[size_t(id)] == -kInf) nearest = std::min(nearest, away);
    else farthest = std::max(farthest, away), mass += p[size_t(id)];
  }
  for (const int32_t id : left.ids) {
    const double away = p[size_t(id)] < 1e-300 ? HUGE_VAL : fabs(-log(p[size_t(id)]) - entropy);
    if (away >= farthest * (1 - kNear) - kNear) last = std::max(last, p[size_t(id)]);
  }
  CHECK(farthest <= nearest * (1 + kNear) + kNear);
  CHECK(mass >= w.shape.typical_p - kNear && (left.ids.size() == 1 || mass - last <= w.shape.typical_p + kNear));
}

void test_xtc(const Kernels* k, const std::vector<float>& x, octavo_sampling w, Random& random, long* fell) {
  const double thresholds[] = {0, 0.01, 0.1, 0.4};
  w.shape.xtc_probability = random.below(4) ? 1 : 0.5, w.shape.xtc_threshold = thresholds[random.below(4)];
  const Noise at{w.seed, w.choice, w.index, 0x585443};
  const int32_t zero = 0;
  uint32_t word;
  k->noise_words(&word, &zero, 1, &at);
  const bool coin = (word + 0.5) / 4294967296.0 < w.shape.xtc_probability;
  const std::vector<double> p = chances(x, w.temperature);
  size_t likely = 0;
  for (const double v : p) {
    if (near(v, w.shape.xtc_threshold)) return;
    likely += v >= w.shape.xtc_threshold && v > 0;
  }
  if (w.shape.xtc_threshold == 0) return CHECK(Shaped(k, x, w).ids.size() >= 1), void();
  const std::vector<int32_t> order = ordered(x);
  std::set<int32_t> want(order.begin(), order.end());
  for (size_t i = 0; coin && i + 1 < likely; i++) want.erase(order[i]);
  *fell += want.size() < order.size();
  CHECK(Shaped(k, x, w).ids == want);
}

// How many tokens make up `mu` bits by Zipf's law.
double zipf(const std::vector<float>& x, const std::vector<int32_t>& order, double temperature, double mu) {
  double products = 0, squares = 0;
  for (size_t i = 0; i + 1 < std::min<size_t>(order.size(), 100); i++) {
    const double rank = log(double(i + 2) / double(i + 1)), fall = (double(x[size_t(order[i])]) - x[size_t(order[i + 1])]) / temperature;
    products += rank * std::min(fall, 1e9), squares += rank * rank;
  }
  const double s = products / squares, n = double(order.size()), e = s - 1;
  const double share = fabs(e) > 1e-9 ? e / (1 - pow(n, -e)) : 1 / log(n);
  return std::min(n, std::max(1.0, exp2(std::min(40.0, (log2(share) + mu) / std::max(s, 1e-9)))));
}

void test_mirostat(const Kernels* k, const std::vector<float>& x, octavo_sampling w, Random& random) {
  const float bits[] = {0.5f, 2, 5, 12};
  const float mu = bits[random.below(4)];
  const std::vector<int32_t> order = ordered(x);
  const std::vector<double> p = chances(x, w.temperature);
  w.mirostat = mu;
  size_t count = 0;
  bool clear = true;
  for (const double v : p) clear = clear && !near(v, exp2(-mu)), count += v >= exp2(-mu);
  count = std::max<size_t>(count, 1);
  if (clear) CHECK(Shaped(k, x, w).ids == std::set<int32_t>(order.begin(), order.begin() + int64_t(count)));
  w.mirostat = -mu;
  if (order.size() < 2) return;
  const double many = zipf(x, order, w.temperature, mu);
  const std::set<int32_t> ids = Shaped(k, x, w).ids;
  CHECK(ids == std::set<int32_t>(order.begin(), order.begin() + int64_t(ids.size())));
  CHECK(double(ids.size()) <= many * (1 + kNear) && double(ids.size()) > many * (1 - kNear) - 1);
}

// All at once: what each leaves is all that the next one sees.
void test_order(const Kernels* k, const std::vector<float>& x, Random& random) {
  octavo_sampling w = plain(random, 0.5 + double(random.below(3)) / 2);
  if (random.below(2)) w.shape.top_n_sigma = 2;
  if (random.below(2)) w.top_k = 50;
  if (random.below(2)) w.shape.typical_p = 0.9;
  if (random.below(2)) w.top_p = 0.9;
  if (random.below(2)) w.shape.xtc_probability = 1, w.shape.xtc_threshold = 0.02;
  if (random.below(2)) w.mirostat = random.below(2) ? 6.0f : -6.0f;
  w.shape.top_n_sigma = is_shaped(w) ? w.shape.top_n_sigma : 3;
  const Shaped together(k, x, w);
  std::vector<float> left = x;
  for (int stage = 0; stage < 6; stage++) {
    octavo_sampling one = w;
    one.shape = {}, one.top_k = 0, one.top_p = 1, one.mirostat = 0;
    if (stage == 0) one.shape.top_n_sigma = w.shape.top_n_sigma;
    if (stage == 1) one.top_k = w.top_k;
    if (stage == 2) one.shape.typical_p = w.shape.typical_p;
    if (stage == 3) one.top_p = w.top_p;
    if (stage == 4) one.shape.xtc_probability = w.shape.xtc_probability, one.shape.xtc_threshold = w.shape.xtc_threshold;
    if (stage == 5) one.mirostat = w.mirostat;
    left = Shaped(k, left, one).x;
  }
  CHECK(left == together.x);
  w.min_p = random.below(2) ? 0 : 0.05;
  const Shaped last(k, x, w);
  Scratch s(int64_t(x.size()));
  CHECK(sample_row(*k, x.data(), int64_t(x.size()), w, s) == plain_draw(k, x, last.w, last.ids));
}

// Nothing that is infinite, tiny or alone is anything but a draw among the able.
void test_edges(const Kernels* k, Random& random) {
  for (int i = 0; i < 300; i++) {
    const int64_t n = random.between(1, 200);
    std::vector<float> x = row_of(random, n, i);
    if (i % 4 == 0) x[size_t(random.below(n))] = kInf;
    if (i % 5 == 0) x[size_t(random.below(n))] = FLT_MAX, x[size_t(random.below(n))] = -FLT_MAX;
    if (i % 9 == 0) x.assign(size_t(n), -kInf), x[size_t(random.below(n))] = -FLT_MAX;
    const double wild[] = {1e-320, 1e-30, 1e-3, 1, 7, 1e38};
    octavo_sampling w = plain(random, i % 6 ? wild[random.below(6)] : 0);
    w.shape.dynatemp_range = random.below(2) ? wild[random.below(6)] : 0, w.shape.dynatemp_exponent = wild[random.below(6)];
    w.shape.top_n_sigma = random.below(3) ? 0 : wild[random.below(6)], w.shape.typical_p = random.below(3) ? 0 : wild[random.below(6)];
    w.shape.xtc_probability = random.below(2), w.shape.xtc_threshold = random.below(2) ? wild[random.below(6)] : 0;
    w.mirostat = random.below(3) ? 0 : float((random.below(2) ? 1 : -1) * wild[random.below(6)]);
    w.min_p = random.below(3) ? 0 : 0.3;
    Scratch s(n);
    const int32_t id = sample_row(*k, x.data(), n, w, s);
    const bool none = std::all_of(x.begin(), x.end(), [](float v) { return v == kInf; });
    const bool infinite = std::find(x.begin(), x.end(), kInf) != x.end();
    CHECK(none ? id == -1 : id >= 0 && id < n && x[size_t(id)] > -kInf && (!infinite || x[size_t(id)] == kInf));
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    Random random(6);
    long fell = 0;
    for (int i = 0; i < 90; i++) {
      const std::vector<float> x = row_of(random, i % 30 == 7 ? 5000 : random.between(1, 500), i);
      const octavo_sampling w = plain(random, 0.4 + double(random.below(4)) / 2);
      test_temperature(k, x, w, random);
      test_sigma(k, x, w, random);
      test_typical(k, x, w, random);
      test_xtc(k, x, w, random, &fell);
      test_mirostat(k, x, w, random);
      test_order(k, x, random);
    }
    CHECK(fell > 10);
    test_edges(k, random);
  }
  return finish("test_shaping");
}
