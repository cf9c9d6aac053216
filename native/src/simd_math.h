// Functions of a vector, by fixed polynomials: the same lanes give the same bits wherever they stand. Included after simd_*.h.
#pragma once

namespace octavo {
namespace {
namespace mm {

// e^x within 1 ulp on [-87, 88]; below it stays at e^-87 (1.6e-38), above at e^88; e^0 is exactly 1; NaN stays NaN.
INL vf v_exp(vf x) {
  x = v_max(v_set(-87.0f), v_min(v_set(88.0f), x));
  vi n = v_round_i(v_mul(x, v_set(1.44269504f)));
  vf k = v_float(n);
  vf r = v_fma(k, v_set(-0.693359375f), x);          // ln 2 in two parts: k times the first is exact
  r = v_fma(k, v_set(2.12194440e-4f), r);
  vf p = v_set(1.9907694e-4f);
  p = v_fma(p, r, v_set(1.3933732e-3f));
  p = v_fma(p, r, v_set(8.3332863e-3f));
  p = v_fma(p, r, v_set(4.1666463e-2f));
  p = v_fma(p, r, v_set(1.6666667e-1f));
  p = v_fma(p, r, v_set(0.5f));
  p = v_fma(v_mul(r, r), p, r);
  vf two_n = v_from_bits(i_shl<23>(i_add(n, i_set(127))));
  return v_fma(p, two_n, two_n);
}

// tanh x within 3 ulp: an odd polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above.
INL vf v_tanh(vf x) {
  vf a = v_abs(x), z = v_mul(x, x);
  vf p = v_set(2.2986555e-3f);
  p = v_fma(p, z, v_set(-8.3496692e-3f));
  p = v_fma(p, z, v_set(2.1770852e-2f));
  p = v_fma(p, z, v_set(-5.3959522e-2f));
  p = v_fma(p, z, v_set(1.3333304e-1f));
  p = v_fma(p, z, v_set(-3.3333334e-1f));
  vf small = v_fma(v_mul(z, x), p, x);
  vf t = v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(v_exp(v_add(a, a)), v_set(1.0f))));
  vf large = v_sel(v_gt(v_zero(), x), v_sub(v_zero(), t), t);
  return v_sel(v_gt(a, v_set(0.625f)), large, small);
}

// x / (1 + e^-y) within 4 ulp for |y| <= 80, beyond which y stays; NaN stays NaN. 2^f on [-1/2, 1/2] by a polynomial within 1e-7, no
// more; 2^n is what the sum that rounds to n holds in its last bits, which stand above the mantissa once they are shifted there.
INL vf v_gate(vf x, vf y) {
  const vf log2e = v_set(-1.44269504f), round = v_set(12582912.0f + 127.0f);
  y = v_max(v_set(-80.0f), v_min(v_set(80.0f), y));
  const vf m = v_fma(y, log2e, round), f = v_fma(y, log2e, v_sub(round, m));
  vf p = v_set(1.32764725e-3f);
  p = v_fma(p, f, v_set(9.67554096e-3f));
  p = v_fma(p, f, v_set(5.55071309e-2f));
  p = v_fma(p, f, v_set(2.40221202e-1f));
  p = v_fma(p, f, v_set(6.93146944e-1f));
  p = v_fma(p, f, v_set(1.00000012f));
  return v_over(x, v_fma(p, v_from_bits(i_shl<23>(v_bits(m))), v_set(1.0f)));
}
INL vf v_silu(vf x) { return v_gate(x, x); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), written as x * sigmoid(2 u): no cancellation for x < 0
INL vf v_gelu(vf x) { return v_gate(x, v_mul(x, v_fma(v_mul(x, x), v_set(0.0713548163f), v_set(1.59576912f)))); }
INL vf v_soft_cap(vf x, float cap) { return v_mul(v_set(cap), v_tanh(v_div(x, v_set(cap)))); }

}  // namespace mm
}  // namespace
}  // namespace octavo
