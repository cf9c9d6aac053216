// Kernels of adapters against plain sums in double precision: random ranks, depths, outputs and rows, which lie anywhere and in any
// order. A row has the bits that it has alone.
#include "check.h"

using namespace check;
using octavo::Kernels;

namespace {

uint16_t bf16_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float rounded(float v) {
  const uint32_t bits = uint32_t(bf16_of(v)) << 16;
  memcpy(&v, &bits, 4);
  return v;
}

struct Factor {  // [lines, width] as the kernels want it: lines one after the other, or in bf16 by pairs, zeros behind the last
  std::vector<float> values;
  Buffer packed;
  Factor(Random& random, int64_t lines, int64_t room, int64_t width, bool half) : values(size_t(lines * width)), packed(room * width * (half ? 2 : 4)) {
    random.fill(values);
    memset(packed.p, 0, size_t(packed.n));
    for (int64_t i = 0; i < lines; i++) {
      for (int64_t j = 0; j < width; j++) {
        float& v = values[size_t(i * width + j)];
        if (half) v = rounded(v);
        if (half) ((uint16_t*)packed.p)[i / 2 * 2 * width + 2 * j + i % 2] = bf16_of(v);
        else ((float*)packed.p)[i * width + j] = v;
      }
    }
  }
};

struct Rows {  // of a larger array, in any order; sorted and one after the other half of the time. Behind a row nothing is a number
  std::vector<float> all;
  std::vector<float*> at;
  std::vector<int64_t> which;
  Rows(Random& random, int64_t rows, int64_t length, int64_t behind = 0) : all(size_t((rows * 3 + 1) * (length + behind))) {
    random.fill(all);
    for (size_t i = 0; i < all.size(); i++)
      if (int64_t(i) % (length + behind) >= length) all[i] = NAN;
    const int64_t first = random.below(rows), apart = random.between(0, 1);
    for (int64_t m = 0; m < rows; m++) which.push_back(apart ? m * 3 + random.below(3) : first + m);
    if (random.below(2)) std::swap(which.front(), which.back());
    for (const int64_t row : which) at.push_back(&all[size_t(row * (length + behind))]);
  }
};

struct Case {
  int64_t rows, k, rank, blocks;
  bool half, pair;
};

Case drawn(Random& random) {
  const int64_t ranks[] = {1, 2, 8, 15, 16, 17, 32, 40, 64}, depths[] = {1, 31, 32, 33, 64, 576, 2047, 2050, 4100};
  return {random.between(1, 8), depths[random.below(9)], ranks[random.below(9)], random.between(1, 5), random.below(2) == 1, random.below(2) == 1};
}

void test_shrink(const Kernels* k, Random& random, const Case& c) {
  const int64_t wide = (c.rank + 15) / 16 * 16;
  const Factor a(random, c.k, (c.k + 31) / 32 * 32, wide, c.half);
  const Rows x(random, c.rows, c.k, 32);
  const bool tiles = c.half && !strcmp(k->name, "amx");
  Buffer u(c.rows * wide * 4), alone(wide * 4);
  k->lora_shrink((float*)u.p, wide, x.at.data(), c.rows, c.k, a.packed.p, wide, c.half, nullptr, 0);
  bool close_to = u.intact(), same = true;
  for (int64_t m = 0; m < c.rows; m++) {
    for (int64_t r = 0; r < wide; r++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < c.k; i++) {
        const double product = double(tiles ? rounded(x.at[size_t(m)][i]) : x.at[size_t(m)][i]) * a.values[size_t(i * wide + r)];
        sum += product, size += fabs(product);
      }
      close_to = close_to && fabs(((float*)u.p)[m * wide + r] - sum) <= 4e-6 * (size + 1e-6);
    }
    k->lora_shrink((float*)alone.p, wide, &x.at[size_t(m)], 1, c.k, a.packed.p, wide, c.half, nullptr, 0);
    same = same && !memcmp(alone.p, u.p + m * wide * 4, size_t(wide * 4)) && alone.intact();
  }
  CHECK(close_to);
  CHECK(same);
  if (!k->lora_takes_operands || !c.half) return;
  const int64_t apart = (c.k + 31) / 32 * 64 + 64;  // the same rows as operands
  Buffer ready(c.rows * apart), again(c.rows * wide * 4);
  memset(ready.p, 0, size_t(ready.n));
  for (int64_t m = 0; m < c.rows; m++)
    for (int64_t i = 0; i < c.k; i++) ((uint16_t*)(ready.p + m * apart))[i] = bf16_of(x.at[size_t(m)][i]);
  k->lora_shrink((float*)again.p, wide, x.at.data(), c.rows, c.k, a.packed.p, wide, c.half, ready.p, apart);
  CHECK(again.intact() && !memcmp(again.p, u.p, size_t(u.n)));
}

// Blocks of outputs lie 16 apart, or 32 where a pair's other half lies between them, which stays as it was.
void test_expand(const Kernels* k, Random& random, const Case& c) {
  const int64_t step = c.pair ? 32 : 16, length = c.blocks * step, ldu = (c.rank + 15) / 16 * 16, high = (c.rank + 1) / 2 * 2;
  const Factor b(random, 1, 1, 1, false);
  std::vector<Factor*> blocks;
  Buffer packed(c.blocks * 16 * (c.half ? 2 * high : 4 * c.rank));
  for (int64_t i = 0; i < c.blocks; i++) {
    blocks.push_back(new Factor(random, c.rank, c.half ? high : c.rank, 16, c.half));
    memcpy(packed.p + i * blocks[0]->packed.n, blocks.back()->packed.p, size_t(blocks.back()->packed.n));
  }
  std::vector<float> u(size_t(c.rows * ldu));
  random.fill(u);
  Rows y(random, c.rows, length);
  const std::vector<float> before = y.all;
  const bool tiles = c.half && !strcmp(k->name, "amx");
  k->lora_expand(y.at.data(), step, u.data(), ldu, c.rows, packed.p, c.rank, c.blocks, c.half);
  std::vector<float> expected = before;
  bool close_to = packed.intact(), same = true;
  for (int64_t m = 0; m < c.rows; m++) {
    const int64_t at = y.which[size_t(m)] * length;
    for (int64_t i = 0; i < c.blocks * 16; i++) {
      const int64_t j = at + i / 16 * step + i % 16;
      double sum = before[size_t(j)], size = fabs(sum);
      for (int64_t r = 0; r < c.rank; r++) {
        const float v = u[size_t(m * ldu + r)];
        const double product = double(tiles ? rounded(v) : v) * blocks[size_t(i / 16)]->values[size_t(r * 16 + i % 16)];
        sum += product, size += fabs(product);
      }
      close_to = close_to && fabs(y.all[size_t(j)] - sum) <= 2e-6 * size;
      expected[size_t(j)] = y.all[size_t(j)];
    }
    std::vector<float> alone(before.begin() + at, before.begin() + at + length);
    float* one = alone.data();
    k->lora_expand(&one, step, &u[size_t(m * ldu)], ldu, 1, packed.p, c.rank, c.blocks, c.half);
    same = same && !memcmp(alone.data(), &y.all[size_t(at)], size_t(length) * 4);
  }
  CHECK(close_to);
  CHECK(same);
  CHECK(expected == y.all);  // nothing else was touched
  for (Factor* block : blocks) delete block;
}

void test_gate(const Kernels* k, Random& random) {
  for (int64_t n : {1, 16, 17, 64, 100, 1536}) {
    std::vector<float> pairs(size_t((n + 15) / 16 * 32)), out(size_t(n + 1), 9.0f);
    random.fill(pairs, 6);
    for (int kind : {octavo::EPI_SILU_MUL, octavo::EPI_GELU_MUL}) {
      k->gate_pairs(out.data(), pairs.data(), kind, n);
      bool fine = out[size_t(n)] == 9.0f;
      for (int64_t i = 0; i < n; i++) {
        const double g = pairs[size_t(i / 16 * 32 + i % 16)], up = pairs[size_t(i / 16 * 32 + i % 16 + 16)];
        const double act = kind == octavo::EPI_SILU_MUL ? g / (1 + exp(-g)) : g / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
        fine = fine && close(out[size_t(i)], act * up, 4e-6);
      }
      CHECK(fine);
    }
  }
}

}  // namespace

int main() {
  for (const Kernels* k : tables()) {
    Random random(11);
    for (int i = 0; i < 120; i++) {
      const Case c = drawn(random);
      test_shrink(k, random, c);
      test_expand(k, random, c);
    }
    test_gate(k, random);
  }
  return finish("test_lora");
}
