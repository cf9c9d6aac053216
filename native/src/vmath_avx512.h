// vmath.h on AVX-512: one register.
#pragma once

namespace octavo {
namespace {
namespace wide {

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

VM_INL vf vload(const float* p) { return _mm512_loadu_ps(p); }
VM_INL void vstore(float* p, vf v) { _mm512_storeu_ps(p, v); }
VM_INL vf vset1(float x) { return _mm512_set1_ps(x); }
VM_INL vi vloadi(const void* p) { return _mm512_loadu_si512(p); }
VM_INL void vstorei(void* p, vi v) { _mm512_storeu_si512(p, v); }
VM_INL vi vset1i(int32_t x) { return _mm512_set1_epi32(x); }
VM_INL vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VM_INL vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
VM_INL vf vabs(vf a) { return _mm512_abs_ps(a); }
VM_INL vf vcvt(vi a) { return _mm512_cvtepi32_ps(a); }
VM_INL vi vround(vf a) { return _mm512_cvtps_epi32(a); }  // nearest, ties to even
VM_INL vf vas_float(vi a) { return _mm512_castsi512_ps(a); }
template <int N> VM_INL vi vshl(vi a) { return _mm512_slli_epi32(a, N); }
template <int N> VM_INL vi vsar(vi a) { return _mm512_srai_epi32(a, N); }
template <int N> VM_INL vi vshr(vi a) { return _mm512_srli_epi32(a, N); }
// The value as if it came from elsewhere: the compiler does not combine what is done to it before and after.
VM_INL vi vopaque(vi a) {
  asm("" : "+v"(a));
  return a;
}
VM_INL vi vandi(vi a, int32_t b) { return _mm512_and_si512(a, _mm512_set1_epi32(b)); }

// Lanes first <= i < last.
VM_INL vm vrange(int64_t first, int64_t last) {
  const uint32_t low = first <= 0 ? 0u : first >= 16 ? 0xffffu : (1u << first) - 1u;
  const uint32_t high = last <= 0 ? 0u : last >= 16 ? 0xffffu : (1u << last) - 1u;
  return (vm)(high & ~low);
}
VM_INL vm vnot_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
VM_INL vm vgreater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
VM_INL vm visnan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
VM_INL bool vany(vm m) { return m != 0; }
VM_INL vf vselect(vm m, vf a, vf b) { return _mm512_mask_mov_ps(b, m, a); }
VM_INL vi vselecti(vm m, vi a, vi b) { return _mm512_mask_mov_epi32(b, m, a); }

VM_INL vf vload_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(vrange(0, n), p); }
VM_INL void vstore_part(float* p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, vrange(0, n), v); }

VM_INL vf vexp2_core(vm keep, vf x) {
  const vf n = _mm512_roundscale_ps(x, 0), f = x - n;
  vf p = vfma(vset1(E4), f, vset1(E3));
  p = vfma(p, f, vset1(E2));
  p = vfma(p, f, vset1(E1));
  p = vfma(p, f, vset1(E0));
  return _mm512_maskz_scalef_ps(keep, vfma(p, f, vset1(1.0f)), n);
}
// 2^x; x is first held to [-126, 126].
VM_INL vf vexp2(vf x) {
  return vexp2_core(0xffff, _mm512_min_ps(vset1(EXP2_MAX), _mm512_max_ps(vset1(EXP2_MIN), x)));
}
// 2^x for x <= 126, and exactly 0 below -126.
VM_INL vf vexp2_small(vf x) { return vexp2_core(vnot_less(x, vset1(EXP2_MIN)), x); }

// ((lane i + lane i + 8) + ... + 4) + ... + 2) + ... + 1, on every instruction set
#define VM_TREE(op)                                                                        \
  __m256 h = op##256(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));             \
  __m128 q = op##128(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));              \
  q = op##128(q, _mm_movehl_ps(q, q));                                                     \
  return _mm_cvtss_f32(op##128(q, _mm_movehdup_ps(q)))
#define VM_ADD256(a, b) _mm256_add_ps(a, b)
#define VM_ADD128(a, b) _mm_add_ps(a, b)
#define VM_MAX256(a, b) _mm256_max_ps(a, b)
#define VM_MAX128(a, b) _mm_max_ps(a, b)
VM_INL float vsum(vf v) { VM_TREE(VM_ADD); }
VM_INL float vmax_lane(vf v) { VM_TREE(VM_MAX); }

}  // namespace wide
}  // namespace
}  // namespace octavo
