// Vectors of one lane in plain C++: the table that runs anywhere, and the definition of what each operation means.
// Every simd_*.h offers the same names: vf (VL floats), vi (VL int32), vm (a lane mask), and the dot operands of gemm.inc.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace octavo {
namespace {
namespace mm {

typedef float vf;
typedef int32_t vi;
typedef bool vm;
constexpr int VL = 1;

INL vi v_bits(vf a) { vi b; memcpy(&b, &a, 4); return b; }
INL vf v_from_bits(vi a) { vf b; memcpy(&b, &a, 4); return b; }

INL vf v_zero() { return 0.0f; }
INL vf v_set(float x) { return x; }
INL vf v_load(const float* p) { return *p; }
INL void v_store(float* p, vf a) { *p = a; }
INL vf v_load_n(const float* p, int64_t n) { return n > 0 ? *p : 0.0f; }
INL void v_store_n(float* p, vf a, int64_t n) { if (n > 0) *p = a; }
INL vf v_add(vf a, vf b) { return a + b; }
INL vf v_sub(vf a, vf b) { return a - b; }
INL vf v_mul(vf a, vf b) { return a * b; }
INL vf v_div(vf a, vf b) { return a / b; }
INL vf v_over(vf a, vf b) { return v_div(a, b); }  // for 1 <= b < 2^126, where a table may be faster
INL vf v_sqrt(vf a) { return sqrtf(a); }
// a * b + c, fused where the machine can; elsewhere the exact product is rounded twice (to double, then to float)
INL vf v_fma(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return (float)((double)a * b + c);
#endif
}
INL vf v_max(vf a, vf b) { return a > b ? a : b; }  // an unordered pair gives b, in every table
INL vf v_min(vf a, vf b) { return a < b ? a : b; }
INL vf v_abs(vf a) { return v_from_bits(v_bits(a) & 0x7fffffff); }
INL vm v_gt(vf a, vf b) { return a > b; }
INL vf v_sel(vm m, vf a, vf b) { return m ? a : b; }
INL float v_sum(vf a) { return a; }    // lanes in one fixed tree
INL float v_first(vf a) { return a; }
INL float v_hmax(vf a) { return a; }

INL vi i_set(int32_t x) { return x; }
INL vi i_load(const int32_t* p) { return *p; }
INL vi i_add(vi a, vi b) { return (vi)((uint32_t)a + (uint32_t)b); }
INL vi i_and(vi a, vi b) { return a & b; }
INL vi i_umax(vi a, vi b) { return (uint32_t)a > (uint32_t)b ? a : b; }
template <int N> INL vi i_shl(vi a) { return (vi)((uint32_t)a << N); }
INL int32_t i_sum(vi a) { return a; }
INL int32_t i_umax_all(vi a) { return a; }
INL vf v_float(vi a) { return (float)a; }
// Nearest integer, ties to even. |a| < 2^22; NaN gives some integer.
INL vi v_round_i(vf a) { return v_bits(a + 12582912.0f) - 0x4b400000; }

INL float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;
  if (mag >= 0x7c00) return v_from_bits((int32_t)(sign | 0x7f800000 | (mag & 0x3ff) << 13));
  float f = v_from_bits((int32_t)(mag << 13)) * 5.192296858534828e+33f;  // 2^112 rebiases the exponent, subnormals too
  return v_from_bits((int32_t)(sign | (uint32_t)v_bits(f)));
}
INL vf v_load_f16(const uint16_t* p) { return f16_to_f32(*p); }
INL vf v_load_bf16(const uint16_t* p) { return v_from_bits((int32_t)((uint32_t)*p << 16)); }
INL vf v_to_bf16(vf a) {  // rounded to bf16 (nearest even), still a float
  uint32_t u = (uint32_t)v_bits(a);
  if ((u & 0x7fffffff) > 0x7f800000) return v_from_bits((int32_t)(u | 0x400000));
  return v_from_bits((int32_t)((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u));
}
INL void v_store_bf16(uint16_t* p, vf a) { *p = (uint16_t)((uint32_t)v_bits(v_to_bf16(a)) >> 16); }
INL void v_store_s8(int8_t* p, vi a) { *p = (int8_t)(a < -128 ? -128 : a > 127 ? 127 : a); }

// ---- dot operands. A lane holds 4 bytes (int8), 8 nibbles (int4) or 2 halves (bf16) of one column along K.
#define W8_FROM_ZERO 0        // 1: dot_w8 multiplies signed weights, so sums start at 0 and not at -128 * sum(a)
#define BF16_ACT_FLOAT 1      // 1: activations of bf16 products are kept as floats already rounded to bf16
#define V_FENCE(c) (void)0    // keeps the compiler from moving an epilogue's work across rows
#define MEMORY_FENCE() (void)0
#define PREFETCH_LINE(p) __builtin_prefetch(p, 0, 2)
constexpr int MAX_TILE = 4, MAX_W8_TILE = 4, MAX_BF16_TILE = 4;  // rows of a tile
constexpr int pass_vectors(int) { return 16; }    // vectors of a row held at once
constexpr bool tile_in_registers(int) { return false; }

INL vi i_bc4(const uint8_t* p) { vi v; memcpy(&v, p, 4); return v; }
typedef uint32_t w8_t;
INL w8_t w8_load(const uint8_t* p) { w8_t v; memcpy(&v, p, 4); return v; }
INL vi dot_w8(vi acc, w8_t w, vi a) {  // acc += sum of u8 * s8 over the four bytes, modulo 2^32
  uint32_t s = (uint32_t)acc;
  for (int i = 0; i < 4; i++) s += (uint32_t)((int32_t)(w >> 8 * i & 255) * (int8_t)((uint32_t)a >> 8 * i));
  return (vi)s;
}
typedef uint32_t u4_t;
INL u4_t u4_low(const uint8_t* p) { return w8_load(p) & 0x0f0f0f0f; }        // K 0..3
INL u4_t u4_high(const uint8_t* p) { return w8_load(p) >> 4 & 0x0f0f0f0f; }  // K 4..7
INL vi dot_u4(vi acc, u4_t w, vi a) { return dot_w8(acc, w, a); }
// nibble `i` of the lane as a float
template <int I> INL vf u4_value(const uint8_t* p) { return (float)(w8_load(p) >> (8 * (I % 4) + 4 * (I / 4)) & 15); }
struct w16_t { vf lo, hi; };
INL w16_t w16_load(const uint8_t* p) { uint32_t v = w8_load(p); return {v_from_bits((int32_t)(v << 16)), v_from_bits((int32_t)(v & 0xffff0000u))}; }
struct a16_t { vf lo, hi; };
INL a16_t a16_bc(const uint8_t* p) { float v[2]; memcpy(v, p, 8); return {v[0], v[1]}; }
INL vf dot_b16(vf acc, w16_t w, a16_t a) { return v_fma(w.lo, a.lo, v_fma(w.hi, a.hi, acc)); }  // the second of the pair first
INL vf v_bc(const uint8_t* p) { float v; memcpy(&v, p, 4); return v; }
INL vf dot_f32(vf acc, vf w, vf a) { return v_fma(w, a, acc); }

}  // namespace mm
}  // namespace
}  // namespace octavo
