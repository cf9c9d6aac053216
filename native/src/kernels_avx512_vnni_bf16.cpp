// Flags: those of avx512 and -mavx512vnni -mavx512bf16
#define OCTAVO_TABLE_NAME avx512_vnni_bf16
#include "simd_avx512.h"
#include "kernels_all.inc"
