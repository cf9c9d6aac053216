// What adapters add to a product. Rows of one adapter are gathered into units of a few. Where threads own rows, each makes
// units of its own rows and meets nobody; otherwise threads get units in turn.
#include <algorithm>
#include <array>

#include "program.h"

namespace octavo {
namespace {

constexpr int64_t kAllPanels = int64_t{1} << 32;

// Targets of a matrix: its own, or both of a pair.
struct Targets {
  int begin, end;
  int64_t step, blocks;  // between blocks of 16 outputs, and how many of them a panel gives
};
Targets targets_of(const octavo_op& lora, int matrix) {
  if (lora.i[3] != EPI_STORE) return {0, 2, 32, 2};
  return {matrix, matrix + 1, 16, 4};
}

}  // namespace

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
  const bool own_rows = mode_t_ == Mode::kRows && step_->tokens <= kRowBlock * threads;
  for (size_t i = 0; i < ops_.size(); i++) {
    if (ops_[i].record.code != OCTAVO_LORA) continue;
    ops_[i].adapted = false;
    for (const int32_t s : by_place_) ops_[i].adapted = ops_[i].adapted || (step_->adapters[s] >= 0 && changes(ops_[i], step_->adapters[s]));
    if (ops_[i].record.i[3] != EPI_STORE) ops_[i - 1].adapted = ops_[i].adapted;  // its LINEAR
    ops_[i].joined = own_rows && i > 0 && ops_[i - 1].adds != OCTAVO_NONE;
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

// What an adapter has for a target; null: nothing.
const Factors* Program::factors(const Op& op, int32_t place, int target) const {
  if (place < 0 || op.record.i[target] == OCTAVO_NONE) return nullptr;
  const Factors& f = adapters_->at(place, op.record.i[target]);
  return f.rank == 0 ? nullptr : &f;
}

// A LORA by itself: after its LINEAR.
void Program::lora(const Op& op, int thread) {
  if (!op.adapted || op.joined) return;
  float* u = scratch_[static_cast<size_t>(thread)].inner;
  for (const AdapterUnit& unit : units_[static_cast<size_t>(thread)]) {
    shrink_unit(op, unit, u, nullptr, 0, thread);
    for (int j = 0; j < (op.record.i[3] == EPI_STORE ? 3 : 1); j++) expand_unit(op, unit, u, {j, 0, kAllPanels});
  }
}

// The inner values of all of a thread's rows, whose operands lie in `act` from row `base` on.
void Program::shrink(const Op& op, const Act& act, int64_t base, int thread) {
  float* u = scratch_[static_cast<size_t>(thread)].inner;
  const bool taken = kernels_->lora_takes_operands && act.fmt == FMT_BF16 && adapters_->half();
  for (const AdapterUnit& unit : units_[static_cast<size_t>(thread)]) {
    const bool together = unit.rows[unit.count - 1] - unit.rows[0] == unit.count - 1;  // they ascend
    shrink_unit(op, unit, u, taken && together ? act.q + (unit.rows[0] - base) * act.lda : nullptr, act.lda, thread);
    u += 3 * unit.count * adapters_->wide();
  }
}

// What adapters add to outputs of all of a thread's rows.
void Program::expand(const Op& op, Outputs of, int thread) {
  const float* u = scratch_[static_cast<size_t>(thread)].inner;
  for (const AdapterUnit& unit : units_[static_cast<size_t>(thread)]) {
    expand_unit(op, unit, u, of);
    u += 3 * unit.count * adapters_->wide();
  }
}

// Inner values of a unit's rows for each target, [3, count, padded rank]. ready: the rows as operands, or null.
void Program::shrink_unit(const Op& op, const AdapterUnit& unit, float* u, const uint8_t* ready, int64_t apart, int thread) {
  if (unit.place < 0 || !changes(op, unit.place)) return;
  const octavo_op& r = op.record;
  const ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  const int64_t k = cols(r.in[0]), wide = stride(r.in[0]);
  const float* x[kAdapterRows] = {};
  for (int32_t m = 0; ready == nullptr && m < unit.count; m++) {
    x[m] = data(r.in[0]) + unit.rows[m] * wide;
    if (op.norm == nullptr) continue;
    float scale = 0.0f;
    kernels_->inv_rms(x[m], wide, 0, 1, k, r.f[0], &scale);
    kernels_->scale_mul(own.adapted + m * wide, x[m], op.norm, scale, k);
    x[m] = own.adapted + m * wide;
  }
  for (int j = 0; j < 3; j++, u += unit.count * adapters_->wide()) {
    const Factors* f = factors(op, unit.place, j);
    if (f != nullptr) kernels_->lora_shrink(u, f->padded, x, unit.count, k, f->a, f->padded, adapters_->half(), ready, apart);
  }
}

// What an adapter adds to some outputs of a unit's rows, and of a pair the activation.
void Program::expand_unit(const Op& op, const AdapterUnit& unit, const float* u, Outputs of) {
  const octavo_op& r = op.record;
  const bool pair = r.i[3] != EPI_STORE;
  const Targets targets = targets_of(r, of.matrix);
  float* y[kAdapterRows];
  for (int j = targets.begin; j < targets.end; j++) {
    const Factors* f = factors(op, unit.place, j);
    if (f == nullptr) continue;
    const int32_t out = r.in[pair ? 1 : 1 + j];
    const int64_t blocks = (adapters_->target(r.i[j]).n + 15) / 16, begin = std::min(of.p0 * targets.blocks, blocks);
    for (int32_t m = 0; m < unit.count; m++) y[m] = data(out) + unit.rows[m] * stride(out) + begin * targets.step + (pair ? 16 * j : 0);
    kernels_->lora_expand(y, targets.step, u + j * unit.count * adapters_->wide(), f->padded, unit.count, f->b + begin * (f->b_bytes / blocks), f->rank,
                          std::min(of.p1 * targets.blocks, blocks) - begin, adapters_->half());
  }
  for (int32_t m = 0; pair && m < unit.count; m++) {
    const int64_t from = std::min(of.p0 * 32, cols(r.in[2])), n = std::min(of.p1 * 32, cols(r.in[2])) - from;
    kernels_->gate_pairs(data(r.in[2]) + unit.rows[m] * stride(r.in[2]) + from, data(r.in[1]) + unit.rows[m] * stride(r.in[1]) + 2 * from, r.i[3], n);
  }
}

}  // namespace octavo
