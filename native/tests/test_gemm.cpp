// Matrix products of every table that runs here: against a double-precision product of the same quantised operands, rows alone
// against rows in batches (same bits), ranges of rows and panels, epilogues, packing and unpacking.
//   make -C native/tests test     or, for ARM by emulation,     make -C native/tests arm
#include "check.h"

using namespace octavo;
using check::Buffer;
using check::Random;

static const char* const NAMES[] = {"fp32", "bf16", "w8g64", "w8pc", "w4g32", "w4g64", "w4g128", "w4a16g32", "w4a16g64", "w4a16g128"};
static bool is_w4(int f) { return f >= FMT_W4G32; }
static bool is_plain(int f) { return f == FMT_FP32 || f == FMT_BF16; }
static bool quantised(int f) { return f >= FMT_W8G64 && f <= FMT_W4G128; }
static int64_t group_of(int f, int64_t k) { return is_w4(f) ? 32 << (f - FMT_W4G32) % 3 : f == FMT_W8G64 ? 64 : k; }

static uint64_t hash_of(const void* p, int64_t n) {
  uint64_t h = 1469598103934665603ull;
  for (int64_t i = 0; i < n; i++) h = (h ^ ((const uint8_t*)p)[i]) * 1099511628211ull;
  return h;
}

struct Matrix {
  Mat m{};
  Buffer memory;
  Matrix(const Kernels* k, int fmt, int64_t n, int64_t depth, bool interleaved = false)
      : m{fmt, interleaved, n, depth, 0, 0, 0, nullptr}, memory(k->mat_layout(&m)) { m.base = memory.p; }
};
struct Operands {
  Act a{};
  Buffer memory;
  Operands(const Kernels* k, int fmt, int64_t depth, int64_t rows) : a{fmt, 0, depth, 0, 0, 0, nullptr, nullptr, nullptr}, memory(check::operand_bytes(k, &a, rows)) {
    a.q = memory.p;
    a.z = (int32_t*)(a.q + rows * a.lda);
    a.s = (float*)(a.z + rows * a.ldg);
  }
};

// ---- the oracle: what the stored bytes mean
static double activation(const Act& a, int64_t row, int64_t k, bool narrow) {
  const uint8_t* q = a.q + row * a.lda;
  if (quantised(a.fmt)) return (double)((const int8_t*)q)[k] * a.s[row * a.ldg + k / group_of(a.fmt, a.kp)];
  if (a.fmt == FMT_FP32 || !narrow) return ((const float*)q)[k];
  uint32_t u = (uint32_t)((const uint16_t*)q)[k] << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
struct Problem {
  int fmt;
  int64_t n, k, rows;
  std::vector<float> w, x, expect;  // expect [rows][n]: exact product of the quantised operands
  std::vector<float> magnitude;     // sum of |terms|, which rounding is relative to
};
static void make(Problem& p, const Kernels* k, Random& rng, Matrix& m, Operands& a) {
  p.w.resize((size_t)(p.n * p.k));
  p.x.resize((size_t)(p.rows * p.k));
  rng.fill(p.w, 0.05f);
  rng.fill(p.x);
  for (int64_t r = 0; r < p.rows; r++) if (r % 5 == 3) for (int64_t i = 0; i < p.k; i += 7) p.x[(size_t)(r * p.k + i)] *= 30;  // outliers
  k->pack(&m.m, m.memory.p, 0, m.m.panels, p.w.data(), nullptr);
  k->quantize(&a.a, 0, p.rows, p.x.data(), p.k, nullptr, nullptr);
  CHECK(m.memory.intact() && a.memory.intact());
  bool narrow = a.a.lda < (a.a.kp * 4 + 63) / 64 * 64 + 64;
  p.expect.assign((size_t)(p.rows * p.n), 0);
  p.magnitude = p.expect;
  std::vector<float> row((size_t)p.k);
  std::vector<double> act((size_t)(p.rows * p.k));
  for (int64_t r = 0; r < p.rows; r++) for (int64_t i = 0; i < p.k; i++) act[(size_t)(r * p.k + i)] = activation(a.a, r, i, narrow);
  for (int64_t c = 0; c < p.n; c++) {
    k->unpack_row(&m.m, c, row.data());
    for (int64_t r = 0; r < p.rows; r++) {
      double sum = 0, size = 0;
      const double range = is_w4(p.fmt) ? 0.1 : 0;  // of the weights: a code's part and its group's offset may nearly cancel
      for (int64_t i = 0; i < p.k; i++) {
        const double x = act[(size_t)(r * p.k + i)], w = row[(size_t)i];
        sum += w * x, size += (fabs(w) + range) * fabs(x);
      }
      p.expect[(size_t)(r * p.n + c)] = (float)sum;
      p.magnitude[(size_t)(r * p.n + c)] = (float)size;
    }
  }
}

static Epilogue store_to(float* out, int64_t ldo) { return {EPI_STORE, out, ldo, nullptr, nullptr, 0, 0}; }

static std::vector<float> product(const Kernels* k, const Matrix& m, const Act& a, int64_t r0, int64_t r1, int64_t n) {
  std::vector<float> out((size_t)(r1 * n), -7);
  Epilogue e = store_to(out.data(), n);
  k->gemm(&m.m, &a, r0, r1, 0, m.m.panels, &e, nullptr);
  return out;
}

static void test_product(const Kernels* k, int fmt, Random& rng, int64_t n, int64_t depth, int64_t rows) {
  Problem p{fmt, n, depth, rows, {}, {}, {}, {}};
  Matrix m(k, fmt, n, depth);
  Operands a(k, fmt, depth, rows);
  make(p, k, rng, m, a);
  std::vector<float> out = product(k, m, a.a, 0, rows, n);
  bool ok = true;
  for (size_t i = 0; i < out.size(); i++) ok = ok && fabs(out[i] - p.expect[i]) <= 1e-6 * p.magnitude[i] + 1e-30;
  if (!CHECK(ok)) printf("  product %s %s n=%ld k=%ld rows=%ld\n", k->name, NAMES[fmt], (long)n, (long)depth, (long)rows);
  for (int64_t i = 0; i < n * depth && !is_plain(fmt); i += 97) {  // a weight is within a step of the source
    std::vector<float> row((size_t)depth);
    k->unpack_row(&m.m, i / depth, row.data());
    ok = ok && fabsf(row[(size_t)(i % depth)] - p.w[(size_t)i]) <= (is_w4(fmt) ? 0.1f / 15 * 0.55f : 0.05f / 127 * 0.55f);
  }
  CHECK(ok);
}

// Times 2^exponent, and 16 more octaves: numbers or products that are denormal here and there.
static void spread(std::vector<float>& x, Random& rng, int exponent) {
  for (float& v : x) v = exponent ? ldexpf(v, exponent + (int)rng.between(-8, 8)) : v;
}

// Rows alone, in every number, from every offset, and by ranges of panels: the same bits.
static void test_bits(const Kernels* k, int fmt, Random& rng, int64_t n, int64_t depth, int w_exponent = 0, int x_exponent = 0) {
  const int64_t rows = 64;
  Matrix m(k, fmt, n, depth);
  Operands a(k, fmt, depth, rows);
  std::vector<float> w((size_t)(n * depth)), x((size_t)(rows * depth));
  rng.fill(w, 0.05f);
  rng.fill(x);
  spread(w, rng, w_exponent), spread(x, rng, x_exponent);
  k->pack(&m.m, m.memory.p, 0, m.m.panels, w.data(), nullptr);
  for (int64_t r = 0; r < rows; r++) k->quantize(&a.a, r, r + 1, x.data(), depth, nullptr, nullptr);
  std::vector<float> alone((size_t)(rows * n));
  for (int64_t r = 0; r < rows; r++) { Epilogue e = store_to(alone.data(), n); k->gemm(&m.m, &a.a, r, r + 1, 0, m.m.panels, &e, nullptr); }
  const int64_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 25, 31, 33, 64};
  for (int64_t count : counts) {
    int64_t r0 = rng.between(0, rows - count), cut = rng.between(0, m.m.panels);
    std::vector<float> out((size_t)(rows * n), -7);
    Epilogue e = store_to(out.data(), n);
    k->gemm(&m.m, &a.a, r0, r0 + count, 0, cut, &e, m.m.base);
    k->gemm(&m.m, &a.a, r0, r0 + count, cut, m.m.panels, &e, nullptr);
    bool same = !memcmp(out.data() + r0 * n, alone.data() + r0 * n, (size_t)(count * n * 4));
    for (int64_t i = 0; i < rows * n; i++) if (i < r0 * n || i >= (r0 + count) * n) same = same && out[(size_t)i] == -7;
    if (!CHECK(same)) printf("  bits %s %s n=%ld k=%ld rows %ld+%ld\n", k->name, NAMES[fmt], (long)n, (long)depth, (long)r0, (long)count);
  }
}

// More rows than a block holds, K in several chunks of either size, an epilogue with everything: the bits of rows alone.
static void test_blocks(const Kernels* k, int fmt, Random& rng, int64_t rows, int64_t depth, int kind) {
  const int64_t n = 2 * rng.between(17, 50), outs = kind >= EPI_SILU_MUL ? n / 2 : n;
  Matrix m(k, fmt, n, depth, kind >= EPI_SILU_MUL);
  Operands a(k, fmt, depth, rows);
  std::vector<float> w((size_t)(n * depth)), x((size_t)(rows * depth)), bias((size_t)m.m.panels * 64), res((size_t)(rows * outs));
  rng.fill(w, 0.05f); rng.fill(x); rng.fill(bias); rng.fill(res);
  k->pack(&m.m, m.memory.p, 0, m.m.panels, w.data(), w.data() + n / 2 * depth);
  k->quantize(&a.a, 0, rows, x.data(), depth, nullptr, nullptr);
  std::vector<float> all((size_t)(rows * outs), -7), one(all);
  Epilogue e{kind, all.data(), outs, bias.data(), kind == EPI_ADD ? res.data() : nullptr, outs, kind == EPI_ADD ? 2.0f : 0.0f};
  first_level_bytes = rng.below(2) ? 48 << 10 : 32 << 10;
  k->gemm(&m.m, &a.a, 0, rows, 0, m.m.panels, &e, nullptr);
  e.out = one.data();
  bool same = true;
  for (int64_t r = 0; r < rows; r += r < 2 || r > rows - 19 ? 1 : 13) {
    k->gemm(&m.m, &a.a, r, r + 1, 0, m.m.panels, &e, nullptr);
    same = same && !memcmp(one.data() + r * outs, all.data() + r * outs, (size_t)outs * 4);
  }
  if (!CHECK(same)) printf("  blocks %s %s n=%ld k=%ld rows=%ld epilogue %d\n", k->name, NAMES[fmt], (long)n, (long)depth, (long)rows, kind);
}

static double silu(double x) { return x / (1 + exp(-x)); }
static double gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

static void test_epilogues(const Kernels* k, int fmt, Random& rng) {
  const int64_t n = 2 * rng.between(1, 90), depth = 96, rows = 7, half = n / 2;
  std::vector<float> gate((size_t)(half * depth)), up(gate), w((size_t)(n * depth)), x((size_t)(rows * depth)), res((size_t)(rows * n)), bias((size_t)n);
  rng.fill(gate, 0.2f); rng.fill(up, 0.2f); rng.fill(x); rng.fill(res); rng.fill(bias, 100);
  memcpy(w.data(), gate.data(), gate.size() * 4);
  memcpy(w.data() + gate.size(), up.data(), up.size() * 4);
  Matrix flat(k, fmt, n, depth), both(k, fmt, n, depth, true);
  Operands a(k, fmt, depth, rows);
  k->pack(&flat.m, flat.memory.p, 0, flat.m.panels, w.data(), nullptr);
  k->pack(&both.m, both.memory.p, 0, both.m.panels, gate.data(), up.data());
  k->quantize(&a.a, 0, rows, x.data(), depth, nullptr, nullptr);
  std::vector<float> plain = product(k, flat, a.a, 0, rows, n), out((size_t)(rows * n)), one((size_t)depth), two(one);
  for (int64_t c = 0; c < n; c++) {
    k->unpack_row(&flat.m, c, one.data());
    k->unpack_row(&both.m, c, two.data());
    CHECK(one == two);
  }
  auto at = [&](int64_t i) { return (size_t)i; };
  std::vector<float> packed_bias((size_t)both.m.panels * 64);
  for (int64_t i = 0; i < half; i++) for (int64_t s = 0; s < 2; s++) packed_bias[at(i / 16 * 32 + i % 16 + 16 * s)] = bias[at(s * half + i)];
  bool ok = true;
  for (bool bare : {false, true}) {  // without bias and cap
    if (bare) bias.assign(bias.size(), 0);
    Epilogue e = {EPI_ADD, out.data(), n, bare ? nullptr : bias.data(), res.data(), n, bare ? 0.0f : 3.0f};
    k->gemm(&flat.m, &a.a, 0, rows, 0, flat.m.panels, &e, nullptr);
    for (int64_t i = 0; i < rows * n; i++) {
      const double sum = (double)plain[at(i)] + bias[at(i % n)];
      ok = ok && check::close(out[at(i)], res[at(i)] + (bare ? sum : 3 * tanh(sum / 3)), 2e-6);
    }
    CHECK(ok);
    for (int kind : {EPI_SILU_MUL, EPI_GELU_MUL}) {
      e = {kind, out.data(), half, bare ? nullptr : packed_bias.data(), nullptr, 0, 0};
      out.assign(out.size(), -7);
      k->gemm(&both.m, &a.a, 0, rows, 0, both.m.panels, &e, nullptr);
      for (int64_t r = 0; r < rows; r++) for (int64_t c = 0; c < half; c++) {
        double g = (double)plain[at(r * n + c)] + bias[at(c)], u = (double)plain[at(r * n + half + c)] + bias[at(half + c)];
        ok = ok && check::close(out[at(r * half + c)], (kind == EPI_SILU_MUL ? silu(g) : gelu(g)) * u, 2e-6);
      }
      for (size_t i = at(rows * half); i < out.size(); i++) ok = ok && out[i] == -7;
    }
  }
  if (!CHECK(ok)) printf("  epilogue %s %s n=%ld\n", k->name, NAMES[fmt], (long)n);
}

static float f16_value(Random& rng, int low, int high) {  // a random normal f16 between 2^low and 2^high
  return (float)(1024 + rng.below(1024)) / 1024 * powf(2, (float)rng.between(low, high - 1));
}

// Stored codes come back exactly; scale and offset as f16 hold them (w8pc: as floats).
static void test_codes(const Kernels* k, int fmt, Random& rng, bool interleaved) {
  const int64_t n = 2 * rng.between(1, 50), group = group_of(fmt, 160), depth = fmt == FMT_W8PC ? 160 : group * 3, groups = depth / group;
  std::vector<uint8_t> codes((size_t)(n * depth));
  std::vector<float> scale((size_t)(n * groups)), offset(scale), row((size_t)depth);
  for (uint8_t& c : codes) c = (uint8_t)(is_w4(fmt) ? rng.below(16) : rng.below(255) - 127);
  for (float& s : scale) s = f16_value(rng, -12, -3);
  for (float& o : offset) o = -f16_value(rng, -6, 1);
  Matrix m(k, fmt, n, depth, interleaved);
  k->pack_codes(&m.m, m.memory.p, 0, m.m.panels, codes.data(), scale.data(), is_w4(fmt) ? offset.data() : nullptr);
  bool ok = m.memory.intact();
  for (int64_t c = 0; c < n; c++) {
    k->unpack_row(&m.m, c, row.data());
    for (int64_t i = 0; i < depth; i++) {
      size_t g = (size_t)(c * groups + i / group);
      uint8_t code = codes[(size_t)(c * depth + i)];
      double want = is_w4(fmt) ? (double)scale[g] * code + offset[g] : (double)scale[g] * (int8_t)code;
      double step = fmt >= FMT_W4A16G32 ? 1.0 / 256 : 1.0 / (1 << 23);
      ok = ok && fabs(row[(size_t)i] - want) <= fabs(want) * step;
    }
  }
  if (!CHECK(ok)) printf("  codes %s %s n=%ld\n", k->name, NAMES[fmt], (long)n);
}

// Every table packs the bytes that the generic one packs, and quantises to its codes.
static void test_same_as_generic(const Kernels* k, int fmt, Random& rng) {
  const Kernels* g = octavo_kernels_generic();
  const int64_t n = rng.between(1, 150), depth = rng.between(1, 1300), rows = 3;
  std::vector<float> w((size_t)(n * depth)), x((size_t)(rows * depth)), mul((size_t)depth), scales((size_t)rows);
  rng.fill(w, 0.05f); rng.fill(x); rng.fill(mul); rng.fill(scales);
  Matrix a(k, fmt, n, depth), b(g, fmt, n, depth);
  if (!CHECK(a.m.panel_bytes == b.m.panel_bytes && a.memory.n == b.memory.n)) return;
  k->pack(&a.m, a.memory.p, 0, a.m.panels, w.data(), nullptr);
  g->pack(&b.m, b.memory.p, 0, b.m.panels, w.data(), nullptr);
  if (!CHECK(hash_of(a.memory.p, a.memory.n) == hash_of(b.memory.p, b.memory.n))) printf("  pack %s %s n=%ld k=%ld\n", k->name, NAMES[fmt], (long)n, (long)depth);
  if (!quantised(fmt)) return;
  Operands p(k, fmt, depth, rows), q(g, fmt, depth, rows);
  for (const Operands* o : {&p, &q}) {  // a normed row, a plain one, and one with a scale alone
    const Kernels* t = o == &p ? k : g;
    t->quantize(&o->a, 0, 1, x.data(), depth, mul.data(), scales.data());
    t->quantize(&o->a, 1, 2, x.data(), depth, nullptr, nullptr);
    t->quantize(&o->a, 2, 3, x.data(), depth, nullptr, scales.data());
  }
  CHECK(p.memory.intact());
  bool same = p.a.lda == q.a.lda && p.a.groups == q.a.groups;
  for (int64_t r = 0; r < rows && same; r++) {
    same = !memcmp(p.a.q + r * p.a.lda, q.a.q + r * q.a.lda, (size_t)p.a.kp);
    for (int64_t i = 0; i < p.a.groups; i++) same = same && p.a.z[r * p.a.ldg + i] == q.a.z[r * q.a.ldg + i] && p.a.s[r * p.a.ldg + i] == q.a.s[r * q.a.ldg + i];
  }
  if (!CHECK(same)) printf("  quantize %s %s k=%ld\n", k->name, NAMES[fmt], (long)depth);
}

// Vector tables agree on the bits of a product of the same quantised operands: sums are exact, the float work is the same.
static void test_same_as_vector(const Kernels* k, const Kernels* v, int fmt, Random& rng) {
  if (!quantised(fmt) || k == v) return;
  const int64_t n = rng.between(1, 150), depth = rng.between(1, 600), rows = rng.between(1, 40);
  std::vector<float> w((size_t)(n * depth)), x((size_t)(rows * depth));
  rng.fill(w, 0.05f); rng.fill(x);
  std::vector<float> out[2];
  for (const Kernels* t : {k, v}) {
    Matrix m(t, fmt, n, depth);
    Operands a(t, fmt, depth, rows);
    t->pack(&m.m, m.memory.p, 0, m.m.panels, w.data(), nullptr);
    t->quantize(&a.a, 0, rows, x.data(), depth, nullptr, nullptr);
    out[t == v] = product(t, m, a.a, 0, rows, n);
  }
  if (!CHECK(!memcmp(out[0].data(), out[1].data(), out[0].size() * 4))) printf("  %s and %s, %s\n", k->name, v->name, NAMES[fmt]);
}

// A row with a NaN or an infinity gives no finite output, and its neighbours do not notice.
static void test_not_finite(const Kernels* k, int fmt, Random& rng) {
  const int64_t n = 70, depth = 130, rows = 3;
  std::vector<float> w((size_t)(n * depth)), x((size_t)(rows * depth));
  rng.fill(w, 0.05f); rng.fill(x);
  Matrix m(k, fmt, n, depth);
  Operands a(k, fmt, depth, rows);
  k->pack(&m.m, m.memory.p, 0, m.m.panels, w.data(), nullptr);
  k->quantize(&a.a, 0, rows, x.data(), depth, nullptr, nullptr);
  std::vector<float> before = product(k, m, a.a, 0, rows, n);
  for (float bad : {NAN, INFINITY}) {
    x[(size_t)(depth + rng.below(depth))] = bad;
    k->quantize(&a.a, 0, rows, x.data(), depth, nullptr, nullptr);
    std::vector<float> out = product(k, m, a.a, 0, rows, n);
    bool ok = !memcmp(out.data(), before.data(), (size_t)n * 4) && !memcmp(out.data() + 2 * n, before.data() + 2 * n, (size_t)n * 4);
    for (int64_t c = 0; c < n; c++) ok = ok && !isfinite(out[(size_t)(n + c)]);
    if (!CHECK(ok)) printf("  not finite %s %s\n", k->name, NAMES[fmt]);
  }
}

static void test_sizes(const Kernels* k) {
  auto bytes = [&](int fmt, int64_t n, int64_t depth, int inter) { Mat m{fmt, inter, n, depth, 0, 0, 0, nullptr}; return k->mat_layout(&m); };
  CHECK(bytes(-1, 8, 8, 0) == -1 && bytes(FMT_COUNT, 8, 8, 0) == -1);
  CHECK(bytes(FMT_BF16, 0, 8, 0) == -1 && bytes(FMT_BF16, 8, -1, 0) == -1 && bytes(FMT_BF16, INT64_MAX, 8, 0) == -1);
  CHECK(bytes(FMT_FP32, 7, 8, 1) == -1 && bytes(FMT_W8PC, 8, 1 << 20, 0) == -1);
  CHECK(bytes(FMT_W8G64, 64, 64, 0) == 4224 && bytes(FMT_W4G32, 64, 32, 0) == 1280 && bytes(FMT_BF16, 65, 32, 0) == 8192);
  Act a{FMT_COUNT, 0, 8, 0, 0, 0, nullptr, nullptr, nullptr};
  CHECK(k->act_layout(&a, 4) == -1);
  a.fmt = FMT_FP32;
  CHECK(k->act_layout(&a, INT64_MAX) == -1 && k->act_layout(&a, -1) == -1);
}

int main(int argc, char** argv) {
  const std::vector<const Kernels*> all = check::tables();
  const Kernels* vector = all.size() > 1 ? all[1] : nullptr;  // the first after generic
  for (const Kernels* k : check::tables(argc > 1 ? argv[1] : nullptr)) {
    Random rng(2026);
    long before = check::failures;
    test_sizes(k);
    for (int fmt = 0; fmt < FMT_COUNT; fmt++) {
      test_product(k, fmt, rng, 64, 256, 6);
      for (int i = 0; i < 6; i++) test_product(k, fmt, rng, rng.between(1, 200), rng.between(1, 400), rng.between(1, 21));
      test_bits(k, fmt, rng, rng.between(65, 300), rng.between(60, 500));
      if (fmt == FMT_BF16) test_bits(k, fmt, rng, 40, 90, -60, -68), test_bits(k, fmt, rng, 40, 90, 20, -126);
      for (int i = 0; i < 3; i++) test_epilogues(k, fmt, rng);
      test_blocks(k, fmt, rng, rng.between(17, 80), rng.between(1500, 1900), EPI_ADD);
      test_blocks(k, fmt, rng, 272, rng.between(60, 200), EPI_STORE);
      test_blocks(k, fmt, rng, rng.between(257, 300), rng.between(150, 420), EPI_SILU_MUL);
      if (!is_plain(fmt)) test_codes(k, fmt, rng, false), test_codes(k, fmt, rng, true);
      test_same_as_generic(k, fmt, rng), test_same_as_generic(k, fmt, rng);
      test_not_finite(k, fmt, rng);
      if (vector && k != all[0]) test_same_as_vector(k, vector, fmt, rng), test_same_as_vector(k, vector, fmt, rng);
    }
    printf("%-18s %s\n", k->name, check::failures == before ? "ok" : "FAILED");
  }
  return check::finish("test_gemm");
}
