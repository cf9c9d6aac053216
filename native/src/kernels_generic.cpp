// Plain C++: any machine.
#define OCTAVO_TABLE_NAME generic
#include "simd_generic.h"
#include "kernels_all.inc"
