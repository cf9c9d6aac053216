// What outlives a program: the kernel table, the packed weights, and pools of KV pages.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "octavo_native.h"
#include "sampling.h"

namespace octavo {

// A packed matrix, or a plain vector of floats.
struct Weight {
  bool is_matrix;
  Mat mat;              // of a matrix
  const float* values;  // of a vector
  int64_t n, k;         // outputs (of a gate/up pair: of one half) and inputs; a vector: values and 0
};

struct Engine {
  Engine(const Kernels* table, int thread_count) : kernels(table), threads(thread_count) {}

  const Kernels* kernels;
  const int threads;
  Arena memory{int64_t{32} << 20};
  std::vector<Weight> weights;
  std::vector<SampleScratch> draws;  // of each thread, for draws outside of a step
  int64_t draw_width = 0;            // the vocabulary that they are made for

  // These return the weight's number, or -1 with `error` set (weights.cpp).
  int64_t add_matrix(const octavo_matrix& given, std::string* error);
  int64_t add_stored(const octavo_matrix& shape, const octavo_stored* halves, int32_t count, std::string* error);
  int64_t declare_matrix(const octavo_matrix& shape, std::string* error);
  int64_t add_vector(const float* data, int64_t n, std::string* error);
  void make_draws(int64_t vocab_size);
  bool layout(const octavo_matrix& given, Mat* mat, int64_t* bytes, std::string* error) const;

 private:
  int64_t pack(Mat* mat, void* job, int64_t outputs);
};

struct Pages {
  KV kv;
  int64_t count;
  int32_t layers;  // of a group
  const Kernels* kernels;
  Arena memory{int64_t{2} << 20};

  uint8_t* blob(int32_t layer, int64_t page, int32_t head) const {
    return kv.base + page * kv.page_bytes + layer * kv.layer_bytes + head * kv.blob_bytes;
  }
  bool valid_slot(int64_t slot) const { return slot >= 0 && slot / kv.page_size < count; }
};

// Fills the layout of a pool; false for a shape that no kernel takes.
bool kv_layout(const Kernels* kernels, KV* kv, int32_t layers);
void copy_page(const Pages& pages, int64_t source, int64_t target);
void move_slot(const Pages& pages, int64_t source, int64_t target, float* scratch);

}  // namespace octavo
