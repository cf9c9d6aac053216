// Opening a program: records with their weights looked up, memory for the largest step, and where threads meet.
#include <algorithm>

#include "program.h"

namespace octavo {
namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

bool Program::open(const octavo_program_spec& spec, std::string* error) {
  if (!check_spec(spec, error)) return false;
  limits_ = spec;
  adapters_ = spec.adapters == nullptr ? nullptr : &spec.adapters->adapters;
  buffers_.assign(spec.buffers, spec.buffers + spec.num_buffers);
  layer_group_.assign(spec.layer_group, spec.layer_group + spec.num_layers);
  layer_index_.assign(spec.layer_index, spec.layer_index + spec.num_layers);
  if (spec.num_extra > 0) extra_.assign(spec.extra, spec.extra + spec.num_extra);
  for (int32_t i = 0; i < spec.num_ropes; i++) {
    const octavo_rope& rope = spec.ropes[i];
    ropes_.push_back({{rope.inv_freq, rope.inv_freq + rope.pairs}, rope.factor, nullptr});
  }
  for (int32_t i = 0; i < spec.num_ops; i++) {
    if (const char* what = wrong(spec.ops[i])) {
      *error = "program: record " + std::to_string(i) + ": " + what;
      return false;
    }
  }
  for (int32_t i = 0; i < spec.num_ops; i++) resolve(spec.ops[i]);
  if (!sinks_agree()) return *error = "program: attention has another window or other sink tokens than before", false;
  for (size_t i = 0; i < ops_.size(); i++) {
    const octavo_op& r = ops_[i].record;
    if (r.code != OCTAVO_LORA || r.i[3] == EPI_STORE) continue;
    const octavo_op* pair = i == 0 ? nullptr : &ops_[i - 1].record;
    if (pair != nullptr && pair->code == OCTAVO_LINEAR && pair->out[1] == r.in[1] && pair->out[0] == r.in[2] && pair->i[0] == r.i[3]) continue;
    *error = "program: record " + std::to_string(i) + ": it does not follow its pair";
    return false;
  }
  int32_t coming = OCTAVO_NONE;
  for (size_t i = ops_.size(); i-- > 0; ops_[i].coming = coming) {
    if (ops_[i].record.code == OCTAVO_LINEAR) coming = static_cast<int32_t>(i);
    if (i > 0 && adds_to(ops_[i].record, ops_[i - 1].record)) ops_[i - 1].adds = static_cast<int32_t>(i);
  }
  note_windows();
  allocate();
  plan_barriers();
  return true;
}

bool Program::adds_to(const octavo_op& lora, const octavo_op& linear) {
  if (lora.code != OCTAVO_LORA || linear.code != OCTAVO_LINEAR || lora.in[0] != linear.in[0]) return false;
  const bool pair = lora.i[3] != EPI_STORE;  // whose place behind its LINEAR has been checked
  bool same = pair || linear.i[0] < EPI_SILU_MUL;
  for (int j = 0; !pair && j < 3; j++) same = same && (lora.i[j] == OCTAVO_NONE || (j < linear.i[1] && lora.in[1 + j] == linear.out[j]));
  return same;
}

void Program::resolve(const octavo_op& record) {
  Op op;
  op.record = record;
  if (record.code == OCTAVO_LINEAR) {
    resolve_linear(&op);
  } else if (record.code == OCTAVO_MOE) {
    resolve_mixture(&op);
  } else if (record.code == OCTAVO_LORA) {
    op.norm = vector(record.w[8]);
  } else if (record.code == OCTAVO_EMBED) {
    op.mats[0] = &weight(record.w[0]);
  } else {
    op.vectors[0] = vector(record.w[0]);
    op.vectors[1] = vector(record.w[1]);
  }
  ops_.push_back(op);
}

void Program::resolve_linear(Op* op) {
  op->count = op->record.i[1];
  for (int j = 0; j < op->count; j++) {
    op->mats[j] = &weight(op->record.w[j]);
    op->bias[j] = vector(op->record.w[4 + j]);
  }
  op->least = panels(*op, 0);
  for (int lot = 1; lot < engine_->threads; lot++) op->least = std::min(op->least, panels(*op, lot));
  op->norm = vector(op->record.w[8]);
  op->act.fmt = op->mats[0]->mat.fmt;
  op->act.k = op->mats[0]->k;
  const int32_t number = static_cast<int32_t>(ops_.size());
  const auto before = std::find_if(ops_.rbegin(), ops_.rend(), [](const Op& o) { return o.record.code == OCTAVO_LINEAR; });
  if (before != ops_.rend()) before->next = number;
}

void Program::resolve_mixture(Op* op) {
  const int32_t count = op->record.i[1];
  const int32_t* numbers = extra_.data() + op->record.i[0];
  if (expert_mats_.empty()) {
    for (const int32_t number : extra_) expert_mats_.push_back(&weight(number));
  }
  op->experts = expert_mats_.data() + op->record.i[0];
  op->norm = vector(op->record.w[8]);
  op->act.fmt = op->inner.fmt = weight(numbers[0]).mat.fmt;
  op->act.k = weight(numbers[0]).k;
  op->inner.k = weight(numbers[count]).k;
}

// The widest view of each group: what a step must find in its page tables.
void Program::note_windows() {
  group_window_.assign(static_cast<size_t>(limits_.num_groups), -1);
  group_sinks_.assign(static_cast<size_t>(limits_.num_groups), 0);
  for (const Op& op : ops_) {
    if (op.record.code != OCTAVO_ATTENTION) continue;
    int32_t& window = group_window_[static_cast<size_t>(layer_group_[static_cast<size_t>(op.record.i[1])])];
    const int32_t mine = op.record.i[3];
    window = window == 0 || mine == 0 ? 0 : std::max(window, mine);
    int32_t& sinks = group_sinks_[static_cast<size_t>(layer_group_[static_cast<size_t>(op.record.i[1])])];
    sinks = std::max(sinks, op.record.i[4]);
    if (op.record.i[4] > 0) turned_back_ = op.record.i[4] + mine - 1;
  }
}

void Program::allocate() {
  int64_t values = 0, operands = 64;
  for (const octavo_buffer& b : buffers_) {
    stride_.push_back(round_up(b.cols, 16));
    const int64_t most = b.rows == OCTAVO_ROWS_R ? limits_.max_logit_rows : limits_.max_tokens;
    values += Arena::checked(most, stride_.back() * int64_t{sizeof(float)});
  }
  values_ = memory_.take(values);
  for (Op& op : ops_) {
    if (op.record.code == OCTAVO_LINEAR) operands = std::max(operands, act_bytes(op.act, shared_rows()));
  }
  act_memory_ = memory_.take(operands);
  for (Rope& rope : ropes_) {
    rope.turns = memory_.take_array<float>(Arena::checked(limits_.max_positions, 2 * static_cast<int64_t>(rope.inv_freq.size())));
  }
  turned_.assign(static_cast<size_t>(limits_.max_positions), 0);
  turns_.assign(2 * static_cast<size_t>(limits_.max_tokens), 0);
  base_.assign(buffers_.size(), nullptr);
  table_.assign(static_cast<size_t>(limits_.num_groups), nullptr);
  sequence_of_.assign(static_cast<size_t>(limits_.max_tokens), 0);
  plan_of_group_.assign(static_cast<size_t>(limits_.num_groups), 0);
  if (adapters_ != nullptr) {
    units_.resize(static_cast<size_t>(engine_->threads));
    for (std::vector<AdapterUnit>& own : units_) own.reserve(static_cast<size_t>(limits_.max_tokens));
    by_place_.reserve(static_cast<size_t>(limits_.max_sequences));
    thread_of_.assign(static_cast<size_t>(limits_.max_sequences), 0);
    ordered_arrays_.assign(5 * static_cast<size_t>(limits_.max_sequences), 0);
  }
  allocate_plans();
  allocate_mixture();
  allocate_threads();
}

void Program::allocate_plans() {
  const KV& kv = pages_->kv;
  const int64_t chunks = (limits_.max_positions + kChunk - 1) / kChunk;
  int64_t state = 1;
  for (const Op& op : ops_) {
    if (op.record.code == OCTAVO_ATTENTION) state = std::max(state, cols(op.record.in[0]) / kv.dim / kv.kv_heads * kernels_->attn_partial(kv.dim));
  }
  const int64_t most = Arena::checked(Arena::checked(limits_.max_tokens, kv.kv_heads), Arena::checked(chunks, state));
  const int64_t floats = chunks > 1 ? std::min(most, kMostStates) : 1;
  states_ = memory_.take_array<float>(floats);
  const PlanLimits limits{engine_->threads, kv.kv_heads, kv.page_size, limits_.max_tokens, limits_.max_sequences, floats, state};
  for (AttentionPlan& plan : plans_) plan.open(limits);
}

void Program::allocate_mixture() {
  int64_t pairs = 0, experts = 0, bytes = 0;
  for (Op& op : ops_) {
    if (op.record.code != OCTAVO_MOE) continue;
    pairs = std::max<int64_t>(pairs, Arena::checked(limits_.max_tokens, op.record.i[2]));
    experts = std::max<int64_t>(experts, op.record.i[1]);
    moe_.ld_inner = std::max(moe_.ld_inner, round_up(op.inner.k, 16));
    moe_.ld_outer = std::max(moe_.ld_outer, round_up(op.act.k, 16));
    bytes = std::max({bytes, act_bytes(op.act, pairs), act_bytes(op.inner, pairs)});
  }
  if (pairs == 0) return;
  moe_.expert = memory_.take_array<int32_t>(pairs);
  moe_.share = memory_.take_array<float>(pairs);
  moe_.place = memory_.take_array<int32_t>(pairs);
  moe_.source = memory_.take_array<int32_t>(pairs);
  moe_.begin = memory_.take_array<int32_t>(experts + 2);
  moe_.inner = memory_.take_array<float>(Arena::checked(pairs, moe_.ld_inner));
  moe_.outer = memory_.take_array<float>(Arena::checked(pairs, moe_.ld_outer));
  moe_.pairs = pairs;
  inner_memory_ = memory_.take(bytes);
}

void Program::allocate_threads() {
  int64_t operands = 64, widest = 0, attention = 64, adapted = 0;
  for (const int64_t stride : stride_) widest = std::max(widest, stride);
  for (const Op& op : ops_) {
    if (op.record.code == OCTAVO_LINEAR) operands = std::max(operands, act_bytes(op.act, kRowBlock));
    if (op.record.code == OCTAVO_LORA) adapted = std::max(adapted, stride(op.record.in[0]));
    if (op.record.code != OCTAVO_ATTENTION) continue;
    const int64_t group = cols(op.record.in[0]) / pages_->kv.dim / pages_->kv.kv_heads;
    attention = std::max(attention, kernels_->attn_scratch(static_cast<int32_t>(group), pages_->kv.dim));
  }
  for (int thread = 0; thread < engine_->threads; thread++) {
    ThreadScratch own{};
    own.operands = memory_.take(operands);
    own.scale = memory_.take_array<float>(std::max(most_rows(), moe_.pairs));
    own.attention = memory_.take(attention);
    own.row = memory_.take_array<float>(2 * widest);
    if (adapted > 0) own.adapted = memory_.take_array<float>(kAdapterRows * adapted);
    if (adapted > 0 && adapters_ != nullptr) own.inner = memory_.take_array<float>(kRowBlock * 3 * adapters_->wide());
    own.sample.allocate(&memory_, limits_.vocab_size);
    scratch_.push_back(own);
  }
}

}  // namespace octavo
