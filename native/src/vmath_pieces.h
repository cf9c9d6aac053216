// vmath.h on everything narrower: 16 lanes as pieces of one register each (32 bytes with AVX2, else 16).
#pragma once
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace octavo {
namespace {
namespace wide {

#if defined(__AVX2__)
constexpr int PIECE = 32;
#else
constexpr int PIECE = 16;
#endif
constexpr int PIECES = 64 / PIECE;

typedef float pf __attribute__((vector_size(PIECE)));
typedef int32_t pi __attribute__((vector_size(PIECE)));
typedef float pf_any __attribute__((vector_size(PIECE), aligned(1), may_alias));  // at any address
typedef int32_t pi_any __attribute__((vector_size(PIECE), aligned(1), may_alias));

struct vf {
  pf p[PIECES];
};
struct vi {
  pi p[PIECES];
};
typedef vi vm;  // lanes of all ones or all zeros

#define VM_EACH(type, expr)                        \
  type r;                                          \
  VM_UNROLL for (int i = 0; i < PIECES; i++) r.p[i] = (expr); \
  return r

VM_INL pf piece1(float x) { return x - (pf){}; }
VM_INL pi piece1i(int32_t x) { return x - (pi){}; }
VM_INL pf piece_fma(pf a, pf b, pf c) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

VM_INL vf operator+(vf a, vf b) { VM_EACH(vf, a.p[i] + b.p[i]); }
VM_INL vf operator-(vf a, vf b) { VM_EACH(vf, a.p[i] - b.p[i]); }
VM_INL vf operator*(vf a, vf b) { VM_EACH(vf, a.p[i] * b.p[i]); }
VM_INL vf operator/(vf a, vf b) { VM_EACH(vf, a.p[i] / b.p[i]); }

VM_INL vf vload(const float* p) { VM_EACH(vf, ((const pf_any*)p)[i]); }
VM_INL void vstore(float* p, vf v) { VM_UNROLL for (int i = 0; i < PIECES; i++) ((pf_any*)p)[i] = v.p[i]; }
VM_INL vf vset1(float x) { VM_EACH(vf, piece1(x)); }
VM_INL vi vloadi(const void* p) { VM_EACH(vi, ((const pi_any*)p)[i]); }
VM_INL void vstorei(void* p, vi v) { VM_UNROLL for (int i = 0; i < PIECES; i++) ((pi_any*)p)[i] = v.p[i]; }
VM_INL vi vset1i(int32_t x) { VM_EACH(vi, piece1i(x)); }
VM_INL vf vfma(vf a, vf b, vf c) { VM_EACH(vf, piece_fma(a.p[i], b.p[i], c.p[i])); }
VM_INL vf vmax(vf a, vf b) { VM_EACH(vf, a.p[i] > b.p[i] ? a.p[i] : b.p[i]); }  // b where either is NaN
VM_INL vf vabs(vf a) { VM_EACH(vf, (pf)((pi)a.p[i] & piece1i(0x7fffffff))); }
VM_INL vf vcvt(vi a) { VM_EACH(vf, __builtin_convertvector(a.p[i], pf)); }
VM_INL vf vas_float(vi a) { VM_EACH(vf, (pf)a.p[i]); }
template <int N> VM_INL vi vshl(vi a) { VM_EACH(vi, a.p[i] << N); }
template <int N> VM_INL vi vsar(vi a) { VM_EACH(vi, a.p[i] >> N); }
typedef uint32_t pu __attribute__((vector_size(PIECE)));
template <int N> VM_INL vi vshr(vi a) { VM_EACH(vi, (pi)((pu)a.p[i] >> N)); }
// The value as if it came from elsewhere: the compiler does not combine what is done to it before and after.
VM_INL vi vopaque(vi a) {
#if defined(__x86_64__) || defined(__i386__)
  VM_UNROLL for (int i = 0; i < PIECES; i++) asm("" : "+x"(a.p[i]));
#endif
  return a;
}
VM_INL vi vandi(vi a, int32_t b) { VM_EACH(vi, a.p[i] & piece1i(b)); }

// Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits; for |x| < 2^22.
constexpr float ROUNDER = 12582912.0f;
VM_INL vi vround(vf a) { VM_EACH(vi, (pi)(a.p[i] + piece1(ROUNDER)) - (pi)piece1(ROUNDER)); }

// Lanes first <= i < last.
VM_INL vm vrange(int64_t first, int64_t last) {
  static const int32_t lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const pi low = piece1i((int32_t)(first < 0 ? 0 : first > LANES ? LANES : first));
  const pi high = piece1i((int32_t)(last < 0 ? 0 : last > LANES ? LANES : last));
  VM_EACH(vm, (pi)(((const pi_any*)lane)[i] >= low) & (pi)(((const pi_any*)lane)[i] < high));
}
VM_INL vm vnot_less(vf a, vf b) { VM_EACH(vm, ~(pi)(a.p[i] < b.p[i])); }
VM_INL vm vgreater(vf a, vf b) { VM_EACH(vm, (pi)(a.p[i] > b.p[i])); }
VM_INL vm visnan(vf a) { VM_EACH(vm, (pi)(a.p[i] != a.p[i])); }
VM_INL bool vany(vm m) {
  alignas(64) int32_t lanes[LANES];
  vstorei(lanes, m);
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= lanes[i];
  return any != 0;
}
VM_INL vf vselect(vm m, vf a, vf b) { VM_EACH(vf, (pf)((m.p[i] & (pi)a.p[i]) | (~m.p[i] & (pi)b.p[i]))); }
VM_INL vi vselecti(vm m, vi a, vi b) { VM_EACH(vi, (m.p[i] & a.p[i]) | (~m.p[i] & b.p[i])); }

VM_INL vf vload_part(const float* p, int64_t n) {
  alignas(64) float lanes[LANES] = {};
  memcpy(lanes, p, (size_t)(n > LANES ? LANES : n) * 4);
  return vload(lanes);
}
VM_INL void vstore_part(float* p, vf v, int64_t n) {
  alignas(64) float lanes[LANES];
  vstore(lanes, v);
  memcpy(p, lanes, (size_t)(n > LANES ? LANES : n) * 4);
}

VM_INL pf piece_exp2(pf x) {
  const pf shifted = x + piece1(ROUNDER), f = x - (shifted - piece1(ROUNDER));
  pf p = piece_fma(piece1(E4), f, piece1(E3));
  p = piece_fma(p, f, piece1(E2));
  p = piece_fma(p, f, piece1(E1));
  p = piece_fma(p, f, piece1(E0));
  p = piece_fma(p, f, piece1(1.0f));
  return p * (pf)(((pi)shifted - (pi)piece1(ROUNDER) + piece1i(127)) << 23);
}
// 2^x; x is first held to [-126, 126].
VM_INL vf vexp2(vf x) {
  const pf low = piece1(EXP2_MIN), high = piece1(EXP2_MAX);
  VM_EACH(vf, piece_exp2(x.p[i] < low ? low : x.p[i] > high ? high : x.p[i]));
}
// 2^x for x <= 126, and exactly 0 below -126.
VM_INL vf vexp2_small(vf x) { return vselect(vnot_less(x, vset1(EXP2_MIN)), vexp2(x), vset1(0.0f)); }

// ((lane i + lane i + 8) + ... + 4) + ... + 2) + ... + 1, on every instruction set
#define VM_ADD(a, b) ((a) + (b))
#define VM_MAX(a, b) ((a) > (b) ? (a) : (b))
#if defined(__AVX2__)
#define VM_QUARTER(op)                                                            \
  const pf h = op(v.p[0], v.p[1]);                                                \
  typedef float quarter __attribute__((vector_size(16)));                         \
  const quarter lo = (quarter)_mm256_castps256_ps128((__m256)h), hi = (quarter)_mm256_extractf128_ps((__m256)h, 1); \
  const quarter q = op(lo, hi)
#else
#define VM_QUARTER(op)                                                            \
  const pf lo = op(v.p[0], v.p[2]), hi = op(v.p[1], v.p[3]);                      \
  const pf q = op(lo, hi)
#endif
VM_INL float vsum(vf v) {
  VM_QUARTER(VM_ADD);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
VM_INL float vmax_lane(vf v) {
  VM_QUARTER(VM_MAX);
  const float even = VM_MAX(q[0], q[2]), odd = VM_MAX(q[1], q[3]);
  return VM_MAX(even, odd);
}

}  // namespace wide
}  // namespace
}  // namespace octavo
