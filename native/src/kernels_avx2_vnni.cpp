// Flags: -mavx2 -mfma -mf16c -mavxvnni
#define OCTAVO_TABLE_NAME avx2_vnni
#include "simd_avx2.h"
#include "kernels_all.inc"
