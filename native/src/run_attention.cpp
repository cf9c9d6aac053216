// Positions, pages and attention.
#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {
namespace {

// Whether a unit reads the same of the pages, `away` kv heads further on, for the same single token.
bool same_pages(const Unit& unit, const Unit& other, int64_t away) {
  return unit.rows == 1 && other.rows == 1 && unit.first == other.first && unit.sequence == other.sequence && !unit.shared && !other.shared &&
         unit.parts == other.parts && unit.chunk0 == other.chunk0 && unit.chunk1 == other.chunk1 && unit.head + away == other.head;
}

}  // namespace

const int32_t* Program::page_row(const Op& op, int32_t sequence) const {
  const size_t group = static_cast<size_t>(layer_group_[static_cast<size_t>(op.record.i[1])]);
  return table_[group] + int64_t{step_->table_row[sequence]} * step_->table_width;
}

const AttentionPlan& Program::plan_of(const Op& op) const {
  return plans_[plan_of_group_[static_cast<size_t>(layer_group_[static_cast<size_t>(op.record.i[1])])]];
}

// Queries, keys and values of the rows that this thread owns: by items when it will attend with them itself.
void Program::rope_kv(const Op& op, int thread) {
  if (share_ == Share::kItems) {
    const AttentionPlan& plan = plan_of(op);
    for (int64_t i = plan.begin(thread); i < plan.begin(thread + 1); i++) {
      const Unit& unit = plan.unit(i);
      rope_unit(op, unit.first, unit.sequence, unit.head);
    }
    return;
  }
  // whole rows where rows are split throughout, otherwise (row, head) pairs
  const int32_t heads = pages_->kv.kv_heads;
  const int64_t grain = mode_t_ == Mode::kRows ? heads : 1, units = step_->tokens * heads / grain;
  for (int64_t u = part(units, thread) * grain; u < part(units, thread + 1) * grain; u++) {
    const int64_t row = u / heads;
    rope_unit(op, row, sequence_of_[static_cast<size_t>(row)], static_cast<int32_t>(u % heads));
  }
}

void Program::rope_unit(const Op& op, int64_t row, int32_t sequence, int32_t head) {
  const octavo_op& r = op.record;
  const KV& kv = pages_->kv;
  const int32_t position = step_->positions[row] + shift_of(sequence), first = step_->starts[sequence];
  const int64_t slot = step_->positions[first] + (row - first);  // of its position, unless it is a tree's
  const int64_t dim = r.i[2], group = cols(r.in[0]) / dim / kv.kv_heads;
  const Rope& rope = ropes_[static_cast<size_t>(r.i[0])];
  const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
  const float *cos = rope.turns + 2 * position * pairs, *sin = cos + pairs;
  float* q = data(r.in[0]) + row * stride(r.in[0]) + head * group * dim;
  float* k = data(r.in[1]) + row * stride(r.in[1]) + head * dim;
  const float* v = data(r.in[2]) + row * stride(r.in[2]) + head * dim;
  if (op.vectors[0] != nullptr) kernels_->qk_norm(q, group, dim, op.vectors[0], r.f[0]);
  if (op.vectors[1] != nullptr) kernels_->qk_norm(k, 1, dim, op.vectors[1], r.f[0]);
  kernels_->rope(q, group, dim, 2 * pairs, cos, sin);
  kernels_->rope(k, 1, dim, 2 * pairs, cos, sin);
  if (step_->no_write != nullptr && step_->no_write[sequence]) return;
  const size_t layer = static_cast<size_t>(r.i[1]);
  uint8_t* blob = pages_->blob(layer_index_[layer], page_row(op, sequence)[slot / kv.page_size], head);
  kernels_->kv_write(&kv, blob, slot % kv.page_size, k, v);
}

// Where the unit after this one begins to read.
void Program::read_ahead(const Op& op, const AttentionPlan& plan, int64_t next, int64_t end, AttnItem* a) const {
  if (next >= end) return;
  const Unit& unit = plan.unit(next);
  const int32_t window = op.record.i[3];
  int64_t seen = unit.chunk0 * kChunk;
  if (window > 0) seen = std::max<int64_t>(step_->positions[unit.first] - window + 1, 0);
  if (op.record.i[4] > 0) seen = 0;  // begins with its sinks
  const int64_t page = seen / pages_->kv.page_size, last = step_->positions[step_->starts[unit.sequence + 1] - 1] / pages_->kv.page_size;
  a->prefetch_pages = page_row(op, unit.sequence) + page;
  a->prefetch_count = last - page + 1;
  a->prefetch = pages_->blob(layer_index_[static_cast<size_t>(op.record.i[1])], a->prefetch_pages[0], unit.head);
}

AttnItem Program::attention_item(const Op& op, int32_t sequence, int32_t head, int32_t rows) const {
  const octavo_op& r = op.record;
  const int64_t dim = r.i[2], group = cols(r.in[0]) / dim / pages_->kv.kv_heads;
  AttnItem a{};
  a.kv = &pages_->kv;
  a.pages = page_row(op, sequence);
  a.layer_in_group = layer_index_[static_cast<size_t>(r.i[1])];
  a.kv_head = head;
  a.group = static_cast<int32_t>(group);
  a.rows = rows;
  a.ldq = stride(r.in[0]);
  a.ldo = stride(r.out[0]);
  a.q = data(r.in[0]) + head * group * dim;
  a.out = data(r.out[0]) + head * group * dim;
  a.scale = r.f[0];
  a.soft_cap = r.f[1];
  a.window = r.i[3];
  a.sink_tokens = r.i[4];
  if (a.sink_tokens > 0) a.turns = ropes_[static_cast<size_t>(r.i[5])].turns;
  if (a.sink_tokens > 0) a.pairs = static_cast<int64_t>(ropes_[static_cast<size_t>(r.i[5])].inv_freq.size());
  a.sinks = op.vectors[0] == nullptr ? nullptr : op.vectors[0] + head * group;
  a.partial_heads = cols(r.in[0]) / dim;
  return a;
}

// The item's rows begin with this token.
void Program::give_rows(const Op& op, AttnItem* a, int64_t token) const {
  a->pos0 = step_->positions[token];
  a->q += token * a->ldq;
  a->out += token * a->ldo;
  if (a->partial != nullptr) a->partial += token * a->partial_heads * a->partial_chunks * kernels_->attn_partial(op.record.i[2]);
}

void Program::attention(const Op& op, int thread) {
  const AttentionPlan& plan = plan_of(op);
  run_units(op, plan, thread);
  mass(op, thread);
  if (share_ != Share::kParts) return;
  Pool::shared().barrier(thread, ahead(op, thread));
  merge_parts(op, plan, thread);
}

void Program::run_units(const Op& op, const AttentionPlan& plan, int thread) {
  const int64_t end = plan.begin(thread + 1);
  for (int64_t i = plan.begin(thread), next; i < end; i = next) {
    const Unit& unit = plan.unit(i);
    AttnItem a = attention_item(op, unit.sequence, unit.head, unit.rows);
    const int64_t most = a.sink_tokens > 0 ? 1 : kernels_->attn_heads(a.kv, a.group);
    for (next = i + 1; next < end && next - i < most && same_pages(unit, plan.unit(next), next - i);) next++;
    a.heads = static_cast<int32_t>(next - i);
    a.scratch = scratch_[static_cast<size_t>(thread)].attention;
    read_ahead(op, plan, next, end, &a);
    a.chunk0 = unit.chunk0;
    a.chunk1 = unit.chunk1;
    if (unit.parts) a.partial = states_of(op, plan, unit.head), a.partial_chunks = plan.part_chunks();
    if (unit.shared) {
      a.row_index = plan.token(unit);
      a.positions = plan.position(unit);
    } else {
      give_rows(op, &a, unit.first);
      if (is_tree(*step_, unit.sequence)) a.parents = step_->parent_rows + unit.first;  // all rows are in one unit
    }
    kernels_->attention(&a);
  }
}

// [token][query head][chunk], from this kv head on.
float* Program::states_of(const Op& op, const AttentionPlan& plan, int32_t head) const {
  const int64_t group = cols(op.record.in[0]) / op.record.i[2] / pages_->kv.kv_heads;
  return states_ + head * group * plan.part_chunks() * kernels_->attn_partial(op.record.i[2]);
}

// Threads share the rows, (merge, token, query head), evenly.
void Program::merge_parts(const Op& op, const AttentionPlan& plan, int thread) {
  const int64_t dim = op.record.i[2], group = cols(op.record.in[0]) / dim / pages_->kv.kv_heads;
  int64_t all = 0, begin = 0;
  for (int64_t i = 0; i < plan.merges(); i++) all += plan.merge(i).rows * group;
  const int64_t first = part(all, thread), last = part(all, thread + 1);
  for (int64_t i = 0; i < plan.merges(); i++) {
    const Merge& merge = plan.merge(i);
    for (int32_t row = 0; row < merge.rows; row++, begin += group) {
      const int64_t head = std::max<int64_t>(first - begin, 0), end = std::min(last - begin, group);
      if (head < end) merge_row(op, plan, merge, row, head, end);
    }
  }
}

// Query heads [head, end) of one token's kv head.
void Program::merge_row(const Op& op, const AttentionPlan& plan, const Merge& merge, int32_t row, int64_t head, int64_t end) {
  AttnItem a = attention_item(op, merge.sequence, merge.head, 1);
  a.partial = states_of(op, plan, merge.head);
  a.partial_chunks = plan.part_chunks();
  give_rows(op, &a, merge.first + row);
  a.out += head * op.record.i[2];
  a.partial += head * a.partial_chunks * kernels_->attn_partial(op.record.i[2]);
  if (a.sinks != nullptr) a.sinks += head;
  a.group = static_cast<int32_t>(end - head);
  kernels_->attention_merge(&a);
}

}  // namespace octavo
