// Drawing a token from one row of logits: the definitions of backends/sampling.py and backends/random.py, token for
// token. Greedy, temperature, top-k, top-p and min-p; bias, bans and penalties have been applied before.
#pragma once
#include "arena.h"
#include "kernels.h"
#include "octavo_native.h"

namespace octavo {

// Working memory of one thread, for a vocabulary.
struct SampleScratch {
  float* values = nullptr;  // [V]
  int32_t* ids = nullptr;   // [V]

  void allocate(Arena* memory, int64_t vocab_size);
};

// The id drawn, or -1 when every token is banned, all are infinitely likely, or a logit is not a number.
int32_t sample_row(const Kernels& kernels, const float* logits, int64_t vocab_size, const octavo_sampling& wanted,
                   const SampleScratch& scratch);

// Null, or what is wrong with a request to draw.
const char* wrong_sampling(const octavo_sampling& wanted, int64_t rows);

float gumbel(uint32_t bits);
uint32_t noise_bits(const octavo_sampling& coordinates, int32_t token_id);

}  // namespace octavo
