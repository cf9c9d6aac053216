// Products. Operands are prepared (normed, quantised) by the threads that need them or in shares, then each thread
// multiplies its panels, or from many rows on its rows by all panels. No choice here changes a bit of the result.
#include <algorithm>

#include "pool.h"
#include "program.h"

namespace octavo {
namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

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
  prepare(op, act, scratch_[static_cast<size_t>(thread)].scale, {share(m, thread), share(m, thread + 1), 0});
  Pool::shared().barrier();
  multiply_share(op, act, m, thread);
}

// Operands are the thread's own, a block of rows at a time: rows of different widths in shared memory would overlap.
void Program::by_rows(const Op& op, int thread) {
  const ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
  const int64_t m = rows(op.record.out[0]), last = share(m, thread + 1);
  const Act act = place(op.act, own.operands, kRowBlock);
  for (int64_t first = share(m, thread); first < last; first += kRowBlock) {
    const RowRange block{0, std::min(kRowBlock, last - first), first};
    prepare(op, act, own.scale, block);
    multiply(op, act, block, 0, op.panels, next_panel(op, thread));
  }
}

void Program::prepare(const Op& op, const Act& act, float* scale, RowRange r) {
  const int32_t in = op.record.in[0];
  const float* x = data(in) + r.base * stride(in);
  if (op.norm != nullptr) kernels_->inv_rms(x, stride(in), r.begin, r.end, cols(in), op.record.f[0], scale);
  kernels_->quantize(&act, r.begin, r.end, x, stride(in), op.norm, op.norm == nullptr ? nullptr : scale);
}

// This thread's panels: a contiguous run, so that its weights are one stream. Panels left over are shared by rows once
// there are enough of them.
void Program::multiply_share(const Op& op, const Act& act, int64_t m, int thread) {
  const int64_t n = op.panels, whole = m >= kSharedPanelRows ? n / engine_->threads * engine_->threads : n;
  const uint8_t* next = next_panel(op, thread);
  multiply(op, act, {0, m, 0}, share(whole, thread), share(whole, thread + 1), whole == n ? next : nullptr);
  if (whole < n) multiply(op, act, {share(m, thread), share(m, thread + 1), 0}, whole, n, next);
}

// Rows of operands by panels [p0, p1), counted over all matrices of the record.
void Program::multiply(const Op& op, const Act& act, RowRange range, int64_t p0, int64_t p1, const uint8_t* next) {
  const octavo_op& r = op.record;
  if (range.begin >= range.end) return;
  int64_t first = 0;
  for (int j = 0; j < op.count; j++) {
    const Mat& mat = *op.mats[j];
    const int64_t begin = std::max<int64_t>(p0 - first, 0), end = std::min(p1 - first, mat.panels);
    first += mat.panels;
    if (begin >= end) continue;
    Epilogue e{};
    e.kind = r.i[0];
    e.ldo = stride(r.out[j]);
    e.out = data(r.out[j]) + range.base * e.ldo;
    e.bias = op.bias[j];
    e.ldr = r.in[1] == OCTAVO_NONE ? 0 : stride(r.in[1]);
    e.res = r.in[1] == OCTAVO_NONE ? nullptr : data(r.in[1]) + range.base * e.ldr;
    e.soft_cap = r.f[1];
    const bool more = p1 > first && j + 1 < op.count;
    kernels_->gemm(&mat, &act, range.begin, range.end, begin, end, &e, more ? op.mats[j + 1]->base : next);
  }
}

// Where this thread's weights of the following product begin.
const uint8_t* Program::next_panel(const Op& op, int thread) const {
  if (op.next == OCTAVO_NONE) return nullptr;
  const Op& next = ops_[static_cast<size_t>(op.next)];
  const Mode how = mode(domain(next));
  int64_t panel = how == Mode::kRows ? 0 : share(next.panels, thread);
  for (int j = 0; j < next.count; j++) {
    const Mat& mat = *next.mats[j];
    if (panel < mat.panels) return mat.base + panel * mat.panel_bytes;
    panel -= mat.panels;
  }
  return nullptr;
}

}  // namespace octavo
