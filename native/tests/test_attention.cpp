// Paged attention and the page layouts: against a double-precision definition on what the pages hold, and bit by bit
// against itself whatever the tile, the chunking and the page size.
#include <cmath>

#include "attention_oracle.h"

using namespace check;
using octavo::Kernels;

namespace {

int effort = 1;  // divides the number of cases: emulators are slow

void test_oracle(const Kernels* k, Random& random) {
  for (int i = 0; i < 60 / effort; i++) {
    const Case c = random_case(random, i % 3);
    const int64_t end = c.pos0 + c.rows;
    Pages pages(k, random, c.type, c.page_size, 2, c.dim, end + random.below(40));
    const Sequence s(random, end, c.dim);
    for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 1);
    Query q(random, c.rows, c.pos0, c.group, c.dim, 4);
    random_attributes(random, q);
    const Sequence stored = pages.stored(1);
    free_behind_window(pages, q);
    const double e = worst_error(q, stored, attend(pages, q, 1));
    if (!CHECK(e <= kTolerance[c.type]))
      printf("  %s %s page %d dim %d group %d rows %ld at %ld window %d cap %g sinks %zu: error %g\n", k->name, kTypes[c.type], c.page_size,
             c.dim, c.group, long(c.rows), long(c.pos0), q.window, double(q.soft_cap), q.sinks.size(), e);
  }
}

// The whole, one token at a time, cut anywhere, in every page size: the same bits.
void test_bits(const Kernels* k, Random& random) {
  for (int i = 0; i < 18 / effort; i++) {
    Case c = random_case(random, i % 3);
    c.rows = random.between(2, i < 3 && effort == 1 ? 512 : 90);
    const int64_t end = c.pos0 + c.rows, width = c.group * c.dim;
    const Sequence s(random, end, c.dim);
    Query q(random, c.rows, c.pos0, c.group, c.dim, 4);
    random_attributes(random, q);
    std::vector<float> whole;
    for (int32_t size : {32, 16, 64, 128}) {
      Pages pages(k, random, c.type, size, 2, c.dim, end);
      for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 1);
      free_behind_window(pages, q);
      std::vector<float> out = attend(pages, q, 1);
      if (whole.empty()) whole = out;
      CHECK(!memcmp(out.data(), whole.data(), out.size() * 4));
      std::fill(out.begin(), out.end(), 0.0f);
      for (int64_t r0 = 0, r1; r0 < c.rows; r0 = r1) {
        r1 = std::min(c.rows, r0 + (size == 32 ? 1 : random.between(1, 80)));
        attend(pages, q, 1, r0, r1, out.data() + r0 * width);
      }
      if (!CHECK(!memcmp(out.data(), whole.data(), out.size() * 4)))
        printf("  %s %s page %d dim %d group %d rows %ld at %ld window %d\n", k->name, kTypes[c.type], size, c.dim, c.group, long(c.rows),
               long(c.pos0), q.window);
    }
  }
}

// A row is the same in a step that has written only up to it and in one that has written more, NaN included.
void test_later_positions(const Kernels* k, Random& random) {
  for (int32_t type = 0; type < 3; type++) {
    const int64_t dim = 64, end = 150;
    Sequence s(random, end, dim);
    for (int64_t p = 100; p < end; p++) s.k[size_t(p * dim + 3)] = s.v[size_t(p * dim + 5)] = NAN;
    Pages pages(k, random, type, 32, 1, int32_t(dim), end);
    for (int64_t p = 0; p < 100; p++) pages.write(s, p, p, 0);
    Query q(random, end, 0, 3, dim, 4);
    std::vector<float> before(q.q.size()), after;
    attend(pages, q, 0, 0, 100, before.data());
    for (int64_t p = 100; p < end; p++) pages.write(s, p, p, 0);
    after = attend(pages, q, 0);
    CHECK(!memcmp(before.data(), after.data(), size_t(100 * 3 * dim * 4)));
    CHECK(std::none_of(before.begin(), before.begin() + 100 * 3 * dim, [](float x) { return x != x; }));
    CHECK(std::all_of(after.begin() + 100 * 3 * dim, after.end(), [](float x) { return x != x; }));  // what is seen is seen
  }
}

// A tree row equals the last token of the chain of its ancestors.
void test_tree(const Kernels* k, Random& random) {
  for (int i = 0; i < 9 / (effort > 3 ? 3 : effort); i++) {
    Case c = random_case(random, i % 3);
    c.rows = random.between(2, 24);
    const int64_t end = c.pos0 + c.rows, width = c.group * c.dim;
    const Sequence s(random, end, c.dim);
    Pages pages(k, random, c.type, c.page_size, 1, c.dim, end);
    for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 0);
    Query q(random, c.rows, c.pos0, c.group, c.dim, 4);
    random_attributes(random, q);
    for (int32_t r = 0; r < c.rows; r++) q.parents.push_back(int32_t(random.below(r + 1)) - 1);
    const Sequence stored = pages.stored(0);
    const std::vector<float> out = attend(pages, q, 0);
    CHECK(worst_error(q, stored, out) <= kTolerance[c.type]);
    for (int64_t row = 0; row < c.rows; row++) {
      Query chain = q;
      std::vector<int64_t> path;
      for (int64_t r = row; r >= 0; r = q.parents[size_t(r)]) path.insert(path.begin(), r);
      Pages straight(k, random, c.type, 64, 1, c.dim, end);
      for (int64_t p = 0; p < c.pos0; p++) straight.write(s, p, p, 0);
      for (size_t d = 0; d < path.size(); d++) straight.write(s, c.pos0 + path[d], c.pos0 + int64_t(d), 0);
      chain.parents.clear();
      chain.pos0 += int64_t(path.size()) - 1 - row;
      std::vector<float> one(size_t(width), 0.0f);
      attend(straight, chain, 0, row, row + 1, one.data());
      CHECK(!memcmp(one.data(), &out[size_t(row * width)], size_t(width * 4)));
    }
  }
}

// Chunks by separate calls, merged; rows of several sequences that share pages, in one item: the bits of plain items.
void test_parts(const Kernels* k, Random& random) {
  for (int i = 0; i < 9 / (effort > 3 ? 3 : effort); i++) {
    Case c = random_case(random, i % 3);
    const int64_t shared = 1024, sequences = 5, width = c.group * c.dim, state = k->attn_partial(c.dim);
    Pages prefix(k, random, c.type, c.page_size, 1, c.dim, shared);
    const Sequence s(random, shared, c.dim);
    for (int64_t p = 0; p < shared; p++) prefix.write(s, p, p, 0);
    Query q(random, sequences, 0, c.group, c.dim, 4);
    if (i % 2) q.soft_cap = 3, q.sinks.assign(size_t(c.group), 0.5f);
    std::vector<float> out(q.q.size()), want(q.q.size()), partial(size_t(sequences * c.group * 4 * state), NAN);
    std::vector<int64_t> positions, order;
    for (int64_t n = 0; n < sequences; n++) positions.push_back(random.between(shared, 1599)), order.push_back((n * 2 + 1) % sequences);
    Buffer scratch(k->attn_scratch(c.group, c.dim));
    octavo::AttnItem item = {};
    item.layer_in_group = 1, item.group = c.group, item.ldq = item.ldo = width, item.scale = q.scale, item.soft_cap = q.soft_cap;
    item.sinks = q.sinks.empty() ? nullptr : q.sinks.data(), item.scratch = scratch.p;
    item.q = q.q.data(), item.out = out.data(), item.partial = partial.data(), item.partial_chunks = 4;
    std::vector<int64_t> places;
    for (int64_t n : order) places.push_back(positions[size_t(n)]);
    octavo::AttnItem both = item;
    both.kv = &prefix.kv, both.pages = prefix.table.data(), both.rows = sequences, both.positions = places.data(), both.row_index = order.data();
    for (int64_t chunk : {1, 0}) both.chunk0 = chunk, both.chunk1 = chunk + 1, k->attention(&both);
    for (int64_t n = 0; n < sequences; n++) {
      Pages own(k, random, c.type, 32, 1, c.dim, 1600);
      const Sequence tail(random, 1600, c.dim);
      for (int64_t p = 0; p <= positions[size_t(n)]; p++) own.write(p < shared ? s : tail, p, p, 0);
      octavo::AttnItem rest = item;
      rest.kv = &own.kv, rest.pages = own.table.data(), rest.rows = 1, rest.pos0 = positions[size_t(n)], rest.row_index = &n;
      for (int64_t chunk : {3, 2}) rest.chunk0 = chunk, rest.chunk1 = chunk + 1, k->attention(&rest);
      k->attention_merge(&rest);
      rest.chunk0 = rest.chunk1 = 0, rest.partial = nullptr, rest.out = want.data();
      k->attention(&rest);
    }
    CHECK(!memcmp(out.data(), want.data(), out.size() * 4));
  }
}

// A run of tokens cut by chunks anywhere, parts in any order, then merged: the bits of the whole.
void test_cuts(const Kernels* k, Random& random) {
  for (int i = 0; i < 12 / effort; i++) {
    Case c = random_case(random, i % 3);
    c.rows = random.between(1, 40), c.pos0 = random.below(2000);
    const int64_t end = c.pos0 + c.rows, width = c.group * c.dim, chunks = (end - 1) / 512 + 1, state = k->attn_partial(c.dim);
    const Sequence s(random, end, c.dim);
    Pages pages(k, random, c.type, c.page_size, 1, c.dim, end);
    for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 0);
    Query q(random, c.rows, c.pos0, c.group, c.dim, 4);
    random_attributes(random, q);
    const std::vector<float> whole = attend(pages, q, 0);
    std::vector<float> out(q.q.size(), -7.0f), partial(size_t(c.rows * c.group * chunks * state), NAN);
    Buffer scratch(k->attn_scratch(c.group, c.dim));
    for (int64_t r0 = 0, r1; r0 < c.rows; r0 = r1) {
      r1 = std::min(c.rows, r0 + random.between(1, 40));
      octavo::AttnItem item = item_of(pages, q, 0, r0, r1, out.data() + r0 * width, scratch);
      item.partial = partial.data() + r0 * c.group * chunks * state, item.partial_chunks = chunks;
      for (int64_t high = chunks, low; high > 0; high = low) {
        low = random.below(high);
        item.chunk0 = low, item.chunk1 = high;
        k->attention(&item);
      }
      k->attention_merge(&item);
    }
    CHECK(scratch.intact());
    if (!CHECK(!memcmp(out.data(), whole.data(), out.size() * 4)))
      printf("  %s %s page %d dim %d group %d rows %ld at %ld window %d\n", k->name, kTypes[c.type], c.page_size, c.dim, c.group, long(c.rows),
             long(c.pos0), q.window);
  }
}

// Several kv heads in one call, whole and by chunks: the bits of single ones.
void test_heads(const Kernels* k, Random& random) {
  for (int i = 0; i < 24 / effort; i++) {
    Case c = random_case(random, i % 3);
    c.pos0 = random.below(1600);
    octavo::KV kv = {};
    kv.type = c.type, kv.page_size = c.page_size, kv.kv_heads = 1, kv.dim = c.dim;
    const int64_t most = k->attn_heads(&kv, c.group);
    if (!CHECK(most >= 1) || most == 1) continue;
    const int64_t heads = random.between(2, most), first = random.below(2), end = c.pos0 + 1, chunks = c.pos0 / 512 + 1;
    Pages pages(k, random, c.type, c.page_size, int32_t(heads + 2), c.dim, end);
    for (int64_t h = 0; h < heads; h++) {
      const Sequence s(random, end, c.dim);
      for (int64_t p = 0; p < end; p++) pages.write(s, p, p, first + h);
    }
    Query q(random, 1, c.pos0, int32_t(c.group * heads), c.dim, 4);
    random_attributes(random, q);
    free_behind_window(pages, q);
    std::vector<float> want, out(q.q.size(), -7.0f);
    for (int64_t h = 0; h < heads; h++) {
      Query one = q;
      one.group = c.group;
      one.q.assign(q.q.begin() + h * c.group * c.dim, q.q.begin() + (h + 1) * c.group * c.dim);
      if (!q.sinks.empty()) one.sinks.assign(q.sinks.begin() + h * c.group, q.sinks.begin() + (h + 1) * c.group);
      for (const float x : attend(pages, one, first + h)) want.push_back(x);
    }
    Buffer scratch(k->attn_scratch(c.group, c.dim));
    octavo::AttnItem item = item_of(pages, q, first, 0, 1, out.data(), scratch);
    item.group = c.group, item.heads = int32_t(heads);
    k->attention(&item);
    bool same = !memcmp(out.data(), want.data(), out.size() * 4);
    std::vector<float> partial(size_t((q.group + 3) * chunks * k->attn_partial(c.dim)), NAN);
    item.partial = partial.data(), item.partial_chunks = chunks, item.partial_heads = q.group + 3;
    for (int64_t high = chunks, low; high > 0; high = low) item.chunk1 = high, item.chunk0 = low = random.below(high), k->attention(&item);
    std::fill(out.begin(), out.end(), -7.0f);
    item.group = q.group, item.heads = 1;
    k->attention_merge(&item);
    same = same && !memcmp(out.data(), want.data(), out.size() * 4);
    if (!CHECK(same && scratch.intact()))
      printf("  heads %s %s page %d dim %d group %d heads %ld at %ld window %d\n", k->name, kTypes[c.type], c.page_size, c.dim, c.group,
             long(heads), long(c.pos0), q.window);
  }
}

// More chunks than are merged at once.
void test_long(const Kernels* k, Random& random) {
  for (int32_t type = 0; type < 3; type++) {
    const int64_t dim = 16, end = 19 * 512 + 100, chunks = 20, state = k->attn_partial(int32_t(dim));
    const Sequence s(random, 640, dim);
    Pages pages(k, random, type, 32, 1, int32_t(dim), end);
    for (int64_t p = 0; p < end; p++) pages.write(s, (p * 7 + p / 512 * 13) % 640, p, 0);
    const Query q(random, 1, end - 1, 2, dim, 4);
    const std::vector<float> whole = attend(pages, q, 0);
    std::vector<float> out(q.q.size(), -7.0f), partial(size_t(2 * chunks * state), NAN);
    Buffer scratch(k->attn_scratch(2, int32_t(dim)));
    octavo::AttnItem item = item_of(pages, q, 0, 0, 1, out.data(), scratch);
    item.partial = partial.data(), item.partial_chunks = chunks;
    for (int64_t chunk = 0; chunk < chunks; chunk++) item.chunk0 = chunk, item.chunk1 = chunk + 1, k->attention(&item);
    k->attention_merge(&item);
    CHECK(!memcmp(out.data(), whole.data(), out.size() * 4));
  }
}

// Scores that rise and fall by many powers of two from block to block.
void test_rising(const Kernels* k, Random& random) {
  for (int32_t type = 0; type < 3; type++)
    for (const int32_t dim : {64, 96}) {
      const int64_t rows = 40, pos0 = 460, end = pos0 + rows;
      Sequence s(random, end, dim);
      for (int64_t p = 0; p < end; p++)
        for (int32_t d = 0; d < dim; d++) s.k[size_t(p * dim + d)] *= float(1 + 12 * (p / 64 % 4));
      Pages pages(k, random, type, 32, 1, dim, end);
      for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 0);
      const Query q(random, rows, pos0, 2, dim, 2);
      const std::vector<float> whole = attend(pages, q, 0);
      CHECK(worst_error(q, pages.stored(0), whole) <= (type == 0 ? 1e-4 : 0.2));  // the rounding of a query counts for more the larger a score
      std::vector<float> one(size_t(2 * dim), 0.0f);
      for (int64_t row = 0; row < rows; row += 13) {
        attend(pages, q, 0, row, row + 1, one.data());
        CHECK(!memcmp(one.data(), &whole[size_t(row * 2 * dim)], one.size() * 4));
      }
    }
}

// Values that are not finite, at positions that only some rows of a tile see, stay with these rows.
void test_poison(const Kernels* k, Random& random) {
  for (int32_t type = 0; type < 3; type++)
    for (const int32_t window : {0, 40}) {
      const int64_t dim = 80, rows = 61, pos0 = 70, end = pos0 + rows, width = 2 * dim;
      Sequence s(random, end, dim);
      for (int64_t p : {pos0 + 9, pos0 + 30}) s.v[size_t(p * dim + 70)] = p % 2 ? NAN : INFINITY;
      Pages pages(k, random, type, 16, 1, int32_t(dim), end);
      for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 0);
      Query q(random, rows, pos0, 2, dim, 4);
      q.window = window;
      const std::vector<float> whole = attend(pages, q, 0);
      std::vector<float> one(size_t(width), 0.0f);
      for (int64_t row = 0; row < rows; row++) {
        attend(pages, q, 0, row, row + 1, one.data());
        CHECK(!memcmp(one.data(), &whole[size_t(row * width)], size_t(width * 4)));
        const bool clean = row < 9 || (window && row >= 30 + window);
        CHECK(clean == std::none_of(one.begin(), one.end(), [](float x) { return !std::isfinite(x); }));
      }
    }
}

// Pages return what was written, to the rounding of their type; sizes that cannot be are refused.
void test_pages(const Kernels* k, Random& random) {
  for (int32_t type = 0; type < 3; type++)
    for (int32_t dim : {4, 20, 64, 256}) {
      Sequence s(random, 64, dim);
      for (int32_t d = 0; d < dim; d++) s.k[size_t(dim + d)] = s.v[size_t(dim + d)] = 0;
      Pages pages(k, random, type, 32, 2, dim, 64);
      std::vector<int64_t> order(64);
      for (int64_t p = 0; p < 64; p++) order[size_t(p)] = p * 37 % 64;
      for (int64_t p : order) pages.write(s, p, p, 0), pages.write(s, 63 - p, p, 1);
      const Sequence got = pages.stored(0);
      const double step = type == 0 ? 0 : type == 1 ? 1.0 / 512 : 0.5 / 127 + 1e-6;
      bool ok = true;
      for (size_t i = 0; i < s.k.size(); i++) ok = ok && fabs(got.k[i] - s.k[i]) <= step && fabs(got.v[i] - s.v[i]) <= step;
      CHECK(ok);
    }
  octavo::KV kv = {};
  kv.type = 1, kv.page_size = 32, kv.kv_heads = 1, kv.dim = 64;
  CHECK(k->kv_layout(&kv) == 2 * 32 * 64 * 2);
  kv.page_size = 48;
  CHECK(k->kv_layout(&kv) == -1);
  kv.page_size = 32, kv.dim = 257;
  CHECK(k->kv_layout(&kv) == -1);
  kv.dim = 64, kv.type = 3;
  CHECK(k->kv_layout(&kv) == -1);
}

}  // namespace

// test_attention [table or "" for all] [divisor of the number of cases]
int main(int argc, char** argv) {
  if (argc > 2) effort = std::max(1, atoi(argv[2]));
  for (const Kernels* k : tables(argc > 1 && argv[1][0] ? argv[1] : nullptr)) {
    Random random(7);
    const long before = failures;
    test_pages(k, random);
    test_oracle(k, random);
    test_bits(k, random);
    test_later_positions(k, random);
    test_tree(k, random);
    test_parts(k, random);
    test_cuts(k, random);
    test_heads(k, random);
    test_long(k, random);
    test_poison(k, random);
    test_rising(k, random);
    if (failures > before) printf("%s: %ld failed\n", k->name, failures - before);
  }
  return finish("test_attention");
}
