// Sixteen float lanes with the same meaning on every instruction set, and the few functions of them that the kernels
// share: exp2, fixed reduction trees, partial loads. AVX-512 has them as one register; elsewhere they are 2 or 4 pieces.
//
// Include it at file scope. `wide` keeps its 16-lane vf, vi and vm apart from those of simd_*.h, which are one register.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#define VM_INL static inline __attribute__((always_inline))
#define VM_NOINLINE static __attribute__((noinline))
#define VM_UNROLL _Pragma("GCC unroll 16")

namespace octavo {
namespace {
namespace wide {

constexpr int LANES = 16;
constexpr float LOG2E = 1.44269504f;

// 2^f on [-1/2, 1/2] as 1 + f * (E0 + f * (E1 + ...)): 1 at 0 exactly, within 3e-6 elsewhere.
constexpr float E0 = 6.931472029e-1f, E1 = 2.402264791e-1f, E2 = 5.550332549e-2f, E3 = 9.618437357e-3f,
                E4 = 1.339887440e-3f;
constexpr float EXP2_MIN = -126.0f, EXP2_MAX = 126.0f;

VM_INL void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

VM_INL uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

VM_INL float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Nearest bf16, ties to even; a NaN stays one.
VM_INL uint16_t to_bf16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? (u >> 16) | 0x40u : rounded);
}

VM_INL float from_bf16(uint16_t h) { return bits_float((uint32_t)h << 16); }

}  // namespace wide
}  // namespace
}  // namespace octavo

#if defined(__AVX512F__)
#include "vmath_avx512.h"
#else
#include "vmath_pieces.h"
#endif

namespace octavo {
namespace {
namespace wide {

// tanh by exp2; the argument is y * 2 * log2(e), so that a caller folds the factor into its own.
VM_INL vf vtanh_of_exp2(vf y2) { return vset1(1.0f) - vset1(2.0f) / (vset1(1.0f) + vexp2(y2)); }

// 1 / (1 + 2^-y)
VM_INL vf vsigmoid_of_exp2(vf y) { return vset1(1.0f) / (vset1(1.0f) + vexp2(vset1(0.0f) - y)); }

}  // namespace wide
}  // namespace
}  // namespace octavo
