// The C ABI over the classes: nothing but argument checks and errors turned into numbers.
#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "adapters.h"
#include "cpus.h"
#include "dispatch.h"
#include "measure.h"
#include "pool.h"
#include "program.h"

using namespace octavo;

struct octavo_engine {
  Engine engine;
};
struct octavo_kv {
  Pages pages;
};
struct octavo_program {
  octavo_program(Engine* engine, Pages* pages) : program(engine, pages) {}
  Program program;
};

namespace {

constexpr const char* kKernelVersion = "5";
constexpr const char* kNoRecord = "a record or handle is missing";
constexpr const char* kNoArray = "an array is missing";
constexpr int64_t kWidest = int64_t{1} << 24;  // columns of logits

std::string& last_error() {
  static thread_local std::string text;
  return text;
}

// What `body` returns, or `failed` with the reason kept: no exception crosses the ABI.
template <typename Result, typename Body>
Result guarded(Result failed, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    last_error() = "out of memory, or a size that no memory has";
  } catch (const std::exception& error) {
    last_error() = error.what();
  }
  return failed;
}

int32_t fail(const char* what) {
  last_error() = what;
  return -1;
}

// Arrays of pairs: more than any pool has pages or slots to name is a mistake.
bool wrong_count(const void* array, int64_t count) { return count < 0 || count > INT32_MAX || (count > 0 && array == nullptr); }

std::string join_names() {
  std::string names;
  for (const Kernels* table : usable_tables()) names += std::string(names.empty() ? "" : " ") + table->name;
  return names;
}

bool describe_kv(const Kernels* kernels, KV* kv, int32_t type, int32_t page_size, int32_t kv_heads, int32_t head_dim, int32_t layers) {
  *kv = KV{};
  kv->type = type;
  kv->page_size = page_size;
  kv->kv_heads = kv_heads;
  kv->dim = head_dim;
  if (kv_layout(kernels, kv, layers)) return true;
  last_error() = "pages: no kernel takes this type, head size or page size (16 * 2^n)";
  return false;
}

// body(i, thread) for each of `count` rows, on the pool.
template <typename Body>
void for_each_row(const Engine& engine, int32_t count, const Body& body) {
  struct Job {
    const Body* body;
    int32_t threads, count;
  } job{&body, std::min(engine.threads, count), count};
  const auto part = [](void* argument, int thread) {
    const Job& mine = *static_cast<const Job*>(argument);
    for (int32_t i = thread; i < mine.count; i += mine.threads) (*mine.body)(i, thread);
  };
  if (count > 0) Pool::shared().run(job.threads, part, &job);
}

const char* wrong_rows(const float* logits, int64_t rows, int64_t stride, int64_t vocab_size, int32_t count, const void* records,
                       const void* out) {
  if (vocab_size < 1 || vocab_size > stride || stride > kWidest) return "sampling: the vocabulary is wider than a row, or too wide";
  if (count < 0 || rows < 1) return "sampling: a count is out of range";
  return count > 0 && (logits == nullptr || records == nullptr || out == nullptr) ? kNoArray : nullptr;
}

const char* wrong_draws(const float* logits, int64_t rows, int64_t stride, int64_t vocab_size, const octavo_sampling* sampling,
                        int32_t samples, const void* out) {
  const char* wrong = wrong_rows(logits, rows, stride, vocab_size, samples, sampling, out);
  for (int32_t i = 0; i < samples && wrong == nullptr; i++) wrong = wrong_sampling(sampling[i], rows, vocab_size);
  return wrong;
}

}  // namespace

int32_t octavo_most_sink_tokens(void) { return 64; }
int32_t octavo_abi_version(void) { return OCTAVO_ABI_VERSION; }
const char* octavo_kernel_version(void) { return kKernelVersion; }
const char* octavo_error(void) { return last_error().c_str(); }
int32_t octavo_cpus(void) { return available_cpus(); }
int64_t octavo_allocations(void) { return Arena::system_calls(); }

const char* octavo_isas(void) {
  static const std::string names = join_names();
  return names.c_str();
}

octavo_engine* octavo_open(const char* isa, int32_t threads) {
  return guarded<octavo_engine*>(nullptr, [&]() -> octavo_engine* {
    const Kernels* table = choose_table(isa == nullptr ? "" : isa, &last_error());
    if (table == nullptr) return nullptr;
    const int count = threads > 0 ? std::min(threads, Pool::kMaxThreads) : available_cpus();
    return new octavo_engine{Engine(table, count)};
  });
}

void octavo_close(octavo_engine* engine) { delete engine; }
const char* octavo_isa(const octavo_engine* engine) { return engine->engine.kernels->name; }
int32_t octavo_threads(const octavo_engine* engine) { return engine->engine.threads; }
int64_t octavo_weight_bytes(const octavo_engine* engine) { return engine->engine.weight_bytes(); }

int64_t octavo_add_matrix(octavo_engine* engine, const octavo_matrix* matrix) {
  if (matrix == nullptr) return fail(kNoRecord);
  return guarded<int64_t>(-1, [&] { return engine->engine.add_matrix(*matrix, &last_error()); });
}

int64_t octavo_add_stored(octavo_engine* engine, int32_t format, int64_t n, int64_t k, const octavo_stored* halves, int32_t count) {
  octavo_matrix shape{};
  shape.format = format;
  shape.interleaved = count == 2;
  shape.n = n;
  shape.k = k;
  return guarded<int64_t>(-1, [&] { return engine->engine.add_stored(shape, halves, count, &last_error()); });
}

int64_t octavo_declare_matrix(octavo_engine* engine, const octavo_matrix* matrix) {
  return guarded<int64_t>(-1, [&] { return engine->engine.declare_matrix(*matrix, &last_error()); });
}

int64_t octavo_add_vector(octavo_engine* engine, const float* data, int64_t n) {
  return guarded<int64_t>(-1, [&] { return engine->engine.add_vector(data, n, &last_error()); });
}

int32_t octavo_pack_scaled(octavo_engine* engine, int64_t weight, const octavo_stored* halves, int32_t count, const float* columns,
                           const float* rows) {
  return guarded<int32_t>(-1, [&] { return engine->engine.pack_scaled(weight, halves, count, columns, rows, &last_error()) ? 0 : -1; });
}

int32_t octavo_set_vector(octavo_engine* engine, int64_t weight, const float* data, int64_t n) {
  return engine->engine.set_vector(weight, data, n, &last_error()) ? 0 : -1;
}

int64_t octavo_matrix_bytes(octavo_engine* engine, const octavo_matrix* matrix) {
  if (matrix == nullptr) return fail(kNoRecord);
  Mat mat;
  int64_t bytes = -1;
  return engine->engine.layout(*matrix, &mat, &bytes, &last_error()) ? bytes : -1;
}

int32_t octavo_read_row(octavo_engine* engine, int64_t weight, int64_t row, float* out) {
  const std::deque<Weight>& weights = engine->engine.weights;
  if (weight < 0 || static_cast<size_t>(weight) >= weights.size()) return fail("weight: no such number");
  const Weight& w = weights[static_cast<size_t>(weight)];
  if (!w.is_matrix || row < 0 || row >= w.mat.n) return fail("row: out of range, or not of a matrix");
  if (out == nullptr) return fail(kNoArray);
  const Mat part = w.part_of_row(row);
  engine->engine.kernels->unpack_row(&part, row, out);
  return 0;
}

octavo_kv* octavo_kv_open(octavo_engine* engine, int32_t type, int32_t page_size, int32_t kv_heads, int32_t head_dim,
                          int32_t layers, int64_t pages) {
  return guarded<octavo_kv*>(nullptr, [&]() -> octavo_kv* {
    const Kernels* kernels = engine->engine.kernels;
    KV kv;
    if (!describe_kv(kernels, &kv, type, page_size, kv_heads, head_dim, layers)) return nullptr;
    if (pages < 1 || pages > INT32_MAX) return fail("pages: out of range"), nullptr;
    auto pool = std::make_unique<octavo_kv>();
    kv.base = pool->pages.memory.take(Arena::checked(pages, kv.page_bytes));
    pool->pages.kv = kv;
    pool->pages.count = pages;
    pool->pages.layers = layers;
    pool->pages.kernels = kernels;
    return pool.release();
  });
}

void octavo_kv_close(octavo_kv* kv) { delete kv; }
int64_t octavo_kv_page_bytes(const octavo_kv* kv) { return kv->pages.kv.page_bytes; }

uint8_t* octavo_kv_page(octavo_kv* kv, int32_t page) {
  const Pages& pages = kv->pages;
  if (page < 0 || page >= pages.count) return fail("pages: a page is out of range"), nullptr;
  return pages.blob(0, page, 0);
}

int64_t octavo_kv_bytes(octavo_engine* engine, int32_t type, int32_t page_size, int32_t kv_heads, int32_t head_dim, int32_t layers) {
  KV kv;
  return describe_kv(engine->engine.kernels, &kv, type, page_size, kv_heads, head_dim, layers) ? kv.page_bytes : -1;
}

int32_t octavo_kv_copy_pages(octavo_kv* kv, const int32_t* pairs, int64_t count) {
  const Pages& pages = kv->pages;
  if (wrong_count(pairs, count)) return fail("pages: the count is out of range, or the array is missing");
  for (int64_t i = 0; i < 2 * count; i++) {
    if (pairs[i] < 0 || pairs[i] >= pages.count) return fail("pages: a page is out of range");
  }
  for (int64_t i = 0; i < count; i++) copy_page(pages, pairs[2 * i], pairs[2 * i + 1]);
  return 0;
}

int32_t octavo_kv_move_slots(octavo_kv* kv, const int64_t* moves, int64_t count) {
  return guarded<int32_t>(-1, [&] {
    const Pages& pages = kv->pages;
    if (wrong_count(moves, count)) return fail("pages: the count is out of range, or the array is missing");
    for (int64_t i = 0; i < 2 * count; i++) {
      if (!pages.valid_slot(moves[i])) return fail("pages: a slot is out of range");
    }
    for (int64_t i = 0; i < count; i++) move_slot(pages, moves[2 * i], moves[2 * i + 1]);
    return 0;
  });
}

int32_t octavo_kv_keep(octavo_kv* kv, const int32_t* sources, int32_t num_sources, const int32_t* targets, int32_t num_targets,
                       const int32_t* kept, int32_t count) {
  return guarded<int32_t>(-1, [&] {
    const Pages& pages = kv->pages;
    if (wrong_count(sources, num_sources) || wrong_count(targets, num_targets) || wrong_count(kept, count)) return fail(kNoArray);
    const int64_t size = pages.kv.page_size;
    for (const auto& [given, many] : {std::pair(sources, num_sources), std::pair(targets, num_targets)}) {
      for (int32_t i = 0; i < many; i++) {
        if (given[i] < 0 || given[i] >= pages.count) return fail("pages: a page is out of range");
      }
    }
    if (count > num_targets * size) return fail("pages: the targets have too few places");
    for (int64_t i = 0; i < int64_t{pages.layers} * pages.kv.kv_heads * count; i++) {
      if (kept[i] < 0 || kept[i] >= num_sources * size) return fail("pages: a place is out of range");
    }
    keep_tokens(pages, sources, targets, kept, count);
    return 0;
  });
}

int32_t octavo_kv_write(octavo_kv* kv, int32_t layer, int64_t slot, const float* k, const float* v) {
  const Pages& pages = kv->pages;
  if (layer < 0 || layer >= pages.layers || !pages.valid_slot(slot)) return fail("pages: a layer or slot is out of range");
  if (k == nullptr || v == nullptr) return fail(kNoArray);
  const KV& shape = pages.kv;
  for (int32_t head = 0; head < shape.kv_heads; head++) {
    uint8_t* blob = pages.blob(layer, slot / shape.page_size, head);
    pages.kernels->kv_write(&shape, blob, slot % shape.page_size, k + head * shape.dim, v + head * shape.dim);
  }
  return 0;
}

int32_t octavo_kv_read(octavo_kv* kv, int32_t layer, int64_t slot, float* k, float* v) {
  const Pages& pages = kv->pages;
  if (layer < 0 || layer >= pages.layers || !pages.valid_slot(slot)) return fail("pages: a layer or slot is out of range");
  if (k == nullptr || v == nullptr) return fail(kNoArray);
  const KV& shape = pages.kv;
  for (int32_t head = 0; head < shape.kv_heads; head++) {
    const uint8_t* blob = pages.blob(layer, slot / shape.page_size, head);
    pages.kernels->kv_read(&shape, blob, slot % shape.page_size, k + head * shape.dim, v + head * shape.dim);
  }
  return 0;
}

octavo_adapters* octavo_adapters_open(int32_t places, int32_t rank, const octavo_target* targets, int32_t count, int32_t half) {
  return guarded<octavo_adapters*>(nullptr, [&]() -> octavo_adapters* {
    auto made = std::make_unique<octavo_adapters>();
    return made->adapters.open(places, rank, targets, count, half != 0, &last_error()) ? made.release() : nullptr;
  });
}

void octavo_adapters_close(octavo_adapters* adapters) { delete adapters; }
int64_t octavo_adapters_bytes(const octavo_adapters* adapters) { return adapters->adapters.bytes(); }

int32_t octavo_adapters_set(octavo_adapters* adapters, int32_t place, int32_t target, int32_t rank, const void* a, const void* b) {
  const char* wrong = adapters->adapters.set(place, target, rank, a, b);
  return wrong == nullptr ? 0 : fail(wrong);
}

int32_t octavo_adapters_clear(octavo_adapters* adapters, int32_t place) {
  return adapters->adapters.clear(place) ? 0 : fail("adapters: no such place");
}

octavo_program* octavo_program_open(octavo_engine* engine, octavo_kv* kv, const octavo_program_spec* spec) {
  return guarded<octavo_program*>(nullptr, [&]() -> octavo_program* {
    if (kv == nullptr || spec == nullptr) return fail(kNoRecord), nullptr;
    auto program = std::make_unique<octavo_program>(&engine->engine, &kv->pages);
    return program->program.open(*spec, &last_error()) ? program.release() : nullptr;
  });
}

void octavo_program_close(octavo_program* program) { delete program; }
int64_t octavo_program_bytes(const octavo_program* program) { return program->program.bytes(); }

int32_t octavo_program_barriers(const octavo_program* program, int32_t tokens, int32_t logit_rows) {
  return program->program.barriers(tokens, logit_rows);
}

int32_t octavo_run(octavo_program* program, const octavo_step* step) {
  if (step == nullptr) return fail(kNoRecord);
  return guarded<int32_t>(-1, [&] { return program->program.run(*step, &last_error()) ? 0 : -1; });
}

int32_t octavo_run_timed(octavo_program* program, const octavo_step* step, double* seconds) {
  if (step == nullptr || seconds == nullptr) return fail(kNoRecord);
  return guarded<int32_t>(-1, [&] { return program->program.run(*step, &last_error(), seconds) ? 0 : -1; });
}

const float* octavo_logits(const octavo_program* program, int64_t* stride) { return program->program.logits(stride); }
const float* octavo_values(const octavo_program* program, int32_t buffer, int64_t* stride) { return program->program.values(buffer, stride); }

double octavo_measure_read(octavo_engine* engine, int32_t threads, int64_t bytes, int32_t rounds) {
  return guarded<double>(-1, [&]() -> double {
    if (threads < 1 || threads > Pool::kMaxThreads || bytes < 1 || rounds < 1) return fail("measure: a count is out of range");
    return measure_read(*engine->engine.kernels, threads, bytes, rounds);
  });
}

double octavo_measure_dots(octavo_engine* engine, int32_t threads, int32_t kind, int64_t repeats, int32_t rounds) {
  return guarded<double>(-1, [&]() -> double {
    const bool sized = threads >= 1 && threads <= Pool::kMaxThreads && repeats >= 1 && rounds >= 1;
    if (!sized || kind < 0 || kind >= kDotKinds) return fail("measure: a count or kind is out of range");
    return measure_dots(*engine->engine.kernels, threads, kind, repeats, rounds);
  });
}

double octavo_measure_barrier(octavo_engine* engine, int32_t threads, int64_t repeats, int32_t rounds) {
  return guarded<double>(-1, [&]() -> double {
    (void)engine;
    if (threads < 1 || threads > Pool::kMaxThreads || repeats < 1 || rounds < 1) return fail("measure: a count is out of range");
    return measure_barrier(threads, repeats, rounds);
  });
}

int32_t octavo_sample(octavo_engine* engine, const float* logits, int64_t rows, int64_t stride, int64_t vocab_size,
                      const octavo_sampling* sampling, int32_t samples, int32_t* sampled) {
  return guarded<int32_t>(-1, [&] {
    if (const char* wrong = wrong_draws(logits, rows, stride, vocab_size, sampling, samples, sampled)) return fail(wrong);
    Engine& e = engine->engine;
    e.make_draws(vocab_size);
    for_each_row(e, samples, [&](int32_t i, int thread) {
      const float* row = logits + sampling[i].row * stride;
      sampled[i] = sample_row(*e.kernels, row, vocab_size, sampling[i], e.draws[static_cast<size_t>(thread)]);
    });
    return 0;
  });
}

int32_t octavo_process(octavo_engine* engine, const float* logits, int64_t rows, int64_t stride, int64_t vocab_size,
                       const octavo_sampling* sampling, int32_t samples, float* out) {
  return guarded<int32_t>(-1, [&] {
    if (const char* wrong = wrong_draws(logits, rows, stride, vocab_size, sampling, samples, out)) return fail(wrong);
    Engine& e = engine->engine;
    e.make_draws(vocab_size);
    for_each_row(e, samples, [&](int32_t i, int thread) {
      const float* row = logits + sampling[i].row * stride;
      apply_rules(*e.kernels, row, vocab_size, sampling[i].rules, e.draws[static_cast<size_t>(thread)], out + i * vocab_size);
    });
    return 0;
  });
}

int32_t octavo_logprobs_of(octavo_engine* engine, const float* logits, int64_t rows, int64_t stride, int64_t vocab_size,
                           octavo_logprobs* wanted, int32_t count) {
  return guarded<int32_t>(-1, [&] {
    const char* wrong = wrong_rows(logits, rows, stride, vocab_size, count, wanted, wanted);
    for (int32_t i = 0; i < count && wrong == nullptr; i++) wrong = wrong_logprobs(wanted[i], rows, vocab_size);
    if (wrong != nullptr) return fail(wrong);
    Engine& e = engine->engine;
    e.make_draws(vocab_size);
    for_each_row(e, count, [&](int32_t i, int thread) {
      const float* row = logits + wanted[i].row * stride;
      fill_logprobs(LogitRow(*e.kernels, row, vocab_size, e.draws[static_cast<size_t>(thread)]), &wanted[i]);
    });
    return 0;
  });
}
