// Attention mass: what the rows of a step look at, for whoever decides which keys stay. Apart from the attention that makes a step's
// values: keys are read one by one, scores are made twice, and nothing but maxima and sums is kept of them.
//
// Of each kv head, over (row, query head) ascending: softmax of scale * q . k over the positions up to the row's own, added up by
// position. A score is one chain over the dimensions, a maximum and a sum go over blocks of 64 positions ascending: the same bits
// whatever the threads and the page size.
#include <math.h>

#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {
namespace {

constexpr int64_t kLanes = 16, kBlockSize = 64, kMostDim = 256, kRowsAtOnce = 64;

struct Query {
  const float* q;
  float scale, soft_cap;
};

void score_block(const Query& row, const float* keys, int64_t dim, float* scores) {
  for (int64_t begin = 0; begin < kBlockSize; begin += kLanes) {
    float sum[kLanes] = {};
    for (int64_t d = 0; d < dim; d++)
      for (int64_t i = 0; i < kLanes; i++) sum[i] += row.q[d] * keys[d * kBlockSize + begin + i];
    for (int64_t i = 0; i < kLanes; i++) scores[begin + i] = row.scale * sum[i];
  }
  if (row.soft_cap > 0)
    for (int64_t i = 0; i < kBlockSize; i++) scores[i] = row.soft_cap * tanhf(scores[i] / row.soft_cap);
}

// The running maximum and sum of exp(score - maximum).
struct State {
  float top = -INFINITY, sum = 0;

  void take(const float* scores, int64_t count) {
    const float before = top;
    for (int64_t i = 0; i < count; i++) top = std::max(top, scores[i]);
    sum *= expf(before - top);
    for (int64_t i = 0; i < count; i++) sum += expf(scores[i] - top);
  }
};

}  // namespace

void Program::mass(const Op& op, int thread) {
  if (step_->scores == nullptr) return;
  Pool::shared().barrier(thread);  // others have turned the queries
  const int64_t heads = pages_->kv.kv_heads;
  for (int64_t head = part(heads, thread); head < part(heads, thread + 1); head++) mass_of_head(op, static_cast<int32_t>(head));
}

void Program::mass_of_head(const Op& op, int32_t head) {
  const KV& kv = pages_->kv;
  const int64_t rows = step_->tokens * (cols(op.record.in[0]) / kv.dim / kv.kv_heads);
  const int64_t seen = step_->positions[step_->tokens - 1] + 1;
  float* mass = step_->scores + (int64_t{op.record.i[1]} * kv.kv_heads + head) * seen;
  std::fill_n(mass, seen, 0.0f);
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    add_mass(op, head, first, std::min(first + kRowsAtOnce, rows), mass, seen);
  }
}

// Rows [first, last), (token, query head of the group).
void Program::add_mass(const Op& op, int32_t head, int64_t first, int64_t last, float* mass, int64_t seen) {
  const octavo_op& r = op.record;
  const int64_t dim = pages_->kv.dim, group = cols(r.in[0]) / dim / pages_->kv.kv_heads;
  State states[kRowsAtOnce];
  alignas(64) float keys[kMostDim * kBlockSize] = {}, scores[kBlockSize];
  for (const bool adds : {false, true}) {
    for (int64_t begin = 0; begin < seen; begin += kBlockSize) {
      read_keys(op, head, begin, std::min(kBlockSize, seen - begin), keys);
      for (int64_t row = first; row < last; row++) {
        const int64_t token = row / group, count = std::min(kBlockSize, step_->positions[token] + 1 - begin);
        if (count <= 0) continue;
        score_block({data(r.in[0]) + token * stride(r.in[0]) + (head * group + row % group) * dim, r.f[0], r.f[1]}, keys, dim, scores);
        State& state = states[row - first];
        if (!adds) state.take(scores, count);
        for (int64_t j = 0; adds && j < count; j++) mass[begin + j] += expf(scores[j] - state.top) / state.sum;
      }
    }
  }
}

// Dimension by dimension, [dim, kBlockSize].
void Program::read_keys(const Op& op, int32_t head, int64_t first, int64_t count, float* keys) {
  const KV& kv = pages_->kv;
  const int32_t layer = layer_index_[static_cast<size_t>(op.record.i[1])];
  float key[kMostDim], value[kMostDim];
  for (int64_t i = 0; i < count; i++) {
    const int64_t position = first + i, page = page_row(op, 0)[position / kv.page_size];
    kernels_->kv_read(&kv, pages_->blob(layer, page, head), position % kv.page_size, key, value);
    for (int64_t d = 0; d < kv.dim; d++) keys[d * kBlockSize + i] = key[d];
  }
}

}  // namespace octavo
