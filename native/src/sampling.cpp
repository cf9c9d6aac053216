#include "sampling.h"

#include <float.h>

#include <algorithm>

namespace octavo {
namespace {

// backends/random.py has the meaning of all numbers.
constexpr uint32_t kUpper = 3037000500u;
constexpr double kSlack = 1e-3;  // of scores: far more than float32 can be wrong where it decides
constexpr float kLn2 = 0.693147180559945309417f, kSqrtHalf = 0.707106781186547524401f;
constexpr float kSeries[] = {1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3};
constexpr int64_t kAtOnce = 256;  // candidates whose words are made together
constexpr int64_t kFew = 8;       // up to a kFew-th of the vocabulary, words are made for each candidate instead of for blocks

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

// 1 / temperature where float32 holds it; beyond, only what ties with the largest has any weight.
float inverse_of(double temperature) { return static_cast<float>(std::min(1.0 / temperature, 1e30)); }

// Infinitely likely tokens share the place of the largest.
void level(const LogitRow& row, float* out) {
  for (int64_t i = 0; i < row.n; i++) out[i] = row.x[i] == HUGE_VALF ? 0.0f : -HUGE_VALF;
}

bool all_infinite(const LogitRow& row) {
  return std::all_of(row.x, row.x + row.n, [](float v) { return v == HUGE_VALF; });
}

// The contest for the largest score + noise among candidates; of equals the lowest id wins.
class Draw {
 public:
  Draw(const LogitRow& row, const octavo_sampling& wanted)
      : row_(row), wanted_(wanted), at_{wanted.seed, wanted.choice, wanted.index, wanted.purpose} {
    hopes_ = {row.scratch.blocks, row.blocks(), row.top, inverse_of(wanted.temperature), -HUGE_VALF, -FLT_MAX, at_};
    uint32_t word;
    const int32_t first = row.top_id();  // always a candidate
    row.kernels.noise_words(&word, &first, 1, &at_);
    offer(first, word);
  }

  int32_t run() {
    contest();
    return key_ > -HUGE_VAL ? id_ : -1;
  }

 private:
  void contest() {
    const octavo_sampling& w = wanted_;
    const int64_t top_k = w.top_k < row_.n ? w.top_k : 0;
    if (w.top_p < 1.0) return among(keep_top_p(row_, top_k, w.top_p, hopes_.inverse));
    if (top_k > 0) return among(keep_top_k(row_, top_k));
    if (w.min_p > 0.0) hopes_.least = lowest(log(w.min_p));
    among_all({-HUGE_VALF, INT32_MAX});
  }

  // A logit that no score of `least` or more lies below.
  float lowest(double least) const {
    const double logit = row_.top + (least - kSlack) * wanted_.temperature;
    return static_cast<float>(logit - fabs(logit) * 1e-6);
  }

  void offer(int32_t id, uint32_t word) {
    const double score = (static_cast<double>(row_.x[id]) - row_.top) / wanted_.temperature;
    if (wanted_.min_p > 0.0 && !(exp(score) >= wanted_.min_p)) return;
    const double key = score + static_cast<double>(gumbel(word));
    if (key < key_ || (key == key_ && id >= id_)) return;
    key_ = key;
    id_ = id;
    hopes_.bar = static_cast<float>(key - kSlack);
  }

  void among(const Kept& kept) {
    const int64_t count = kept.count;
    if (count * kFew > row_.n) return among_all(kept.last);
    uint32_t words[kAtOnce];
    float x[kAtOnce];
    int32_t which[kAtOnce + 1];
    for (int64_t i = 0; i < count; i += kAtOnce) {
      const int32_t* ids = row_.scratch.ids + i;
      const int64_t some = std::min(kAtOnce, count - i);
      for (int64_t j = 0; j < some; j++) x[j] = row_.x[ids[j]];
      row_.kernels.noise_words(words, ids, some, &at_);
      const int64_t left = row_.kernels.hopeful(&hopes_, x, words, some, which);
      for (int64_t j = 0; j < left; j++) offer(ids[which[j]], words[which[j]]);
    }
  }

  void among_all(const LastKept& last) {
    uint32_t words[kBlock];
    int32_t which[kBlock + 1];
    hopes_.least = std::max(hopes_.least, last.value);
    const int64_t count = hopes_.count;
    for (int64_t b = row_.kernels.next_hopeful(&hopes_, 0, words); b < count; b = row_.kernels.next_hopeful(&hopes_, b + 1, words)) {
      const int64_t first = b * kBlock, some = std::min<int64_t>(kBlock, row_.n - first);
      const int64_t left = row_.kernels.hopeful(&hopes_, row_.x + first, words, some, which);
      for (int64_t j = 0; j < left; j++) {
        const int32_t id = static_cast<int32_t>(first) + which[j];
        if (last.covers(row_.x[id], id)) offer(id, words[which[j]]);
      }
    }
  }

  const LogitRow& row_;
  const octavo_sampling& wanted_;
  const Noise at_;
  Hopes hopes_{};
  double key_ = -HUGE_VAL;
  int32_t id_ = INT32_MAX;
};

int32_t draw(const LogitRow& row, const octavo_sampling& wanted) {
  if (!is_shaped(wanted)) return wanted.temperature == 0.0 ? row.top_id() : Draw(row, wanted).run();
  const octavo_sampling left = shape_row(row, wanted);
  const LogitRow shaped(row.kernels, row.scratch.shaped, row.n, row.scratch);
  return left.temperature == 0.0 ? shaped.top_id() : Draw(shaped, left).run();
}

int32_t choose(const LogitRow& row, const octavo_sampling& wanted) {
  if (row.top != row.top || row.top == -HUGE_VALF || (row.top == HUGE_VALF && all_infinite(row))) return -1;
  if (wanted.temperature == 0.0 && !is_shaped(wanted)) return row.top_id();
  if (row.top != HUGE_VALF) return draw(row, wanted);
  level(row, row.scratch.values);
  return draw(LogitRow(row.kernels, row.scratch.values, row.n, row.scratch), wanted);
}

}  // namespace

void SampleScratch::allocate(Arena* memory, int64_t vocab_size) {
  values = memory->take_array<float>(vocab_size);
  shaped = memory->take_array<float>(vocab_size);
  weights = memory->take_array<float>(vocab_size);
  blocks = memory->take_array<float>(vocab_size / kBlock + 1);
  ids = memory->take_array<int32_t>(vocab_size + kBlock);
  marks = memory->take(vocab_size);
}

int64_t SampleScratch::bytes(int64_t vocab_size) { return vocab_size * 17 + vocab_size / kBlock * 4 + 4 * kBlock; }

int32_t LogitRow::top_id() const {
  int64_t b = 0;
  while (b + 1 < blocks() && scratch.blocks[b] != top) b++;
  int64_t id = b * kBlock;
  while (id + 1 < n && x[id] != top) id++;
  return static_cast<int32_t>(id);
}

float LogitRow::lowest_block() const {
  float least = top;
  for (int64_t b = 0; b < blocks(); b++) least = scratch.blocks[b] == -HUGE_VALF ? least : std::min(least, scratch.blocks[b]);
  return least;
}

float gumbel(uint32_t bits) {
  if (bits < kUpper) return -log32(-log32(static_cast<float>((bits + 0.5) * 0x1p-32)));
  const float distance = static_cast<float>((0xffffffffu - bits + 0.5) * 0x1p-32);
  return -log32(-log_of_ratio(-distance / (2.0f - distance)));
}

int32_t sample_row(const Kernels& kernels, const float* logits, int64_t n, const octavo_sampling& w,
                   const SampleScratch& scratch) {
  if (w.rules != nullptr) apply_rules(kernels, logits, n, w.rules, scratch, scratch.values);
  const LogitRow row(kernels, w.rules != nullptr ? scratch.values : logits, n, scratch);
  const int32_t id = choose(row, w);
  if (w.logprobs == nullptr || id < 0) return id;
  w.logprobs->row = w.row;
  w.logprobs->token = id;
  const bool same = row.x == logits && row.top != HUGE_VALF && !is_shaped(w);  // scratch.blocks are still this row's
  fill_logprobs(same ? row : LogitRow(kernels, logits, n, scratch), w.logprobs);
  return id;
}

}  // namespace octavo
