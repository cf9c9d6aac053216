// Flags: -march=armv8.2-a+dotprod+i8mm+bf16
#define OCTAVO_TABLE_NAME neon_i8mm
#include "simd_neon.h"
#include "kernels_all.inc"
