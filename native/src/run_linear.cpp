// Products. Operands are prepared (normed, quantised) by the threads that need them or in shares, then each thread
// multiplies its panels, or from many rows on its rows by all panels. No choice here changes a bit of the result.
#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {
namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

const uint8_t* first_panel(const Weight& weight, int lot) {
  const Lot& own = weight.lots[static_cast<size_t>(lot)];
  return own.base + own.begin * weight.mat.panel_bytes;
}

}  // namespace

int64_t Program::act_bytes(const Act& layout, int64_t row_count) const {
  Act act = layout;
  const int64_t q = kernels_->act_layout(&act, row_count);
  return round_up(q, 64) + 2 * round_up(row_count * act.ldg * int64_t{sizeof(float)}, 64);
}

// Operands of `row_count` rows in `memory`: values, then starts, then scales.
Act Program::place(const Act& layout, uint8_t* memory, int64_t row_count) const {
  Act act = layout;
  act.q = memory;
  memory += round_up(kernels_->act_layout(&act, row_count), 64);
  act.z = reinterpret_cast<int32_t*>(memory);
  act.s = reinterpret_cast<float*>(memory + round_up(row_count * act.ldg * int64_t{sizeof(float)}, 64));
  return act;
}

void Program::linear(const Op& op, int thread) {
  if (rows(op.record.out[0]) == 0) return;
  switch (mode(domain(op))) {
    case Mode::kFew: return few_rows(op, thread);
    case Mode::kPanels: return by_panels(op, thread);
    case Mode::kRows: return by_rows(op, thread);
  }
}

void Program::few_rows(const Op& op, int thread) {
  const ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  const int64_t m = rows(op.record.out[0]);
  const Act act = place(op.act, own.operands, kRowBlock);
  prepare(op, act, own.scale, {0, m, 0});
  multiply_share(op, act, m, thread);
}

void Program::by_panels(const Op& op, int thread) {
  const int64_t m = rows(op.record.out[0]);
  const Act act = place(op.act, act_memory_, shared_rows());
  prepare(op, act, scratch_[static_cast<size_t>(thread)].scale, {part(m, thread), part(m, thread + 1), 0});
  Pool::shared().barrier(thread, ahead(op, thread));
  multiply_share(op, act, m, thread);
}

// Operands are the thread's own, a block of rows at a time: rows of different widths in shared memory would overlap.
void Program::by_rows(const Op& op, int thread) {
  const ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  const int64_t m = rows(op.record.out[0]), last = part(m, thread + 1);
  const Act act = place(op.act, own.operands, kRowBlock);
  const bool joined = adapted_ && op.adds != OCTAVO_NONE && ops_[static_cast<size_t>(op.adds)].adapted && ops_[static_cast<size_t>(op.adds)].joined;
  for (int64_t first = part(m, thread); first < last; first += kRowBlock) {
    const RowRange block{0, std::min(kRowBlock, last - first), first};
    prepare(op, act, own.scale, block);
    if (joined) shrink(ops_[static_cast<size_t>(op.adds)], act, first, thread);
    for (int i = 0, lot = thread; i < engine_->threads; i++, lot = (lot + 1) % engine_->threads) {
      const bool end = i + 1 == engine_->threads;
      const uint8_t* next = end ? next_panel(op, thread) : nullptr;
      if (joined) multiply_joined(op, act, block, lot, next, thread);
      else multiply(op, act, block, lot, 0, panels(op, lot), next);
    }
  }
}

void Program::prepare(const Op& op, const Act& act, float* scale, RowRange r) {
  const int32_t in = op.record.in[0];
  const float* x = data(in) + r.base * stride(in);
  if (op.norm != nullptr) kernels_->inv_rms(x, stride(in), r.begin, r.end, cols(in), op.record.f[0], scale);
  kernels_->quantize(&act, r.begin, r.end, x, stride(in), op.norm, op.norm == nullptr ? nullptr : scale);
}

// Some panels of a lot at a time, then what adapters add to their outputs.
void Program::multiply_joined(const Op& op, const Act& act, RowRange block, int lot, const uint8_t* next, int thread) {
  const int64_t all = panels(op, lot), bytes = op.mats[0]->mat.panel_bytes;
  const uint8_t* first = first_weights(op, lot).next;
  int64_t done = 0;
  for (int j = 0; j < op.count; j++) {
    const Lot& own = op.mats[j]->lots[static_cast<size_t>(lot)];
    for (int64_t p = own.begin, n; p < own.end; p += n, done += n) {
      n = std::min(kJoinedPanels, own.end - p);
      multiply(op, act, block, lot, done, done + n, done + n < all ? first + (done + n) * bytes : next);
      expand(ops_[static_cast<size_t>(op.adds)], {j, p, p + n}, thread);
    }
  }
}

// Panels of a record that are this thread's.
int64_t Program::panels(const Op& op, int lot) const {
  int64_t count = 0;
  for (int j = 0; j < op.count; j++) {
    const Lot& own = op.mats[j]->lots[static_cast<size_t>(lot)];
    count += own.end - own.begin;
  }
  return count;
}

// This thread's panels: a contiguous run, so that its weights are one stream. Those that it has more than others are shared
// by rows once there are enough of them.
void Program::multiply_share(const Op& op, const Act& act, int64_t m, int thread) {
  const bool shares = m >= kSharedPanelRows;
  const uint8_t* next = next_panel(op, thread);
#ifdef OCTAVO_ABLATE_CLAIMS  // native/tests/ablate.sh: what would threads gain that take the next panel, whosever it is?
  for (int i = 0, lot = thread; i < engine_->threads; i++, lot = (lot + 1) % engine_->threads) {
    std::atomic<int64_t>& taken = claims[&op - ops_.data()][lot];
    const int64_t count = shares ? op.least : panels(op, lot);
    const uint8_t* first = first_weights(op, lot).next;
    for (int64_t p; (p = taken.fetch_add(1)) < count;) {
      multiply(op, act, {0, m, 0}, lot, p, p + 1, p + 1 < count ? first + (p + 1) * op.mats[0]->mat.panel_bytes : next);
    }
  }
#else
  multiply(op, act, {0, m, 0}, thread, 0, shares ? op.least : panels(op, thread), next);
#endif
  for (int lot = 0; shares && lot < engine_->threads; lot++) {
    multiply(op, act, {part(m, thread), part(m, thread + 1), 0}, lot, op.least, panels(op, lot), next);
  }
}

// Rows of operands by panels [p0, p1) of a lot, counted over all matrices of the record.
void Program::multiply(const Op& op, const Act& act, RowRange range, int lot, int64_t p0, int64_t p1, const uint8_t* next) {
  const octavo_op& r = op.record;
  if (range.begin >= range.end) return;
  int64_t first = 0;
  for (int j = 0; j < op.count; j++) {
    const Lot& own = op.mats[j]->lots[static_cast<size_t>(lot)];
    const int64_t count = own.end - own.begin, begin = std::max<int64_t>(p0 - first, 0), end = std::min(p1 - first, count);
    first += count;
    if (begin >= end) continue;
    const bool apart = adapted_ && op.adapted;  // a pair that an adapter changes before its epilogue
    const int32_t out = apart ? r.out[1] : r.out[j];
    Epilogue e{};
    e.kind = apart ? EPI_STORE : r.i[0];
    e.ldo = stride(out);
    e.out = data(out) + range.base * e.ldo;
    e.bias = op.bias[j];
    e.ldr = r.in[1] == OCTAVO_NONE ? 0 : stride(r.in[1]);
    e.res = r.in[1] == OCTAVO_NONE ? nullptr : data(r.in[1]) + range.base * e.ldr;
    e.soft_cap = r.f[1];
    Mat mat = op.mats[j]->part(static_cast<size_t>(lot));
    if (apart) mat.n = mat.panels * 64;  // in packed order: the last block of a width that is no multiple of 16, too
    const uint8_t* following = j + 1 < op.count && p1 > first ? first_panel(*op.mats[j + 1], lot) : next;
    kernels_->gemm(&mat, &act, range.begin, range.end, own.begin + begin, own.begin + end, &e, following);
  }
}

// Where this thread's weights of a product begin, and where the first run of them ends.
Ahead Program::first_weights(const Op& op, int thread) const {
  for (int j = 0; j < op.count; j++) {
    const Lot& own = op.mats[j]->lots[static_cast<size_t>(thread)];
    const int64_t bytes = op.mats[j]->mat.panel_bytes;
    if (own.begin < own.end) return {own.base + own.begin * bytes, own.base + own.end * bytes};
  }
  return {};
}

const uint8_t* Program::next_panel(const Op& op, int thread) const {
  return op.next == OCTAVO_NONE ? nullptr : first_weights(ops_[static_cast<size_t>(op.next)], thread).next;
}

// What to fetch before and while `op` waits, as far as it has not been fetched yet.
Ahead* Program::ahead(const Op& op, int thread) {
  ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  if (own.ahead_of == op.coming) return &own.ahead;
  own.ahead_of = op.coming;
  own.ahead = {};
  if (op.coming == OCTAVO_NONE) return &own.ahead;
  const Op& coming = ops_[static_cast<size_t>(op.coming)];
  if (mode(domain(coming)) == Mode::kRows) return &own.ahead;
  own.ahead = first_weights(coming, thread);
  own.ahead.end = std::min(own.ahead.end, own.ahead.next + kAheadBytes);
  return &own.ahead;
}

}  // namespace octavo
