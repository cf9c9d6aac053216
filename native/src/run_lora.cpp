// What adapters add to a product. Rows of one adapter are gathered into units of a few, which threads take in turn.
#include <algorithm>

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

// Sequences in the order of their places, those without an adapter first; then units of their rows, and which records matter.
void Program::gather_adapters() {
  adapted_ = has_adapters(*step_);
  units_.clear();
  if (!adapted_) return;
  by_place_.resize(static_cast<size_t>(step_->sequences));
  for (int32_t s = 0; s < step_->sequences; s++) by_place_[static_cast<size_t>(s)] = s;
  const int32_t* place = step_->adapters;
  std::sort(by_place_.begin(), by_place_.end(), [place](int32_t a, int32_t b) { return place[a] != place[b] ? place[a] < place[b] : a < b; });
  const int64_t share = step_->tokens / (2 * engine_->threads);  // so that every thread gets some
  const int32_t most = static_cast<int32_t>(std::clamp<int64_t>(share, 1, kAdapterRows));
  for (const int32_t s : by_place_) {
    for (int32_t t = step_->starts[s]; t < step_->starts[s + 1]; t++) {
      if (units_.empty() || units_.back().place != place[s] || units_.back().count == most) units_.push_back({place[s], 0, {}});
      units_.back().rows[units_.back().count++] = t;
    }
  }
  for (size_t i = 0; i < ops_.size(); i++) {
    if (ops_[i].record.code != OCTAVO_LORA) continue;
    ops_[i].adapted = false;
    for (const AdapterUnit& unit : units_) ops_[i].adapted = ops_[i].adapted || (unit.place >= 0 && changes(ops_[i], unit.place));
    if (ops_[i].record.i[3] != EPI_STORE) ops_[i - 1].adapted = ops_[i].adapted;  // its LINEAR
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
  for (size_t i = static_cast<size_t>(thread); i < units_.size(); i += static_cast<size_t>(engine_->threads)) {
    const AdapterUnit& unit = units_[i];
    const size_t after = i + static_cast<size_t>(engine_->threads);
    const Factors* next = after < units_.size() && units_[after].place >= 0 ? first_factors(op, units_[after].place, 0) : nullptr;
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
    const Factors* next = follows != nullptr ? follows : after != nullptr ? after : &f;
    const bool half = adapters_->half();
    kernels_->lora_shrink(own.inner, f.padded, x, unit.count, k, f.a, f.padded, half, f.b);
    kernels_->lora_expand(y, pair ? 32 : 16, own.inner, f.padded, unit.count, f.b, f.rank, (adapters_->target(r.i[j]).n + 15) / 16, half, next->a);
  }
}

}  // namespace octavo
