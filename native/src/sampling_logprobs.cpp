#include <algorithm>

#include "sampling.h"

namespace octavo {

void fill_logprobs(const LogitRow& raw, octavo_logprobs* wanted) {
  octavo_logprobs& w = *wanted;
  const float top = raw.top;
  const double normaliser =
      isfinite(top) ? top + log(raw.kernels.sum_exp(raw.x, raw.n, top, 1.0f, nullptr, nullptr)) : static_cast<double>(NAN);
  w.rank = raw.x[w.token] == top && raw.top_id() == w.token ? 1 : raw.kernels.rank_of(raw.x, raw.n, w.token);
  double* next = w.values;
  *next++ = raw.x[w.token] - normaliser;
  w.found = w.top > 0 ? static_cast<int32_t>(keep_top_k(raw, w.top).count) : 0;
  int32_t* ids = raw.scratch.ids;
  std::sort(ids, ids + w.found, [&](int32_t a, int32_t b) { return raw.before(a, b); });
  for (int32_t i = 0; i < w.found; i++) {
    w.top_ids[i] = ids[i];
    *next++ = raw.x[ids[i]] - normaliser;
  }
  next = w.values + 1 + w.top;
  for (int32_t i = 0; i < w.chosen; i++) *next++ = raw.x[w.chosen_ids[i]] - normaliser;
}

}  // namespace octavo
