// A mixture of experts as one record: choose, sort the (row, expert) pairs by expert, multiply group by group, and add
// each row's answers up in the order in which its experts were chosen. Experts that nobody chose are not read.
#include <math.h>

#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {

void Program::moe(const Op& op, int thread) {
  Pool& pool = Pool::shared();
  route(op, thread);
  pool.barrier(thread);
  if (thread == 0) sort_pairs(op);
  pool.barrier(thread);
  for (const bool down : {false, true}) {
    expert_operands(op, thread, down);
    pool.barrier(thread);
    experts(op, thread, down);
    pool.barrier(thread);
  }
  combine(op, thread);
}

// The top_k experts of each of this thread's rows and their shares: softmax over all, ties by lower number.
void Program::route(const Op& op, int thread) {
  const octavo_op& r = op.record;
  const int64_t count = r.i[1], k = r.i[2];
  for (int64_t t = part(step_->tokens, thread); t < part(step_->tokens, thread + 1); t++) {
    const float* score = data(r.in[2]) + t * stride(r.in[2]);
    int32_t* chosen = moe_.expert + t * k;
    const double top = *std::max_element(score, score + count);
    double all = 0.0, some = 0.0;
    for (int64_t e = 0; e < count; e++) all += exp(score[e] - top);
    for (int64_t slot = 0; slot < k; slot++) {
      int32_t best = OCTAVO_NONE;
      for (int32_t e = 0; e < count; e++) {
        const bool taken = std::find(chosen, chosen + slot, e) != chosen + slot;
        if (!taken && (best == OCTAVO_NONE || score[e] > score[best])) best = e;
      }
      chosen[slot] = best;
      some += exp(score[best] - top);
    }
    const double total = r.i[3] ? some : all;
    for (int64_t slot = 0; slot < k; slot++) {
      moe_.share[t * k + slot] = static_cast<float>(exp(score[chosen[slot]] - top) / total);
    }
  }
}

// Counting sort: pairs of an expert lie together, rows ascending.
void Program::sort_pairs(const Op& op) {
  const int64_t count = op.record.i[1], k = op.record.i[2], pairs = step_->tokens * k;
  int32_t* begin = moe_.begin;
  std::fill(begin, begin + count + 2, 0);
  for (int64_t i = 0; i < pairs; i++) begin[moe_.expert[i] + 2]++;
  for (int64_t e = 0; e < count; e++) begin[e + 2] += begin[e + 1];
  for (int64_t i = 0; i < pairs; i++) {
    const int32_t place = begin[moe_.expert[i] + 1]++;
    moe_.place[i] = place;
    moe_.source[place] = static_cast<int32_t>(i / k);
  }
}

void Program::expert_operands(const Op& op, int thread, bool down) {
  const octavo_op& r = op.record;
  const int64_t pairs = int64_t{step_->tokens} * r.i[2];
  const int64_t first = part(pairs, thread), last = part(pairs, thread + 1);
  if (down) {
    const Act act = place(op.inner, inner_memory_, int64_t{limits_.max_tokens} * r.i[2]);
    kernels_->quantize(&act, first, last, moe_.inner, moe_.ld_inner, nullptr, nullptr);
    return;
  }
  const Act act = place(op.act, inner_memory_, int64_t{limits_.max_tokens} * r.i[2]);
  float* scale = op.norm == nullptr ? nullptr : scratch_[static_cast<size_t>(thread)].scale;
  for (int64_t p = first; p < last; p++) {
    // a kernel finds row p at p * stride: with a stride of 0 every row is this one
    const float* x = data(r.in[0]) + moe_.source[p] * stride(r.in[0]);
    if (op.norm != nullptr) kernels_->inv_rms(x, 0, p, p + 1, cols(r.in[0]), r.f[0], scale);
    kernels_->quantize(&act, p, p + 1, x, 0, op.norm, scale);
  }
}

void Program::experts(const Op& op, int thread, bool down) {
  const octavo_op& r = op.record;
  const Act act = place(down ? op.inner : op.act, inner_memory_, int64_t{limits_.max_tokens} * r.i[2]);
  Epilogue e{};
  e.kind = down ? static_cast<int32_t>(EPI_STORE) : r.i[4];
  e.out = down ? moe_.outer : moe_.inner;
  e.ldo = down ? moe_.ld_outer : moe_.ld_inner;
  for (int64_t x = 0; x < r.i[1]; x++) {
    const int64_t r0 = moe_.begin[x], r1 = moe_.begin[x + 1];
    const Weight* expert = op.experts[down ? r.i[1] + x : x];
    const Lot& own = expert->lots[static_cast<size_t>(thread)];
    const Mat mat = expert->part(static_cast<size_t>(thread));
    if (r0 < r1 && own.begin < own.end) kernels_->gemm(&mat, &act, r0, r1, own.begin, own.end, &e, nullptr);
  }
}

void Program::combine(const Op& op, int thread) {
  const octavo_op& r = op.record;
  const int64_t k = r.i[2], n = cols(r.out[0]);
  float* product = scratch_[static_cast<size_t>(thread)].row;
  float* sum = product + (n + 15) / 16 * 16;
  for (int64_t t = part(step_->tokens, thread); t < part(step_->tokens, thread + 1); t++) {
    for (int64_t slot = 0; slot < k; slot++) {
      const float* answer = moe_.outer + moe_.place[t * k + slot] * moe_.ld_outer;
      kernels_->scale_mul(slot == 0 ? sum : product, answer, nullptr, moe_.share[t * k + slot], n);
      if (slot > 0) kernels_->add_rows(sum, sum, product, n);
    }
    float* out = data(r.out[0]) + t * stride(r.out[0]);
    if (r.in[1] == OCTAVO_NONE) {
      std::copy(sum, sum + n, out);
    } else {
      kernels_->add_rows(out, data(r.in[1]) + t * stride(r.in[1]), sum, n);
    }
  }
}

}  // namespace octavo
