// Row kernels against double precision, for every length around a vector's border; a row alone equals a row among others.
#include <algorithm>

#include "check.h"

using namespace check;
using octavo::Kernels;

namespace {

const int64_t kLengths[] = {1, 4, 8, 15, 16, 17, 33, 63, 64, 65, 100, 128, 576, 1536, 2051};

double rms_of(const float* x, int64_t n, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += double(x[i]) * x[i];
  return 1 / sqrt(sum / double(n) + eps);
}

void test_norms(const Kernels* k, Random& random) {
  for (int64_t n : kLengths) {
    const int64_t rows = 5, ldx = n + 3;
    std::vector<float> x(size_t(rows * ldx)), w(static_cast<size_t>(n)), b(static_cast<size_t>(n)), y(size_t(n + 1), 9.0f), inv(rows, -1.0f), alone(rows);
    random.fill(x, 3), random.fill(w), random.fill(b);
    k->inv_rms(x.data(), ldx, 0, rows, n, 1e-5f, inv.data());
    for (int64_t r = 0; r < rows; r++) {
      k->inv_rms(x.data(), ldx, r, r + 1, n, 1e-5f, alone.data());
      CHECK(alone[size_t(r)] == inv[size_t(r)]);
      CHECK(close(inv[size_t(r)], rms_of(&x[size_t(r * ldx)], n, 1e-5f), 1e-6));
    }
    double mean = 0, var = 0;
    for (int64_t i = 0; i < n; i++) mean += double(x[size_t(i)]) / double(n);
    for (int64_t i = 0; i < n; i++) var += (x[size_t(i)] - mean) * (x[size_t(i)] - mean) / double(n);
    for (const float* bias : {(const float*)b.data(), (const float*)nullptr}) {
      k->layer_norm(y.data(), x.data(), w.data(), bias, 1e-5f, n);
      bool ok = y[size_t(n)] == 9.0f;
      for (int64_t i = 0; i < n; i++) {
        const double want = (x[size_t(i)] - mean) / sqrt(var + 1e-5f) * w[size_t(i)] + (bias ? bias[i] : 0);
        ok = ok && close(y[size_t(i)], want, 1e-4);  // a row of one value is its own mean: the difference is rounding alone
      }
      CHECK(ok);
    }
  }
}

void test_elementwise(const Kernels* k, Random& random) {
  for (int64_t n : kLengths) {
    std::vector<float> a(static_cast<size_t>(n)), b(static_cast<size_t>(n)), y(size_t(n + 1), 9.0f);
    random.fill(a, 6), random.fill(b, 6);
    a[0] = -200, a[size_t(n / 2)] = 200;
    bool sums = true, products = true, silu = true, gelu = true;
    k->add_rows(y.data(), a.data(), b.data(), n);
    for (int64_t i = 0; i < n; i++) sums = sums && y[size_t(i)] == a[size_t(i)] + b[size_t(i)];
    k->scale_mul(y.data(), a.data(), b.data(), 0.3f, n);
    for (int64_t i = 0; i < n; i++) products = products && y[size_t(i)] == a[size_t(i)] * 0.3f * b[size_t(i)];
    k->scale_mul(y.data(), a.data(), nullptr, 0.3f, n);
    for (int64_t i = 0; i < n; i++) products = products && y[size_t(i)] == a[size_t(i)] * 0.3f;
    k->gated(y.data(), a.data(), b.data(), octavo::EPI_SILU_MUL, n);
    for (int64_t i = 0; i < n; i++) silu = silu && close(y[size_t(i)], a[size_t(i)] / (1 + exp(-double(a[size_t(i)]))) * b[size_t(i)], 2e-6);
    k->gated(y.data(), a.data(), b.data(), octavo::EPI_GELU_MUL, n);
    for (int64_t i = 0; i < n; i++) {
      const double g = a[size_t(i)], inner = sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
      gelu = gelu && close(y[size_t(i)], 0.5 * g * (1 + tanh(inner)) * b[size_t(i)], 4e-6);
    }
    CHECK(sums && y[size_t(n)] == 9.0f);
    CHECK(products);
    CHECK(silu);
    CHECK(gelu);
  }
  float nan = NAN, one = 1, y = 0;
  k->gated(&y, &nan, &one, octavo::EPI_SILU_MUL, 1);
  CHECK(y != y);
}

void test_heads(const Kernels* k, Random& random) {
  const int64_t shapes[][2] = {{8, 8}, {64, 64}, {80, 32}, {128, 128}, {96, 24}, {256, 256}};
  for (const auto& shape : shapes) {
    const int64_t heads = 3, dim = shape[0], rotary = shape[1], half = rotary / 2;
    std::vector<float> x(size_t(heads * dim)), cosines(static_cast<size_t>(half)), sines(static_cast<size_t>(half)), w(static_cast<size_t>(dim));
    random.fill(x), random.fill(w);
    for (int64_t i = 0; i < half; i++) cosines[size_t(i)] = cosf(float(i)), sines[size_t(i)] = sinf(float(i));
    std::vector<float> y = x, z = x;
    k->rope(y.data(), heads, dim, rotary, cosines.data(), sines.data());
    k->qk_norm(z.data(), heads, dim, w.data(), 1e-6f);
    bool turned = true, normed = true;
    for (int64_t h = 0; h < heads; h++)
      for (int64_t d = 0; d < dim; d++) {
        const size_t at = size_t(h * dim + d);
        const size_t i = size_t(d % half), low = size_t(h * dim) + i, high = low + size_t(half);
        const double want = d < half ? double(x[low]) * cosines[i] - double(x[high]) * sines[i]
                            : d < rotary ? double(x[high]) * cosines[i] + double(x[low]) * sines[i] : x[at];
        turned = turned && close(y[at], want, 2e-7);
        normed = normed && close(z[at], x[at] * rms_of(&x[size_t(h * dim)], dim, 1e-6f) * w[size_t(d)], 1e-6);
      }
    CHECK(turned);
    CHECK(normed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* k : tables(argc > 1 ? argv[1] : nullptr)) {
    Random random(3);
    test_norms(k, random);
    test_elementwise(k, random);
    test_heads(k, random);
  }
  return finish("test_rows");
}
