// Flags: none beyond 64-bit ARM.
#define OCTAVO_TABLE_NAME neon
#include "simd_neon.h"
#include "kernels_all.inc"
