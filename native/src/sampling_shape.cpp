// The rarer samplers: dynamic temperature, top-n-sigma, typical, XTC, mirostat. backends/shaping.py has the definitions.
#include <float.h>
#include <string.h>

#include <algorithm>

#include "sampling.h"

namespace octavo {
namespace {

constexpr uint32_t kXtcCoin = 0x585443;  // backends/random.py
constexpr int64_t kZipfTokens = 100;     // backends/shaping.py
constexpr int kLanes = 8;                // sums side by side, then added in order

// Sums over the tokens that are not banned, of w * d^0, d^1 and d^2; d = logit - largest logit, w their weights (null: 1).
struct Moments {
  double count = 0.0, first = 0.0, second = 0.0;
};

Moments moments(const LogitRow& row, const float* weights) {
  double sums[3][kLanes] = {};
  const auto add = [&](int64_t i, int lane) {
    const bool able = row.x[i] > -HUGE_VALF;
    const double d = able ? static_cast<double>(row.x[i]) - row.top : 0.0;
    const double w = able ? (weights != nullptr ? static_cast<double>(weights[i]) : 1.0) : 0.0;
    sums[0][lane] += w, sums[1][lane] += w * d, sums[2][lane] += w * d * d;
  };
  const int64_t whole = row.n - row.n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int j = 0; j < kLanes; j++) add(i + j, j);
  for (int64_t i = whole; i < row.n; i++) add(i, static_cast<int>(i - whole));
  Moments m;
  for (int j = 0; j < kLanes; j++) m.count += sums[0][j], m.first += sums[1][j], m.second += sums[2][j];
  return m;
}

double weigh(const LogitRow& row, double temperature) {
  float from[kFrom];
  return row.kernels.sum_exp(row.x, row.n, row.top, static_cast<float>(std::min(1.0 / temperature, 1e30)), row.scratch.weights, from);
}

double temperature_of(const LogitRow& row, const octavo_sampling& w) {
  if (w.shape.dynatemp_range <= 0.0) return w.temperature;
  const double low = std::max(0.0, w.temperature - w.shape.dynatemp_range), high = w.temperature + w.shape.dynatemp_range;
  weigh(row, 1.0);
  const Moments m = moments(row, row.scratch.weights);
  const double entropy = log(m.count) - m.first / m.count, tokens = moments(row, nullptr).count;
  const double share = tokens > 1.0 ? std::min(1.0, std::max(0.0, entropy / log(tokens))) : 0.0;
  return low + (high - low) * pow(share, w.shape.dynatemp_exponent);
}

// A row that loses tokens, stage by stage, in scratch.shaped. Each stage makes its own LogitRow of what is left.
class Shaper {
 public:
  Shaper(const LogitRow& row, const octavo_sampling& wanted) : row_(row), w_(wanted), out_(row.scratch.shaped) {
    memcpy(out_, row.x, static_cast<size_t>(row.n) * sizeof(float));
    w_.temperature = temperature_of(row, wanted);
  }

  octavo_sampling run() {
    if (w_.temperature == 0.0) return w_;
    if (w_.shape.top_n_sigma > 0.0) keep_sigma();
    if (w_.top_k > 0 && w_.top_k < row_.n) keep(keep_top_k(left(), w_.top_k));
    if (w_.shape.typical_p > 0.0) keep_typical();
    if (w_.top_p < 1.0) keep(keep_top_p(left(), 0, w_.top_p, static_cast<float>(std::min(1.0 / w_.temperature, 1e30))));
    if (w_.shape.xtc_probability > 0.0 && coin()) drop_top_choices();
    if (w_.mirostat != 0.0f) keep_mirostat();
    w_.top_k = 0;
    w_.top_p = 1.0;
    return w_;
  }

 private:
  LogitRow left() const { return LogitRow(row_.kernels, out_, row_.n, row_.scratch); }

  void keep(const Kept& kept) {
    std::fill(out_, out_ + row_.n, -HUGE_VALF);
    for (int64_t i = 0; i < kept.count; i++) out_[row_.scratch.ids[i]] = row_.x[row_.scratch.ids[i]];
  }

  void keep_sigma() {
    const Moments m = moments(row_, nullptr);
    const double mean = m.first / m.count, variance = m.second / m.count - mean * mean;
    const double floor = variance > 0.0 ? row_.top - w_.shape.top_n_sigma * sqrt(variance) : row_.top;
    for (int64_t i = 0; i < row_.n; i++) out_[i] = out_[i] >= floor ? out_[i] : -HUGE_VALF;
  }

  // In place of each logit its distance from the mean one, negative: what is nearest to it comes first.
  void keep_typical() {
    const LogitRow before = left();
    const double total = weigh(before, w_.temperature);
    const Moments m = moments(before, row_.scratch.weights);
    const double mean = before.top + m.first / m.count;
    for (int64_t i = 0; i < row_.n; i++) {
      if (out_[i] > -HUGE_VALF) out_[i] = static_cast<float>(std::max<double>(-fabs(out_[i] - mean), -FLT_MAX));
    }
    keep(keep_share(left(), row_.scratch.weights, w_.shape.typical_p * total));
  }

  bool coin() const {
    const Noise at{w_.seed, w_.choice, w_.index, kXtcCoin};
    const int32_t id = 0;
    uint32_t word;
    row_.kernels.noise_words(&word, &id, 1, &at);
    return (word + 0.5) * 0x1p-32 < w_.shape.xtc_probability;
  }

  void drop_top_choices() {
    const LogitRow before = left();
    const double total = settle(before);
    const int64_t likely = at_least(before, w_.shape.xtc_threshold * total, w_.shape.xtc_threshold);
    if (likely < 2) return;
    const LastKept stays = last_kept(before, likely);
    for (int64_t i = 0; i < likely; i++) {
      const int32_t id = row_.scratch.ids[i];
      if (id != stays.id) out_[id] = -HUGE_VALF;
    }
  }

  void keep_mirostat() {
    const double total = settle(left());
    const LogitRow before = left();
    if (w_.mirostat < 0.0f) return keep(keep_top_k(before, zipf_count(before, -static_cast<double>(w_.mirostat))));
    const double share = exp2(-static_cast<double>(w_.mirostat));
    const int64_t count = at_least(before, share * total, share);
    keep(count > 0 ? Kept{count, {}} : keep_top_k(before, 1));
  }

  // How many tokens make up `mu` bits, if chances fall by rank as those of the likeliest do.
  int64_t zipf_count(const LogitRow& row, double mu) const {
    int32_t* const ids = row_.scratch.ids;
    const int64_t likeliest = keep_top_k(row, kZipfTokens).count, tokens = static_cast<int64_t>(moments(row, nullptr).count);
    if (likeliest < 2) return likeliest;
    std::sort(ids, ids + likeliest, [&](int32_t a, int32_t b) { return row.before(a, b); });
    double products = 0.0, squares = 0.0;
    for (int64_t i = 0; i + 1 < likeliest; i++) {
      const double rank = log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
      const double fall = (static_cast<double>(row.x[ids[i]]) - row.x[ids[i + 1]]) / w_.temperature;
      products += rank * std::min(fall, 1e9), squares += rank * rank;
    }
    const double steep = products / squares, over = steep - 1.0, n = static_cast<double>(tokens);
    const double share = fabs(over) > 1e-9 ? over / (1.0 - pow(n, -over)) : 1.0 / log(n);
    const double bits = (log2(share) + mu) / std::max(steep, 1e-9);
    return bits >= 31.0 ? tokens : std::min(tokens, std::max<int64_t>(1, static_cast<int64_t>(exp2(bits))));
  }

  // Without what min_p leaves out; the sum of the weights that are left.
  double settle(const LogitRow& row) { return w_.min_p > 0.0 ? keep_min_p(row) : weigh(row, w_.temperature); }

  // The tokens with that weight at least, in scratch.ids; how many. `bound` is no larger than `weight`.
  int64_t at_least(const LogitRow& row, double weight, double bound) const {
    const double logit = row.top + (log(bound) - 1e-3) * w_.temperature;
    const float least = static_cast<float>(std::max<double>(logit - fabs(logit) * 1e-6, -FLT_MAX));
    int32_t* const ids = row_.scratch.ids;
    const int64_t found = row.kernels.gather(row.x, row.n, row.scratch.blocks, least, HUGE_VALF, ids);
    return std::remove_if(ids, ids + found, [&](int32_t id) { return !(weight_of(row, id) >= weight); }) - ids;
  }

  double weight_of(const LogitRow& row, int32_t id) const {
    return exp((static_cast<double>(row.x[id]) - row.top) / w_.temperature);
  }

  // Only these stay; the sum of their weights.
  double keep_min_p(const LogitRow& row) {
    const int64_t count = at_least(row, w_.min_p, w_.min_p);
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += weight_of(row, row_.scratch.ids[i]);
    keep({count, {}});
    w_.min_p = 0.0;
    return total;
  }

  const LogitRow& row_;
  octavo_sampling w_;
  float* const out_;
};

}  // namespace

bool is_shaped(const octavo_sampling& w) {
  const octavo_shape& s = w.shape;
  return s.typical_p > 0.0 || s.top_n_sigma > 0.0 || s.xtc_probability > 0.0 || s.dynatemp_range > 0.0 || w.mirostat != 0.0f;
}

octavo_sampling shape_row(const LogitRow& row, const octavo_sampling& wanted) { return Shaper(row, wanted).run(); }

}  // namespace octavo
