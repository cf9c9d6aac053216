// Flags: -march=armv8.2-a+dotprod
#define OCTAVO_TABLE_NAME neon_dotprod
#include "simd_neon.h"
#include "kernels_all.inc"
