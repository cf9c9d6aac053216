// A check, a random number, an aligned buffer, and the kernel tables that this machine can run: what the native tests share.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../src/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace check {

inline long failures = 0, passed = 0;
inline bool report(bool ok, const char* what, const char* file, int line) {
  ok ? passed++ : failures++;
  if (!ok && failures <= 20) printf("FAILED %s:%d: %s\n", file, line, what);
  return ok;
}
inline int finish(const char* name) {
  printf("%s: %ld checks, %ld failed\n", name, passed + failures, failures);
  return failures != 0 || passed == 0;  // a test that looked at nothing has not passed
}

struct Random {  // xorshift64*
  uint64_t s;
  explicit Random(uint64_t seed) : s(seed * 2654435769u + 88172645463325252ull) {}
  uint64_t next() { s ^= s >> 12; s ^= s << 25; s ^= s >> 27; return s * 2685821657736338717ull; }
  int64_t below(int64_t n) { return (int64_t)((next() >> 33) % (uint64_t)n); }
  int64_t between(int64_t a, int64_t b) { return a + below(b - a + 1); }
  float uniform() { return (float)(int64_t)((next() >> 40) - (1 << 23)) / (float)(1 << 23); }  // [-1, 1)
  void fill(std::vector<float>& v, float scale = 1) { for (float& x : v) x = uniform() * scale; }
};

struct Buffer {  // 64-byte aligned, with a guard behind it that intact() looks at
  uint8_t* p;
  int64_t n;
  explicit Buffer(int64_t bytes) : n(bytes) {
    p = (uint8_t*)aligned_alloc(64, (size_t)((bytes + 127) / 64 * 64 + 64));
    memset(p, 0xa5, (size_t)((bytes + 127) / 64 * 64 + 64));
  }
  ~Buffer() { free(p); }
  Buffer(const Buffer&) = delete;
  bool intact() const { for (int64_t i = n; i < n + 64; i++) if (p[i] != 0xa5) return false; return true; }
};

inline bool close(double a, double b, double tolerance) { return fabs(a - b) <= tolerance * (1 + fabs(b)) || (a != a && b != b); }

}  // namespace check

#define CHECK(x) check::report((x), #x, __FILE__, __LINE__)

namespace octavo {
#define OCTAVO_DECLARE(name) extern "C" __attribute__((weak)) const Kernels* octavo_kernels_##name();
OCTAVO_DECLARE(generic) OCTAVO_DECLARE(avx2) OCTAVO_DECLARE(avx2_vnni) OCTAVO_DECLARE(avx512)
OCTAVO_DECLARE(avx512_vnni_bf16) OCTAVO_DECLARE(amx) OCTAVO_DECLARE(neon) OCTAVO_DECLARE(neon_dotprod) OCTAVO_DECLARE(neon_i8mm)
}  // namespace octavo

namespace check {

#if defined(__x86_64__)
inline bool has_bit(unsigned leaf, unsigned sub, int word, int bit) {
  unsigned r[4];
  asm volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(sub));
  return r[word] >> bit & 1;
}
inline bool has_tiles() {
#if defined(OCTAVO_EMULATED_TILES)
  return true;
#elif defined(__linux__)
  return has_bit(7, 0, 3, 24) && has_bit(7, 0, 3, 25) && has_bit(7, 0, 3, 22) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // asks for the tile data registers
#else
  return false;
#endif
}
#endif

// Fills the layout; bytes of q, z and s one after the other.
inline int64_t operand_bytes(const octavo::Kernels* k, octavo::Act* a, int64_t rows) {
  const int64_t q = k->act_layout(a, rows);
  return q + 8 * rows * a->ldg;
}

// Tables that are linked in and can run here; `only` (or null) names one.
inline std::vector<const octavo::Kernels*> tables(const char* only = nullptr) {
  std::vector<const octavo::Kernels*> all;
  auto add = [&](const octavo::Kernels* (*get)(), bool runs) {
    const octavo::Kernels* k = get && runs ? get() : nullptr;
    if (k && (!only || !strcmp(only, k->name))) all.push_back(k);
  };
  add(octavo::octavo_kernels_generic, true);
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  bool dots = avx512 && __builtin_cpu_supports("avx512vnni") && has_bit(7, 1, 0, 5);
  add(octavo::octavo_kernels_avx2, avx2);
  add(octavo::octavo_kernels_avx2_vnni, avx2 && has_bit(7, 1, 0, 4));
  add(octavo::octavo_kernels_avx512, avx512);
  add(octavo::octavo_kernels_avx512_vnni_bf16, dots);
  add(octavo::octavo_kernels_amx, dots && has_tiles());
#elif defined(__aarch64__)
  add(octavo::octavo_kernels_neon, true);
  add(octavo::octavo_kernels_neon_dotprod, true);
  add(octavo::octavo_kernels_neon_i8mm, true);
#endif
  return all;
}

}  // namespace check
