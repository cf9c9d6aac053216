// Flags: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
#define OCTAVO_TABLE_NAME avx512
#include "simd_avx512.h"
#include "kernels_all.inc"
