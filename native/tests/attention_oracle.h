// The plain definition of attention, in double precision on what the pages hold, and random calls of it.
#pragma once
#include <math.h>

#include "attention_fixture.h"

namespace check {

inline const char* const kTypes[] = {"fp32", "bf16", "int8"};
constexpr double kTolerance[] = {3e-6, 1.2e-2, 2.5e-2};  // bf16 and int8 round queries and probabilities

// Positions whose K/V row `row` sees, in order.
inline std::vector<int64_t> seen(const Query& q, int64_t row) {
  std::vector<int64_t> slots;
  int64_t depth = row;
  if (!q.parents.empty()) {
    for (int64_t r = row; r >= 0; r = q.parents[size_t(r)]) slots.insert(slots.begin(), q.pos0 + r);
    depth = int64_t(slots.size()) - 1;
  }
  const int64_t position = q.pos0 + depth, first = q.window ? std::max<int64_t>(0, position - q.window + 1) : 0;
  std::vector<int64_t> all;
  for (int64_t p = 0; p <= position; p++)
    if (p >= first || p < q.sink_tokens) all.push_back(p < q.pos0 || q.parents.empty() ? p : slots[size_t(p - q.pos0)]);
  return all;
}

// The query of (row, head) as it looks at sink tokens: so far on as if the window followed them.
inline std::vector<double> turned_back(const Query& q, int64_t dim, int64_t row, int64_t g) {
  const float* from = &q.q[size_t((row * q.group + g) * dim)];
  std::vector<double> turned(from, from + dim);
  const int64_t by = std::max<int64_t>(0, q.pos0 + row - (q.sink_tokens + q.window - 1));
  for (int64_t j = 0; j < q.pairs; j++) {
    const double angle = double(by) * q.frequency(j), low = from[j], high = from[j + q.pairs];
    turned[size_t(j)] = low * cos(angle) + high * sin(angle);
    turned[size_t(j + q.pairs)] = high * cos(angle) - low * sin(angle);
  }
  return turned;
}

inline void oracle_row(const Query& q, const Sequence& s, const std::vector<int64_t>& slots, int64_t row, int64_t g, double* out) {
  const float* from = &q.q[size_t((row * q.group + g) * s.dim)];
  const std::vector<double> plain(from, from + s.dim), turned = turned_back(q, s.dim, row, g);
  std::vector<double> score;
  double top = q.sinks.empty() ? -1e300 : q.sinks[size_t(g)], sum = 0;
  for (int64_t p : slots) {
    double dot = 0;
    for (int64_t d = 0; d < s.dim; d++) dot += (p < q.sink_tokens ? turned : plain)[size_t(d)] * s.k[size_t(p * s.dim + d)];
    dot *= q.scale;
    if (q.soft_cap > 0) dot = q.soft_cap * tanh(dot / q.soft_cap);
    score.push_back(dot);
    top = std::max(top, dot);
  }
  std::fill(out, out + s.dim, 0.0);
  if (!q.sinks.empty()) sum = exp(q.sinks[size_t(g)] - top);
  for (size_t i = 0; i < slots.size(); i++) {
    const double w = exp(score[i] - top);
    sum += w;
    for (int64_t d = 0; d < s.dim; d++) out[d] += w * s.v[size_t(slots[i] * s.dim + d)];
  }
  for (int64_t d = 0; d < s.dim; d++) out[d] /= sum;
}

inline double worst_error(const Query& q, const Sequence& s, const std::vector<float>& out) {
  std::vector<double> want(size_t(s.dim));
  double worst = 0;
  for (int64_t row = 0; row < q.rows; row++) {
    const std::vector<int64_t> slots = seen(q, row);
    for (int64_t g = 0; g < q.group; g++) {
      oracle_row(q, s, slots, row, g, want.data());
      for (int64_t d = 0; d < s.dim; d++) {
        const double e = fabs(want[size_t(d)] - out[size_t((row * q.group + g) * s.dim + d)]);
        worst = e <= worst ? worst : e;  // a NaN stays
      }
    }
  }
  return worst;
}

struct Case {
  int32_t type, page_size, dim, group;
  int64_t rows, pos0;
};

inline Case random_case(Random& random, int32_t type) {
  const int32_t dims[] = {4, 8, 16, 64, 64, 80, 96, 128, 256}, pages[] = {16, 32, 64, 128}, groups[] = {1, 2, 3, 4, 7};
  Case c = {type, pages[random.below(4)], dims[random.below(9)], groups[random.below(5)], 0, 0};
  c.rows = random.below(3) == 0 ? random.between(2, 70) : 1;
  c.pos0 = random.below(4) == 0 ? 0 : random.below(random.below(3) == 0 ? 1200 : 200);
  return c;
}

inline void random_attributes(Random& random, Query& q) {
  const int32_t windows[] = {0, 0, 1, 7, 63, 64, 65, 200, 512};
  q.window = windows[random.below(9)];
  if (random.below(3) == 0) q.soft_cap = 3.0f;
  if (random.below(3) == 0)
    for (int i = 0; i < q.group; i++) q.sinks.push_back(random.uniform() * 3);
}

// Pages that no row of the query may look at are gone.
inline void free_behind_window(Pages& pages, const Query& q) {
  if (!q.window) return;
  for (int64_t p = (q.sink_tokens + pages.kv.page_size - 1) / pages.kv.page_size; (p + 1) * pages.kv.page_size <= q.pos0 - q.window + 1; p++)
    pages.table[size_t(p)] = -1;
}

}  // namespace check
