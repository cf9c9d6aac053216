// Sampling kernels: noise bit by bit as the Python definition gives it, argmax with ties and NaN, log-sum-exp.
#include "check.h"
#include "gumbel_values.h"

using namespace check;
using octavo::Kernels;

namespace {

void test_gumbel(const Kernels* k) {
  for (const GumbelRow& row : kGumbelRows) {
    std::vector<float> noise(kGumbelLength + 1, 5.0f), part(kGumbelLength, 0.0f);
    k->gumbel_row(noise.data(), kGumbelLength, row.seed, row.choice, row.index, row.purpose);
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < kGumbelLength; i++) {
      uint32_t word;
      memcpy(&word, &noise[size_t(i)], 4);
      if (i < 8) CHECK(word == row.first[i]);
      hash = (hash ^ word) * 0x100000001b3u;
    }
    CHECK(hash == row.hash);
    CHECK(noise[kGumbelLength] == 5.0f);
    k->gumbel_row(part.data(), 301, row.seed, row.choice, row.index, row.purpose);
    CHECK(!memcmp(part.data(), noise.data(), 301 * 4));
  }
}

void test_argmax(const Kernels* k, Random& random) {
  for (int i = 0; i < 200; i++) {
    const int64_t n = random.between(1, 130);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = float(random.below(9)) - 4;  // many ties
    if (i % 5 == 0) x[size_t(random.below(n))] = NAN;
    if (i % 7 == 0) x[size_t(random.below(n))] = -INFINITY;
    if (i % 11 == 0) x.assign(size_t(n), -INFINITY);
    int64_t want = 0, id = -1;
    float value = 9;
    for (int64_t j = 1; j < n; j++)
      if (x[size_t(j)] > x[size_t(want)]) want = j;
    for (int64_t j = n - 1; j >= 0; j--)
      if (x[size_t(j)] != x[size_t(j)]) want = j;
    const bool nan = x[size_t(want)] != x[size_t(want)];
    k->argmax(x.data(), n, &id, &value);
    CHECK(id == want && (nan ? value != value : value == x[size_t(want)]));
  }
}

void test_logsumexp(const Kernels* k, Random& random) {
  for (int64_t n : {1, 7, 16, 17, 1000, 49152}) {
    std::vector<float> x(static_cast<size_t>(n));
    random.fill(x, 12);
    if (n > 7) x[3] = -INFINITY;
    float max = -INFINITY;
    for (float v : x) max = v > max ? v : max;
    double sum = 0;
    for (float v : x) sum += exp(double(v) - max);
    CHECK(close(k->logsumexp(x.data(), n, max), max + log(sum), 1e-6));
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    Random random(5);
    test_gumbel(k);
    test_argmax(k, random);
    test_logsumexp(k, random);
  }
  return finish("test_sampling");
}
