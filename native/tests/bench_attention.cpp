// Micro benchmark of attention, one thread: decode in GB/s of K and V, prefill in GFLOP/s and as a share of the machine's
// dot peak, noise and row kernels in ns. Sizes of SmolLM2-135M: 9 query heads on 3 kv heads of 64.
#include <time.h>

#include "attention_fixture.h"

using namespace check;
using octavo::Kernels;

namespace {

constexpr int32_t kDim = 64, kGroup = 3, kHeads = 3;

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

template <class F>
double best(int tries, F f) {
  double least = 1e9;
  for (int i = 0; i < tries; i++) {
    const double t = now();
    f();
    least = std::min(least, now() - t);
  }
  return least;
}

#if defined(__x86_64__)
#define D1(d) "vdpbf16ps %%zmm30,%%zmm31,%%zmm" #d "\n\t"
#define D8(a, b, c, d, e, f, g, h) D1(a) D1(b) D1(c) D1(d) D1(e) D1(f) D1(g) D1(h)
__attribute__((target("avx512f"), noinline)) void dots24(long rounds) {
  asm volatile("vpxord %%zmm30,%%zmm30,%%zmm30\n\tvpxord %%zmm31,%%zmm31,%%zmm31\n1:\n\t"
               D8(0, 1, 2, 3, 4, 5, 6, 7) D8(8, 9, 10, 11, 12, 13, 14, 15) D8(16, 17, 18, 19, 20, 21, 22, 23)
               "dec %0\n\tjnz 1b\n\t" : "+r"(rounds)::"cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8",
               "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21",
               "zmm22", "zmm23", "zmm30", "zmm31");
}
#endif

// GFLOP/s of 24 independent bf16 dots; 0 where there is no such instruction.
double bf16_peak() {
#if defined(__x86_64__)
  if (!has_bit(7, 1, 0, 5)) return 0;
  const long rounds = 1000000;
  return double(rounds) * 24 * 64 / best(3, [&] { dots24(rounds); }) * 1e-9;
#else
  return 0;
#endif
}

// GB/s of this thread reading 256 MB, what decode is measured against.
double read_rate() {
  const size_t bytes = size_t(256) << 20;
  uint64_t* p = (uint64_t*)aligned_alloc(size_t(2) << 20, bytes);
  madvise(p, bytes, MADV_HUGEPAGE);
  memset(p, 1, bytes);
  uint64_t sum[8] = {};
  const double t = best(3, [&] {
    for (size_t i = 0; i < bytes / 8; i += 8) {
      __builtin_prefetch(p + i + 128, 0, 3);
      for (size_t j = 0; j < 8; j++) sum[j] += p[i + j];
    }
  });
  free(p);
  return (sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7]) == 1 ? 0 : double(bytes) / t * 1e-9;
}

struct Shape {
  int32_t type, page, dim, group, heads;
};

// `sequences` rows at context `context`; `layers` copies of their pages, so that K and V come from memory.
void decode(const Kernels* k, Random& random, const Shape& shape, int64_t sequences, int64_t context, int64_t layers) {
  octavo::KV kv = {};
  kv.type = shape.type, kv.page_size = shape.page, kv.kv_heads = shape.heads, kv.dim = shape.dim;
  k->kv_layout(&kv);
  kv.page_bytes = kv.layer_bytes * layers;
  const int64_t pages = (context + shape.page - 1) / shape.page;
  const size_t width = size_t(shape.group * shape.dim * shape.heads);
  const size_t bytes = size_t(sequences * pages * kv.page_bytes), huge = size_t(2) << 20;
  kv.base = (uint8_t*)aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
  madvise(kv.base, bytes, MADV_HUGEPAGE);
  std::vector<float> row(size_t(shape.dim), 0.0f);
  random.fill(row);
  for (int32_t t = 0; t < shape.page; t++) k->kv_write(&kv, kv.base, t, row.data(), row.data());
  for (size_t at = size_t(kv.blob_bytes); at < bytes; at += size_t(kv.blob_bytes)) memcpy(kv.base + at, kv.base, size_t(kv.blob_bytes));
  std::vector<int32_t> table(size_t(sequences * pages));
  for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(i);
  Buffer scratch(k->attn_scratch(shape.group, shape.dim));
  std::vector<float> q(width, 0.0f), out(width, 0.0f);
  random.fill(q);
  const int64_t most = k->attn_heads(&kv, shape.group);
  const double t = best(3, [&] {
    for (int64_t layer = 0; layer < layers; layer++)
      for (int64_t i = 0, n; i < sequences * shape.heads; i = n) {
        octavo::AttnItem item = {};
        n = i + std::min(most, shape.heads - i % shape.heads);  // the item that this thread takes next
        item.heads = int32_t(n - i);
        item.kv = &kv, item.pages = &table[size_t(i / shape.heads * pages)], item.layer_in_group = layer, item.kv_head = int32_t(i % shape.heads);
        item.group = shape.group, item.rows = 1, item.pos0 = context - 1, item.q = q.data(), item.out = out.data(), item.scale = 0.125f;
        item.ldq = item.ldo = int64_t(width), item.scratch = scratch.p;
        if (n < sequences * shape.heads)
          item.prefetch_pages = &table[size_t(n / shape.heads * pages)], item.prefetch_count = pages,
          item.prefetch = kv.base + table[size_t(n / shape.heads * pages)] * kv.page_bytes + layer * kv.layer_bytes + n % shape.heads * kv.blob_bytes;
        k->attention(&item);
      }
  });
  const double read = double(sequences * shape.heads * layers * pages) * double(kv.blob_bytes);
  printf("  decode  %ld x context %4ld  %6.1f GB/s  %7.2f us an item\n", long(sequences), long(context), read / t * 1e-9,
         t / double(sequences * shape.heads * layers) * 1e6);
  free(kv.base);
}

void prefill(const Kernels* k, Random& random, const Shape& shape, int64_t pos0, int64_t rows, double peak) {
  Pages pages(k, random, shape.type, shape.page, 1, shape.dim, pos0 + rows);
  const Sequence s(random, pos0 + rows, shape.dim);
  for (int64_t p = 0; p < s.positions; p++) pages.write(s, p, p, 0);
  Query q(random, rows, pos0, shape.group, shape.dim, 1);
  std::vector<float> out(q.q.size());
  const double t = best(9, [&] { attend(pages, q, 0, 0, rows, out.data()); });
  double pairs = 0;
  for (int64_t r = 0; r < rows; r++) pairs += double(pos0 + r + 1) * shape.group;
  const double flops = pairs * shape.dim * 4 / t * 1e-9;
  printf("  prefill %ld from %4ld    %6.1f GFLOP/s (%.2f of the bf16 dot peak)\n", long(rows), long(pos0), flops, peak > 0 ? flops / peak : 0.0);
}

void small(const Kernels* k, Random& random) {
  std::vector<float> x(49152), y(49152), blocks(49152 / octavo::kBlock + 1), from(octavo::kFrom);
  random.fill(x, 5);
  const octavo::Hopes hopes{blocks.data(), 49152 / octavo::kBlock, 5, 1, 10, -5, {1, 2, 3, 0}};
  uint32_t bits[octavo::kBlock];
  const double maxima = best(5, [&] { k->maxima(x.data(), 49152, blocks.data()); });
  const double noise = best(5, [&] { for (int64_t b = 0; (b = k->next_hopeful(&hopes, b, bits)) < hopes.count; b++) {} });
  const double sum = best(5, [&] { k->sum_exp(x.data(), 49152, 5, 1, y.data(), from.data()); });
  const double norm = best(50, [&] { k->inv_rms(x.data(), 576, 0, 16, 576, 1e-5f, y.data()); });
  const double gate = best(50, [&] { k->gated(y.data(), x.data(), x.data(), octavo::EPI_SILU_MUL, 1536); });
  printf("  49152 logits: words %.0f us, maxima %.1f us, weights %.1f us; a row: rms of 576 %.0f ns, gate of 1536 %.0f ns\n", noise * 1e6,
         maxima * 1e6, sum * 1e6, norm / 16 * 1e9, gate * 1e9);
}

void writes(const Kernels* k, Random& random, int32_t type, const char* name) {
  Pages pages(k, random, type, 32, 1, kDim, 32);
  const Sequence s(random, 32, kDim);
  const double t = best(50, [&] { for (int64_t p = 0; p < 32; p++) pages.write(s, p, p, 0); });
  printf(" %s pages: a token and head is written in %.0f ns\n", name, t / 32 * 1e9);
}

}  // namespace

// bench_attention [table or ""] [type page dim group heads]
int main(int argc, char** argv) {
  const double peak = bf16_peak();
  printf("this core: bf16 dot peak %.0f GFLOP/s, reads %.1f GB/s\n", peak, read_rate());
  const char* names[] = {"fp32", "bf16", "int8"};
  std::vector<Shape> shapes = {{1, 16, 64, 3, 3}, {2, 16, 64, 3, 3}, {0, 16, 64, 3, 3}};
  if (argc > 6) shapes = {{atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6])}};
  for (const Kernels* k : tables(argc > 1 && argv[1][0] ? argv[1] : nullptr)) {
    Random random(11);
    printf("%s\n", k->name);
    if (argc <= 6) small(k, random);
    for (const Shape& shape : shapes) {
      printf(" page %d, dim %d, %d heads on each of %d\n", shape.page, shape.dim, shape.group, shape.heads);
      writes(k, random, shape.type, names[shape.type]);
      decode(k, random, shape, 64, 128, 12);
      decode(k, random, shape, 64, 1024, 2);
      decode(k, random, shape, 1, 4096, 30);
      decode(k, random, shape, 1, 1024, 1);  // from the second-level cache: what the kernel itself takes
      prefill(k, random, shape, 0, 512, peak);
      prefill(k, random, shape, 512, 512, peak);
    }
  }
  return 0;
}
