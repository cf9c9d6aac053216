// Attention that leaves the first tokens of a sequence in sight of its window: against the definition in double precision, and bit
// by bit against itself however the rows are cut, on pages of any size, before later positions are written.
#include "attention_oracle.h"

using namespace check;
using octavo::Kernels;

namespace {

Query random_query(Random& random, const Case& c) {
  const int32_t windows[] = {1, 7, 63, 64, 65, 200, 512}, tokens[] = {1, 4, 4, 16, 33, 63, 64};
  Query q(random, c.rows, c.pos0, c.group, c.dim, 4);
  random_attributes(random, q);
  q.window = windows[random.below(7)];
  q.sink(tokens[random.below(7)], random.below(3) == 0 ? std::max(1, c.dim / 4) : c.dim / 2);
  return q;
}

void describe(const Kernels* k, const Case& c, const Query& q) {
  printf("  %s %s page %d dim %d group %d rows %ld at %ld window %d sink tokens %d turning %ld cap %g sinks %zu\n", k->name, kTypes[c.type], c.page_size,
         c.dim, c.group, long(c.rows), long(c.pos0), q.window, q.sink_tokens, long(q.pairs), double(q.soft_cap), q.sinks.size());
}

void test_oracle(const Kernels* k, Random& random, int cases) {
  for (int i = 0; i < cases; i++) {
    const Case c = random_case(random, i % 3);
    const int64_t end = c.pos0 + c.rows;
    Pages pages(k, random, c.type, c.page_size, 2, c.dim, end + random.below(40));
    const Sequence s(random, end, c.dim);
    for (int64_t p = 0; p < end; p++) pages.write(s, p, p, 1);
    const Query q = random_query(random, c);
    const Sequence stored = pages.stored(1);
    free_behind_window(pages, q);
    if (!CHECK(worst_error(q, stored, attend(pages, q, 1)) <= kTolerance[c.type])) describe(k, c, q);
  }
}

void test_bits(const Kernels* k, Random& random, int cases) {
  for (int i = 0; i < cases; i++) {
    Case c = random_case(random, i % 3);
    c.rows = random.between(2, 90);
    const int64_t end = c.pos0 + c.rows, width = c.group * c.dim;
    const Sequence s(random, end, c.dim);
    const Query q = random_query(random, c);
    std::vector<float> whole;
    for (int32_t size : {32, 16, 64, 128}) {
      Pages pages(k, random, c.type, size, 2, c.dim, end);
      std::vector<float> out(q.q.size(), -7.0f);
      for (int64_t p = 0; p < c.pos0; p++) pages.write(s, p, p, 1);
      for (int64_t r0 = 0, r1; r0 < c.rows; r0 = r1) {
        r1 = size == 32 ? c.rows : std::min(c.rows, r0 + (size == 16 ? 1 : random.between(1, 80)));
        for (int64_t p = c.pos0 + r0; p < c.pos0 + r1; p++) pages.write(s, p, p, 1);
        if (r0 == 0) free_behind_window(pages, q);
        attend(pages, q, 1, r0, r1, out.data() + r0 * width);
      }
      if (whole.empty()) whole = out;
      if (!CHECK(!memcmp(out.data(), whole.data(), out.size() * 4))) describe(k, c, q);
    }
  }
}

// Where the window reaches back to the beginning nothing is turned: the values of plain attention, nearly.
void test_near(const Kernels* k, Random& random) {
  for (int32_t type = 0; type < 3; type++) {
    const int64_t dim = 64, rows = 200;
    const Sequence s(random, rows, dim);
    Pages pages(k, random, type, 32, 1, int32_t(dim), rows);
    for (int64_t p = 0; p < rows; p++) pages.write(s, p, p, 0);
    Query q(random, rows, 0, 3, dim, 4);
    const std::vector<float> plain = attend(pages, q, 0);
    q.window = int32_t(rows), q.sink(4, dim / 2);
    const std::vector<float> sunk = attend(pages, q, 0);
    double worst = 0;
    for (size_t i = 0; i < plain.size(); i++) worst = std::max(worst, fabs(double(plain[i]) - sunk[i]));
    CHECK(worst <= kTolerance[type]);
  }
}

}  // namespace

// test_attention_sinks [table or "" for all] [divisor of the number of cases]
int main(int argc, char** argv) {
  const int effort = argc > 2 ? std::max(1, atoi(argv[2])) : 1;
  for (const Kernels* k : tables(argc > 1 && argv[1][0] ? argv[1] : nullptr)) {
    Random random(8);
    test_oracle(k, random, 45 / effort);
    test_bits(k, random, 12 / effort);
    test_near(k, random);
  }
  return finish("test_attention_sinks");
}
