#include "sampling.h"

#include <math.h>

#include <algorithm>

namespace octavo {
namespace {

// backends/random.py has the meaning of all numbers.
constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kStep0 = 0x9E3779B9, kStep1 = 0xBB67AE85;
constexpr uint32_t kUpper = 3037000500u;
constexpr double kReach = 22.9 - -3.2;  // a candidate further behind cannot win
constexpr double kSlack = 1e-3;  // of scores: far more than float32 can be wrong where it decides
constexpr double kColdest = 1e-6;  // temperatures below take the slow way: their inverse is too large for float32
constexpr float kLn2 = 0.693147180559945309417f, kSqrtHalf = 0.707106781186547524401f;
constexpr float kSeries[] = {1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3};

float log_of_ratio(float s) {  // log((1 + s) / (1 - s))
  const float square = s * s;
  float total = kSeries[0];
  for (int i = 1; i < 4; i++) total = total * square + kSeries[i];
  return 2.0f * (total * square * s + s);
}

float log32(float value) {
  int exponent;
  float mantissa = frexpf(value, &exponent);
  if (mantissa < kSqrtHalf) {
    mantissa *= 2.0f;
    exponent--;
  }
  const float fraction = log_of_ratio((mantissa - 1.0f) / (mantissa + 1.0f));
  return static_cast<float>(exponent) * kLn2 + fraction;
}

// (logit - top) / temperature, where infinitely likely tokens share the place of the largest.
struct Scores {
  const float* logits;
  double top, temperature;
  bool infinite;

  double operator[](int64_t i) const {
    if (infinite) return logits[i] == HUGE_VALF ? 0.0 : -HUGE_VAL;
    return (static_cast<double>(logits[i]) - top) / temperature;
  }
  bool quick() const { return !infinite && temperature >= kColdest; }  // float32 may sort out the hopeless
  bool before(int32_t a, int32_t b) const {  // (logit descending, id ascending)
    const float x = infinite ? static_cast<float>((*this)[a]) : logits[a], y = infinite ? static_cast<float>((*this)[b]) : logits[b];
    return x != y ? x > y : a < b;
  }
};

struct Best {
  double key = -HUGE_VAL;
  int32_t id = -1;

  void offer(double candidate, int32_t token_id) {
    if (candidate > key || (candidate == key && token_id < id)) {
      key = candidate;
      id = token_id;
    }
  }
};

bool any_nan(const float* x, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) count += x[i] != x[i];
  return count > 0;
}

bool all_infinite(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float v) { return v == HUGE_VALF; });
}

int32_t draw_from_all(const Kernels& kernels, const Scores& scores, int64_t n, const octavo_sampling& w,
                      const SampleScratch& scratch) {
  kernels.gumbel_row(scratch.values, n, w.seed, w.choice, w.index, w.purpose);
  const float* noise = scratch.values;
  const bool quick = scores.quick();
  const float top = static_cast<float>(scores.top), inverse = quick ? static_cast<float>(1.0 / w.temperature) : 0.0f;
  Best best;
  float bar = -HUGE_VALF;  // nothing below it, in float32, can win
  for (int64_t i = 0; i < n; i++) {
    if (quick && (scores.logits[i] - top) * inverse + noise[i] < bar) continue;
    const double score = scores[i];
    if (score < -kReach) continue;
    best.offer(score + static_cast<double>(noise[i]), static_cast<int32_t>(i));
    bar = static_cast<float>(best.key - kSlack);
  }
  return best.id;
}

// The sum of all weights exp(score): what top_p is a share of when there is no top_k.
double total_weight(const Kernels& kernels, const Scores& scores, int64_t n, const SampleScratch& scratch) {
  float* scaled = scratch.values;
  if (!scores.quick()) {
    for (int64_t i = 0; i < n; i++) scaled[i] = static_cast<float>(scores[i]);
    return exp(kernels.logsumexp(scaled, n, 0.0f));
  }
  const float inverse = static_cast<float>(1.0 / scores.temperature), top = static_cast<float>(scores.top) * inverse;
  kernels.scale_mul(scaled, scores.logits, nullptr, inverse, n);
  return exp(kernels.logsumexp(scaled, n, top) - static_cast<double>(top));
}

// Ids whose score is at least `least`, into scratch.ids.
int64_t gather(const Scores& scores, int64_t n, double least, const SampleScratch& scratch) {
  const bool all = !scores.quick() || least == -HUGE_VAL;
  const double logit = all ? 0.0 : scores.top + (least - kSlack) * scores.temperature;
  const float bar = all ? -HUGE_VALF : static_cast<float>(logit - fabs(logit) * 1e-6);
  int64_t near = 0, count = 0;
  for (int64_t i = 0; i < n; i++) {
    scratch.ids[near] = static_cast<int32_t>(i);
    near += !(scores.logits[i] < bar);
  }
  for (int64_t i = 0; i < near; i++) {
    const double score = scores[scratch.ids[i]];
    scratch.ids[count] = scratch.ids[i];
    count += score >= least && score != -HUGE_VAL;
  }
  return count;
}

// Orders the first `wanted` of `count` ids.
void order(const Scores& scores, int32_t* ids, int64_t count, int64_t wanted) {
  const auto before = [&](int32_t a, int32_t b) { return scores.before(a, b); };
  if (wanted < count) std::nth_element(ids, ids + wanted, ids + count, before);
  std::sort(ids, ids + std::min(wanted, count), before);
}

// How many of the ordered candidates top_p keeps; -1: all of them and it may be more.
int64_t nucleus(const Scores& scores, const int32_t* ids, int64_t count, double enough) {
  double reached = 0.0;
  for (int64_t i = 0; i < count; i++) {
    if (i > 0 && reached >= enough) return i;
    reached += exp(scores[ids[i]]);
  }
  return reached >= enough ? count : -1;
}

int64_t keep_top_k(const Scores& scores, int64_t n, const octavo_sampling& w, const SampleScratch& scratch) {
  const int64_t found = gather(scores, n, -HUGE_VAL, scratch);
  const int64_t count = std::min<int64_t>(w.top_k, found);
  order(scores, scratch.ids, found, count);
  if (w.top_p >= 1.0) return count;
  double total = 0.0;
  for (int64_t i = 0; i < count; i++) total += exp(scores[scratch.ids[i]]);
  const int64_t kept = nucleus(scores, scratch.ids, count, w.top_p * total);
  return kept < 0 ? count : kept;
}

// Less likely tokens than `least` have together at most the weight that top_p leaves out.
int64_t keep_top_p(const Kernels& kernels, const Scores& scores, int64_t n, const octavo_sampling& w,
                   const SampleScratch& scratch) {
  const double enough = w.top_p * total_weight(kernels, scores, n, scratch);
  const double least = w.top_p > 0.0 ? log((1.0 - w.top_p) / static_cast<double>(n)) - 1e-3 : -1.0;
  const int64_t found = gather(scores, n, least, scratch);
  for (int64_t wanted = 256;; wanted *= 8) {
    const int64_t count = std::min(wanted, found);
    order(scores, scratch.ids, found, count);
    const int64_t kept = nucleus(scores, scratch.ids, count, enough);
    if (kept >= 0) return kept;
    if (count == found) return found;
  }
}

int32_t draw_from_few(const Kernels& kernels, const Scores& scores, int64_t n, const octavo_sampling& w,
                      const SampleScratch& scratch) {
  int64_t count;
  if (w.top_k > 0) {
    count = keep_top_k(scores, n, w, scratch);
  } else if (w.top_p < 1.0) {
    count = keep_top_p(kernels, scores, n, w, scratch);
  } else {
    count = gather(scores, n, log(w.min_p) - 1e-9, scratch);
  }
  Best best;
  for (int64_t i = 0; i < count; i++) {
    const int32_t id = scratch.ids[i];
    const double score = scores[id];
    if (exp(score) >= w.min_p) best.offer(score + static_cast<double>(gumbel(noise_bits(w, id))), id);
  }
  return best.id;
}

}  // namespace

void SampleScratch::allocate(Arena* memory, int64_t vocab_size) {
  values = memory->take_array<float>(vocab_size);
  ids = memory->take_array<int32_t>(vocab_size + 1);  // gather writes one past what it keeps
}

uint32_t noise_bits(const octavo_sampling& at, int32_t token_id) {
  uint32_t c[4] = {static_cast<uint32_t>(token_id) >> 2, at.index, at.choice, at.purpose};
  uint32_t k0 = static_cast<uint32_t>(at.seed), k1 = static_cast<uint32_t>(at.seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t even = uint64_t{kMultiplier0} * c[0], odd = uint64_t{kMultiplier1} * c[2];
    const uint32_t first = static_cast<uint32_t>(odd >> 32) ^ c[1] ^ k0;
    const uint32_t third = static_cast<uint32_t>(even >> 32) ^ c[3] ^ k1;
    c[0] = first;
    c[1] = static_cast<uint32_t>(odd);
    c[2] = third;
    c[3] = static_cast<uint32_t>(even);
    k0 += kStep0;
    k1 += kStep1;
  }
  return c[token_id & 3];
}

float gumbel(uint32_t bits) {
  if (bits < kUpper) return -log32(-log32(static_cast<float>((bits + 0.5) * 0x1p-32)));
  const float distance = static_cast<float>((0xffffffffu - bits + 0.5) * 0x1p-32);
  return -log32(-log_of_ratio(-distance / (2.0f - distance)));
}

const char* wrong_sampling(const octavo_sampling& w, int64_t rows) {
  if (w.row < 0 || w.row >= rows) return "sampling: row out of range";
  if (!(w.temperature >= 0.0) || !(w.top_p >= 0.0) || !(w.min_p >= 0.0) || w.top_k < 0) return "sampling: not a parameter";
  return nullptr;
}

int32_t sample_row(const Kernels& kernels, const float* logits, int64_t n, const octavo_sampling& w,
                   const SampleScratch& scratch) {
  if (any_nan(logits, n)) return -1;
  int64_t id;
  float top;
  kernels.argmax(logits, n, &id, &top);
  if (top == -HUGE_VALF || (top == HUGE_VALF && all_infinite(logits, n))) return -1;
  if (w.temperature == 0.0) return static_cast<int32_t>(id);
  const Scores scores{logits, static_cast<double>(top), w.temperature, top == HUGE_VALF};
  const bool all = w.top_k <= 0 && w.top_p >= 1.0 && w.min_p <= 0.0;
  return all ? draw_from_all(kernels, scores, n, w, scratch) : draw_from_few(kernels, scores, n, w, scratch);
}

}  // namespace octavo
