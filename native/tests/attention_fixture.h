// A sequence in pages for the tests and the micro benchmark of attention: a pool whose unwritten slots are NaN and whose
// page -1 faults, and the items that read it.
#pragma once
#include <sys/mman.h>

#include <algorithm>

#include "check.h"

namespace check {

// K and V of one kv head, [positions][dim].
struct Sequence {
  int64_t positions, dim;
  std::vector<float> k, v;
  Sequence(Random& random, int64_t n, int64_t d) : positions(n), dim(d), k(size_t(n * d)), v(size_t(n * d)) {
    random.fill(k);
    random.fill(v);
  }
};

// Pages in random order; every byte 0xff until written. Memory before the pool is not readable.
struct Pages {
  const octavo::Kernels* kernels;
  octavo::KV kv = {};
  std::vector<int32_t> table;
  uint8_t* map;
  size_t mapped;

  Pages(const octavo::Kernels* k, Random& random, int32_t type, int32_t page_size, int32_t heads, int32_t dim, int64_t positions)
      : kernels(k) {
    kv.type = type, kv.page_size = page_size, kv.kv_heads = heads, kv.dim = dim;
    CHECK(kernels->kv_layout(&kv) == kv.layer_bytes && kv.blob_bytes % 64 == 0);
    kv.page_bytes = 2 * kv.layer_bytes;  // two layers, of which the tests use the second
    const int64_t pages = (positions + page_size - 1) / page_size, guard = (kv.page_bytes + 8191) / 4096 * 4096;
    mapped = size_t(guard + pages * kv.page_bytes + 4096);
    map = (uint8_t*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    kv.base = map + guard;
    memset(kv.base, 0xff, size_t(pages * kv.page_bytes));
    mprotect(map, size_t(guard), PROT_NONE);
    for (int64_t i = 0; i < pages; i++) table.push_back(int32_t(i));
    for (int64_t i = pages - 1; i > 0; i--) std::swap(table[size_t(i)], table[size_t(random.below(i + 1))]);
  }
  ~Pages() { munmap(map, mapped); }
  Pages(const Pages&) = delete;

  uint8_t* blob(int64_t position, int64_t head) {
    return kv.base + table[size_t(position / kv.page_size)] * kv.page_bytes + kv.layer_bytes + head * kv.blob_bytes;
  }
  void write(const Sequence& s, int64_t from, int64_t position, int64_t head) {
    kernels->kv_write(&kv, blob(position, head), position % kv.page_size, &s.k[size_t(from * s.dim)], &s.v[size_t(from * s.dim)]);
  }
  // What the pages hold, as floats.
  Sequence stored(int64_t head) {
    Random none(1);
    Sequence s(none, int64_t(table.size()) * kv.page_size, kv.dim);
    for (int64_t p = 0; p < s.positions; p++)
      kernels->kv_read(&kv, blob(p, head), p % kv.page_size, &s.k[size_t(p * s.dim)], &s.v[size_t(p * s.dim)]);
    return s;
  }
};

// Attributes of a call and its queries [rows][group * dim].
struct Query {
  int64_t rows, pos0;
  int32_t group;
  float scale, soft_cap = 0;
  int32_t window = 0;
  std::vector<float> q, sinks;
  std::vector<int32_t> parents;
  int32_t sink_tokens = 0;
  int64_t pairs = 0;
  std::vector<float> turns;  // [positions, 2, pairs]
  Query(Random& random, int64_t n, int64_t p, int32_t g, int64_t dim, float magnitude) : rows(n), pos0(p), group(g), q(size_t(n * g * dim)) {
    scale = magnitude / sqrtf(float(dim));
    random.fill(q);
  }
  // Leaves `tokens` in sight of a window, by rotation of the first 2 * half values of a head.
  void sink(int32_t tokens, int64_t half) {
    sink_tokens = tokens, pairs = half;
    for (int64_t p = 0; p < pos0 + rows; p++)
      for (const bool sine : {false, true})
        for (int64_t j = 0; j < half; j++) turns.push_back(float(sine ? sin(double(p) * frequency(j)) : cos(double(p) * frequency(j))));
  }
  double frequency(int64_t j) const { return pow(100.0, -double(j) / double(pairs)); }
};

// Rows [r0, r1) of the query -> out.
inline octavo::AttnItem item_of(Pages& pages, const Query& query, int64_t head, int64_t r0, int64_t r1, float* out, Buffer& scratch) {
  const int64_t width = query.group * pages.kv.dim;
  octavo::AttnItem item = {};
  item.kv = &pages.kv, item.pages = pages.table.data(), item.layer_in_group = 1, item.kv_head = int32_t(head);
  item.group = query.group, item.rows = r1 - r0, item.pos0 = query.pos0 + (query.parents.empty() ? r0 : 0);
  item.q = query.q.data() + r0 * width, item.ldq = width, item.out = out, item.ldo = width;
  item.scale = query.scale, item.soft_cap = query.soft_cap, item.window = query.window;
  item.sinks = query.sinks.empty() ? nullptr : query.sinks.data();
  item.parents = query.parents.empty() ? nullptr : query.parents.data();
  item.sink_tokens = query.sink_tokens, item.pairs = query.pairs, item.turns = query.turns.data();
  item.scratch = scratch.p;
  const int64_t pages_left = int64_t(pages.table.size()) - 1;
  item.prefetch_pages = pages.table.data() + pages_left, item.prefetch_count = 1;
  item.prefetch = pages.blob(pages_left * pages.kv.page_size, head);
  return item;
}

inline void attend(Pages& pages, const Query& query, int64_t head, int64_t r0, int64_t r1, float* out) {
  Buffer scratch(pages.kernels->attn_scratch(query.group, pages.kv.dim));
  const octavo::AttnItem item = item_of(pages, query, head, r0, r1, out, scratch);
  pages.kernels->attention(&item);
  CHECK(scratch.intact());
}

inline std::vector<float> attend(Pages& pages, const Query& query, int64_t head) {
  std::vector<float> out(query.q.size(), -7.0f);
  attend(pages, query, head, 0, query.rows, out.data());
  return out;
}

}  // namespace check
