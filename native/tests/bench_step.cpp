// Whole steps of SmolLM2-135M's shape (random weights) through the C interface of one or more builds of the library, taken in
// turn within one process: what a change to the way a step runs is worth.
//   bench_step [-f w8g64] [-k bf16] [-t threads] [-r rounds] [-w microseconds] [-s] [-o] library.so[:isa] ... -- sequences,tokens,cached[,shared] ...
// shared: tokens of a common prefix whose pages all sequences name. -w: this much work of the caller's own between two steps. -s: no draw. -o: time of each kind of record instead.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "octavo_native.h"

namespace {

constexpr int64_t H = 576, HEADS = 9, KV_HEADS = 3, DIM = 64, INNER = 1536, VOCAB = 49152, LAYERS = 30;
constexpr int32_t PAGE = 16;
const char* const FORMATS[] = {"fp32", "bf16", "w8g64", "w8pc", "w4g32", "w4g64", "w4g128", "w4a16g32", "w4a16g64", "w4a16g128"};
const char* const KV_TYPES[] = {"fp32", "bf16", "int8"};

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}
int find_name(const char* const* names, int count, const char* wanted) {
  for (int i = 0; i < count; i++) {
    if (!strcmp(names[i], wanted)) return i;
  }
  fprintf(stderr, "unknown name %s\n", wanted);
  exit(2);
}

struct Point {
  int32_t sequences, tokens, cached, shared;
  int32_t rows() const { return sequences * tokens; }
};

// One build of the library with the model loaded.
struct Build {
  std::string name;
  void* library;
  octavo_engine* engine;
  octavo_kv* kv;
  octavo_program* program;
  std::vector<octavo_op> ops;
  int64_t weight_bytes, token_bytes;
  template <typename F>
  F find(F, const char* symbol) const {
    void* found = dlsym(library, symbol);
    if (found == nullptr) fprintf(stderr, "%s\n", dlerror()), exit(1);
    return reinterpret_cast<F>(found);
  }
#define CALL(b, f) (b).find(&f, #f)
};

std::vector<float> noise(size_t n, float scale) {
  std::mt19937 rng(static_cast<uint32_t>(n));
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> cycle(std::min<size_t>(n, 65537)), values(n);
  for (float& v : cycle) v = normal(rng);
  for (size_t i = 0; i < n; i++) values[i] = cycle[i % cycle.size()];
  return values;
}

void must(int64_t result, const Build& b) {
  if (result < 0) fprintf(stderr, "%s: %s\n", b.name.c_str(), CALL(b, octavo_error)()), exit(1);
}

int32_t add(const Build& b, int format, int64_t n, int64_t k, bool pair = false) {
  static std::map<std::pair<int64_t, int64_t>, std::vector<float>> made;
  std::vector<float>& data = made[{n, k}];
  if (data.empty()) data = noise(static_cast<size_t>(n * k), 0.04f);
  octavo_matrix m{};
  m.format = format, m.interleaved = pair, m.n = n, m.k = k, m.data = data.data(), m.up = pair ? data.data() : nullptr;
  const int64_t number = CALL(b, octavo_add_matrix)(b.engine, &m);
  must(number, b);
  return static_cast<int32_t>(number);
}

octavo_op record(int32_t code) {
  octavo_op op;
  memset(&op, 0, sizeof op);
  op.code = code;
  std::fill(std::begin(op.in), std::end(op.in), OCTAVO_NONE);
  std::fill(std::begin(op.out), std::end(op.out), OCTAVO_NONE);
  std::fill(std::begin(op.w), std::end(op.w), OCTAVO_NONE);
  return op;
}

enum { X, Q, K, V, O, M, S, LOGITS, BUFFERS };

octavo_op linear(std::initializer_list<int32_t> w, int32_t in, std::initializer_list<int32_t> out, int32_t norm, int32_t epilogue, int32_t add_to) {
  octavo_op op = record(OCTAVO_LINEAR);
  std::copy(w.begin(), w.end(), op.w);
  std::copy(out.begin(), out.end(), op.out);
  op.in[0] = in, op.in[1] = add_to, op.w[8] = norm, op.i[0] = epilogue, op.i[1] = static_cast<int32_t>(w.size()), op.f[0] = 1e-5f;
  return op;
}

void load(Build* b, const char* isa, int format, int kv_type, int threads, const Point& most, int64_t pages) {
  b->engine = CALL(*b, octavo_open)(isa, threads);
  if (!b->engine) must(-1, *b);
  const std::vector<float> ones = noise(INNER, 1.0f);
  const auto vector = [&](int64_t n) { return static_cast<int32_t>(CALL(*b, octavo_add_vector)(b->engine, ones.data(), n)); };
  const int head = format >= 4 && format <= 6 ? 2 : format;
  const int32_t table = add(*b, head, VOCAB, H);
  const int64_t embedded = CALL(*b, octavo_weight_bytes)(b->engine);
  octavo_op embed = record(OCTAVO_EMBED);
  embed.out[0] = X, embed.w[0] = table, embed.f[0] = 1;
  b->ops.push_back(embed);
  for (int32_t layer = 0; layer < LAYERS; layer++) {
    const int32_t q = add(*b, format, H, H), k = add(*b, format, KV_HEADS * DIM, H), v = add(*b, format, KV_HEADS * DIM, H);
    b->ops.push_back(linear({q, k, v}, X, {Q, K, V}, vector(H), 0, OCTAVO_NONE));
    octavo_op rope = record(OCTAVO_ROPE_KV), attention = record(OCTAVO_ATTENTION);
    rope.in[0] = Q, rope.in[1] = K, rope.in[2] = V, rope.i[1] = layer, rope.i[2] = DIM;
    attention.in[0] = Q, attention.out[0] = O, attention.i[1] = layer, attention.i[2] = DIM, attention.f[0] = 0.125f;
    b->ops.push_back(rope);
    b->ops.push_back(attention);
    b->ops.push_back(linear({add(*b, format, H, H)}, O, {X}, OCTAVO_NONE, 1, X));
    b->ops.push_back(linear({add(*b, format, INNER, H, true)}, X, {M}, vector(H), 2, OCTAVO_NONE));
    b->ops.push_back(linear({add(*b, format, H, INNER)}, M, {X}, OCTAVO_NONE, 1, X));
  }
  octavo_op select = record(OCTAVO_SELECT);
  select.in[0] = X, select.out[0] = S;
  b->ops.push_back(select);
  b->ops.push_back(linear({table}, S, {LOGITS}, vector(H), 0, OCTAVO_NONE));
  b->weight_bytes = CALL(*b, octavo_weight_bytes)(b->engine);
  (void)embedded;
  b->kv = CALL(*b, octavo_kv_open)(b->engine, kv_type, PAGE, KV_HEADS, DIM, LAYERS, pages);
  if (!b->kv) must(-1, *b);
  b->token_bytes = CALL(*b, octavo_kv_page_bytes)(b->kv) / PAGE;
  const std::vector<float> kv_row = noise(KV_HEADS * DIM + 64, 1.0f);
  for (int64_t slot = 0; slot < pages * PAGE; slot++) {
    for (int32_t layer = 0; layer < LAYERS; layer++) CALL(*b, octavo_kv_write)(b->kv, layer, slot, kv_row.data() + slot % 61, kv_row.data() + slot % 59);
  }
  const int64_t widths[BUFFERS] = {H, H, KV_HEADS * DIM, KV_HEADS * DIM, H, INNER, H, VOCAB};
  octavo_buffer buffers[BUFFERS];
  for (int i = 0; i < BUFFERS; i++) buffers[i] = {i >= S ? OCTAVO_ROWS_R : OCTAVO_ROWS_T, 0, widths[i]};
  std::vector<double> frequencies;
  for (int64_t j = 0; j < DIM / 2; j++) frequencies.push_back(__builtin_pow(1e5, -2.0 * static_cast<double>(j) / DIM));
  const octavo_rope turn{frequencies.data(), 1.0, DIM / 2};
  std::vector<int32_t> group(LAYERS, 0), index(LAYERS);
  for (int32_t i = 0; i < LAYERS; i++) index[static_cast<size_t>(i)] = i;
  octavo_program_spec spec{};
  spec.size = sizeof spec, spec.num_buffers = BUFFERS, spec.num_ops = static_cast<int32_t>(b->ops.size()), spec.num_ropes = 1;
  spec.num_layers = LAYERS, spec.num_groups = 1, spec.max_tokens = most.tokens, spec.max_sequences = most.sequences;
  spec.max_logit_rows = most.sequences, spec.max_positions = most.cached, spec.vocab_size = VOCAB, spec.logits = LOGITS, spec.hidden = OCTAVO_NONE;
  spec.buffers = buffers, spec.ops = b->ops.data(), spec.ropes = &turn, spec.layer_group = group.data(), spec.layer_index = index.data();
  b->program = CALL(*b, octavo_program_open)(b->engine, b->kv, &spec);
  if (!b->program) must(-1, *b);
}

// A step's arrays.
struct Batch {
  std::vector<int32_t> ids, positions, starts, slots, table, rows, sampled;
  std::vector<octavo_sampling> draws;
  octavo_step step{};

  explicit Batch(const Point& p, bool draw) {
    std::mt19937 rng(7);
    const int32_t each = (p.cached + p.tokens + PAGE - 1) / PAGE, common = p.shared / PAGE;
    std::vector<int32_t> order(static_cast<size_t>(each) * static_cast<size_t>(p.sequences));
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    starts.push_back(0);
    for (int32_t s = 0; s < p.sequences; s++) {
      for (int32_t t = 0; t < p.tokens; t++) ids.push_back(static_cast<int32_t>(rng() % VOCAB)), positions.push_back(p.cached + t);
      starts.push_back(static_cast<int32_t>(ids.size()));
      rows.push_back(static_cast<int32_t>(ids.size()) - 1);
      slots.push_back(s);
      for (int32_t i = 0; i < each; i++) table.push_back(order[static_cast<size_t>((i < common ? 0 : s) * each + i)]);
      octavo_sampling d{};
      d.row = s;
      draws.push_back(d);
    }
    sampled.resize(static_cast<size_t>(p.sequences));
    step.size = sizeof step, step.tokens = p.rows(), step.sequences = p.sequences, step.logit_rows = p.sequences;
    step.samples = draw ? p.sequences : 0, step.table_width = each, step.table_rows = p.sequences;
    step.token_ids = ids.data(), step.positions = positions.data(), step.starts = starts.data(), step.table_row = slots.data();
    step.page_table = table.data(), step.rows = rows.data(), step.sampling = draws.data(), step.sampled = sampled.data();
  }
};

const char* label(const octavo_op& op) {
  switch (op.code) {
    case OCTAVO_EMBED: return "embed";
    case OCTAVO_ROPE_KV: return "rope";
    case OCTAVO_ATTENTION: return "attention";
    case OCTAVO_SELECT: return "select";
    default: return op.i[1] == 3 ? "qkv" : op.out[0] == LOGITS ? "head" : op.i[0] == 2 ? "gate/up" : op.in[0] == M ? "down" : "o";
  }
}

uint32_t checksum(const Build& b, const Batch& batch) {
  int64_t stride = 0;
  const float* logits = CALL(b, octavo_logits)(b.program, &stride);
  uint32_t sum = 0;
  for (int64_t r = 0; r < batch.step.logit_rows; r++) {
    for (int64_t i = 0; i < VOCAB; i++) {
      uint32_t bits;
      memcpy(&bits, logits + r * stride + i, 4);
      sum = sum * 31 + bits;
    }
  }
  return sum;
}

void work_for(double seconds) {
  const double end = now() + seconds;
  volatile double x = 1;
  while (now() < end) x = x * 1.0001;
}

void times(const std::vector<Build>& builds, const Point& p, int rounds, bool draw, bool by_record, double wait) {
  Batch batch(p, draw);
  std::vector<std::vector<double>> took(builds.size());
  std::vector<std::map<std::string, std::vector<double>>> parts(builds.size());
  std::vector<double> read, meet;
  for (int round = 0; round <= rounds; round++) {
    for (size_t turn = 0; turn < builds.size(); turn++) {
      const size_t i = (turn + static_cast<size_t>(round)) % builds.size();  // whoever comes first finds its own threads awake
      const Build& b = builds[i];
      const int steps = p.rows() >= 128 ? 1 : p.rows() >= 16 ? 3 : 8;
      for (int s = 0; s <= steps; s++) {
        std::vector<double> seconds(b.ops.size());
        work_for(wait);
        const double begin = now();
        must(by_record ? CALL(b, octavo_run_timed)(b.program, &batch.step, seconds.data()) : CALL(b, octavo_run)(b.program, &batch.step), b);
        if (round > 0 && s > 0) took[i].push_back(now() - begin);
        if (!by_record || round == 0 || s == 0) continue;
        std::map<std::string, double> sums;
        for (size_t o = 0; o < b.ops.size(); o++) sums[label(b.ops[o])] += seconds[o];
        for (const auto& [name, sum] : sums) parts[i][name].push_back(sum);
      }
    }
    const Build& any = builds[0];
    const int32_t threads = CALL(any, octavo_threads)(any.engine);
    read.push_back(CALL(any, octavo_measure_read)(any.engine, threads, int64_t{128} << 20, 1));
    meet.push_back(CALL(any, octavo_measure_barrier)(any.engine, threads, 2000, 1));
  }
  const double rate = median(read);
  printf("%d x %d behind %d", p.sequences, p.tokens, p.cached);
  if (p.shared) printf(" (%d shared)", p.shared);
  printf(": read %.1f GB/s, barrier %.0f ns\n", rate / 1e9, 1e9 * median(meet));
  for (size_t i = 0; i < builds.size(); i++) {
    const Build& b = builds[i];
    const double m = median(took[i]), least = *std::min_element(took[i].begin(), took[i].end());
    const double kv = static_cast<double>(b.token_bytes) * p.sequences * (p.cached + p.tokens);
    const double bound = (static_cast<double>(b.weight_bytes) + kv) / rate;
    printf("  %-28s %8.3f ms, least %8.3f, bound %.3f (%.0f%%), %.0f rows/s, bits %08x\n", b.name.c_str(), 1e3 * m, 1e3 * least, 1e3 * bound, 100 * bound / m,
           p.rows() / m, checksum(b, batch));
    for (const auto& [name, each] : parts[i]) printf("    %-10s %8.1f us\n", name.c_str(), 1e6 * median(each));
  }
  fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int format = 2, kv_type = 1, threads = 0, rounds = 5, at = 1;
  bool draw = true, by_record = false;
  double wait = 0;
  std::vector<std::string> paths;
  for (; at < argc && strcmp(argv[at], "--"); at++) {
    const std::string a = argv[at];
    if (a == "-f") format = find_name(FORMATS, 10, argv[++at]);
    else if (a == "-k") kv_type = find_name(KV_TYPES, 3, argv[++at]);
    else if (a == "-t") threads = atoi(argv[++at]);
    else if (a == "-r") rounds = atoi(argv[++at]);
    else if (a == "-w") wait = 1e-6 * atof(argv[++at]);
    else if (a == "-s") draw = false;
    else if (a == "-o") by_record = true, draw = false;
    else paths.push_back(a);
  }
  std::vector<Point> points;
  Point most{1, 1, 1, 0};
  int64_t pages = 1;
  for (at++; at < argc; at++) {
    Point p{1, 1, 0, 0};
    sscanf(argv[at], "%d,%d,%d,%d", &p.sequences, &p.tokens, &p.cached, &p.shared);
    points.push_back(p);
    most.sequences = std::max(most.sequences, p.sequences);
    most.tokens = std::max(most.tokens, p.rows());
    most.cached = std::max(most.cached, p.cached + p.tokens);
    pages = std::max<int64_t>(pages, int64_t{p.sequences} * ((p.cached + p.tokens + PAGE - 1) / PAGE));
  }
  std::vector<Build> builds;
  for (const std::string& path : paths) {
    Build b{};
    const size_t colon = path.find(':');
    for (size_t at = path.find('@'); at != std::string::npos; at = path.find('@', at + 1)) putenv(strdup(path.substr(at + 1, path.find('@', at + 1) - at - 1).c_str()));
    b.name = path.substr(path.rfind('/') + 1);
    b.library = dlopen(path.substr(0, path.find_first_of(":@")).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!b.library) fprintf(stderr, "%s\n", dlerror()), exit(1);
    load(&b, colon == std::string::npos ? nullptr : path.c_str() + colon + 1, format, kv_type, threads, most, pages);
    builds.push_back(b);
  }
  if (builds.empty() || points.empty()) return fprintf(stderr, "usage: bench_step library.so ... -- sequences,tokens,cached ...\n"), 2;
  for (const Point& p : points) times(builds, p, rounds, draw, by_record, wait);
  return 0;
}
