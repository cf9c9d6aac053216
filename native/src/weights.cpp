// Weights into packed panels: from values, from codes, or straight from the bytes of a file.
//
// Every thread packs the panels that it will mostly read: first touch places them near it. What has to become values first
// does so a piece of a panel at a time, which fits the second-level cache; no copy of a matrix ever exists.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "engine.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kMaxSide = int64_t{1} << 24;  // of a matrix
constexpr int64_t kPiece = 512;                 // inputs that become values at a time: whole groups, whole blocks
constexpr int64_t kGiveBack = int64_t{4} << 20;  // bytes of a mapped file that a thread has read before it gives them back

// Working memory of a thread: the values of a panel's piece; the codes of a panel with their tables.
struct Scratch {
  std::vector<float> values;
  std::vector<uint8_t> codes;
  std::vector<float> scale, offset;
};

struct PackJob {
  const Kernels* kernels;
  const Mat* mat;
  std::vector<Lot> lots;  // [threads]
  const octavo_matrix* given = nullptr;  // values or codes,
  const octavo_stored* halves = nullptr; // or the bytes of a file
  int64_t row_bytes[2] = {0, 0};
  bool blocks = false;  // these go in as they are
  const float *columns = nullptr, *rows = nullptr;  // factors [k] of values, [n] of those of the last half
  std::vector<Scratch> scratch = {};
};

// Rows [row, row + rows) of each half belong to a panel.
struct Share {
  int64_t row, rows;
};

Share share_of(const Mat& mat, int64_t panel) {
  const int64_t width = mat.interleaved ? 32 : 64, n = mat.interleaved ? mat.n / 2 : mat.n;
  return {panel * width, std::min(width, n - panel * width)};
}

// scale * code + offset of inputs [k0, k1) of a row
void dequantize(const octavo_matrix& m, int64_t row, int64_t k0, int64_t k1, float* out) {
  const int64_t groups = (m.k + m.group - 1) / m.group;
  const int8_t* codes = m.codes + row * m.k;
  for (int64_t k = k0; k < k1;) {
    const int64_t g = k / m.group, end = std::min(k1, (g + 1) * m.group);
    const float scale = m.scale[row * groups + g], offset = m.offset != nullptr ? m.offset[row * groups + g] : -0.0f;
    for (; k < end; k++) *out++ = scale * static_cast<float>(codes[k]) + offset;
  }
}

// Where row `row` of a half lies in its file
int64_t stored_row(const PackJob& job, int half, int64_t row) {
  const int32_t heads = job.halves[half].heads;
  if (heads == 0) return row;
  const int64_t dim = job.mat->n / heads, at = row % dim;
  return row - at + at % (dim / 2) * 2 + at / (dim / 2);
}

const uint8_t* stored_bytes(const PackJob& job, int half, int64_t row) {
  return job.halves[half].data + stored_row(job, half, row) * job.row_bytes[half];
}

void values_of(const PackJob& job, int half, int64_t row, int64_t k0, int64_t k1, float* out) {
  if (job.halves == nullptr) return dequantize(*job.given, row + half * job.given->n, k0, k1, out);
  job.kernels->stored_decode(job.halves[half].type, stored_bytes(job, half, row), k0, k1, out);
  if (job.columns != nullptr) job.kernels->scale_mul(out, out, job.columns + k0, 1.0f, k1 - k0);
  if (job.rows != nullptr && half == (job.mat->interleaved ? 1 : 0)) job.kernels->scale_mul(out, out, nullptr, job.rows[row], k1 - k0);
}

// A panel from values, piece by piece along K; w8pc needs the whole row to know its scale.
void pack_values(const PackJob& job, int64_t panel, uint8_t* target, float* values) {
  const Mat& mat = *job.mat;
  const Share share = share_of(mat, panel);
  const int64_t piece = mat.fmt == FMT_W8PC ? mat.k : kPiece;
  const int halves = mat.interleaved ? 2 : 1;
  int64_t done = 0;  // bytes of the panel
  for (int64_t k = 0; k < mat.k; k += piece) {
    Mat part{};
    part.fmt = mat.fmt;
    part.interleaved = mat.interleaved;
    part.n = halves * share.rows;
    part.k = std::min(piece, mat.k - k);
    job.kernels->mat_layout(&part);
    for (int half = 0; half < halves; half++) {
      float* out = values + half * share.rows * part.k;
      for (int64_t r = 0; r < share.rows; r++) values_of(job, half, share.row + r, k, k + part.k, out + r * part.k);
    }
    job.kernels->pack(&part, target + done, 0, 1, values, values + share.rows * part.k);
    done += part.panel_bytes;
  }
}

// A panel of blocks that go in as they are; false where float16 does not hold one of them.
bool pack_blocks(const PackJob& job, int64_t panel, uint8_t* target, Scratch* scratch) {
  const Mat& mat = *job.mat;
  const Share share = share_of(mat, panel);
  const int64_t groups = mat.k / 32, count = mat.interleaved ? 2 : 1;
  for (int64_t i = 0; i < count * share.rows; i++) {
    const int half = static_cast<int>(i / share.rows);
    const uint8_t* row = stored_bytes(job, half, share.row + i % share.rows);
    if (!job.kernels->stored_codes(job.halves[half].type, row, mat.k, scratch->codes.data() + i * mat.k,
                                   scratch->scale.data() + i * groups, scratch->offset.data() + i * groups)) {
      return false;
    }
  }
  Mat part = mat;
  part.n = count * share.rows;
  part.panels = 1;
  job.kernels->pack_codes(&part, target, 0, 1, scratch->codes.data(), scratch->scale.data(),
                          scratch->offset.data());
  return true;
}

// Blocks of 32 are groups of 32; a row of one block is a group of any size.
bool keeps_blocks(const PackJob& job) {
  const int32_t fmt = job.mat->fmt;
  const bool fits = fmt == FMT_W4G32 || fmt == FMT_W4A16G32 || (fmt >= FMT_W4G32 && fmt <= FMT_W4A16G128 && job.mat->k == 32);
  const bool first = job.halves[0].type == 2 || job.halves[0].type == 3;
  return fits && first && (!job.mat->interleaved || job.halves[1].type == 2 || job.halves[1].type == 3);
}

bool take_halves(PackJob* job, const octavo_stored* halves, int32_t count, int64_t n, std::string* error) {
  job->halves = halves;
  for (int32_t i = 0; i < count; i++) {
    job->row_bytes[i] = job->kernels->stored_row_bytes(halves[i].type, job->mat->k);
    const int32_t heads = halves[i].heads;
    const bool turned = heads == 0 || (heads > 0 && count == 1 && n % (2 * int64_t{heads}) == 0);
    if (job->row_bytes[i] < 0 || halves[i].data == nullptr || halves[i].bytes != n * job->row_bytes[i] || !turned) {
      *error = "matrix: a stored type that is not read, bytes that are no whole rows of whole blocks, or no whole heads";
      return false;
    }
  }
  return true;
}

// Whole pages of the rows [begin, end) of each half: read, packed, and not needed again soon.
void give_back(const PackJob& job, int64_t begin, int64_t end) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (int half = 0; half < (job.mat->interleaved ? 2 : 1); half++) {
    if (!job.halves[half].mapped) continue;
    const int64_t data = reinterpret_cast<int64_t>(job.halves[half].data);
    const int64_t from = (data + begin * job.row_bytes[half] + page - 1) / page * page;
    const int64_t to = (data + end * job.row_bytes[half]) / page * page;
    if (to > from) madvise(reinterpret_cast<void*>(from), static_cast<size_t>(to - from), MADV_DONTNEED);
  }
}

void pack_stored_part(const PackJob& job, const Lot& lot, Scratch* scratch) {
  int64_t from = lot.begin < lot.end ? share_of(*job.mat, lot.begin).row : 0;
  for (int64_t panel = lot.begin; panel < lot.end; panel++) {
    uint8_t* target = lot.base + panel * job.mat->panel_bytes;
    if (!job.blocks || !pack_blocks(job, panel, target, scratch)) pack_values(job, panel, target, scratch->values.data());
    const Share share = share_of(*job.mat, panel);
    const int64_t to = share.row + share.rows;
    if ((to - from) * job.row_bytes[0] < kGiveBack && panel + 1 < lot.end) continue;
    give_back(job, from, to);
    from = to;
  }
}

void pack_part(void* argument, int thread) {
  PackJob& job = *static_cast<PackJob*>(argument);
  const Lot& lot = job.lots[static_cast<size_t>(thread)];
  if (job.halves != nullptr) return pack_stored_part(job, lot, &job.scratch[static_cast<size_t>(thread)]);
  const octavo_matrix& m = *job.given;
  if (m.codes != nullptr && m.group != 0) {
    float* values = job.scratch[static_cast<size_t>(thread)].values.data();
    for (int64_t panel = lot.begin; panel < lot.end; panel++) pack_values(job, panel, lot.base + panel * job.mat->panel_bytes, values);
  } else if (m.codes != nullptr) {
    job.kernels->pack_codes(job.mat, lot.base, lot.begin, lot.end, reinterpret_cast<const uint8_t*>(m.codes), m.scale, m.offset);
  } else {
    job.kernels->pack(job.mat, lot.base, lot.begin, lot.end, m.data, m.up);
  }
}

// Nothing is allocated on the threads: an exception there would have nobody to catch it.
void make_scratch(PackJob* job) {
  const Mat& mat = *job->mat;
  job->scratch.resize(job->lots.size());
  for (Scratch& own : job->scratch) {
    own.values.resize(64 * static_cast<size_t>(mat.fmt == FMT_W8PC ? mat.k : std::min(mat.k, kPiece)));
    if (!job->blocks) continue;
    own.codes.resize(64 * static_cast<size_t>(mat.k));
    own.scale.resize(2 * static_cast<size_t>(mat.k));
    own.offset.resize(2 * static_cast<size_t>(mat.k));
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
  PackJob job{kernels, &mat, deal(mat)};
  job.given = &given;
  if (codes && given.group > 0) make_scratch(&job);
  return pack(mat, &job, given.n);
}

int64_t Engine::add_stored(const octavo_matrix& shape, const octavo_stored* halves, int32_t count, std::string* error) {
  Mat mat;
  int64_t bytes;
  if (halves == nullptr || count < 1 || count > 2) {
    *error = "matrix: one half or two";
    return -1;
  }
  if (!layout(shape, &mat, &bytes, error)) return -1;
  PackJob job{kernels, &mat, deal(mat)};
  if (!take_halves(&job, halves, count, shape.n, error)) return -1;
  job.blocks = keeps_blocks(job);
  make_scratch(&job);
  return pack(mat, &job, shape.n);
}

bool Engine::pack_scaled(int64_t number, const octavo_stored* halves, int32_t count, const float* columns, const float* rows,
                         std::string* error) {
  const bool known = number >= 0 && static_cast<size_t>(number) < weights.size() && weights[static_cast<size_t>(number)].is_matrix;
  Weight* w = known ? &weights[static_cast<size_t>(number)] : nullptr;
  if (w == nullptr || halves == nullptr || count != (w->mat.interleaved ? 2 : 1)) {
    *error = "matrix: no such number, or another count of halves";
    return false;
  }
  PackJob job{kernels, &w->mat, w->lots};
  if (!take_halves(&job, halves, count, w->n, error)) return false;
  job.columns = columns;
  job.rows = rows;
  make_scratch(&job);
  Pool::shared().run(threads, pack_part, &job);
  w->undo = nullptr;
  if (columns == nullptr) return true;
  float* undo = memory.take_array<float>((w->k + 15) / 16 * 16);
  for (int64_t i = 0; i < w->k; i++) undo[i] = 1.0f / columns[i];
  w->undo = undo;
  return true;
}

int64_t Engine::add(const Mat& mat, const std::vector<Lot>& lots, int64_t outputs) {
  weights.push_back({true, mat, nullptr, outputs, mat.k, lots});
  return static_cast<int64_t>(weights.size()) - 1;
}

int64_t Engine::pack(const Mat& mat, void* job, int64_t outputs) {
  std::vector<Lot>& lots = static_cast<PackJob*>(job)->lots;
  take(mat, &lots);
  Pool::shared().run(threads, pack_part, job);
  return add(mat, lots, outputs);
}

// Memory is taken and not touched, so it costs nothing.
int64_t Engine::declare_matrix(const octavo_matrix& shape, std::string* error) {
  Mat mat;
  int64_t bytes;
  if (!layout(shape, &mat, &bytes, error)) return -1;
  std::vector<Lot> lots = deal(mat);
  take(mat, &lots);
  return add(mat, lots, shape.n);
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

bool Engine::set_vector(int64_t number, const float* data, int64_t n, std::string* error) {
  const bool known = number >= 0 && static_cast<size_t>(number) < weights.size();
  if (!known || data == nullptr || weights[static_cast<size_t>(number)].is_matrix || weights[static_cast<size_t>(number)].n != n) {
    *error = "vector: no such number, or another length";
    return false;
  }
  memcpy(const_cast<float*>(weights[static_cast<size_t>(number)].values), data, static_cast<size_t>(n) * sizeof(float));
  return true;
}

}  // namespace octavo
