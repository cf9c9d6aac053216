// Products of SmolLM2-135M's shapes by one thread, weights streamed from memory: GOP/s, and the share of the dot rate that the
// same thread reaches with nothing but dots (up to 8 rows GB/s and the share of the read rate). Timed in thread CPU time, best of
// a few, so that a shared core disturbs little.
//   bench_gemm [table [format [milliseconds a point]]]
#include <time.h>

#include <functional>

#include "check.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace octavo;

static const char* const NAMES[] = {"fp32", "bf16", "w8g64", "w8pc", "w4g32", "w4g64", "w4g128", "w4a16g32", "w4a16g64", "w4a16g128"};
struct Shape { const char* name; int64_t n, k; bool gated; };
static const Shape SHAPES[] = {{"qkv", 960, 576, false}, {"o", 576, 576, false}, {"gateup", 3072, 576, true}, {"down", 576, 1536, false}, {"head", 49152, 576, false}};
static const int64_t ROWS[] = {1, 8, 16, 32, 64, 256};

static double now() { timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }
static double best_of(int times, const std::function<void()>& f) {
  double best = 1e30;
  for (int i = 0; i < times; i++) { double t = now(); f(); t = now() - t; best = t < best ? t : best; }
  return best;
}

static uint8_t* arena(int64_t bytes) {
  const int64_t huge = 2 << 20;
  uint8_t* p = (uint8_t*)aligned_alloc((size_t)huge, (size_t)((bytes + huge - 1) / huge * huge));
#if defined(__linux__)
  madvise(p, (size_t)bytes, MADV_HUGEPAGE);
#endif
  memset(p, 0, (size_t)bytes);
  return p;
}

// Operations a second (multiply and add counted) of the dot that a format's kernel uses; 0: unknown.
static double peak(const Kernels* k, int fmt) {
  const int kind = fmt == FMT_FP32 ? 2 : fmt == FMT_BF16 || fmt >= FMT_W4A16G32 ? 1 : 0;
  double operations = 0;
  const double t = best_of(5, [&] { operations = k->dots(kind, 20000); });
  return operations / t;
}

struct Bench {
  const Kernels* k;
  int fmt;
  uint8_t* weights;
  int64_t room;
  float* out;
  double ms, dots, read;
};

static void shape_line(const Bench& b, const Shape& s) {
  Mat m{b.fmt, s.gated, s.n, s.k, 0, 0, 0, b.weights};
  int64_t bytes = (b.k->mat_layout(&m) + 4095) / 4096 * 4096, copies = getenv("WARM") ? 1 : b.room / bytes;
  check::Random rng(1);
  std::vector<float> w((size_t)(64 * s.k)), x((size_t)(512 * s.k));
  rng.fill(w, 0.05f), rng.fill(x);
  Mat one = m;
  one.n = 64, one.interleaved = 0, one.panels = 1;
  for (int64_t p = 0; p < m.panels; p++) b.k->pack(&one, b.weights + p * m.panel_bytes, 0, 1, w.data(), nullptr);
  for (int64_t c = 1; c < copies; c++) memcpy(b.weights + c * bytes, b.weights, (size_t)bytes);
  Act a{b.fmt, 0, s.k, 0, 0, 0, nullptr, nullptr, nullptr};
  int64_t operands = b.k->act_layout(&a, 512);
  uint8_t* memory = arena(operands + 8 * 512 * a.ldg);  // huge pages, as in the engine
  a.q = memory, a.z = (int32_t*)(a.q + 512 * a.lda), a.s = (float*)(a.z + 512 * a.ldg);
  b.k->quantize(&a, 0, 512, x.data(), s.k, nullptr, nullptr);
  Epilogue e{s.gated ? EPI_SILU_MUL : EPI_STORE, b.out, s.gated ? s.n / 2 : s.n, nullptr, nullptr, 0, 0};
  if (getenv("SHAPE") && strcmp(getenv("SHAPE"), s.name)) return;
  printf("%-18s %-9s %-7s", b.k->name, NAMES[b.fmt], s.name);
  int64_t turn = 0;
  for (int64_t rows : ROWS) {
    auto call = [&] { m.base = b.weights + turn++ % copies * bytes; b.k->gemm(&m, &a, 0, rows, 0, m.panels, &e, nullptr); };
    double once = best_of(2, call);
    int64_t calls = (int64_t)(b.ms * 1e-3 / 4 / once) + 1;
    double t = best_of(4, [&] { for (int64_t i = 0; i < calls; i++) call(); }) / (double)calls;
    double ops = 2.0 * (double)(rows * s.n * s.k) / t;
    if (rows <= 8) printf(" | %5.1f %3.0f%%", (double)bytes / t / 1e9, 100 * (double)bytes / t / b.read);
    else printf(" | %5.0f %2.0f%%", ops / 1e9, b.dots > 0 ? 100 * ops / b.dots : 0.0);
    fflush(stdout);
  }
  printf("\n");
  free(memory);
}

int main(int argc, char** argv) {
  const int64_t room = 256 << 20;
  uint8_t* weights = arena(room);
  float* out = (float*)arena(512 * 49152 * 4);
  const Kernels* reader = check::tables().back();
  const double read = (double)room / best_of(3, [&] { reader->read_bytes(weights, room); });
  printf("read %.1f GB/s; columns: rows (GB/s of weights up to 8, then GOP/s and the share of the dot rate)\n", read / 1e9);
  for (int64_t rows : ROWS) printf("%s%ld", rows == ROWS[0] ? "rows " : ", ", (long)rows);
  printf("\n");
  for (const Kernels* k : check::tables(argc > 1 ? argv[1] : nullptr)) {
    for (int fmt = 0; fmt < FMT_COUNT; fmt++) {
      if (argc > 2 && strcmp(argv[2], NAMES[fmt])) continue;
      Bench b{k, fmt, weights, room, out, argc > 3 ? atof(argv[3]) : 20, peak(k, fmt), read};
      if (b.dots > 0) printf("%s dots: %.0f GOP/s\n", NAMES[fmt], b.dots / 1e9);
      for (const Shape& s : SHAPES) shape_line(b, s);
    }
  }
}
