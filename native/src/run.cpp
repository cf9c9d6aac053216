// What the threads do in a step, except for products and attention: rows, and the draw at the end.
#include <math.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {

void Program::thread_main(void* program, int thread) { static_cast<Program*>(program)->walk(thread); }

void Program::walk(int thread) {
  Pool& pool = Pool::shared();
  const std::vector<uint8_t>& meet = barriers_[adapted_][plan_number(mode_t_, mode_r_, share_)];
  scratch_[static_cast<size_t>(thread)].ahead_of = OCTAVO_NONE;
  turn_tables(thread);
  for (size_t i = 0; i < ops_.size(); i++) {
    if (!adapted_ && ops_[i].record.code == OCTAVO_LORA) continue;
    if (op_seconds_ != nullptr) {
      execute_timed(i, thread);
      continue;
    }
    if (meet[i]) pool.barrier(thread, ahead(ops_[i], thread));
    execute(ops_[i], thread);
  }
  if (step_->samples == 0 && step_->hidden == nullptr) return;
  pool.barrier(thread);
  give_hidden(thread);
  sample(thread);
}

void Program::execute_timed(size_t index, int thread) {
  Pool& pool = Pool::shared();
  timespec begin{}, end{};
  pool.barrier(thread);
  if (thread == 0) clock_gettime(CLOCK_MONOTONIC, &begin);
  execute(ops_[index], thread);
  pool.barrier(thread);
  if (thread != 0) return;
  clock_gettime(CLOCK_MONOTONIC, &end);
  op_seconds_[index] = static_cast<double>(end.tv_sec - begin.tv_sec) + 1e-9 * static_cast<double>(end.tv_nsec - begin.tv_nsec);
}

void Program::execute(const Op& op, int thread) {
  switch (op.record.code) {
    case OCTAVO_EMBED: return embed(op, thread);
    case OCTAVO_LINEAR: return linear(op, thread);
    case OCTAVO_NORM: return norm(op, thread);
    case OCTAVO_SELECT: return select(op, thread);
    case OCTAVO_ROPE_KV: return rope_kv(op, thread);
    case OCTAVO_ATTENTION: return attention(op, thread);
    case OCTAVO_MOE: return moe(op, thread);
    case OCTAVO_LORA: return lora(op, thread);
    default: return elementwise(op, thread);
  }
}

// Cosines and sines of positions that no step had before, in double precision as in the reference.
void Program::turn_tables(int thread) {
  for (Rope& rope : ropes_) {
    const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
    for (int64_t i = part(num_turns_, thread); i < part(num_turns_, thread + 1); i++) {
      const int32_t position = turns_[static_cast<size_t>(i)];
      float *cos = rope.turns + 2 * position * pairs, *sin = cos + pairs;
      for (int64_t j = 0; j < pairs; j++) {
        const double angle = position * rope.inv_freq[static_cast<size_t>(j)];
        cos[j] = static_cast<float>(::cos(angle) * rope.factor);
        sin[j] = static_cast<float>(::sin(angle) * rope.factor);
      }
    }
  }
}

void Program::embed(const Op& op, int thread) {
  const int32_t out = op.record.out[0];
  const float scale = op.record.f[0];
  for (int64_t t = part(step_->tokens, thread); t < part(step_->tokens, thread + 1); t++) {
    float* row = data(out) + t * stride(out);
    const Mat table = op.mats[0]->part_of_row(step_->token_ids[t]);
    kernels_->unpack_row(&table, step_->token_ids[t], row);
    const float* undo = op.mats[0]->undo;
    if (scale != 1.0f || undo != nullptr) kernels_->scale_mul(row, row, undo, scale, cols(out));
  }
}

void Program::norm(const Op& op, int thread) {
  const octavo_op& r = op.record;
  const int64_t n = cols(r.out[0]), m = rows(r.out[0]), r0 = part(m, thread), r1 = part(m, thread + 1);
  const ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  kernels_->inv_rms(data(r.in[0]), stride(r.in[0]), r0, r1, n, r.f[0], own.scale);
  for (int64_t row = r0; row < r1; row++) {
    const float* x = data(r.in[0]) + row * stride(r.in[0]);
    float* y = data(r.out[0]) + row * stride(r.out[0]);
    if (r.in[1] == OCTAVO_NONE) {
      kernels_->scale_mul(y, x, op.vectors[0], own.scale[row], n);
    } else {
      kernels_->scale_mul(own.row, x, op.vectors[0], own.scale[row], n);
      kernels_->add_rows(y, data(r.in[1]) + row * stride(r.in[1]), own.row, n);
    }
  }
}

void Program::elementwise(const Op& op, int thread) {
  const octavo_op& r = op.record;
  const int64_t n = cols(r.out[0]), m = rows(r.out[0]);
  for (int64_t row = part(m, thread); row < part(m, thread + 1); row++) {
    float* y = data(r.out[0]) + row * stride(r.out[0]);
    const float* a = data(r.in[0]) + row * stride(r.in[0]);
    const float* b = r.in[1] == OCTAVO_NONE ? nullptr : data(r.in[1]) + row * stride(r.in[1]);
    switch (r.code) {
      case OCTAVO_LAYER_NORM: kernels_->layer_norm(y, a, op.vectors[0], op.vectors[1], r.f[0], n); break;
      case OCTAVO_ADD: kernels_->add_rows(y, a, b, n); break;
      case OCTAVO_SCALE: kernels_->scale_mul(y, a, nullptr, r.f[0], n); break;
      default: kernels_->gated(y, a, b, r.i[0], n); break;
    }
  }
}

void Program::select(const Op& op, int thread) {
  const int32_t in = op.record.in[0], out = op.record.out[0];
  for (int64_t row = part(step_->logit_rows, thread); row < part(step_->logit_rows, thread + 1); row++) {
    const float* from = data(in) + step_->rows[row] * stride(in);
    memcpy(data(out) + row * stride(out), from, static_cast<size_t>(cols(in)) * sizeof(float));
  }
}

void Program::give_hidden(int thread) {
  if (step_->hidden == nullptr) return;
  const int32_t from = limits_.hidden;
  const int64_t n = cols(from);
  for (int64_t t = part(step_->tokens, thread); t < part(step_->tokens, thread + 1); t++) {
    memcpy(step_->hidden + t * n, data(from) + t * stride(from), static_cast<size_t>(n) * sizeof(float));
  }
}

void Program::sample(int thread) {
  for (int32_t i = thread; i < step_->samples; i += engine_->threads) {
    const octavo_sampling& wanted = step_->sampling[i];
    const float* row = data(limits_.logits) + wanted.row * stride(limits_.logits);
    step_->sampled[i] = sample_row(*kernels_, row, limits_.vocab_size, wanted, scratch_[static_cast<size_t>(thread)].sample);
  }
}

}  // namespace octavo
