// Vectors of 4 lanes for 64-bit ARM; uses the dot product and bf16 extensions where the file is compiled with them.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define INL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace octavo {
namespace {
namespace mm {

typedef float32x4_t vf;
typedef int32x4_t vi;
typedef uint32x4_t vm;
constexpr int VL = 4;

INL vi v_bits(vf a) { return vreinterpretq_s32_f32(a); }
INL vf v_from_bits(vi a) { return vreinterpretq_f32_s32(a); }

INL vf v_zero() { return vdupq_n_f32(0); }
INL vf v_set(float x) { return vdupq_n_f32(x); }
INL vf v_load(const float* p) { return vld1q_f32(p); }
INL void v_store(float* p, vf a) { vst1q_f32(p, a); }
INL vf v_load_n(const float* p, int64_t n) {
  if (n >= 4) return v_load(p);
  float lanes[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < n; i++) lanes[i] = p[i];
  return v_load(lanes);
}
INL void v_store_n(float* p, vf a, int64_t n) {
  if (n >= 4) return v_store(p, a);
  float lanes[4];
  v_store(lanes, a);
  for (int64_t i = 0; i < n; i++) p[i] = lanes[i];
}
INL vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INL vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
INL vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INL vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
INL vf v_over(vf a, vf b) { return v_div(a, b); }
INL vf v_sqrt(vf a) { return vsqrtq_f32(a); }
INL vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INL vm v_gt(vf a, vf b) { return vcgtq_f32(a, b); }
INL vf v_sel(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }
INL vf v_max(vf a, vf b) { return v_sel(v_gt(a, b), a, b); }  // an unordered pair gives b, in every table
INL vf v_min(vf a, vf b) { return v_sel(v_gt(b, a), a, b); }
INL vf v_abs(vf a) { return vabsq_f32(a); }
INL float v_first(vf a) { return vgetq_lane_f32(a, 0); }
INL float v_sum(vf a) {  // 4 -> 2 -> 1, halves first
  float32x2_t h = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
INL float v_hmax(vf a) { return vmaxvq_f32(a); }

INL vi i_set(int32_t x) { return vdupq_n_s32(x); }
INL vi i_load(const int32_t* p) { return vld1q_s32(p); }
INL vi i_add(vi a, vi b) { return vaddq_s32(a, b); }
INL vi i_and(vi a, vi b) { return vandq_s32(a, b); }
INL vi i_umax(vi a, vi b) { return vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b))); }
template <int N> INL vi i_shl(vi a) { return vshlq_n_s32(a, N); }
INL int32_t i_sum(vi a) { return vaddvq_s32(a); }
INL int32_t i_umax_all(vi a) { return (int32_t)vmaxvq_u32(vreinterpretq_u32_s32(a)); }
INL vf v_float(vi a) { return vcvtq_f32_s32(a); }
INL vi v_round_i(vf a) { return vcvtnq_s32_f32(a); }

INL vf v_load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INL float f16_to_f32(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }
INL vf v_load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INL vf v_to_bf16(vf a) {
  uint32x4_t u = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  uint32x4_t r = vandq_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), vdupq_n_u32(0xffff0000u));
  return vreinterpretq_f32_u32(vbslq_u32(vceqq_f32(a, a), r, vorrq_u32(u, vdupq_n_u32(0x400000))));
}
INL void v_store_bf16(uint16_t* p, vf a) { vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_f32(v_to_bf16(a)), 16)); }
INL void v_store_s8(int8_t* p, vi a) {
  int16x4_t h = vqmovn_s32(a);
  int8x8_t b = vqmovn_s16(vcombine_s16(h, h));
  memcpy(p, &b, 4);
}

// ---- dot operands (see simd_generic.h for their meaning)
#define V_FENCE(c) asm volatile("" : "+w"(c)::"memory")
#define MEMORY_FENCE() asm volatile("" ::: "memory")
#define PREFETCH_LINE(p) __builtin_prefetch(p, 0, 2)
constexpr int MAX_TILE = 4, MAX_W8_TILE = 4, MAX_BF16_TILE = 4;
constexpr int pass_vectors(int rows) { return rows == 1 ? 8 : 4; }
constexpr bool tile_in_registers(int) { return false; }

INL vi i_bc4(const uint8_t* p) { return vreinterpretq_s32_u32(vld1q_dup_u32((const uint32_t*)p)); }
INL vf v_bc(const uint8_t* p) { return vld1q_dup_f32((const float*)p); }
INL vf dot_f32(vf acc, vf w, vf a) { return vfmaq_f32(acc, w, a); }

// acc += sum over the four bytes of a lane, signed by signed
INL vi dot_s8(vi acc, int8x16_t w, int8x16_t a) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(acc, w, a);
#else
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a))), high = vpaddlq_s16(vmull_high_s8(w, a));
  return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}
typedef int8x16_t u4_t;
INL u4_t u4_low(const uint8_t* p) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
INL u4_t u4_high(const uint8_t* p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }
INL vi dot_u4(vi acc, u4_t w, vi a) { return dot_s8(acc, w, vreinterpretq_s8_s32(a)); }
template <int I> INL vf u4_value(const uint8_t* p) {
  uint32x4_t v = vreinterpretq_u32_u8(vld1q_u8(p));
  return vcvtq_f32_u32(vandq_u32(vshlq_u32(v, vdupq_n_s32(-(8 * (I % 4) + 4 * (I / 4)))), vdupq_n_u32(15)));
}

#ifdef __ARM_FEATURE_MATMUL_INT8
#define W8_FROM_ZERO 0
typedef uint8x16_t w8_t;
INL w8_t w8_load(const uint8_t* p) { return vld1q_u8(p); }
INL vi dot_w8(vi acc, w8_t w, vi a) { return vusdotq_s32(acc, w, vreinterpretq_s8_s32(a)); }
#else
#define W8_FROM_ZERO 1
typedef int8x16_t w8_t;
INL w8_t w8_load(const uint8_t* p) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128))); }
INL vi dot_w8(vi acc, w8_t w, vi a) { return dot_s8(acc, w, vreinterpretq_s8_s32(a)); }
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define BF16_ACT_FLOAT 0
typedef bfloat16x8_t w16_t;
typedef bfloat16x8_t a16_t;
INL w16_t w16_load(const uint8_t* p) { return vreinterpretq_bf16_u8(vld1q_u8(p)); }
INL a16_t a16_bc(const uint8_t* p) { return vreinterpretq_bf16_s32(i_bc4(p)); }
INL vf dot_b16(vf acc, w16_t w, a16_t a) { return vbfdotq_f32(acc, w, a); }
INL void store_pair(uint8_t* p, vf lo, vf hi) {
  uint32x4_t l = vreinterpretq_u32_f32(v_to_bf16(lo)), h = vreinterpretq_u32_f32(v_to_bf16(hi));
  vst1q_u8(p, vreinterpretq_u8_u32(vorrq_u32(vshrq_n_u32(l, 16), h)));
}
#else
#define BF16_ACT_FLOAT 1
struct w16_t { vf lo, hi; };
struct a16_t { vf lo, hi; };
INL w16_t w16_load(const uint8_t* p) {
  uint32x4_t v = vreinterpretq_u32_u8(vld1q_u8(p));
  return {vreinterpretq_f32_u32(vshlq_n_u32(v, 16)), vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000u)))};
}
INL a16_t a16_bc(const uint8_t* p) { return {v_bc(p), v_bc(p + 4)}; }
INL vf dot_b16(vf acc, w16_t w, a16_t a) { return dot_f32(dot_f32(acc, w.hi, a.hi), w.lo, a.lo); }
#endif

}  // namespace mm
}  // namespace
}  // namespace octavo
