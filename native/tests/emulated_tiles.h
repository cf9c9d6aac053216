// Tile registers in plain C++, one set for each thread, for machines that have none: included before the amx table, whose intrinsics
// they replace (-DOCTAVO_EMULATED_TILES=ON). Sums are added in the processor's order; what a configuration does not span is zero.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace emulated {

struct Tiles {
  uint8_t config[64];
  alignas(64) uint8_t of[8][16][64];

  int rows(int t) const { return config[48 + t]; }
  int bytes(int t) const { return config[16 + 2 * t]; }
};
inline thread_local Tiles tiles;

// A processor would raise an exception.
inline void must(bool is) {
  if (!is) abort();
}

inline void load_config(const void* from) {
  memcpy(tiles.config, from, 64);
  memset(tiles.of, 0, sizeof tiles.of);
  for (int i = 2; i < 16; i++) must(tiles.config[i] == 0);
  must(tiles.config[0] == 1);
  for (int t = 0; t < 8; t++) must(tiles.rows(t) <= 16 && tiles.bytes(t) <= 64 && tiles.config[17 + 2 * t] == 0);
}
inline void store_config(void* to) { memcpy(to, tiles.config, 64); }
inline void release() { memset(&tiles, 0, sizeof tiles); }
inline void zero(int t) {
  must(tiles.rows(t) > 0 && tiles.bytes(t) > 0);
  memset(tiles.of[t], 0, sizeof tiles.of[t]);
}
inline void load(int t, const void* from, int64_t stride) {
  zero(t);
  for (int i = 0; i < tiles.rows(t); i++) memcpy(tiles.of[t][i], (const uint8_t*)from + i * stride, (size_t)tiles.bytes(t));
}
inline void store(int t, void* to, int64_t stride) {
  must(tiles.rows(t) > 0);
  for (int i = 0; i < tiles.rows(t); i++) memcpy((uint8_t*)to + i * stride, tiles.of[t][i], (size_t)tiles.bytes(t));
}

inline void must_fit(int sum, int a, int b) {
  must(tiles.config[0] == 1 && sum != a && sum != b && a != b);
  must(tiles.rows(sum) == tiles.rows(a) && tiles.bytes(sum) == tiles.bytes(b) && tiles.bytes(a) == 4 * tiles.rows(b) && tiles.rows(sum) > 0 && tiles.rows(b) > 0);
}

inline float flushed(float v) { return fabsf(v) < 1.17549435e-38f ? copysignf(0, v) : v; }
inline float wide(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return flushed(v);
}
inline void dot_bf16(int sum, int a, int b) {
  must_fit(sum, a, b);
  for (int m = 0; m < tiles.rows(sum); m++) {
    float even[16] = {}, odd[16] = {}, all[16];
    for (int k = 0; k < tiles.rows(b); k++) {
      uint32_t pair, line[16];
      memcpy(&pair, tiles.of[a][m] + 4 * k, 4);
      memcpy(line, tiles.of[b][k], 64);
      const float first = wide(pair << 16), second = wide(pair & 0xffff0000);
      for (int n = 0; n < 16; n++) {
        even[n] = flushed(fmaf(first, wide(line[n] << 16), even[n]));
        odd[n] = flushed(fmaf(second, wide(line[n] & 0xffff0000), odd[n]));
      }
    }
    memcpy(all, tiles.of[sum][m], 64);
    for (int n = 0; n < 16; n++) all[n] = flushed(flushed(all[n]) + flushed(even[n] + odd[n]));
    memcpy(tiles.of[sum][m], all, (size_t)tiles.bytes(sum));
  }
}
template <class A, class B> inline void dot_int8(int sum, int a, int b) {
  must_fit(sum, a, b);
  for (int m = 0; m < tiles.rows(sum); m++) {
    uint32_t all[16];
    memcpy(all, tiles.of[sum][m], 64);
    for (int k = 0; k < tiles.rows(b); k++) {
      for (int n = 0; n < 16; n++)
        for (int i = 0; i < 4; i++) all[n] += (uint32_t)((A)tiles.of[a][m][4 * k + i] * (B)tiles.of[b][k][4 * n + i]);
    }
    memcpy(tiles.of[sum][m], all, (size_t)tiles.bytes(sum));
  }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#define _tile_loadconfig emulated::load_config
#define _tile_storeconfig emulated::store_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dot_bf16
#define _tile_dpbssd (emulated::dot_int8<int8_t, int8_t>)
#define _tile_dpbsud (emulated::dot_int8<int8_t, uint8_t>)
#define _tile_dpbusd (emulated::dot_int8<uint8_t, int8_t>)
