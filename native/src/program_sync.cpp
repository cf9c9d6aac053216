// Where the threads of a program meet: worked out for every way in which a step's rows can be shared.
#include "program.h"

namespace octavo {
namespace {

// What records share besides buffers, numbered after them.
enum Shared : int32_t { kOperands = 0, kPages = 1, kTurns = 2, kStates = 3, kSharedCount = 4 };

struct Ways {
  Mode t, r;
  Share share;
  int32_t buffers;
  const std::vector<octavo_buffer>& of;

  Owner row_owner(int32_t buffer) const {
    return of[static_cast<size_t>(buffer)].rows == OCTAVO_ROWS_R ? Owner::kRowR : Owner::kRowT;
  }
  Mode mode(int32_t buffer) const { return row_owner(buffer) == Owner::kRowR ? r : t; }
};

using Accesses = std::vector<Access>;

void reads(Accesses* list, int32_t buffer, Owner owner) {
  if (buffer != OCTAVO_NONE) list->push_back({buffer, owner, false});
}

void writes(Accesses* list, int32_t buffer, Owner owner) {
  if (buffer != OCTAVO_NONE) list->push_back({buffer, owner, true});
}

// Before and after the barrier inside the record, if it has one.
struct Stages {
  Accesses first, second;
  bool split = false;
};

Stages linear_stages(const octavo_op& op, const Ways& ways, bool adapted) {
  Stages s;
  const Mode mode = ways.mode(op.out[0]);
  const Owner row = ways.row_owner(op.out[0]), panel = mode == Mode::kRows ? row : Owner::kAny;
  s.split = mode == Mode::kPanels;
  Accesses* products = s.split ? &s.second : &s.first;
  reads(&s.first, op.in[0], mode == Mode::kFew ? Owner::kAny : row);
  if (s.split) writes(&s.first, ways.buffers + kOperands, Owner::kAny);
  if (s.split) reads(products, ways.buffers + kOperands, Owner::kAny);
  reads(products, op.in[1], panel);
  for (int j = 0; j < op.i[1]; j++) writes(products, op.out[j], panel);
  if (adapted && op.i[0] >= EPI_SILU_MUL) writes(products, op.out[1], panel);  // of a pair: one of the two
  return s;
}

Stages rope_stages(const octavo_op& op, const Ways& ways) {
  Stages s;
  const Owner row = ways.t == Mode::kRows ? Owner::kRowT : Owner::kAny;
  const Owner owner = ways.share == Share::kItems ? Owner::kItem : row;
  for (const int32_t buffer : op.in) reads(&s.first, buffer, owner);
  reads(&s.first, ways.buffers + kTurns, owner);
  writes(&s.first, op.in[0], owner);
  writes(&s.first, op.in[1], owner);
  writes(&s.first, ways.buffers + kPages, owner);
  return s;
}

Stages attention_stages(const octavo_op& op, const Ways& ways) {
  Stages s;
  const Owner owner = ways.share == Share::kItems ? Owner::kItem : Owner::kAny;
  reads(&s.first, op.in[0], owner);
  reads(&s.first, ways.buffers + kPages, owner);
  writes(&s.first, op.out[0], owner);
  s.split = ways.share == Share::kParts;
  if (!s.split) return s;
  writes(&s.first, ways.buffers + kStates, owner);
  reads(&s.second, ways.buffers + kStates, owner);
  writes(&s.second, op.out[0], owner);
  return s;
}

// Where rows are not split throughout: units of rows, whosever they are.
Stages lora_stages(const octavo_op& op, const Ways& ways) {
  Stages s;
  const Owner owner = ways.t == Mode::kRows ? Owner::kRowT : Owner::kAny;
  for (const int32_t buffer : op.in) reads(&s.first, buffer, owner);
  for (int j = 1; j < 4; j++) writes(&s.first, op.in[j], owner);
  return s;
}

Stages stages_of(const octavo_op& op, const Ways& ways, bool adapted) {
  if (op.code == OCTAVO_LORA) return lora_stages(op, ways);
  if (op.code == OCTAVO_LINEAR) return linear_stages(op, ways, adapted);
  if (op.code == OCTAVO_ROPE_KV) return rope_stages(op, ways);
  if (op.code == OCTAVO_ATTENTION) return attention_stages(op, ways);
  Stages s;
  const Owner row = ways.row_owner(op.out[0]);
  if (op.code == OCTAVO_MOE) {  // meets by itself in between; sums up rows at the end
    s.split = true;
    reads(&s.second, op.in[1], row);
    writes(&s.second, op.out[0], row);
    return s;
  }
  for (const int32_t buffer : op.in) reads(&s.first, buffer, op.code == OCTAVO_SELECT ? Owner::kAny : row);
  writes(&s.first, op.out[0], row);
  return s;
}

std::vector<uint8_t> plan(const std::vector<Op>& ops, const Ways& ways, bool adapted) {
  SyncState state(static_cast<size_t>(ways.buffers + kSharedCount));
  state.apply({{ways.buffers + kTurns, Owner::kAny, true}});
  std::vector<uint8_t> meet;
  for (const Op& op : ops) {
    if (!adapted && op.record.code == OCTAVO_LORA) {
      meet.push_back(0);
      continue;
    }
    const Stages stages = stages_of(op.record, ways, adapted);
    const bool barrier = op.record.code == OCTAVO_MOE || state.needs_barrier(stages.first);
    if (barrier) state.barrier();
    state.apply(stages.first);
    if (stages.split) state.barrier();
    if (stages.split) state.apply(stages.second);
    meet.push_back(barrier);
  }
  return meet;
}

}  // namespace

void Program::plan_barriers() {
  for (const Mode t : {Mode::kFew, Mode::kPanels, Mode::kRows}) {
    for (const Mode r : {Mode::kFew, Mode::kPanels, Mode::kRows}) {
      for (const Share share : {Share::kUnits, Share::kItems, Share::kParts}) {
        const Ways ways{t, r, share, static_cast<int32_t>(buffers_.size()), buffers_};
        for (const bool adapted : {false, true}) barriers_[adapted][plan_number(t, r, share)] = plan(ops_, ways, adapted);
      }
    }
  }
}

}  // namespace octavo
