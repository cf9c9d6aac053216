// The first tokens of a row in the order (logit descending, id ascending), by number or by probability, without sorting it.
#include <float.h>

#include <algorithm>

#include "sampling.h"

namespace octavo {
namespace {

constexpr int kBins = 256;
constexpr int64_t kSorted = 48;    // so few are sorted at once
constexpr int64_t kListed = 1024;  // more are narrowed down by passes over the whole row first
constexpr int kRounds = 12;        // of narrowing down, for values at all scales

struct Span {
  float high, low;
};

Span span_of(const LogitRow& row, const int32_t* ids, int64_t count) {
  Span s{row.x[ids[0]], row.x[ids[0]]};
  for (int64_t i = 1; i < count; i++) {
    s.high = std::max(s.high, row.x[ids[i]]);
    s.low = std::min(s.low, row.x[ids[i]]);
  }
  return s;
}

// The shortest prefix of the ordered `count` ids whose mass, after `reached`, reaches `enough`: moved to the front of ids; its
// length. Everything if it never does. What lies clearly on one side is sorted into bins; only the bin in which the boundary
// lies is looked at again.
template <typename Mass>
int64_t shortest_prefix(const LogitRow& row, int32_t* ids, int64_t count, double reached, double enough, const Mass& mass) {
  int64_t done = 0, end = count;
  for (int round = 0; round < kRounds && end - done > kSorted; round++) {
    const Span s = span_of(row, ids + done, end - done);
    const float scale = kBins / (s.high - s.low);
    if (!(scale > 0.0f && scale < FLT_MAX)) break;  // all equal, or too far apart for float32
    const auto bin = [&](int32_t id) { return std::min(kBins - 1, static_cast<int>((s.high - row.x[id]) * scale)); };
    double sums[kBins] = {};
    for (int64_t i = done; i < end; i++) sums[bin(ids[i])] += mass(ids[i]);
    int edge = 0;
    while (edge < kBins && reached + sums[edge] < enough) reached += sums[edge++];
    if (edge == kBins) return end;
    int32_t* const begin = ids + done;
    int32_t* const middle = std::partition(begin, ids + end, [&](int32_t id) { return bin(id) < edge; });
    end = std::partition(middle, ids + end, [&](int32_t id) { return bin(id) == edge; }) - ids;
    done = middle - ids;
  }
  std::sort(ids + done, ids + end, [&](int32_t a, int32_t b) { return row.before(a, b); });
  while (done < end && reached < enough) reached += mass(ids[done++]);
  return done;
}

int64_t gather(const LogitRow& row, float least, float most = HUGE_VALF) {
  return row.kernels.gather(row.x, row.n, row.scratch.blocks, least, most, row.scratch.ids);
}

// Where the boundary lies: at least `low`, below `high`, above which `reached` lies already.
struct Bracket {
  float low, high = HUGE_VALF;
  double reached = 0.0;

  float most() const { return high == HUGE_VALF ? high : nextafterf(high, -HUGE_VALF); }  // without a boundary yet: certain ones too
};

// Limits that part the bracket: evenly, or, where nothing is known below, ever further from the top.
void part(const LogitRow& row, const Bracket& b, int round, float* limits) {
  const double top = std::min({b.high, row.top, FLT_MAX});
  const bool open = b.low == -FLT_MAX;
  const double step = open ? ldexp(std::max(std::min(row.top, FLT_MAX) - row.lowest_block(), 1e-3f) / 8, 8 * round) : (top - b.low) / kLimits;
  for (int j = 0; j < kLimits; j++) {
    const double limit = top - step * (open ? static_cast<double>(1 << j) : j + 1);
    limits[j] = j + 1 < kLimits ? static_cast<float>(std::max<double>(limit, b.low)) : b.low;
  }
}

// One pass over the row: the part of the bracket in which `enough` is reached. False when it never is.
bool narrow(const LogitRow& row, const float* weights, double enough, int round, Bracket* b) {
  float limits[kLimits];
  double sums[kLimits];
  part(row, *b, round, limits);
  row.kernels.mass_from(row.x, weights, row.n, limits, sums);
  int j = 0;
  while (j < kLimits && sums[j] < enough) j++;
  if (j == kLimits) return false;
  b->low = limits[j];
  if (j > 0) b->high = limits[j - 1], b->reached = sums[j - 1];
  return true;
}

// The last member of the shortest prefix whose mass (weights, or 1 each where null) reaches `enough`; it has at least `low`.
LastKept last_of_prefix(const LogitRow& row, const float* weights, double enough, float low) {
  Bracket b{low};
  int64_t found = gather(row, b.low);
  for (int round = 0; round < kRounds && found > kListed; round++) {
    if (!narrow(row, weights, enough, round, &b)) return {b.low, INT32_MAX};
    const int64_t before = found;
    found = gather(row, b.low, b.most());
    if (round > 1 && found == before) break;  // ties
  }
  const auto mass = [&](int32_t id) { return weights == nullptr ? 1.0 : static_cast<double>(weights[id]); };
  const int64_t kept = shortest_prefix(row, row.scratch.ids, found, b.reached, enough, mass);
  return kept == 0 ? LastKept{b.high, INT32_MAX} : last_kept(row, kept);
}

// A score that the nucleus does not go below: less likely tokens than that have together at most what top_p leaves out. `from`
// are sums of kernels.sum_exp, not exact.
double least_of_nucleus(const LogitRow& row, double top_p, double total, const float* from) {
  for (int j = 0; j < kFrom; j++) {
    if (from[j] >= 1.001 * top_p * total) return -(j + 1) * kOctaves * M_LN2 - 1e-3;
  }
  return std::min(log((1.0 - top_p) * total / static_cast<double>(row.n)), 0.0) - 1e-3;
}

// The members of the order up to `last`, in scratch.ids.
Kept list(const LogitRow& row, const LastKept& last) {
  int32_t* const ids = row.scratch.ids;
  int32_t* const end = ids + gather(row, last.value);
  return {std::remove_if(ids, end, [&](int32_t id) { return !last.covers(row.x[id], id); }) - ids, last};
}

// No more than k - 1 logits lie above it: the k-th largest block maximum.
float kth_maximum(const LogitRow& row, int64_t k) {
  const int64_t count = row.blocks();
  if (k > count) return -FLT_MAX;
  float* copy = row.scratch.weights;
  std::copy(row.scratch.blocks, row.scratch.blocks + count, copy);
  std::nth_element(copy, copy + (k - 1), copy + count, [](float a, float b) { return a > b; });
  return std::max(copy[k - 1], -FLT_MAX);
}

}  // namespace

LastKept last_kept(const LogitRow& row, int64_t count) {
  const int32_t* ids = row.scratch.ids;
  const int32_t id = *std::max_element(ids, ids + count, [&](int32_t a, int32_t b) { return row.before(a, b); });
  return {row.x[id], id};
}

Kept keep_top_k(const LogitRow& row, int64_t k) {
  return list(row, last_of_prefix(row, nullptr, static_cast<double>(k), kth_maximum(row, k)));
}

Kept keep_share(const LogitRow& row, const float* weights, double enough) {
  return list(row, last_of_prefix(row, weights, std::max(enough, DBL_MIN), -FLT_MAX));
}

Kept keep_top_p(const LogitRow& row, int64_t top_k, double top_p, float inverse) {
  float* const weights = row.scratch.weights;
  if (top_k <= 0) {
    float from[kFrom];
    const double total = row.kernels.sum_exp(row.x, row.n, row.top, inverse, weights, from);
    const double logit = row.top + least_of_nucleus(row, top_p, total, from) / inverse;
    const float low = std::max(static_cast<float>(logit - fabs(logit) * 1e-6), -FLT_MAX);
    return list(row, last_of_prefix(row, weights, std::max(top_p * total, DBL_MIN), low));
  }
  int32_t* const ids = row.scratch.ids;
  const int64_t found = keep_top_k(row, top_k).count;
  double total = 0.0;
  for (int64_t i = 0; i < found; i++) {
    weights[ids[i]] = static_cast<float>(exp((static_cast<double>(row.x[ids[i]]) - row.top) * inverse));
    total += weights[ids[i]];
  }
  const auto mass = [&](int32_t id) { return static_cast<double>(weights[id]); };
  const int64_t kept = shortest_prefix(row, ids, found, 0.0, std::max(top_p * total, DBL_MIN), mass);
  return {kept, last_kept(row, kept)};
}

}  // namespace octavo
