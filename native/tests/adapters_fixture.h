// The tiny model with adapters on all of its projections.
#pragma once
#include "program_fixture.h"

namespace check {

constexpr int32_t kMany = 64;   // sequences of a step: threads own rows then
constexpr int32_t kMost = 600;  // tokens of a step: more than one thread's operands at a time

struct AdaptersCloser {
  void operator()(octavo_adapters* adapters) const { octavo_adapters_close(adapters); }
};
using AdaptersPtr = std::unique_ptr<octavo_adapters, AdaptersCloser>;

struct Adapted {
  Model model;
  Records records;
  std::vector<octavo_target> targets;
  AdaptersPtr adapters;
  ProgramPtr program;
  int32_t places, rank;
  bool half;

  Adapted(const char* isa, int32_t threads, int32_t format, int32_t kv_type, int32_t size, int32_t count, int32_t most, bool bf16)
      : model(isa, threads, format, kv_type, size), records(model.records), places(count), rank(most), half(bf16) {
    records.ops.clear();
    for (const octavo_op& op : model.records.ops) add(op);
    records.limits.max_sequences = kMany, records.limits.max_tokens = records.limits.max_logit_rows = kMost;
    records.limits.num_ops = int32_t(records.ops.size()), records.limits.num_buffers = int32_t(records.buffers.size());
    adapters.reset(octavo_adapters_open(places, rank, targets.data(), int32_t(targets.size()), half));
    program = open();
    if (!CHECK(adapters != nullptr && program != nullptr)) printf("  %s\n", octavo_error()), exit(1);
  }
  ProgramPtr open() {
    octavo_program_spec spec = records.spec();
    spec.adapters = adapters.get();
    return ProgramPtr(octavo_program_open(model.engine.get(), model.kv.get(), &spec));
  }
  // Random factors of a rank, in the layout that the library takes, the last places empty.
  int32_t set(Random& random, int32_t place, int32_t target, int32_t of) {
    const int64_t padded = (of + 15) / 16 * 16, blocks = (targets[size_t(target)].n + 15) / 16, k = targets[size_t(target)].k;
    std::vector<float> a(size_t(k * padded), 0), b(size_t(blocks * of * 16), 0);
    for (int64_t i = 0; i < k; i++)
      for (int64_t r = 0; r < of; r++) a[size_t(i * padded + r)] = random.uniform() * 0.2f;
    for (int64_t i = 0; i < blocks * of * 16; i++)
      if (i / (of * 16) * 16 + i % 16 < targets[size_t(target)].n) b[size_t(i)] = random.uniform() * 0.2f;
    if (!half) return octavo_adapters_set(adapters.get(), place, target, of, a.data(), b.data());
    return octavo_adapters_set(adapters.get(), place, target, of, upper_halves(a).data(), upper_halves(b).data());
  }
  void fill(Random& random) {
    for (int32_t place = 0; place < places; place++)
      for (int32_t target = 0; target < int32_t(targets.size()); target++)
        if (random.below(6) > 0) CHECK(set(random, place, target, int32_t(random.between(1, rank))) == 0);
  }

 private:
  static std::vector<uint16_t> upper_halves(const std::vector<float>& values) {
    std::vector<uint16_t> halves;
    for (const float v : values) {
      uint32_t bits;
      memcpy(&bits, &v, 4);
      halves.push_back(uint16_t(bits >> 16));
    }
    return halves;
  }
  int32_t target(int64_t n, int64_t k) { return targets.push_back({n, k}), int32_t(targets.size()) - 1; }
  int64_t columns(int32_t buffer) const { return records.buffers[size_t(buffer)].cols; }
  void add(octavo_op op) {
    octavo_op lora{};
    lora.code = OCTAVO_LORA, lora.in[0] = op.in[0], lora.w[8] = op.w[8], lora.f[0] = op.f[0];
    std::fill_n(lora.in + 1, 3, OCTAVO_NONE), std::fill_n(lora.out, 4, OCTAVO_NONE), std::fill_n(lora.w, 8, OCTAVO_NONE), std::fill_n(lora.i, 3, OCTAVO_NONE);
    const int64_t k = op.in[0] == OCTAVO_NONE ? 0 : columns(op.in[0]);
    const bool pair = op.code == OCTAVO_LINEAR && op.i[0] >= octavo::EPI_SILU_MUL;
    if (pair) {
      records.buffers.push_back({OCTAVO_ROWS_T, 0, ((kInner + 15) / 16 * 32 + 63) / 64 * 64});
      op.out[1] = lora.in[1] = int32_t(records.buffers.size()) - 1, lora.in[2] = op.out[0], lora.i[3] = op.i[0];
      for (const int j : {0, 1}) lora.i[j] = target(columns(op.out[0]), k);
    }
    const bool plain = op.code == OCTAVO_LINEAR && !pair && op.out[0] != ROUTER && op.out[0] != LOGITS;
    for (int j = 0; plain && j < op.i[1]; j++) lora.in[1 + j] = op.out[j], lora.i[j] = target(columns(op.out[j]), k);
    records.ops.push_back(op);
    if (pair || plain) records.ops.push_back(lora);
  }
};

}  // namespace check
