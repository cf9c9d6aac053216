// One step before the threads start: is it within the limits, where do its values lie, what does attention have to do.
#include <string.h>

#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {
namespace {

constexpr int64_t kMostRows = 1 << 20;  // of a page table

}  // namespace

bool Program::check_step(const octavo_step& step, std::string* error) const {
  const char* wrong = wrong_step(step);
  for (int32_t s = 0; wrong == nullptr && s < step.sequences; s++) wrong = wrong_sequence(step, s);
  if (wrong == nullptr) wrong = wrong_adapters(step);
  if (wrong != nullptr) *error = std::string("step: ") + wrong;
  return wrong == nullptr;
}

const char* Program::wrong_step(const octavo_step& step) const {
  if (step.size != static_cast<int32_t>(sizeof step)) return "the record has another size";
  if (step.tokens < 1 || step.tokens > limits_.max_tokens) return "tokens out of range";
  if (step.sequences < 1 || step.sequences > limits_.max_sequences) return "sequences out of range";
  if (step.logit_rows < 0 || step.logit_rows > limits_.max_logit_rows) return "logit_rows out of range";
  if (step.samples < 0 || step.samples > step.logit_rows) return "samples out of range";
  if (step.grammar_masks) return "masks are not served yet";
  if (step.scores && (step.sequences != 1 || step.parent_rows)) return "attention mass is that of one sequence, a chain";
  const bool given = step.token_ids && step.positions && step.starts && step.table_row && step.page_table;
  if (!given || (step.logit_rows && !step.rows)) return "an array is missing";
  if (step.samples && (!step.sampling || !step.sampled)) return "an array is missing";
  if (step.hidden && limits_.hidden == OCTAVO_NONE) return "this program gives no hidden states";
  if (step.table_width < 1 || step.table_rows < 1 || step.table_rows > kMostRows) return "the page table is empty or too long";
  if (step.starts[0] != 0 || step.starts[step.sequences] != step.tokens) return "starts do not span the tokens";
  for (int32_t t = 0; t < step.tokens; t++) {
    if (step.token_ids[t] < 0 || step.token_ids[t] >= limits_.vocab_size) return "a token id is outside the vocabulary";
  }
  for (int32_t r = 0; r < step.logit_rows; r++) {
    if (step.rows[r] < 0 || step.rows[r] >= step.tokens) return "a logit row is out of range";
  }
  for (int32_t i = 0; i < step.samples; i++) {
    if (const char* wrong = wrong_sampling(step.sampling[i], step.logit_rows, limits_.vocab_size)) return wrong;
  }
  return nullptr;
}

// Positions follow each other, or their rows' parents; every page that the sequence reads or writes exists.
const char* Program::wrong_sequence(const octavo_step& step, int32_t s) const {
  const int32_t first = step.starts[s], stop = step.starts[s + 1];
  if (stop <= first || stop > step.tokens) return "a sequence has no token";
  const int64_t begin = step.positions[first], end = begin + (stop - first);
  if (begin < 0 || end > limits_.max_positions) return "a position is out of range";
  for (int32_t t = first; t < stop; t++) {
    const int32_t parent = step.parent_rows ? step.parent_rows[t] : t - first - 1;
    if (parent < -1 || parent >= t - first) return "a tree row does not follow an earlier one";
    if (step.positions[t] != (parent < 0 ? begin : step.positions[first + parent] + 1)) return "positions are not consecutive";
  }
  const int64_t size = pages_->kv.page_size, last = (end - 1) / size;
  if (step.table_row[s] < 0 || step.table_row[s] >= step.table_rows) return "a page table row is out of range";
  if (last >= step.table_width) return "a page table row is too short";
  const int32_t shift = step.shifts ? step.shifts[step.table_row[s]] : 0;
  if (shift < 0 || shift > limits_.max_positions - end) return "a position is shifted out of range";
  for (size_t g = 0; g < group_window_.size(); g++) {
    const int32_t window = group_window_[g];
    if (window > 0 && (shift > 0 || step.scores)) return "shifts and attention mass are not defined beside a window";
    const int64_t seen = window > 0 ? std::max<int64_t>(begin - window + 1, 0) : 0;
    const int32_t* pages = step.page_table + (static_cast<int64_t>(g) * step.table_rows + step.table_row[s]) * step.table_width;
    for (int64_t p = window < 0 ? begin / size : seen / size; p <= last; p++) {
      if (pages[p] < 0 || pages[p] >= pages_->count) return "a page that is needed is freed or out of range";
    }
    const int64_t sunk = std::min<int64_t>(group_sinks_[g], end);
    if (sunk > 0 && step.parent_rows != nullptr && is_tree(step, s)) return "a tree is not defined beside sink tokens";
    for (int64_t p = 0; p * size < sunk; p++) {
      if (pages[p] < 0 || pages[p] >= pages_->count) return "a page of sink tokens is freed or out of range";
    }
  }
  return nullptr;
}

Mode Program::mode_for(int64_t rows) const {
  if (engine_->threads == 1 || rows >= kSplitRows * engine_->threads) return Mode::kRows;
  return rows <= kFewRows ? Mode::kFew : Mode::kPanels;
}

int64_t Program::rows(int32_t buffer) const {
  return buffers_[static_cast<size_t>(buffer)].rows == OCTAVO_ROWS_R ? step_->logit_rows : step_->tokens;
}

// Values lie one after the other, as close as this step's rows allow.
void Program::bind(const octavo_step& given) {
  mode_t_ = mode_for(given.tokens);
  mode_r_ = mode_for(given.logit_rows);
  adapted_ = has_adapters(given);
  step_ = adapted_ ? in_order(given) : &given;
  const octavo_step& step = *step_;
#ifdef OCTAVO_ABLATE_CLAIMS
  for (size_t i = 0; i < ops_.size(); i++) std::fill_n(claims[i], engine_->threads, 0);
#endif
  uint8_t* next = values_;
  for (size_t b = 0; b < buffers_.size(); b++) {
    base_[b] = reinterpret_cast<float*>(next);
    next += rows(static_cast<int32_t>(b)) * stride_[b] * static_cast<int64_t>(sizeof(float));
  }
  for (size_t g = 0; g < table_.size(); g++) {
    table_[g] = step.page_table + static_cast<int64_t>(g) * step.table_rows * step.table_width;
  }
  for (int32_t s = 0; s < step.sequences; s++) {
    for (int32_t t = step.starts[s]; t < step.starts[s + 1]; t++) sequence_of_[static_cast<size_t>(t)] = s;
  }
  note_turns();
  plan_attention();
  gather_adapters();
}

// Groups whose layers see all positions have one plan, the others another; one whose sequences share other pages joins those.
void Program::plan_attention() {
  int32_t window = 0;
  bool first = true, second = false;
  for (size_t g = 0; g < table_.size(); g++) {
    if (group_window_[g] == 0 && first) plans_[0].make(*step_, table_[g], 0, true), first = false;
    const bool joins = group_window_[g] == 0 && plans_[0].fits(table_[g]);
    plan_of_group_[g] = joins ? 0 : 1;
    if (joins) continue;
    window = !second || (window > 0 && group_window_[g] > 0) ? std::max(window, group_window_[g]) : 0;
    second = true;
  }
  if (second) plans_[1].make(*step_, table_[0], window, false);
  const bool decode = step_->tokens == step_->sequences;
  share_ = !first && plans_[0].merges() > 0 ? Share::kParts : decode ? Share::kItems : Share::kUnits;
}

// The step's positions that no earlier step had, and those by which queries are turned back.
void Program::note_turns() {
  num_turns_ = 0;
  for (int32_t t = 0; t < step_->tokens; t++) {
    note_turn(step_->positions[t] + shift_of(sequence_of_[static_cast<size_t>(t)]));
    if (turned_back_ > 0 && step_->positions[t] > turned_back_) note_turn(step_->positions[t] - turned_back_);
  }
}

void Program::note_turn(int32_t position) {
  uint8_t& known = turned_[static_cast<size_t>(position)];
  if (!known) turns_[static_cast<size_t>(num_turns_++)] = position;
  known = 1;
}

bool Program::run(const octavo_step& step, std::string* error, double* op_seconds) {
  if (!check_step(step, error)) return false;
  bind(step);
  op_seconds_ = op_seconds;
  Pool::shared().run(engine_->threads, thread_main, this);
  return true;
}

const float* Program::values(int32_t buffer, int64_t* stride_out) const {
  if (buffer < 0 || static_cast<size_t>(buffer) >= base_.size()) return nullptr;
  *stride_out = stride(buffer);
  return data(buffer);
}

const float* Program::logits(int64_t* stride_out) const {
  *stride_out = stride(limits_.logits);
  return data(limits_.logits);
}

int Program::barriers(int64_t tokens, int64_t logit_rows) const {
  int count = 0;
  for (const uint8_t flag : barriers_[0][plan_number(mode_for(tokens), mode_for(logit_rows), Share::kItems)]) count += flag != 0;
  return count;
}

}  // namespace octavo
