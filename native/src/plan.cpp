#include "plan.h"

#include <string.h>

#include <algorithm>

namespace octavo {
namespace {

constexpr int32_t kNone = -1;
constexpr int32_t kTileTokens = 32;    // of one plain unit
constexpr int32_t kFewTokens = 8;      // sequences with more do not join a shared read: each of their reads serves many rows
constexpr int32_t kSharedTokens = 16;  // of one shared unit: the next one finds the pages in the cache
constexpr int32_t kLeastCut = 8;       // tokens of a piece
constexpr int64_t kStart = 64;         // what a unit costs beside its positions, in positions
constexpr int64_t kSlack = 600;        // 200 positions of one token: less is not worth two more barriers

}  // namespace

bool is_tree(const octavo_step& step, int32_t sequence) {
  if (step.parent_rows == nullptr) return false;
  const int32_t first = step.starts[sequence];
  for (int32_t t = first; t < step.starts[sequence + 1]; t++)
    if (step.parent_rows[t] != t - first - 1) return true;
  return false;
}

void AttentionPlan::open(const PlanLimits& limits) {
  limits_ = limits;
  const size_t sequences = static_cast<size_t>(limits.max_sequences), heads = static_cast<size_t>(limits.kv_heads);
  const size_t readers = 2 * static_cast<size_t>(std::min<int64_t>(limits.max_tokens, int64_t{kFewTokens} * limits.max_sequences));
  const size_t tiles = static_cast<size_t>(limits.max_tokens / kTileTokens) + sequences;
  const size_t units = heads * (tiles + readers / kSharedTokens + sequences);
  listed_.resize(units);
  dealt_.resize(units + heads * static_cast<size_t>(limits.threads));
  taken_.resize(heads);
  merges_.resize(heads * sequences + static_cast<size_t>(limits.threads));
  begin_.assign(static_cast<size_t>(limits.threads) + 1, 0);
  reader_token_.resize(readers);
  reader_position_.resize(readers);
  class_of_.resize(sequences);
  found_of_.resize(sequences);
  own_from_.resize(sequences);
  classes_.resize(sequences);
  found_.resize(sequences);
  size_t entries = 4;
  while (entries < 2 * sequences) entries *= 2;
  entries_.resize(entries);
}

void AttentionPlan::make(const octavo_step& step, const int32_t* table, int32_t window, bool parts) {
  step_ = &step;
  table_ = table;
  window_ = window;
  num_listed_ = num_merges_ = part_chunks_ = 0;
  for (int32_t s = 0; s < step.sequences; s++) part_chunks_ = std::max(part_chunks_, chunks(s));
  parts_ = parts && window == 0 && part_chunks_ > 1;
  parts_ = parts_ && int64_t{step.tokens} * limits_.kv_heads * part_chunks_ <= limits_.part_floats / limits_.state_floats;
  std::fill(own_from_.begin(), own_from_.begin() + step.sequences, 0);
  num_classes_ = 0;
  num_readers_ = 0;
  if (parts_ && step.sequences > 1) find_shared();
  list_shared();
  for (int32_t s = 0; s < step.sequences; s++) list_own(s);
  deal();
}

// Up to the largest position: a tree's need not be the last.
int64_t AttentionPlan::chunks(int32_t s) const {
  int32_t last = step_->positions[step_->starts[s + 1] - 1];
  if (step_->parent_rows != nullptr)
    for (int32_t t = step_->starts[s]; t < step_->starts[s + 1]; t++) last = std::max(last, step_->positions[t]);
  return last / kChunk + 1;
}

bool AttentionPlan::may_cut_tokens(const Unit& unit) const {
  return !unit.shared && !unit.parts && unit.rows >= 2 * kLeastCut && !is_tree(*step_, unit.sequence);
}

// ---- what is shared

// The whole chunk lies behind the sequence, and everything before it is shared already.
bool AttentionPlan::may_share(int32_t s, int32_t chunk) const {
  return own_from_[static_cast<size_t>(s)] == chunk && tokens(s) <= kFewTokens && first_position(s) >= (chunk + 1) * kChunk;
}

bool AttentionPlan::same_pages(const int32_t* table, int32_t a, int32_t b, int32_t chunk0, int32_t chunk1) const {
  const int64_t size = limits_.page_size, first = chunk0 * kChunk / size, last = (chunk1 * kChunk - 1) / size;
  const size_t bytes = static_cast<size_t>(last - first + 1) * sizeof(int32_t);
  return memcmp(pages(table, a) + first, pages(table, b) + first, bytes) == 0;
}

bool AttentionPlan::fits(const int32_t* table) const {
  for (int32_t s = 0; num_classes_ > 0 && s < step_->sequences; s++) {
    for (int32_t c = class_of_[static_cast<size_t>(s)]; c != kNone; c = classes_[static_cast<size_t>(c)].parent) {
      const Class& of = classes_[static_cast<size_t>(c)];
      if (!same_pages(table, s, of.leader, of.chunk0, of.chunk1)) return false;
    }
  }
  return true;
}

void AttentionPlan::find_shared() {
  std::fill(class_of_.begin(), class_of_.begin() + step_->sequences, kNone);
  for (int32_t chunk = 0; look_through(chunk);) chunk++;
  list_readers();
}

// One chunk of all sequences; whether any of them share it.
bool AttentionPlan::look_through(int32_t chunk) {
  std::fill(entries_.begin(), entries_.end(), Entry{kNone, kNone});
  num_found_ = 0;
  for (int32_t s = 0; s < step_->sequences; s++) {
    found_of_[static_cast<size_t>(s)] = may_share(s, chunk) ? find(s, chunk) : kNone;
  }
  for (int32_t i = 0; i < num_found_; i++) found_[static_cast<size_t>(i)].becomes = keep(found_[static_cast<size_t>(i)], chunk);
  bool any = false;
  for (int32_t s = 0; s < step_->sequences; s++) {
    const int32_t found = found_of_[static_cast<size_t>(s)];
    if (found == kNone || found_[static_cast<size_t>(found)].becomes == kNone) continue;
    class_of_[static_cast<size_t>(s)] = found_[static_cast<size_t>(found)].becomes;
    own_from_[static_cast<size_t>(s)] = chunk + 1;
    any = true;
  }
  return any;
}

// Those with the same past and the same pages of this chunk, perhaps the first of them.
int32_t AttentionPlan::find(int32_t s, int32_t chunk) {
  const int32_t last = pages(table_, s)[((chunk + 1) * kChunk - 1) / limits_.page_size];
  const int32_t parent = class_of_[static_cast<size_t>(s)];
  const size_t mask = entries_.size() - 1;
  size_t at = static_cast<size_t>(last) & mask;
  for (; entries_[at].found != kNone; at = (at + 1) & mask) {
    Found& of = found_[static_cast<size_t>(entries_[at].found)];
    if (entries_[at].page != last || of.parent != parent || !same_pages(table_, s, of.leader, chunk, chunk + 1)) continue;
    of.members++;
    of.tokens += tokens(s);
    return entries_[at].found;
  }
  entries_[at] = {last, num_found_};
  found_[static_cast<size_t>(num_found_)] = {s, parent, 1, tokens(s), kNone};
  return num_found_++;
}

// The class that it makes: its parent made longer where all of that are here, a new one where there are several.
int32_t AttentionPlan::keep(const Found& found, int32_t chunk) {
  if (found.members < 2) return kNone;
  if (found.parent != kNone) {
    Class& parent = classes_[static_cast<size_t>(found.parent)];
    if (parent.members == found.members) return parent.chunk1 = chunk + 1, found.parent;
  }
  const bool room = num_readers_ + found.tokens <= static_cast<int64_t>(reader_token_.size());
  if (!room || num_classes_ == static_cast<int32_t>(classes_.size())) return kNone;
  classes_[static_cast<size_t>(num_classes_)] = {found.leader, found.parent, found.members, 0, chunk, chunk + 1, num_readers_};
  num_readers_ += found.tokens;
  return num_classes_++;
}

void AttentionPlan::list_readers() {
  for (int32_t s = 0; num_classes_ > 0 && s < step_->sequences; s++) {
    for (int32_t c = class_of_[static_cast<size_t>(s)]; c != kNone; c = classes_[static_cast<size_t>(c)].parent) {
      Class& of = classes_[static_cast<size_t>(c)];
      for (int32_t t = step_->starts[s]; t < step_->starts[s + 1]; t++) {
        const size_t at = static_cast<size_t>(of.first + of.tokens++);
        reader_token_[at] = t;
        reader_position_[at] = step_->positions[t];
      }
    }
  }
}

// ---- units

void AttentionPlan::list(const Unit& unit) { listed_[static_cast<size_t>(num_listed_++)] = unit; }

void AttentionPlan::list_shared() {
  for (int32_t c = 0; c < num_classes_; c++) {
    const Class& of = classes_[static_cast<size_t>(c)];
    for (int32_t head = 0; head < limits_.kv_heads; head++) {
      for (int32_t i = 0; i < of.tokens; i += kSharedTokens) {
        const int32_t first = static_cast<int32_t>(of.first) + i;
        list({of.leader, head, first, std::min(kSharedTokens, of.tokens - i), of.chunk0, of.chunk1, true, true});
      }
    }
  }
}

// What a sequence does not share.
void AttentionPlan::list_own(int32_t s) {
  const int32_t from = own_from_[static_cast<size_t>(s)], start = step_->starts[s], count = tokens(s);
  for (int32_t head = 0; head < limits_.kv_heads; head++) {
    if (from > 0) {
      const Unit unit{s, head, start, count, from, static_cast<int32_t>(chunks(s)), false, true};
      list(unit);
      note_merge(unit);
      continue;
    }
    const int32_t most = is_tree(*step_, s) ? count : kTileTokens;
    for (int32_t i = 0; i < count; i += most) list({s, head, start + i, std::min(most, count - i), 0, 0, false, false});
  }
}

void AttentionPlan::note_merge(const Unit& unit) {
  merges_[static_cast<size_t>(num_merges_++)] = {unit.sequence, unit.head, unit.first, unit.rows};
}

// Positions read, each by some rows: the reading itself costs about as much as two rows.
int64_t AttentionPlan::cost(const Unit& unit) const {
  const int32_t last = unit.shared ? unit.chunk1 * static_cast<int32_t>(kChunk) : step_->positions[unit.first] + unit.rows / 2 + 1;
  int64_t begin = unit.chunk0 * kChunk, end = last;
  if (unit.chunk1 > 0) end = std::min<int64_t>(end, unit.chunk1 * kChunk);
  if (window_ > 0) begin = std::max<int64_t>(begin, end - window_);
  return (end - begin + kStart) * (unit.rows + 2);
}

// ---- shares

void AttentionPlan::take(const Unit& unit) { dealt_[static_cast<size_t>(num_dealt_++)] = unit; }

// Contiguous runs of units. One that crosses the border is cut, or goes where most of it lies.
void AttentionPlan::deal() {
  int64_t total = 0, reached = 0, i = 0;
  for (int64_t n = 0; n < num_listed_; n++) total += cost(listed_[static_cast<size_t>(n)]);
  num_dealt_ = 0;
  for (int thread = 0; thread < limits_.threads; thread++) {
    begin_[static_cast<size_t>(thread)] = num_dealt_;
    const bool last = thread + 1 == limits_.threads;
    const int64_t goal = total * (thread + 1) / limits_.threads;
    for (; i < num_listed_; i++) {
      if (!last && crosses(i, goal - reached) && cut_heads(&i, goal - reached, &reached)) break;
      Unit &unit = listed_[static_cast<size_t>(i)], rest = unit;
      const int64_t whole = cost(unit), room = last ? whole : goal - reached;
      if (whole > room + kSlack && room > kSlack && cut(&unit, room, &rest)) {
        reached += cost(unit);
        take(unit);
        unit = rest;
        break;
      }
      if (whole / 2 > room) break;
      reached += whole;
      take(unit);
    }
  }
  begin_[static_cast<size_t>(limits_.threads)] = num_dealt_;
}

// The units from `first` on that are one each of the heads of a sequence, end at ..
int64_t AttentionPlan::heads_end(int64_t first) const {
  const Unit& unit = listed_[static_cast<size_t>(first)];
  int64_t end = first + 1;
  if (!parts_ || unit.shared || may_cut_tokens(unit)) return end;
  for (; end < num_listed_; end++) {
    const Unit& other = listed_[static_cast<size_t>(end)];
    if (other.shared || other.sequence != unit.sequence || other.first != unit.first) break;
  }
  return end;
}

// Whether one of them lies across the border, `room` away.
bool AttentionPlan::crosses(int64_t first, int64_t room) const {
  const int64_t end = heads_end(first);
  for (int64_t n = first; n < end && room > kSlack; n++) {
    const int64_t whole = cost(listed_[static_cast<size_t>(n)]);
    if (whole > room + kSlack) return end - first > 1;
    room -= whole;
  }
  return false;
}

// Cuts all of them at about the same chunk, so that a thread reads all heads of its pages: they lie side by side, and there are
// half as many pages to find. What is left stays listed from *first on; false where that is no good.
bool AttentionPlan::cut_heads(int64_t* first, int64_t room, int64_t* reached) {
  const int64_t begin = *first, end = heads_end(begin);
  const auto unit = [&](int64_t n) -> Unit& { return listed_[static_cast<size_t>(n)]; };
  int64_t wanted = (room / (unit(begin).rows + 2) + kChunk / 2) / kChunk, all = 0;  // chunks of single heads
  int32_t level = unit(begin).chunk0;
  for (int64_t n = begin; n < end; n++) all += last_chunk(unit(n)) - unit(n).chunk0, level = std::min(level, unit(n).chunk0);
  if (wanted < 1 || wanted >= all) return false;
  std::fill(taken_.begin(), taken_.end(), 0);
  for (; wanted > 0; level++) {
    for (int64_t n = begin; n < end && wanted > 0; n++) {
      const bool has = unit(n).chunk0 <= level && level < last_chunk(unit(n));
      taken_[static_cast<size_t>(n - begin)] += has;
      wanted -= has;
    }
  }
  for (int64_t n = begin; n < end; n++) *reached += take_chunks(&unit(n), taken_[static_cast<size_t>(n - begin)]);
  *first = end;
  for (int64_t n = end - 1; n >= begin; n--) {
    if (unit(n).rows > 0) unit(--*first) = unit(n);
  }
  return true;
}

// The first `chunks` of a unit; the rest stays in it, or no rows. -> their cost
int64_t AttentionPlan::take_chunks(Unit* unit, int32_t chunks) {
  if (chunks == 0) return 0;
  const int32_t last = last_chunk(*unit);
  const bool whole = chunks == last - unit->chunk0;
  if (!whole && !unit->parts) note_merge(*unit);
  unit->parts = unit->parts || !whole;
  Unit piece = *unit;
  if (whole) {
    unit->rows = 0;
  } else {
    unit->chunk1 = last;
    unit->chunk0 = piece.chunk1 = piece.chunk0 + chunks;
  }
  take(piece);
  return cost(piece);
}

// Leaves about `wanted` of a unit, the other part in `rest`; false where that is no good.
bool AttentionPlan::cut(Unit* unit, int64_t wanted, Unit* rest) {
  if (may_cut_tokens(*unit)) return cut_tokens(unit, wanted, rest);
  const int64_t most = unit->chunk1 > 0 ? unit->chunk1 - unit->chunk0 : chunks(unit->sequence);
  const int64_t keep = (wanted / (unit->rows + 2) + kChunk / 2) / kChunk;
  if (!parts_ || keep < 1 || keep >= most) return false;
  if (!unit->parts) note_merge(*unit);
  unit->parts = true;
  *rest = *unit;
  rest->chunk1 = unit->chunk0 + static_cast<int32_t>(most);
  rest->chunk0 = unit->chunk1 = unit->chunk0 + static_cast<int32_t>(keep);
  return true;
}

bool AttentionPlan::cut_tokens(Unit* unit, int64_t wanted, Unit* rest) const {
  const int64_t near = (wanted * unit->rows / cost(*unit) + kLeastCut / 2) / kLeastCut * kLeastCut;
  const int32_t keep = static_cast<int32_t>(std::clamp<int64_t>(near, kLeastCut, unit->rows - kLeastCut));
  *rest = *unit;
  rest->first += keep;
  rest->rows -= keep;
  unit->rows = keep;
  return true;
}

}  // namespace octavo
