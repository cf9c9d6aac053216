// What adapters add to a product. Rows of one adapter are gathered into units of a few. Where threads own rows, each makes
// units of its own rows and meets nobody; otherwise threads get units in turn.
#include <algorithm>
#include <array>

#include "program.h"

namespace octavo {

bool Program::has_adapters(const octavo_step& step) {
  bool any = false;
  for (int32_t s = 0; step.adapters != nullptr && s < step.sequences; s++) any = any || step.adapters[s] >= 0;
  return any;
}

const char* Program::wrong_adapters(const octavo_step& step) const {
  for (int32_t s = 0; step.adapters != nullptr && s < step.sequences; s++) {
    const int32_t place = step.adapters[s];
    if (place != OCTAVO_NONE && (adapters_ == nullptr || place < 0 || place >= adapters_->places())) return "an adapter is out of range";
  }
  return nullptr;
}

// Sequences in the order of their places, those without an adapter last.
void Program::sort_places(const octavo_step& step) {
  by_place_.resize(static_cast<size_t>(step.sequences));
  for (int32_t s = 0; s < step.sequences; s++) by_place_[static_cast<size_t>(s)] = s;
  const int32_t* place = step.adapters;
  std::sort(by_place_.begin(), by_place_.end(), [place](int32_t a, int32_t b) { return place[a] != place[b] ? place[a] > place[b] : a < b; });
}

// Which thread owns each sequence's row: all of an adapter go where the fewest are so far, then those without one fill up.
void Program::deal_places(const octavo_step& step) {
  std::array<int32_t, Pool::kMaxThreads> filled{};
  for (size_t i = 0; i < by_place_.size();) {
    const int32_t place = step.adapters[by_place_[i]];
    const int32_t thread = static_cast<int32_t>(std::min_element(filled.begin(), filled.begin() + engine_->threads) - filled.begin());
    do {
      thread_of_[static_cast<size_t>(by_place_[i++])] = thread;
      filled[static_cast<size_t>(thread)]++;
    } while (place >= 0 && i < by_place_.size() && step.adapters[by_place_[i]] == place);
  }
}

// A step in which every sequence computes one token and has its logits, in an order in which rows of an adapter are one
// thread's, so that its factors are read once. Rows of logits stay where they were.
const octavo_step* Program::in_order(const octavo_step& given) {
  bool plain = engine_->threads > 1 && mode_t_ == Mode::kRows && given.sequences == given.tokens && given.logit_rows == given.tokens;
  plain = plain && given.parent_rows == nullptr && given.no_write == nullptr && given.hidden == nullptr;
  for (int32_t t = 0; plain && t < given.tokens; t++) plain = given.rows[t] == t;
  if (!plain) return &given;
  sort_places(given);
  deal_places(given);
  const int32_t *thread = thread_of_.data(), *place = given.adapters;
  std::sort(by_place_.begin(), by_place_.end(), [thread, place](int32_t a, int32_t b) {
    if (thread[a] != thread[b]) return thread[a] < thread[b];
    return place[a] != place[b] ? place[a] > place[b] : a < b;
  });
  const int32_t n = given.tokens;
  int32_t *ids = ordered_arrays_.data(), *positions = ids + n, *tables = ids + 2 * n, *places = ids + 3 * n, *rows = ids + 4 * n;
  for (int32_t t = 0; t < n; t++) {
    const int32_t from = by_place_[static_cast<size_t>(t)];
    ids[t] = given.token_ids[from];
    positions[t] = given.positions[from];
    tables[t] = given.table_row[from];
    places[t] = given.adapters[from];
    rows[from] = t;
  }
  ordered_ = given;
  ordered_.token_ids = ids;
  ordered_.positions = positions;
  ordered_.table_row = tables;
  ordered_.adapters = places;
  ordered_.rows = rows;
  return &ordered_;
}

// Units of the step's rows, and which records matter.
void Program::gather_adapters() {
  for (std::vector<AdapterUnit>& own : units_) own.clear();
  if (!adapted_) return;
  sort_places(*step_);
  const int64_t share = step_->tokens / (2 * engine_->threads);  // so that every thread gets some
  const int threads = engine_->threads;
  if (mode_t_ != Mode::kRows) deal_rows(0, step_->tokens, std::clamp<int64_t>(share, 1, kAdapterRows), 0, threads);
  for (int thread = 0; mode_t_ == Mode::kRows && thread < threads; thread++) {
    deal_rows(part(step_->tokens, thread), part(step_->tokens, thread + 1), kAdapterRows, thread, 1);
  }
  for (size_t i = 0; i < ops_.size(); i++) {
    if (ops_[i].record.code != OCTAVO_LORA) continue;
    ops_[i].adapted = false;
    for (const int32_t s : by_place_) ops_[i].adapted = ops_[i].adapted || (step_->adapters[s] >= 0 && changes(ops_[i], step_->adapters[s]));
    if (ops_[i].record.i[3] != EPI_STORE) ops_[i - 1].adapted = ops_[i].adapted;  // its LINEAR
  }
}

// Rows [first, last) as units of up to `most`, in turn for so many threads from `thread` on.
void Program::deal_rows(int64_t first, int64_t last, int64_t most, int thread, int threads) {
  AdapterUnit* unit = nullptr;
  int turn = 0;
  for (const int32_t s : by_place_) {
    const int32_t place = step_->adapters[s];
    const int64_t end = std::min<int64_t>(step_->starts[s + 1], last);
    for (int64_t t = std::max<int64_t>(step_->starts[s], first); t < end; t++) {
      if (unit == nullptr || unit->place != place || unit->count == most) {
        std::vector<AdapterUnit>& own = units_[static_cast<size_t>(thread + turn++ % threads)];
        own.push_back({place, 0, {}});
        unit = &own.back();
      }
      unit->rows[unit->count++] = static_cast<int32_t>(t);
    }
  }
}

bool Program::changes(const Op& op, int32_t place) const {
  bool any = false;
  for (int j = 0; j < 3; j++) any = any || (op.record.i[j] != OCTAVO_NONE && adapters_->at(place, op.record.i[j]).rank > 0);
  return any;
}

void Program::lora(const Op& op, int thread) {
  if (!op.adapted) return;
  const octavo_op& r = op.record;
  const std::vector<AdapterUnit>& own = units_[static_cast<size_t>(thread)];
  for (size_t i = 0; i < own.size(); i++) {
    const AdapterUnit& unit = own[i];
    const bool last = i + 1 == own.size() || own[i + 1].place < 0;
    const Op* of = !last ? &op : op.next == OCTAVO_NONE ? nullptr : &ops_[static_cast<size_t>(op.next)];
    const int32_t place = own[last ? 0 : i + 1].place;
    const Factors* next = of == nullptr || place < 0 ? nullptr : first_factors(*of, place, 0);
    if (unit.place >= 0 && changes(op, unit.place)) adapt(op, unit, next, thread);
    for (int32_t m = 0; r.i[3] != EPI_STORE && m < unit.count; m++) {
      const int64_t row = unit.rows[m];
      kernels_->gate_pairs(data(r.in[2]) + row * stride(r.in[2]), data(r.in[1]) + row * stride(r.in[1]), r.i[3], cols(r.in[2]));
    }
  }
}

// What an adapter has for the first target from `from` on; null: nothing.
const Factors* Program::first_factors(const Op& op, int32_t place, int from) const {
  for (int j = from; j < 3; j++) {
    const int32_t target = op.record.i[j];
    if (target != OCTAVO_NONE && adapters_->at(place, target).rank > 0) return &adapters_->at(place, target);
  }
  return nullptr;
}

void Program::adapt(const Op& op, const AdapterUnit& unit, const Factors* after, int thread) {
  const octavo_op& r = op.record;
  const ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  const bool pair = r.i[3] != EPI_STORE;
  const int64_t k = cols(r.in[0]), wide = stride(r.in[0]);
  const float* x[kAdapterRows];
  float* y[kAdapterRows];
  for (int32_t m = 0; m < unit.count; m++) {
    x[m] = data(r.in[0]) + unit.rows[m] * wide;
    if (op.norm == nullptr) continue;
    float scale = 0.0f;
    kernels_->inv_rms(x[m], wide, 0, 1, k, r.f[0], &scale);
    kernels_->scale_mul(own.adapted + m * wide, x[m], op.norm, scale, k);
    x[m] = own.adapted + m * wide;
  }
  for (int j = 0; j < 3; j++) {
    if (r.i[j] == OCTAVO_NONE || adapters_->at(unit.place, r.i[j]).rank == 0) continue;
    const Factors& f = adapters_->at(unit.place, r.i[j]);
    const int32_t out = r.in[pair ? 1 : 1 + j];
    for (int32_t m = 0; m < unit.count; m++) y[m] = data(out) + unit.rows[m] * stride(out) + (pair ? 16 * j : 0);
    const Factors* follows = first_factors(op, unit.place, j + 1);
    const Factors* next = follows != nullptr ? follows : after;
    const Coming a = next == nullptr ? Coming{} : Coming{next->a, next->a + next->a_bytes};
    const Coming b = next == nullptr ? Coming{} : Coming{next->b, next->b + next->b_bytes};
    const bool half = adapters_->half();
    kernels_->lora_shrink(own.inner, f.padded, x, unit.count, k, f.a, f.padded, half, a);
    kernels_->lora_expand(y, pair ? 32 : 16, own.inner, f.padded, unit.count, f.b, f.rank, (adapters_->target(r.i[j]).n + 15) / 16, half, b);
  }
}

}  // namespace octavo
