// What outlives a program: the kernel table, the packed weights, and pools of KV pages.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "octavo_native.h"
#include "sampling.h"

namespace octavo {

// The panels of a matrix that are one thread's: panel p lies at base + p * panel_bytes.
struct Lot {
  int64_t begin = 0, end = 0;
  uint8_t* base = nullptr;
};

// A packed matrix, or a plain vector of floats.
struct Weight {
  bool is_matrix;
  Mat mat;              // of a matrix; without a base: lots have theirs
  const float* values;  // of a vector
  int64_t n, k;         // outputs (of a gate/up pair: of one half) and inputs; a vector: values and 0
  std::vector<Lot> lots = {};  // [threads] all panels, in order
  const float* undo = nullptr;  // [k] what takes the columns' factors out of a looked-up row again, or null

  // The matrix as a thread's kernels see it, which take panels of this lot only.
  Mat part(size_t lot) const {
    Mat view = mat;
    view.base = lots[lot].base;
    return view;
  }
  Mat part_of_row(int64_t row) const;
};

struct Engine {
  Engine(const Kernels* table, int thread_count);

  const Kernels* kernels;
  const int threads;
  Arena memory{int64_t{2} << 20};
  // Each thread's panels of all matrices, in the order in which they were added: one stream of memory, which a thread's
  // prefetches follow beyond the end of a product.
  std::vector<std::unique_ptr<Arena>> streams;
  std::deque<Weight> weights;  // stay where they are: programs point at them
  std::vector<SampleScratch> draws;  // of each thread, for draws outside of a step
  int64_t draw_width = 0;            // the vocabulary that they are made for

  // These return the weight's number, or -1 with `error` set (weights.cpp).
  int64_t add_matrix(const octavo_matrix& given, std::string* error);
  int64_t add_stored(const octavo_matrix& shape, const octavo_stored* halves, int32_t count, std::string* error);
  int64_t declare_matrix(const octavo_matrix& shape, std::string* error);
  int64_t add_vector(const float* data, int64_t n, std::string* error);
  // In place, as octavo_native.h says; false with `error` set.
  bool pack_scaled(int64_t number, const octavo_stored* halves, int32_t count, const float* columns, const float* rows, std::string* error);
  bool set_vector(int64_t number, const float* data, int64_t n, std::string* error);
  int64_t weight_bytes() const;
  void make_draws(int64_t vocab_size);
  bool layout(const octavo_matrix& given, Mat* mat, int64_t* bytes, std::string* error) const;

 private:
  std::vector<Lot> deal(const Mat& mat) const;
  void take(const Mat& mat, std::vector<Lot>* lots);
  int64_t pack(const Mat& mat, void* job, int64_t outputs);
  int64_t add(const Mat& mat, const std::vector<Lot>& lots, int64_t outputs);
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
void move_slot(const Pages& pages, int64_t source, int64_t target);
void keep_tokens(const Pages& pages, const int32_t* sources, const int32_t* targets, const int32_t* kept, int64_t count);

}  // namespace octavo
