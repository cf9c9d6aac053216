// The C ABI under wrong numbers: sizes that are negative, huge or just beyond, indices out of range, arrays that are missing.
// Everything is refused with a sentence and nothing has been written, or it was another valid request. Steps and programs:
// test_hostile_steps.cpp. Most of what these look for the sanitizers see (`make sanitize`).
#include "hostile_fixture.h"

using namespace check;

namespace {

void test_engine(octavo_engine* engine) {
  const std::string endless(100000, 'x');
  for (const char* isa : {"sse9", "AMX", " ", "generic ", endless.c_str()}) NO_HANDLE(engine, octavo_open(isa, 1));
  for (const int32_t threads : {kLeast32, -1, 0}) {
    EnginePtr opened(octavo_open("generic", threads));
    CHECK(opened != nullptr && octavo_threads(opened.get()) == octavo_cpus());
  }
  EnginePtr many(octavo_open("generic", kMost32));
  CHECK(many != nullptr && octavo_threads(many.get()) == 255);
  octavo_close(nullptr), octavo_kv_close(nullptr), octavo_program_close(nullptr);
}

void test_matrices(octavo_engine* engine) {
  const std::vector<float> data(64 * 8, 0.5f);
  const std::vector<int8_t> codes(64 * 8, 3);
  const int64_t before = octavo_weight_bytes(engine);
  for (const int32_t format : {kLeast32, -1, int32_t(octavo::FMT_COUNT), kMost32})
    for (const bool coded : {false, true}) {
      octavo_matrix m{format, 0, 8, 64, data.data(), nullptr, coded ? codes.data() : nullptr, data.data(), nullptr, 0};
      REFUSED(engine, octavo_add_matrix(engine, &m));
      REFUSED(engine, octavo_matrix_bytes(engine, &m));
    }
  for (int32_t format = 0; format < octavo::FMT_COUNT; format++)
    for (const int32_t pair : {0, 1})
      for (const int64_t n : kSizes)
        for (const int64_t k : kSizes) {
          octavo_matrix m{format, pair, n, k, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
          REFUSED(engine, octavo_add_matrix(engine, &m));  // no data at all
          const bool inside = n > 0 && k > 0 && n <= 1 << 24 && k <= 1 << 24;
          const int64_t bytes = octavo_matrix_bytes(engine, &m);
          const bool absurd = bytes < 0;  // a size within the limits that no memory has
          CHECK(inside && !absurd ? bytes >= n * k / 2 && bytes < int64_t{1} << 53 : refused(engine, bytes < 0));
          if (inside && k <= 130000) CHECK(!absurd);
          m.data = m.up = data.data();
          if (!inside) REFUSED(engine, octavo_add_matrix(engine, &m));
        }
  for (const int64_t group : {kLeast64, int64_t{-1}, int64_t{65}, int64_t{1} << 40, kMost64}) {
    octavo_matrix m{octavo::FMT_W4G32, 0, 8, 64, nullptr, nullptr, codes.data(), data.data(), data.data(), group};
    REFUSED(engine, octavo_add_matrix(engine, &m));
  }
  octavo_matrix half{octavo::FMT_BF16, 1, 4, 64, data.data(), nullptr, nullptr, nullptr, nullptr, 0};
  REFUSED(engine, octavo_add_matrix(engine, &half));
  octavo_matrix unscaled{octavo::FMT_W8G64, 0, 8, 64, nullptr, nullptr, codes.data(), nullptr, nullptr, 0};
  REFUSED(engine, octavo_add_matrix(engine, &unscaled));
  octavo_matrix whole{octavo::FMT_BF16, 0, 8, 64, nullptr, nullptr, codes.data(), data.data(), nullptr, 0};
  REFUSED(engine, octavo_add_matrix(engine, &whole));
  REFUSED(engine, octavo_add_matrix(engine, nullptr));
  REFUSED(engine, octavo_matrix_bytes(engine, nullptr));
  CHECK(octavo_weight_bytes(engine) == before);
}

// What a file holds: its type, its length and its heads are what somebody else wrote.
void test_stored(octavo_engine* engine) {
  std::vector<uint8_t> data(8 * 64 * 4, 0);
  const int64_t before = octavo_weight_bytes(engine);
  const int32_t types[] = {kLeast32, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 29, 30, 31, kMost32};
  for (const int32_t type : types)
    for (const int64_t bytes : kSizes)
      for (const int64_t k : {int64_t{1}, int64_t{31}, int64_t{64}, int64_t{256}, int64_t{1} << 24, kMost64}) {
        octavo_stored half{type, 0, 0, 0, data.data(), bytes};
        REFUSED(engine, octavo_add_stored(engine, octavo::FMT_W4G32, 8, k, &half, 1));
        half.data = nullptr;
        REFUSED(engine, octavo_add_stored(engine, octavo::FMT_W4G32, 8, k, &half, 1));
      }
  octavo_stored halves[2] = {{30, 0, 0, 0, data.data(), 8 * 64 * 2}, {30, 0, 0, 0, data.data(), 8 * 64 * 2}};
  for (const int32_t count : {kLeast32, -1, 0, 3, kMost32}) REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, count));
  REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, nullptr, 1));
  for (const int64_t n : kSizes) {
    REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, n, 64, halves, 1));
    REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, n, halves, 2));
  }
  for (const int32_t format : {kLeast32, -1, int32_t(octavo::FMT_COUNT), kMost32}) REFUSED(engine, octavo_add_stored(engine, format, 8, 64, halves, 1));
  for (const int32_t heads : {kLeast32, -1, 3, 8, kMost32}) {
    halves[0].heads = heads;
    REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, 1));
  }
  halves[0].heads = 2;
  REFUSED(engine, octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, 2));  // a pair has no heads
  CHECK(octavo_weight_bytes(engine) == before && octavo_add_stored(engine, octavo::FMT_BF16, 8, 64, halves, 1) >= 0);
}

void test_vectors_and_rows(octavo_engine* engine) {
  const std::vector<float> data(64 * 8, 0.5f);
  for (const int64_t n : kSizes)
    if (n <= 0 || n > 1 << 24) REFUSED(engine, octavo_add_vector(engine, data.data(), n));
  REFUSED(engine, octavo_add_vector(engine, nullptr, 4));
  const int64_t vector = octavo_add_vector(engine, data.data(), 64);
  octavo_matrix m{octavo::FMT_W8G64, 1, 4, 64, data.data(), data.data(), nullptr, nullptr, nullptr, 0};
  const int64_t matrix = octavo_add_matrix(engine, &m);
  std::vector<float> row(64, -1);
  CHECK(vector >= 0 && matrix > vector && octavo_read_row(engine, matrix, 7, row.data()) == 0);
  for (const int64_t n : kSizes) {
    if (n < 0 || n >= 8) REFUSED(engine, octavo_read_row(engine, matrix, n, row.data()));
    REFUSED(engine, octavo_read_row(engine, vector, n, row.data()));
  }
  REFUSED(engine, octavo_read_row(engine, matrix, 0, nullptr));
  for (const int64_t weight : {kLeast64, int64_t{-1}, matrix + 1, kMost64}) {  // the text that refused() takes for no answer
    CHECK(octavo_read_row(engine, weight, 0, row.data()) < 0);
  }
}

void test_pages(octavo_engine* engine) {
  const int32_t type = octavo::KV_BF16;
  for (const int32_t size : {17, 24, 48, 4095, 8192}) REFUSED(engine, octavo_kv_bytes(engine, type, size, 2, 16, 1));
  for (const int64_t wide : kSizes) {
    const int32_t n = int32_t(std::clamp<int64_t>(wide, kLeast32, kMost32));
    if (n < 0 || n >= octavo::KV_COUNT) {
      NO_HANDLE(engine, octavo_kv_open(engine, n, 16, 2, 16, 1, 4));
      REFUSED(engine, octavo_kv_bytes(engine, n, 16, 2, 16, 1));
    }
    NO_HANDLE(engine, octavo_kv_open(engine, type, n, 2, 16, 1, 4));  // no size of the list is one of a page
    REFUSED(engine, octavo_kv_bytes(engine, type, n, 2, 16, 1));
    if (n < 1 || n > 4096) {
      NO_HANDLE(engine, octavo_kv_open(engine, type, 16, n, 16, 1, 4));
      NO_HANDLE(engine, octavo_kv_open(engine, type, 16, 2, n, 1, 4));
      NO_HANDLE(engine, octavo_kv_open(engine, type, 16, 2, 16, n, 4));
      REFUSED(engine, octavo_kv_bytes(engine, type, 16, n, n, n));
    }
    if (wide < 1 || wide > kMost32) NO_HANDLE(engine, octavo_kv_open(engine, type, 16, 2, 16, 1, wide));
  }
  NO_HANDLE(engine, octavo_kv_open(engine, type, 4096, 1024, 1024, 4096, kMost32));  // more than any memory
  CHECK(octavo_kv_bytes(engine, octavo::KV_FP32, 512, 1024, 256, 4096) >= int64_t{1} << 40);  // the largest
}

void test_slots(octavo_engine* engine, int32_t type) {
  KVPtr kv(octavo_kv_open(engine, type, 16, 2, 24, 3, 4));
  std::vector<float> k(48, 1), v(48, 2);
  CHECK(octavo_kv_write(kv.get(), 2, 63, k.data(), v.data()) == 0);
  for (const int64_t n : kSizes) {
    if (n < 0 || n >= 64) {
      REFUSED(engine, octavo_kv_write(kv.get(), 0, n, k.data(), v.data()));
      REFUSED(engine, octavo_kv_read(kv.get(), 0, n, k.data(), v.data()));
      const int64_t moves[] = {0, 1, 1, n, n, 2};
      REFUSED(engine, octavo_kv_move_slots(kv.get(), moves, 2));
      REFUSED(engine, octavo_kv_move_slots(kv.get(), moves, 3));
    }
    const int32_t at = int32_t(std::clamp<int64_t>(n, kLeast32, kMost32));
    if (at < 0 || at > 3) {
      REFUSED(engine, octavo_kv_write(kv.get(), at, 0, k.data(), v.data()));
      REFUSED(engine, octavo_kv_read(kv.get(), at, 0, k.data(), v.data()));
      const int32_t pairs[] = {0, 1, 1, at, at, 2};
      REFUSED(engine, octavo_kv_copy_pages(kv.get(), pairs, 2));
      REFUSED(engine, octavo_kv_copy_pages(kv.get(), pairs, 3));
    }
    const int64_t move[] = {63, 0};
    const int32_t pair[] = {3, 0};
    if (n < 0 || n > kMost32) {
      REFUSED(engine, octavo_kv_copy_pages(kv.get(), pair, n));
      REFUSED(engine, octavo_kv_move_slots(kv.get(), move, n));
    }
  }
  REFUSED(engine, octavo_kv_copy_pages(kv.get(), nullptr, 1));
  REFUSED(engine, octavo_kv_move_slots(kv.get(), nullptr, 1));
  REFUSED(engine, octavo_kv_write(kv.get(), 0, 0, nullptr, v.data()));
  REFUSED(engine, octavo_kv_read(kv.get(), 0, 0, k.data(), nullptr));
  CHECK(octavo_kv_copy_pages(kv.get(), nullptr, 0) == 0 && octavo_kv_move_slots(kv.get(), nullptr, 0) == 0);
  octavo_kv_read(kv.get(), 2, 63, k.data(), v.data());
  CHECK(fabsf(k[47] - 1) < 0.01f && fabsf(v[47] - 2) < 0.02f);
  octavo_kv_read(kv.get(), 2, 15, k.data(), v.data());
  CHECK(k[47] == 0 && v[47] == 0);
}

void test_measurements(octavo_engine* engine) {
  for (const int32_t wrong : {kLeast32, -1, 0}) {
    REFUSED(engine, octavo_measure_read(engine, wrong, 4096, 1));
    REFUSED(engine, octavo_measure_read(engine, 1, wrong, 1));
    REFUSED(engine, octavo_measure_read(engine, 1, 4096, wrong));
    REFUSED(engine, octavo_measure_dots(engine, wrong, 0, 1, 1));
    REFUSED(engine, octavo_measure_dots(engine, 1, 0, wrong, 1));
    REFUSED(engine, octavo_measure_dots(engine, 1, 0, 1, wrong));
    REFUSED(engine, octavo_measure_barrier(engine, wrong, 1, 1));
    REFUSED(engine, octavo_measure_barrier(engine, 1, wrong, 1));
    REFUSED(engine, octavo_measure_barrier(engine, 1, 1, wrong));
  }
  for (const int32_t kind : {kLeast32, -1, 3, kMost32}) REFUSED(engine, octavo_measure_dots(engine, 1, kind, 1, 1));
  REFUSED(engine, octavo_measure_read(engine, 256, 4096, 1));
  REFUSED(engine, octavo_measure_read(engine, 1, kMost64, 1));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<const octavo::Kernels*> all = tables(argc > 1 ? argv[1] : nullptr);
  for (const octavo::Kernels* k : all) {
    EnginePtr engine(octavo_open(k->name, 2));
    if (k == all.front()) test_engine(engine.get()), test_measurements(engine.get());
    test_matrices(engine.get());
    test_stored(engine.get());
    test_vectors_and_rows(engine.get());
    test_pages(engine.get());
    for (int32_t type = 0; type < octavo::KV_COUNT; type++) test_slots(engine.get(), type);
  }
  CHECK(refusals > 10000);
  return finish("test_hostile");
}
