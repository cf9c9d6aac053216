// What tests of sampling share: working memory, rows of logits of every kind, and their order.
#pragma once
#include <algorithm>
#include <set>

#include "../src/sampling.h"
#include "check.h"

namespace check {

using namespace octavo;

constexpr float kInf = INFINITY;

struct Scratch : SampleScratch {
  std::vector<float> a, b, c, f;
  std::vector<int32_t> d;
  std::vector<uint8_t> e;
  explicit Scratch(int64_t n)
      : a(size_t(n)), b(size_t(n)), c(size_t(n / kBlock + 1)), f(size_t(n)), d(size_t(n + kBlock)), e(size_t(n)) {
    values = a.data(), shaped = f.data(), weights = b.data(), blocks = c.data(), ids = d.data(), marks = e.data();
  }
};

// Many ties, some banned, some far away; i chooses what it looks like.
inline std::vector<float> row_of(Random& random, int64_t n, int64_t i) {
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = i % 3 ? 6 * random.uniform() : float(random.below(9)) - 4;
  if (i % 4 == 1) for (float& v : x) v = random.below(3) ? v : -kInf;
  if (i % 5 == 2) for (float& v : x) v = ldexpf(v, int(random.between(-60, 60)));
  if (i % 7 == 3) x.assign(size_t(n), 2.5f);
  x[size_t(random.below(n))] = 3;
  return x;
}

inline bool before(const std::vector<float>& x, int32_t a, int32_t b) { return x[size_t(a)] != x[size_t(b)] ? x[size_t(a)] > x[size_t(b)] : a < b; }

inline std::vector<int32_t> ordered(const std::vector<float>& x) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < x.size(); i++) if (x[i] != -kInf) ids.push_back(int32_t(i));
  std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return before(x, a, b); });
  return ids;
}

// The contest without any shortcut.
inline int32_t plain_draw(const Kernels* k, const std::vector<float>& x, const octavo_sampling& w, const std::set<int32_t>& kept) {
  const Noise at{w.seed, w.choice, w.index, w.purpose};
  const double top = *std::max_element(x.begin(), x.end());
  std::pair<double, int32_t> best{-INFINITY, 0};
  for (const int32_t id : kept) {
    uint32_t word;
    k->noise_words(&word, &id, 1, &at);
    const double score = (double(x[size_t(id)]) - top) / w.temperature;
    if (exp(score) >= w.min_p) best = std::max(best, {score + double(gumbel(word)), -id});
  }
  return -best.second;
}

}  // namespace check
