// Flags: those of avx512_vnni_bf16 and -mamx-tile -mamx-int8 -mamx-bf16. The process must have asked the kernel for tile data (dispatch.cpp).
#define OCTAVO_TABLE_NAME amx
#include "simd_avx512.h"
#include "kernels_all.inc"
