/* gcc 12's tile intrinsics do not say that they read memory: stores before them get lost. These do. */
#pragma once
#ifdef __AMX_TILE__
#include <immintrin.h>
#undef _tile_loadd
#define FIXED_TILE_LOADD(dst, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #dst : : "r"((const void *)(base)), "r"((long)(stride)) : "memory")
#define _tile_loadd(dst, base, stride) FIXED_TILE_LOADD(dst, base, stride)
#define _tile_loadconfig(from) __asm__ volatile("ldtilecfg (%0)" : : "r"((const void *)(from)) : "memory")
#endif
