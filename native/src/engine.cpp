#include "engine.h"

#include <string.h>

#include <algorithm>
#include <vector>

#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kMaxSide = int64_t{1} << 24;  // of a matrix

struct PackJob {
  const Kernels* kernels;
  const Mat* mat;
  const octavo_matrix* given;
  uint8_t* target;
  int threads;
  std::vector<float> values;  // [threads, 64, k] where codes are rounded anew
};

// scale * code + offset of rows [row, row + rows)
void dequantize(const octavo_matrix& m, int64_t row, int64_t rows, float* out) {
  const int64_t groups = (m.k + m.group - 1) / m.group;
  for (int64_t r = row; r < row + rows; r++, out += m.k) {
    for (int64_t g = 0; g < groups; g++) {
      const float scale = m.scale[r * groups + g], offset = m.offset != nullptr ? m.offset[r * groups + g] : -0.0f;
      const int64_t end = std::min(m.k, (g + 1) * m.group);
      for (int64_t i = g * m.group; i < end; i++) out[i] = scale * static_cast<float>(m.codes[r * m.k + i]) + offset;
    }
  }
}

// A panel is packed as a matrix of its own rows, whose values fit the cache.
void pack_anew(const PackJob& job, int64_t panel, float* values) {
  const octavo_matrix& m = *job.given;
  const int64_t width = m.interleaved ? 32 : 64, row = panel * width, rows = std::min(width, m.n - row);
  float* up = values + rows * m.k;
  Mat part = *job.mat;
  part.n = m.interleaved ? 2 * rows : rows;
  part.panels = 1;
  dequantize(m, row, rows, values);
  if (m.interleaved) dequantize(m, m.n + row, rows, up);
  job.kernels->pack(&part, job.target + panel * job.mat->panel_bytes, 0, 1, values, up);
}

// Each thread packs the panels that it will mostly read: first touch places them near it.
void pack_part(void* argument, int thread) {
  auto& job = *static_cast<PackJob*>(argument);
  const int64_t begin = job.mat->panels * thread / job.threads, end = job.mat->panels * (thread + 1) / job.threads;
  const octavo_matrix& m = *job.given;
  if (m.codes != nullptr && m.group != 0) {
    float* values = job.values.data() + static_cast<size_t>(thread) * 64 * static_cast<size_t>(m.k);
    for (int64_t panel = begin; panel < end; panel++) pack_anew(job, panel, values);
  } else if (m.codes != nullptr) {
    job.kernels->pack_codes(job.mat, job.target, begin, end, reinterpret_cast<const uint8_t*>(m.codes), m.scale, m.offset);
  } else {
    job.kernels->pack(job.mat, job.target, begin, end, m.data, m.up);
  }
}

}  // namespace

bool Engine::layout(const octavo_matrix& given, Mat* mat, int64_t* bytes, std::string* error) const {
  const bool inside = given.n > 0 && given.k > 0 && given.n <= kMaxSide && given.k <= kMaxSide;
  if (!inside || given.format < 0 || given.format >= FMT_COUNT) {
    *error = "matrix: size or format out of range";
    return false;
  }
  *mat = Mat{};
  mat->fmt = given.format;
  mat->interleaved = given.interleaved != 0;
  mat->n = given.interleaved ? 2 * given.n : given.n;
  mat->k = given.k;
  *bytes = kernels->mat_layout(mat);
  if (*bytes < 0) *error = "matrix: this instruction set has no kernel for the format";
  return *bytes >= 0;
}

int64_t Engine::add_matrix(const octavo_matrix& given, std::string* error) {
  Mat mat;
  int64_t bytes;
  if (!layout(given, &mat, &bytes, error)) return -1;
  const bool codes = given.codes != nullptr && given.scale != nullptr && given.group >= 0 && given.group <= given.k;
  if (codes && given.group == 0 && (given.format == FMT_FP32 || given.format == FMT_BF16)) {
    *error = "matrix: the format has no codes";
    return -1;
  }
  if (given.codes != nullptr ? !codes : (given.data == nullptr || (given.interleaved && given.up == nullptr))) {
    *error = "matrix: neither values nor codes were given";
    return -1;
  }
  uint8_t* target = memory.take(bytes);
  mat.base = target;
  PackJob job{kernels, &mat, &given, target, threads, {}};
  if (codes && given.group > 0) job.values.resize(static_cast<size_t>(threads) * 64 * static_cast<size_t>(given.k));
  Pool::shared().run(threads, pack_part, &job);
  weights.push_back({true, mat, nullptr, given.n, given.k});
  return static_cast<int64_t>(weights.size()) - 1;
}

int64_t Engine::add_vector(const float* data, int64_t n, std::string* error) {
  if (data == nullptr || n <= 0 || n > kMaxSide) {
    *error = "vector: size out of range";
    return -1;
  }
  float* target = memory.take_array<float>((n + 15) / 16 * 16);
  memcpy(target, data, static_cast<size_t>(n) * sizeof(float));
  weights.push_back({false, Mat{}, target, n, 0});
  return static_cast<int64_t>(weights.size()) - 1;
}

void Engine::make_draws(int64_t vocab_size) {
  if (vocab_size <= draw_width) return;
  draws.resize(static_cast<size_t>(threads));
  for (SampleScratch& own : draws) own.allocate(&memory, vocab_size);
  draw_width = vocab_size;
}

bool kv_layout(const Kernels* kernels, KV* kv, int32_t layers) {
  const int32_t p = kv->page_size;
  const bool known = kv->type >= 0 && kv->type < KV_COUNT && layers > 0 && layers <= 4096;
  const bool sized = p >= 16 && p <= 4096 && (p & (p - 1)) == 0;
  const bool heads = kv->kv_heads > 0 && kv->kv_heads <= 1024 && kv->dim > 0 && kv->dim <= 1024;
  if (!known || !sized || !heads || kernels->kv_layout(kv) < 0) return false;
  kv->page_bytes = kv->layer_bytes * layers;
  return true;
}

void copy_page(const Pages& pages, int64_t source, int64_t target) {
  const size_t bytes = static_cast<size_t>(pages.kv.page_bytes);
  memmove(pages.blob(0, target, 0), pages.blob(0, source, 0), bytes);
}

// Through float32, which holds a stored value exactly: what is written again are the same bytes.
void move_slot(const Pages& pages, int64_t source, int64_t target, float* scratch) {
  const KV& kv = pages.kv;
  for (int32_t layer = 0; layer < pages.layers; layer++) {
    for (int32_t head = 0; head < kv.kv_heads; head++) {
      const uint8_t* from = pages.blob(layer, source / kv.page_size, head);
      uint8_t* to = pages.blob(layer, target / kv.page_size, head);
      pages.kernels->kv_read(&kv, from, source % kv.page_size, scratch, scratch + kv.dim);
      pages.kernels->kv_write(&kv, to, target % kv.page_size, scratch, scratch + kv.dim);
    }
  }
}

}  // namespace octavo
