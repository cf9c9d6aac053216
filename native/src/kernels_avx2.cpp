// Flags: -mavx2 -mfma -mf16c
#define OCTAVO_TABLE_NAME avx2
#include "simd_avx2.h"
#include "kernels_all.inc"
