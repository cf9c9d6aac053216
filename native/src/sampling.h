// From a row of logits to a token and its logprobs: the definitions of backends/sampling.py and backends/random.py, token for
// token. Bias, bans, masks and penalties; greedy, temperature, top-k, top-p and min-p; log-softmax of the raw row.
#pragma once
#include <math.h>

#include "arena.h"
#include "kernels.h"
#include "octavo_native.h"

namespace octavo {

// Working memory of one thread, for a vocabulary.
struct SampleScratch {
  float* values = nullptr;   // [V] the row as its rules leave it
  float* shaped = nullptr;   // [V] and without what may not be drawn
  float* weights = nullptr;  // [V]
  float* blocks = nullptr;   // [V / kBlock] maxima of the row at hand
  int32_t* ids = nullptr;    // [V] and kBlock more
  uint8_t* marks = nullptr;  // [V] all zero between uses

  void allocate(Arena* memory, int64_t vocab_size);
  static int64_t bytes(int64_t vocab_size);
};

// A row and its maxima. `top` is its largest value, or a NaN where the row has one.
struct LogitRow {
  LogitRow(const Kernels& table, const float* logits, int64_t vocab_size, const SampleScratch& own)
      : kernels(table), scratch(own), x(logits), n(vocab_size), top(table.maxima(logits, vocab_size, own.blocks)) {}

  const Kernels& kernels;
  const SampleScratch& scratch;
  const float* x;
  int64_t n;
  float top;

  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  int32_t top_id() const;      // the first of the largest
  float lowest_block() const;  // the least maximum above -inf of a block
  bool before(int32_t a, int32_t b) const { return x[a] != x[b] ? x[a] > x[b] : a < b; }
};

// Null, or what is wrong with a request.
const char* wrong_sampling(const octavo_sampling& wanted, int64_t rows, int64_t vocab_size);
const char* wrong_logprobs(const octavo_logprobs& wanted, int64_t rows, int64_t vocab_size);

// The id drawn from a raw row, or -1 when every token is banned, all are infinitely likely, or a logit is not a number.
// Fills wanted.logprobs.
int32_t sample_row(const Kernels& kernels, const float* logits, int64_t vocab_size, const octavo_sampling& wanted,
                   const SampleScratch& scratch);

// out = the row as `rules` (or null) leave it. Uses scratch.marks only.
void apply_rules(const Kernels& kernels, const float* logits, int64_t vocab_size, const octavo_rules* rules,
                 const SampleScratch& scratch, float* out);

void fill_logprobs(const LogitRow& raw, octavo_logprobs* wanted);

// Whether more is asked for than temperature, top_k, top_p and min_p.
bool is_shaped(const octavo_sampling& wanted);
// What is left to be drawn after all that was asked for, others -inf, in scratch.shaped; what is left to be asked for: a
// temperature (0: the largest logit), and min_p.
octavo_sampling shape_row(const LogitRow& row, const octavo_sampling& wanted);

// The members up to this one of the order (logit descending, id ascending).
struct LastKept {
  float value;
  int32_t id;
  bool covers(float x, int32_t i) const { return x > value || (x == value && i <= id); }
};
struct Kept {
  int64_t count;  // they stand at the front of scratch.ids, in any order
  LastKept last;
};
LastKept last_kept(const LogitRow& row, int64_t count);  // of those in scratch.ids, count >= 1

// The first ones of the order; -inf never belongs to them.
Kept keep_top_k(const LogitRow& row, int64_t k);
// `inverse` of the temperature. top_k 0: of all.
Kept keep_top_p(const LogitRow& row, int64_t top_k, double top_p, float inverse);
// The shortest prefix of the order whose mass, by weights [V], reaches `enough`.
Kept keep_share(const LogitRow& row, const float* weights, double enough);

float gumbel(uint32_t bits);

}  // namespace octavo
