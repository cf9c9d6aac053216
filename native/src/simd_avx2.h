// Vectors of 8 lanes. Needs AVX2, FMA, F16C; uses AVX-VNNI where the file is compiled with it.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace octavo {
namespace {
namespace mm {

typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;
constexpr int VL = 8;

INL vi v_bits(vf a) { return _mm256_castps_si256(a); }
INL vf v_from_bits(vi a) { return _mm256_castsi256_ps(a); }
INL vi first_lanes(int64_t n) {
  int32_t k = n >= 8 ? 8 : n <= 0 ? 0 : (int32_t)n;
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(k), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INL vf v_zero() { return _mm256_setzero_ps(); }
INL vf v_set(float x) { return _mm256_set1_ps(x); }
INL vf v_load(const float* p) { return _mm256_loadu_ps(p); }
INL void v_store(float* p, vf a) { _mm256_storeu_ps(p, a); }
INL vf v_load_n(const float* p, int64_t n) { return n >= 8 ? v_load(p) : _mm256_maskload_ps(p, first_lanes(n)); }
INL void v_store_n(float* p, vf a, int64_t n) { if (n >= 8) v_store(p, a); else _mm256_maskstore_ps(p, first_lanes(n), a); }
INL vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INL vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INL vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INL vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INL vf v_over(vf a, vf b) { return v_div(a, b); }
INL vf v_sqrt(vf a) { return _mm256_sqrt_ps(a); }
INL vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INL vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INL vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INL vf v_abs(vf a) { return v_from_bits(_mm256_and_si256(v_bits(a), _mm256_set1_epi32(0x7fffffff))); }
INL vm v_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INL vf v_sel(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
INL float v_sum(vf a) {  // 8 -> 4 -> 2 -> 1, halves first
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INL float v_first(vf a) { return _mm256_cvtss_f32(a); }
INL float v_hmax(vf a) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

INL vi i_set(int32_t x) { return _mm256_set1_epi32(x); }
INL vi i_load(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INL vi i_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INL vi i_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INL vi i_umax(vi a, vi b) { return _mm256_max_epu32(a, b); }
template <int N> INL vi i_shl(vi a) { return _mm256_slli_epi32(a, N); }
INL int32_t i_sum(vi a) {
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
INL int32_t i_umax_all(vi a) {
  __m128i q = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  q = _mm_max_epu32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epu32(q, _mm_shuffle_epi32(q, 0xb1)));
}
INL vf v_float(vi a) { return _mm256_cvtepi32_ps(a); }
INL vi v_round_i(vf a) { return _mm256_cvtps_epi32(a); }

INL float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
INL vf v_load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INL vf v_load_bf16(const uint16_t* p) { return v_from_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)); }
INL vf v_to_bf16(vf a) {
  vi u = v_bits(a), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), i_set(1));
  vi r = _mm256_and_si256(i_add(u, i_add(odd, i_set(0x7fff))), i_set((int32_t)0xffff0000));
  vf nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_blendv_ps(v_from_bits(r), v_from_bits(_mm256_or_si256(u, i_set(0x400000))), nan);
}
INL __m128i narrow16(vi a, bool is_signed) {  // 8 x 32 -> 8 x 16, saturating
  __m128i l = _mm256_castsi256_si128(a), h = _mm256_extracti128_si256(a, 1);
  return is_signed ? _mm_packs_epi32(l, h) : _mm_packus_epi32(l, h);
}
INL void v_store_bf16(uint16_t* p, vf a) { _mm_storeu_si128((__m128i*)p, narrow16(_mm256_srli_epi32(v_bits(v_to_bf16(a)), 16), false)); }
INL void v_store_s8(int8_t* p, vi a) { __m128i h = narrow16(a, true); _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(h, h)); }

// ---- dot operands (see simd_generic.h for their meaning)
#define V_FENCE(c) asm volatile("" : "+x"(c)::"memory")
#define MEMORY_FENCE() asm volatile("" ::: "memory")
#define PREFETCH_LINE(p) _mm_prefetch((const char*)(p), _MM_HINT_T1)
constexpr int MAX_TILE = 4, MAX_W8_TILE = 4, MAX_BF16_TILE = 4;
constexpr int pass_vectors(int rows) { return rows == 1 ? 4 : 2; }
constexpr bool tile_in_registers(int) { return false; }

INL vi i_bc4(const uint8_t* p) { int32_t v; memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
INL vi load_half_line(const uint8_t* p) { return _mm256_load_si256((const __m256i*)p); }

typedef vi u4_t;
INL u4_t u4_low(const uint8_t* p) { return _mm256_and_si256(load_half_line(p), _mm256_set1_epi8(15)); }
INL u4_t u4_high(const uint8_t* p) { return _mm256_and_si256(_mm256_srli_epi16(load_half_line(p), 4), _mm256_set1_epi8(15)); }
template <int I> INL vf u4_value(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(load_half_line(p), 8 * (I % 4) + 4 * (I / 4)), i_set(15)));
}

#ifdef __AVXVNNI__
#define W8_FROM_ZERO 0
typedef vi w8_t;
INL w8_t w8_load(const uint8_t* p) { return load_half_line(p); }
INL vi dot_w8(vi acc, w8_t w, vi a) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a)); return acc; }
INL vi dot_u4(vi acc, u4_t w, vi a) { return dot_w8(acc, w, a); }
#else
// |w| * (sign of w) a through the 16-bit pair sums, which stay below 2 * 128 * 127 < 2^15: exact.
#define W8_FROM_ZERO 1
struct w8_t { vi w; };
INL w8_t w8_load(const uint8_t* p) { return {_mm256_xor_si256(load_half_line(p), _mm256_set1_epi8((char)128))}; }
alignas(32) static const int16_t ONES[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};  // from memory: registers are short
INL vi dot_u4(vi acc, u4_t w, vi a) {
  vi t;
  asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(t) : "x"(w), "x"(a), "m"(ONES));
  return acc;
}
INL vi dot_w8(vi acc, w8_t w, vi a) { return dot_u4(acc, _mm256_abs_epi8(w.w), _mm256_sign_epi8(a, w.w)); }
#endif

#define BF16_ACT_FLOAT 1
struct w16_t { vf lo, hi; };
struct a16_t { vf lo, hi; };
INL w16_t w16_load(const uint8_t* p) {
  vi v = load_half_line(p);
  return {v_from_bits(_mm256_slli_epi32(v, 16)), v_from_bits(_mm256_and_si256(v, i_set((int32_t)0xffff0000)))};
}
INL a16_t a16_bc(const uint8_t* p) { float v[2]; memcpy(v, p, 8); return {v_set(v[0]), v_set(v[1])}; }
INL vf v_bc(const uint8_t* p) { return _mm256_broadcast_ss((const float*)p); }
INL vf dot_f32(vf acc, vf w, vf a) { asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a)); return acc; }
INL vf dot_b16(vf acc, w16_t w, a16_t a) { return dot_f32(dot_f32(acc, w.hi, a.hi), w.lo, a.lo); }

}  // namespace mm
}  // namespace
}  // namespace octavo
