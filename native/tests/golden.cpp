// Vectors of one machine that another is held against:
//   golden write FILE    what the generic table gives here
//   golden check FILE    whether every table that runs here gives the same
// Stored bytes, integers and random numbers are the same everywhere. Sums of floats may differ between instruction sets in
// their last bits: they are compared to the largest value of their vector.
#include <map>
#include <string>

#include "../src/sampling.h"
#include "adapters_fixture.h"
#include "attention_fixture.h"

using namespace check;
using octavo::Kernels;

namespace {

std::vector<float> floats(int64_t n) { return std::vector<float>(static_cast<size_t>(n), 0.0f); }

struct Entry {
  std::string hash;            // of bytes that are the same everywhere, or
  std::vector<float> values;   // close to these
  double tolerance = 0;        // times the largest of them
};
using Entries = std::map<std::string, Entry>;

std::string hash_of(const void* bytes, int64_t n) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < n; i++) hash = (hash ^ static_cast<const uint8_t*>(bytes)[i]) * 0x100000001b3u;
  char text[17];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

// A product: the packed matrix and, where the format rounds them to integers, the rows byte by byte; the sums nearly.
void products(const Kernels* k, int32_t fmt, Entries* out) {
  const std::string name = "format" + std::to_string(fmt);
  const int64_t n = 150, depth = 384, rows = 5;
  Random random(100u + uint64_t(fmt));
  auto w = floats(n * depth), x = floats(rows * depth), sums = floats(rows * n), row = floats(depth);
  random.fill(w, 0.05f);
  random.fill(x);
  octavo::Mat mat{fmt, 0, n, depth, 0, 0, 0, nullptr};
  Buffer packed(k->mat_layout(&mat));
  mat.base = packed.p;
  k->pack(&mat, packed.p, 0, mat.panels, w.data(), nullptr);
  (*out)[name + " pack"].hash = hash_of(packed.p, packed.n);
  k->unpack_row(&mat, n - 1, row.data());
  (*out)[name + " row"].hash = hash_of(row.data(), depth * 4);

  octavo::Act act{fmt, 0, depth, 0, 0, 0, nullptr, nullptr, nullptr};
  Buffer memory(check::operand_bytes(k, &act, rows));
  act.q = memory.p;
  act.z = reinterpret_cast<int32_t*>(act.q + rows * act.lda);
  act.s = reinterpret_cast<float*>(act.z + rows * act.ldg);
  k->quantize(&act, 0, rows, x.data(), depth, nullptr, nullptr);
  const bool integers = fmt >= octavo::FMT_W8G64 && fmt <= octavo::FMT_W4G128;
  for (int64_t r = 0; r < rows && integers; r++) {
    const std::string at = name + " quantize " + std::to_string(r);
    (*out)[at + " q"].hash = hash_of(act.q + r * act.lda, act.kp);
    (*out)[at + " z"].hash = hash_of(act.z + r * act.ldg, act.groups * 4);
    (*out)[at + " s"].hash = hash_of(act.s + r * act.ldg, act.groups * 4);
  }
  octavo::Epilogue store{octavo::EPI_STORE, sums.data(), n, nullptr, nullptr, 0, 0};
  k->gemm(&mat, &act, 0, rows, 0, mat.panels, &store, nullptr);
  // Tables without bf16 products multiply the unrounded activations.
  (*out)[name + " product"] = {"", sums, fmt == octavo::FMT_BF16 || fmt >= octavo::FMT_W4A16G32 ? 4e-3 : 2e-6};
}

// Attention over pages of one type: the pages byte by byte, the result nearly.
void attention(const Kernels* k, int32_t type, Entries* out) {
  const std::string name = "kv" + std::to_string(type);
  const int64_t dim = 64, context = 700, rows = 9;
  Random random(200u + uint64_t(type));
  Sequence sequence(random, context, dim);
  Pages pages(k, random, type, 32, 1, int32_t(dim), context);
  for (int64_t p = 0; p < context; p++) pages.write(sequence, p, p, 0);
  const int64_t bytes = (context + 31) / 32 * pages.kv.page_bytes;
  (*out)[name + " pages"].hash = hash_of(pages.kv.base, bytes);
  Query query(random, rows, context - rows, 3, dim, 4.0f);
  auto result = floats(rows * 3 * dim);
  attend(pages, query, 0, 0, rows, result.data());
  const double tolerance = type == octavo::KV_FP32 ? 1e-5 : 2e-2;
  (*out)[name + " attention"] = {"", result, tolerance};
  Query tree = query, sunk = query;
  for (int32_t r = 0; r < rows; r++) tree.parents.push_back(int32_t(random.below(r + 1)) - 1);
  attend(pages, tree, 0, 0, rows, result.data());
  (*out)[name + " tree"] = {"", result, tolerance};
  sunk.window = 100, sunk.sink(7, dim / 2);
  attend(pages, sunk, 0, 0, rows, result.data());
  (*out)[name + " sinks"] = {"", result, tolerance};
}

// Tokens of one page that move to others, byte by byte.
void moves(const Kernels* k, int32_t type, Entries* out) {
  const int64_t dim = 20, slots = 64;
  EnginePtr engine(octavo_open(k->name, 1));
  KVPtr kv(octavo_kv_open(engine.get(), type, 16, 2, dim, 1, slots / 16));
  Random random(250u + uint64_t(type));
  auto key = floats(2 * dim), value = floats(2 * dim);
  for (int64_t slot = 0; slot < slots; slot++) {
    random.fill(key), random.fill(value);
    CHECK(octavo_kv_write(kv.get(), 0, slot, key.data(), value.data()) == 0);
  }
  std::vector<int64_t> pairs;
  for (int i = 0; i < 40; i++) pairs.push_back(random.below(slots));
  CHECK(octavo_kv_move_slots(kv.get(), pairs.data(), 20) == 0);
  (*out)["kv" + std::to_string(type) + " moved"].hash = hash_of(octavo_kv_page(kv.get(), 0), slots / 16 * octavo_kv_page_bytes(kv.get()));
}

// Logits of a program with adapters, several in one step.
void adapters(const Kernels* k, bool half, Entries* out) {
  Random random(500u + half);
  Adapted adapted(k->name, 1, octavo::FMT_FP32, octavo::KV_FP32, 16, 3, 37, half);
  adapted.fill(random);
  Advance all(adapted.program.get(), 16, 5, random);
  Step step;
  for (int32_t s = 0; s < 5; s++) step.add(random_tokens(random, 5), 0, s == 2 ? 5 : 1, s);
  step.places = {0, 1, 0, OCTAVO_NONE, 2};
  all.place(&step);
  (*out)[half ? "adapters bf16" : "adapters fp32"] = {"", all.run(&step), half ? 3e-2 : 1e-5};
}

void rows(const Kernels* k, Entries* out) {
  const int64_t n = 577, heads = 3, dim = 64;
  Random random(300);
  auto x = floats(n), w = floats(n), y = floats(n);
  random.fill(x);
  random.fill(w);
  float scale = 0;
  k->inv_rms(x.data(), n, 0, 1, n, 1e-5f, &scale);
  (*out)["inv_rms"] = {"", {scale}, 1e-6};
  k->layer_norm(y.data(), x.data(), w.data(), nullptr, 1e-5f, n);
  (*out)["layer_norm"] = {"", y, 1e-5};
  k->gated(y.data(), x.data(), w.data(), octavo::EPI_SILU_MUL, n);
  (*out)["silu"] = {"", y, 1e-5};
  k->gated(y.data(), x.data(), w.data(), octavo::EPI_GELU_MUL, n);
  (*out)["gelu"] = {"", y, 1e-5};
  k->qk_norm(x.data(), heads, dim, w.data(), 1e-6f);
  k->rope(x.data(), heads, dim, dim, w.data(), y.data());
  (*out)["head_norm_rope"] = {"", std::vector<float>(x.begin(), x.begin() + heads * dim), 1e-5};
}

void sampling(const Kernels* k, Entries* out) {
  const int64_t n = 5000;
  std::vector<int32_t> ids(static_cast<size_t>(n + octavo::kBlock));
  std::vector<uint32_t> words(static_cast<size_t>(n));
  auto x = floats(n), blocks = floats(n / octavo::kBlock + 1), masked = floats(n);
  for (int32_t i = 0; i < n; i++) ids[size_t(i)] = i;
  const octavo::Noise at{0x123456789abcdefu, 7, 11, 1};
  k->noise_words(words.data(), ids.data(), n, &at);
  (*out)["words"].hash = hash_of(words.data(), n * 4);
  Random random(400);
  random.fill(x, 9);
  const float top = k->maxima(x.data(), n, blocks.data());
  (*out)["maxima"].hash = hash_of(blocks.data(), (n / octavo::kBlock + 1) * 4);
  const int64_t found = k->gather(x.data(), n, blocks.data(), 7.5f, 8.5f, ids.data());
  (*out)["gather"].hash = hash_of(ids.data(), found * 4);
  const int64_t rank = k->rank_of(x.data(), n, 77);
  (*out)["rank"].hash = hash_of(&rank, 8);
  k->mask_row(masked.data(), x.data(), n, reinterpret_cast<const uint8_t*>(words.data()), n / 8 - 3);
  (*out)["mask"].hash = hash_of(masked.data(), n * 4);
  (*out)["sum_exp"] = {"", {float(k->sum_exp(x.data(), n, top, 0.8f, nullptr, nullptr))}, 1e-6};
}

// What each of the rarer samplers leaves, as a set of ids.
void shapes(const Kernels* k, Entries* out) {
  const int64_t n = 5000;
  auto x = floats(n), shaped = floats(n), values = floats(n), weights = floats(n), blocks = floats(n / octavo::kBlock + 1);
  std::vector<int32_t> ids(static_cast<size_t>(n + octavo::kBlock));
  std::vector<uint8_t> marks(static_cast<size_t>(n));
  octavo::SampleScratch own;
  own.values = values.data(), own.shaped = shaped.data(), own.weights = weights.data(), own.blocks = blocks.data(), own.ids = ids.data(), own.marks = marks.data();
  Random random(450);
  random.fill(x, 6);
  const octavo_shape alone[] = {{0.5, 0, 0, 0, 0, 0}, {0, 1.2, 0, 0, 0, 0}, {0, 0, 1, 0.0006, 0, 0}, {0, 0, 0, 0, 0.5, 2}, {0.9, 1.5, 1, 0.001, 0.3, 1}};
  for (int which = 0; which < 7; which++) {
    octavo_sampling w{0, 0, 1, 1, 0, 5, 6, 7, 8, which < 5 ? 0 : which == 5 ? 9.5f : -9.5f, nullptr, nullptr, which < 5 ? alone[which] : octavo_shape{}};
    const octavo_sampling left = octavo::shape_row(octavo::LogitRow(*k, x.data(), n, own), w);
    (*out)["shape " + std::to_string(which)].hash = hash_of(shaped.data(), n * 4);
    (*out)["shape " + std::to_string(which) + " temperature"] = {"", {float(left.temperature)}, 1e-5};
    const int32_t id = octavo::sample_row(*k, x.data(), n, w, own);
    (*out)["shape " + std::to_string(which) + " drawn"].hash = hash_of(&id, 4);
  }
}

Entries compute(const Kernels* k) {
  Entries out;
  for (int32_t fmt = 0; fmt < octavo::FMT_COUNT; fmt++) products(k, fmt, &out);
  for (int32_t type = 0; type < octavo::KV_COUNT; type++) attention(k, type, &out), moves(k, type, &out);
  for (const bool half : {false, true}) adapters(k, half, &out);
  rows(k, &out);
  sampling(k, &out);
  shapes(k, &out);
  return out;
}

// A line an entry: name|hash|tolerance|values, the floats in hexadecimal
int write(const char* path) {
  FILE* file = fopen(path, "w");
  if (file == nullptr) return perror(path), 1;
  for (const auto& [name, entry] : compute(octavo::octavo_kernels_generic())) {
    fprintf(file, "%s|%s|%a|", name.c_str(), entry.hash.c_str(), entry.tolerance);
    for (float v : entry.values) fprintf(file, "%a ", double(v));
    fprintf(file, "\n");
  }
  return fclose(file);
}

bool read(const char* path, Entries* out) {
  FILE* file = fopen(path, "r");
  if (file == nullptr) return perror(path), false;
  std::string line;
  for (int c = fgetc(file); c != EOF; c = fgetc(file)) {
    if (c != '\n') { line += char(c); continue; }
    const size_t first = line.find('|'), second = line.find('|', first + 1);
    Entry entry;
    entry.hash = line.substr(first + 1, second - first - 1);
    char* at = nullptr;
    entry.tolerance = strtod(line.c_str() + second + 1, &at);
    for (char *from = at + 1, *next = from;; from = next) {
      const float value = strtof(from, &next);
      if (next == from) break;
      entry.values.push_back(value);
    }
    (*out)[line.substr(0, first)] = entry;
    line.clear();
  }
  return fclose(file) == 0 && !out->empty();
}

bool agree(const Entry& want, const Entry& got) {
  if (want.hash != got.hash || want.values.size() != got.values.size()) return false;
  double largest = 0;
  for (float v : want.values) largest = fabs(v) > largest ? fabs(v) : largest;
  for (size_t i = 0; i < want.values.size(); i++)
    if (!(fabs(double(want.values[i]) - got.values[i]) <= want.tolerance * largest)) return false;
  return true;
}

int compare(const char* path) {
  Entries want;
  if (!read(path, &want)) return 1;
  for (const Kernels* k : tables()) {
    const long before = failures;
    Entries got = compute(k);
    CHECK(got.size() == want.size());
    for (const auto& [name, entry] : want)
      if (!CHECK(agree(entry, got[name]))) printf("  %s: %s\n", k->name, name.c_str());
    printf("%-18s %s\n", k->name, failures == before ? "ok" : "FAILED");
  }
  return finish("golden");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && !strcmp(argv[1], "write")) return write(argv[2]);
  if (argc == 3 && !strcmp(argv[1], "check")) return compare(argv[2]);
  fprintf(stderr, "usage: golden write|check FILE\n");
  return 2;
}
