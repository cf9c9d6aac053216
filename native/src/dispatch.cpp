#include "dispatch.h"

#include <stdlib.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// A table that was not built is a null symbol.
#define OCTAVO_TABLE(name) extern "C" __attribute__((weak)) const octavo::Kernels* octavo_kernels_##name();
namespace octavo {
OCTAVO_TABLE(generic)
OCTAVO_TABLE(avx2)
OCTAVO_TABLE(avx2_vnni)
OCTAVO_TABLE(avx512)
OCTAVO_TABLE(avx512_vnni_bf16)
OCTAVO_TABLE(amx)
OCTAVO_TABLE(neon)
OCTAVO_TABLE(neon_dotprod)
OCTAVO_TABLE(neon_i8mm)

namespace {

struct Features {
  bool avx2 = false, avx2_vnni = false, avx512 = false, avx512_vnni_bf16 = false, amx = false;
  bool neon = false, dotprod = false, i8mm = false;
};

#if defined(__x86_64__)
constexpr int kArchRequestPermission = 0x1023, kTileData = 18;

// Linux hands out the tile registers on request.
bool tiles_permitted() {
#ifdef __linux__
  return syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

uint64_t enabled_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool bit(uint32_t word, int index) { return word >> index & 1; }

Features detect() {
  Features f;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return f;  // OSXSAVE
  const bool fma = bit(c, 12), f16c = bit(c, 29);
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tmm = (state >> 17 & 3) == 3;
  if (!ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = bit(b, 5) && fma && f16c;
  f.avx512 = f.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
  const bool vnni512 = bit(c, 11), amx_types = bit(d, 22) && bit(d, 24) && bit(d, 25);  // bf16, tile, int8
  uint32_t a1 = 0, b1, c1, d1;
  if (a >= 1) __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1);
  f.avx2_vnni = f.avx2 && bit(a1, 4);
  f.avx512_vnni_bf16 = f.avx512 && vnni512 && bit(a1, 5);
#ifdef OCTAVO_EMULATED_TILES  // native/tests/emulated_tiles.h
  f.amx = f.avx512_vnni_bf16;
#else
  f.amx = f.avx512_vnni_bf16 && tmm && amx_types && tiles_permitted();
#endif
  return f;
}
#elif defined(__aarch64__)
Features detect() {
  Features f;
  f.neon = true;
#ifdef __linux__
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  f.dotprod = first >> 20 & 1;
  f.i8mm = f.dotprod && (second >> 13 & 1) && (second >> 14 & 1);  // i8mm and bf16
#endif
  return f;
}
#else
Features detect() { return {}; }
#endif

int64_t first_level() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return first_level_bytes;
}

void add(std::vector<const Kernels*>* tables, bool supported, const Kernels* (*table)()) {
  if (!supported || table == nullptr) return;
  if (const Kernels* kernels = table()) tables->push_back(kernels);
}

}  // namespace

std::vector<const Kernels*> usable_tables() {
  static const Features f = detect();
  static const int64_t known = first_level_bytes = first_level();
  (void)known;
  std::vector<const Kernels*> tables;
  add(&tables, f.amx, octavo_kernels_amx);  // docs/decisions/0007
  add(&tables, f.avx512_vnni_bf16, octavo_kernels_avx512_vnni_bf16);
  add(&tables, f.avx512, octavo_kernels_avx512);
  add(&tables, f.avx2_vnni, octavo_kernels_avx2_vnni);
  add(&tables, f.avx2, octavo_kernels_avx2);
  add(&tables, f.i8mm, octavo_kernels_neon_i8mm);
  add(&tables, f.dotprod, octavo_kernels_neon_dotprod);
  add(&tables, f.neon, octavo_kernels_neon);
  add(&tables, true, octavo_kernels_generic);
  return tables;
}

const Kernels* choose_table(const std::string& name, std::string* error) {
  const std::vector<const Kernels*> tables = usable_tables();
  const char* wish = getenv("OCTAVO_NATIVE_ISA");
  const std::string wanted = !name.empty() ? name : wish != nullptr ? wish : "";
  std::string known;
  for (const Kernels* table : tables) {
    if (wanted.empty() || wanted == table->name) return table;
    known += std::string(known.empty() ? "" : ", ") + table->name;
  }
  *error = "instruction set '" + wanted + "': this CPU or this build does not have it; use one of " + known;
  return nullptr;
}

}  // namespace octavo
