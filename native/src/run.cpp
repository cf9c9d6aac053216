// What the threads do in a step, except for products: rows, positions, pages, attention, and the draw at the end.
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
  const std::vector<uint8_t>& meet = barriers_[plan_number(mode_t_, mode_r_, decode_)];
  turn_tables(thread);
  for (size_t i = 0; i < ops_.size(); i++) {
    if (op_seconds_ != nullptr) {
      execute_timed(i, thread);
      continue;
    }
    if (meet[i]) pool.barrier();
    execute(ops_[i], thread);
  }
  if (step_->samples == 0 && step_->hidden == nullptr) return;
  pool.barrier();
  give_hidden(thread);
  sample(thread);
}

void Program::execute_timed(size_t index, int thread) {
  Pool& pool = Pool::shared();
  timespec begin{}, end{};
  pool.barrier();
  if (thread == 0) clock_gettime(CLOCK_MONOTONIC, &begin);
  execute(ops_[index], thread);
  pool.barrier();
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
    default: return elementwise(op, thread);
  }
}

// Cosines and sines of the step's positions, in double precision as in the reference.
void Program::turn_tables(int thread) {
  for (Rope& rope : ropes_) {
    const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
    for (int64_t t = share(step_->tokens, thread); t < share(step_->tokens, thread + 1); t++) {
      for (int64_t j = 0; j < pairs; j++) {
        const double angle = step_->positions[t] * rope.inv_freq[static_cast<size_t>(j)];
        rope.cos[t * pairs + j] = static_cast<float>(::cos(angle) * rope.factor);
        rope.sin[t * pairs + j] = static_cast<float>(::sin(angle) * rope.factor);
      }
    }
  }
}

void Program::embed(const Op& op, int thread) {
  const int32_t out = op.record.out[0];
  const float scale = op.record.f[0];
  for (int64_t t = share(step_->tokens, thread); t < share(step_->tokens, thread + 1); t++) {
    float* row = data(out) + t * stride(out);
    kernels_->unpack_row(op.mats[0], step_->token_ids[t], row);
    if (scale != 1.0f) kernels_->scale_mul(row, row, nullptr, scale, cols(out));
  }
}

void Program::norm(const Op& op, int thread) {
  const octavo_op& r = op.record;
  const int64_t n = cols(r.out[0]), m = rows(r.out[0]), r0 = share(m, thread), r1 = share(m, thread + 1);
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
  for (int64_t row = share(m, thread); row < share(m, thread + 1); row++) {
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
  for (int64_t row = share(step_->logit_rows, thread); row < share(step_->logit_rows, thread + 1); row++) {
    const float* from = data(in) + step_->rows[row] * stride(in);
    memcpy(data(out) + row * stride(out), from, static_cast<size_t>(cols(in)) * sizeof(float));
  }
}

// Queries, keys and values of the rows that this thread owns: by items when it will attend with them itself.
void Program::rope_kv(const Op& op, int thread) {
  const int32_t heads = pages_->kv.kv_heads;
  if (decode_) {
    const size_t id = static_cast<size_t>(thread);
    for (int64_t i = item_share_[id]; i < item_share_[id + 1]; i++) {
      const Item& item = items_[static_cast<size_t>(i)];
      rope_unit(op, item.first, item.sequence, item.head);
    }
    return;
  }
  // whole rows where rows are split throughout, otherwise (row, head) pairs
  const int64_t grain = mode_t_ == Mode::kRows ? heads : 1, units = step_->tokens * heads / grain;
  for (int64_t u = share(units, thread) * grain; u < share(units, thread + 1) * grain; u++) {
    const int64_t row = u / heads;
    rope_unit(op, row, sequence_of_[static_cast<size_t>(row)], static_cast<int32_t>(u % heads));
  }
}

void Program::rope_unit(const Op& op, int64_t row, int32_t sequence, int32_t head) {
  const octavo_op& r = op.record;
  const KV& kv = pages_->kv;
  const int64_t dim = r.i[2], group = cols(r.in[0]) / dim / kv.kv_heads;
  const Rope& rope = ropes_[static_cast<size_t>(r.i[0])];
  const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
  const float *cos = rope.cos + row * pairs, *sin = rope.sin + row * pairs;
  float* q = data(r.in[0]) + row * stride(r.in[0]) + head * group * dim;
  float* k = data(r.in[1]) + row * stride(r.in[1]) + head * dim;
  const float* v = data(r.in[2]) + row * stride(r.in[2]) + head * dim;
  if (op.vectors[0] != nullptr) kernels_->qk_norm(q, group, dim, op.vectors[0], r.f[0]);
  if (op.vectors[1] != nullptr) kernels_->qk_norm(k, 1, dim, op.vectors[1], r.f[0]);
  kernels_->rope(q, group, dim, 2 * pairs, cos, sin);
  kernels_->rope(k, 1, dim, 2 * pairs, cos, sin);
  if (step_->no_write != nullptr && step_->no_write[sequence]) return;
  const size_t layer = static_cast<size_t>(r.i[1]);
  const int32_t* pages = table_[static_cast<size_t>(layer_group_[layer])] + int64_t{step_->table_row[sequence]} * step_->table_width;
  const int32_t position = step_->positions[row];
  uint8_t* blob = pages_->blob(layer_index_[layer], pages[position / kv.page_size], head);
  kernels_->kv_write(&kv, blob, position % kv.page_size, k, v);
}

const uint8_t* Program::first_blob(const Op& op, const Item& item) const {
  const size_t layer = static_cast<size_t>(op.record.i[1]);
  const int32_t* pages = table_[static_cast<size_t>(layer_group_[layer])] + int64_t{step_->table_row[item.sequence]} * step_->table_width;
  const int64_t seen = std::max<int64_t>(step_->positions[item.first] - op.record.i[3] + 1, 0);
  const int32_t page = pages[op.record.i[3] > 0 ? seen / pages_->kv.page_size : 0];
  return pages_->blob(layer_index_[layer], page, item.head);
}

void Program::attention(const Op& op, int thread) {
  const octavo_op& r = op.record;
  const int64_t dim = r.i[2], group = cols(r.in[0]) / dim / pages_->kv.kv_heads;
  const size_t layer = static_cast<size_t>(r.i[1]), id = static_cast<size_t>(thread);
  AttnItem a{};
  a.kv = &pages_->kv;
  a.layer_in_group = layer_index_[layer];
  a.group = static_cast<int32_t>(group);
  a.ldq = stride(r.in[0]);
  a.ldo = stride(r.out[0]);
  a.scale = r.f[0];
  a.soft_cap = r.f[1];
  a.window = r.i[3];
  a.scratch = scratch_[id].attention;
  for (int64_t i = item_share_[id]; i < item_share_[id + 1]; i++) {
    const Item& item = items_[static_cast<size_t>(i)];
    a.pages = table_[static_cast<size_t>(layer_group_[layer])] + int64_t{step_->table_row[item.sequence]} * step_->table_width;
    a.kv_head = item.head;
    a.rows = item.rows;
    a.pos0 = step_->positions[item.first];
    a.q = data(r.in[0]) + item.first * a.ldq + item.head * group * dim;
    a.out = data(r.out[0]) + item.first * a.ldo + item.head * group * dim;
    a.sinks = op.vectors[0] == nullptr ? nullptr : op.vectors[0] + item.head * group;
    a.prefetch = i + 1 < item_share_[id + 1] ? first_blob(op, items_[static_cast<size_t>(i + 1)]) : nullptr;
    kernels_->attention(&a);
  }
}

void Program::give_hidden(int thread) {
  if (step_->hidden == nullptr) return;
  const int32_t from = limits_.hidden;
  const int64_t n = cols(from);
  for (int64_t t = share(step_->tokens, thread); t < share(step_->tokens, thread + 1); t++) {
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
