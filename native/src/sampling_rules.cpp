// Bias, bans, masks and penalties, in the order and rounding of backends/numpy_sampling.py: each step is done in double and
// rounded to float32.
#include <float.h>
#include <string.h>

#include "sampling.h"

namespace octavo {
namespace {

bool given(const void* list, int64_t count) { return count >= 0 && (count == 0 || list != nullptr); }

// Whether all of [count] ids, `step` apart, are token ids.
bool token_ids(const int32_t* ids, int64_t count, int64_t step, int64_t vocab_size) {
  uint32_t wrong = 0;
  for (int64_t i = 0; i < count; i++) wrong |= static_cast<uint32_t>(static_cast<uint32_t>(ids[i * step]) >= static_cast<uint64_t>(vocab_size));
  return wrong == 0;
}

const char* wrong_rules(const octavo_rules& r, int64_t vocab_size) {
  const bool lists = given(r.bias_ids, r.num_bias) && given(r.bias, r.num_bias) && given(r.banned, r.num_banned) &&
                     given(r.prompt, r.num_prompt) && given(r.output, r.num_output) &&
                     given(r.penalised, r.num_penalised) && given(r.penalties, r.num_penalised);
  if (!lists || r.allowed_bytes < 0 || r.mask_bytes < 0) return "sampling: a list is missing";
  const bool inside = token_ids(r.bias_ids, r.num_bias, 1, vocab_size) && token_ids(r.banned, r.num_banned, 1, vocab_size) &&
                      token_ids(r.prompt, r.num_prompt, 2, vocab_size) && token_ids(r.output, r.num_output, 2, vocab_size) &&
                      token_ids(r.penalised, r.num_penalised, 1, vocab_size);
  if (!inside) return "sampling: a token id is outside the vocabulary";
  return r.repetition > 0.0 ? nullptr : "sampling: a repetition penalty is not positive";
}

void add(float* logit, double bias) { *logit = static_cast<float>(static_cast<double>(*logit) + bias); }

// Once for each id of prompt and output together.
void repeat_penalty(const octavo_rules& r, const SampleScratch& scratch, float* out) {
  const auto each = [&](const auto& visit) {
    for (int32_t i = 0; i < r.num_prompt; i++) visit(r.prompt[2 * i]);
    for (int32_t i = 0; i < r.num_output; i++) visit(r.output[2 * i]);
  };
  each([&](int32_t id) {
    if (scratch.marks[id]) return;
    scratch.marks[id] = 1;
    const double logit = out[id];
    out[id] = static_cast<float>(logit > 0.0 ? logit / r.repetition : logit * r.repetition);
  });
  each([&](int32_t id) { scratch.marks[id] = 0; });
}

}  // namespace

void apply_rules(const Kernels& kernels, const float* logits, int64_t n, const octavo_rules* rules,
                 const SampleScratch& scratch, float* out) {
  if (rules == nullptr || (rules->allowed == nullptr && rules->mask == nullptr)) {
    memcpy(out, logits, static_cast<size_t>(n) * sizeof(float));
    if (rules == nullptr) return;
  }
  const octavo_rules& r = *rules;
  if (r.allowed != nullptr) kernels.mask_row(out, logits, n, r.allowed, r.allowed_bytes);
  if (r.mask != nullptr) kernels.mask_row(out, r.allowed != nullptr ? out : logits, n, r.mask, r.mask_bytes);
  for (int32_t i = 0; i < r.num_bias; i++) add(&out[r.bias_ids[i]], r.bias[i]);
  for (int32_t i = 0; i < r.num_banned; i++) out[r.banned[i]] = -HUGE_VALF;
  if (r.repetition != 1.0) repeat_penalty(r, scratch, out);
  if (r.frequency != 0.0 || r.presence != 0.0) {
    for (int32_t i = 0; i < r.num_output; i++) {
      const int32_t* pair = r.output + 2 * i;
      add(&out[pair[0]], -(pair[1] * r.frequency + (pair[1] > 0 ? r.presence : 0.0)));
    }
  }
  for (int64_t i = 0; i < r.num_penalised; i++) add(&out[r.penalised[i]], -r.penalties[i]);
}

const char* wrong_sampling(const octavo_sampling& w, int64_t rows, int64_t vocab_size) {
  if (w.row < 0 || w.row >= rows) return "sampling: row out of range";
  if (!(w.temperature >= 0.0) || !(w.top_p >= 0.0) || !(w.min_p >= 0.0) || w.top_k < 0) return "sampling: not a parameter";
  const octavo_shape& s = w.shape;
  for (const double value : {s.typical_p, s.top_n_sigma, s.xtc_probability, s.xtc_threshold, s.dynatemp_range, s.dynatemp_exponent}) {
    if (!(value >= 0.0 && value <= FLT_MAX)) return "sampling: not a parameter";
  }
  if (!(fabsf(w.mirostat) <= FLT_MAX)) return "sampling: not a parameter";
  if (w.logprobs != nullptr) {
    octavo_logprobs wanted = *w.logprobs;
    wanted.row = wanted.token = 0;  // the draw's
    if (const char* wrong = wrong_logprobs(wanted, rows, vocab_size)) return wrong;
  }
  return w.rules == nullptr ? nullptr : wrong_rules(*w.rules, vocab_size);
}

const char* wrong_logprobs(const octavo_logprobs& w, int64_t rows, int64_t vocab_size) {
  if (w.row < 0 || w.row >= rows || w.token < 0 || w.token >= vocab_size) return "logprobs: row or token out of range";
  if (!given(w.top_ids, w.top) || !given(w.chosen_ids, w.chosen) || w.values == nullptr) return "logprobs: a list is missing";
  return token_ids(w.chosen_ids, w.chosen, 1, vocab_size) ? nullptr : "logprobs: a token id is outside the vocabulary";
}

}  // namespace octavo
