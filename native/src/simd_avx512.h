// Vectors of 16 lanes. Needs AVX-512 F, BW, VL, DQ; uses VNNI and BF16 where the file is compiled with them.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace octavo {
namespace {
namespace mm {

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;
constexpr int VL = 16;

INL vi v_bits(vf a) { return _mm512_castps_si512(a); }
INL vf v_from_bits(vi a) { return _mm512_castsi512_ps(a); }
INL __mmask16 first_lanes(int64_t n) { return n >= 16 ? (__mmask16)0xffff : n <= 0 ? (__mmask16)0 : (__mmask16)((1u << n) - 1); }

INL vf v_zero() { return _mm512_setzero_ps(); }
INL vf v_set(float x) { return _mm512_set1_ps(x); }
INL vf v_load(const float* p) { return _mm512_loadu_ps(p); }
INL void v_store(float* p, vf a) { _mm512_storeu_ps(p, a); }
INL vf v_load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INL void v_store_n(float* p, vf a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
INL vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INL vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INL vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INL vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
// a / b within 1.5 ulp for 1 <= b < 2^126: a line through the bits, two steps. Not vrcp14ps, whose bits are each vendor's own.
INL vf v_over(vf a, vf b) {
  vf r = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(0x7ef44000), _mm512_castps_si512(b)));
  r = _mm512_mul_ps(r, _mm512_fnmadd_ps(b, r, _mm512_set1_ps(2.0016f)));
  const vf e = _mm512_fnmadd_ps(b, r, _mm512_set1_ps(1.0f));
  return _mm512_mul_ps(a, _mm512_fmadd_ps(r, _mm512_fmadd_ps(e, e, e), r));
}
INL vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }
INL vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INL vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INL vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INL vf v_abs(vf a) { return _mm512_abs_ps(a); }
INL vm v_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INL vf v_sel(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
INL float v_sum(vf a) {  // 16 -> 8 -> 4 -> 2 -> 1, halves first
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INL float v_first(vf a) { return _mm512_cvtss_f32(a); }
INL float v_hmax(vf a) { return _mm512_reduce_max_ps(a); }

INL vi i_set(int32_t x) { return _mm512_set1_epi32(x); }
INL vi i_load(const int32_t* p) { return _mm512_loadu_si512(p); }
INL vi i_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INL vi i_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INL vi i_umax(vi a, vi b) { return _mm512_max_epu32(a, b); }
template <int N> INL vi i_shl(vi a) { return _mm512_slli_epi32(a, N); }
INL int32_t i_sum(vi a) {  // not the compiler's reduction: it adds as int, and rows that are not finite overflow
  __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
INL int32_t i_umax_all(vi a) { return (int32_t)_mm512_reduce_max_epu32(a); }
INL vf v_float(vi a) { return _mm512_cvtepi32_ps(a); }
INL vi v_round_i(vf a) { return _mm512_cvtps_epi32(a); }

INL float f16_to_f32(uint16_t h) { return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16((short)h))); }
INL vf v_load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INL vf v_load_bf16(const uint16_t* p) { return v_from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
INL vf v_to_bf16(vf a) {
  vi u = v_bits(a), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), i_set(1));
  vi r = _mm512_and_si512(i_add(u, i_add(odd, i_set(0x7fff))), i_set((int32_t)0xffff0000));
  __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return v_from_bits(_mm512_mask_or_epi32(r, nan, u, i_set(0x400000)));
}
INL void v_store_bf16(uint16_t* p, vf a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(v_bits(v_to_bf16(a)), 16))); }
INL void v_store_s8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }

// ---- dot operands (see simd_generic.h for their meaning)
#define V_FENCE(c) asm volatile("" : "+v"(c)::"memory")
#define MEMORY_FENCE() asm volatile("" ::: "memory")
#define PREFETCH_LINE(p) _mm_prefetch((const char*)(p), _MM_HINT_T1)
constexpr int MAX_TILE = 6;                // rows of a tile
constexpr int pass_vectors(int) { return 4; }
constexpr bool tile_in_registers(int rows) { return rows <= 2; }

INL vi i_bc4(const uint8_t* p) { int32_t v; memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
INL vi load_line(const uint8_t* p) { return _mm512_load_si512(p); }

typedef vi u4_t;
INL u4_t u4_low(const uint8_t* p) { return _mm512_and_si512(load_line(p), _mm512_set1_epi8(15)); }
INL u4_t u4_high(const uint8_t* p) { return _mm512_and_si512(_mm512_srli_epi16(load_line(p), 4), _mm512_set1_epi8(15)); }
template <int I> INL vf u4_value(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(load_line(p), 8 * (I % 4) + 4 * (I / 4)), i_set(15)));
}

#ifdef __AVX512VNNI__
// Inline assembly: with intrinsics GCC keeps two copies of each accumulator of a grouped tile and stores one in every K-step.
#define W8_FROM_ZERO 0
constexpr int MAX_W8_TILE = 6;
typedef vi w8_t;
INL w8_t w8_load(const uint8_t* p) { return load_line(p); }
INL vi dot_w8(vi acc, w8_t w, vi a) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a)); return acc; }
INL vi dot_u4(vi acc, u4_t w, vi a) { return dot_w8(acc, w, a); }
#else
// |w| * (sign of w) a through the 16-bit pair sums, which stay below 2 * 128 * 127 < 2^15: exact.
#define W8_FROM_ZERO 1
constexpr int MAX_W8_TILE = 4;
struct w8_t { vi mag; __mmask64 neg; };
INL w8_t w8_load(const uint8_t* p) {
  vi w = _mm512_xor_si512(load_line(p), _mm512_set1_epi8((char)128));
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
INL vi dot_u4(vi acc, u4_t w, vi a) {
  vi t;
  asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0" : "+v"(acc), "=&v"(t) : "v"(w), "v"(a), "v"(_mm512_set1_epi16(1)));
  return acc;
}
INL vi dot_w8(vi acc, w8_t w, vi a) { return dot_u4(acc, w.mag, _mm512_mask_sub_epi8(a, w.neg, _mm512_setzero_si512(), a)); }
#endif

// ---- quantisation, sixteen vectors to one: lane g of the result is the sum or maximum of v[LANES_FROM[g]]'s lanes
#define LANES_AT_ONCE 1
static const int8_t LANES_FROM[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
template <class F> INL vi lanes_of(const vi (&v)[16], F f) {
  vi a[8], b[4], c[2];
  UNROLL for (int i = 0; i < 8; i++) a[i] = f(_mm512_shuffle_i32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_i32x4(v[i], v[i + 8], 0xee));
  UNROLL for (int i = 0; i < 4; i++) b[i] = f(_mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd));
  UNROLL for (int i = 0; i < 2; i++) c[i] = f(_mm512_unpacklo_epi64(b[i], b[i + 2]), _mm512_unpackhi_epi64(b[i], b[i + 2]));
  const __m512 x = _mm512_castsi512_ps(c[0]), y = _mm512_castsi512_ps(c[1]);
  return f(v_bits(_mm512_shuffle_ps(x, y, 0x88)), v_bits(_mm512_shuffle_ps(x, y, 0xdd)));
}
INL vi i_umax_lanes(const vi (&v)[16]) { return lanes_of(v, [](vi a, vi b) __attribute__((always_inline)) { return i_umax(a, b); }); }
INL vi i_add_lanes(const vi (&v)[16]) { return lanes_of(v, [](vi a, vi b) __attribute__((always_inline)) { return i_add(a, b); }); }
INL vi i_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INL vi i_low_half(vi a) { return _mm512_maskz_mov_epi32(0x00ff, a); }
INL vi i_high_half(vi a) { return _mm512_maskz_mov_epi32(0xff00, a); }
// 4 x 16 x 32 bits -> 64 x 8, saturating
INL vi i_narrow(vi a, vi b, vi c, vi d) {
  const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
}

INL vf v_bc(const uint8_t* p) { float v; memcpy(&v, p, 4); return v_set(v); }
INL vf dot_f32(vf acc, vf w, vf a) { asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a)); return acc; }

#ifdef __AVX512BF16__
#define BF16_ACT_FLOAT 0
constexpr int MAX_BF16_TILE = 6;
typedef vi w16_t;
typedef vi a16_t;
INL w16_t w16_load(const uint8_t* p) { return load_line(p); }
INL a16_t a16_bc(const uint8_t* p) { return i_bc4(p); }
INL vf dot_b16(vf acc, w16_t w, a16_t a) { asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a)); return acc; }
// lane = (bf16 of lo, bf16 of hi)
INL void store_pair(uint8_t* p, vf lo, vf hi) {
  const vi order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008, 0x190009,
                                     0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  _mm512_store_si512(p, _mm512_permutexvar_epi16(order, (vi)_mm512_cvtne2ps_pbh(hi, lo)));
}
#else
#define BF16_ACT_FLOAT 1
constexpr int MAX_BF16_TILE = 4;
struct w16_t { vf lo, hi; };
struct a16_t { vf lo, hi; };
INL w16_t w16_load(const uint8_t* p) {
  vi v = load_line(p);
  return {v_from_bits(_mm512_slli_epi32(v, 16)), v_from_bits(_mm512_and_si512(v, i_set((int32_t)0xffff0000)))};
}
INL a16_t a16_bc(const uint8_t* p) { float v[2]; memcpy(v, p, 8); return {v_set(v[0]), v_set(v[1])}; }
INL vf dot_b16(vf acc, w16_t w, a16_t a) { return dot_f32(dot_f32(acc, w.hi, a.hi), w.lo, a.lo); }
#endif

}  // namespace mm
}  // namespace
}  // namespace octavo
