#include "engine.h"

#include <string.h>

#include <algorithm>

namespace octavo {

Engine::Engine(const Kernels* table, int thread_count) : kernels(table), threads(thread_count) {
  for (int thread = 0; thread < thread_count; thread++) streams.push_back(std::make_unique<Arena>(int64_t{16} << 20));
}

int64_t Engine::weight_bytes() const {
  int64_t bytes = memory.used();
  for (const auto& stream : streams) bytes += stream->used();
  return bytes;
}

// Equal numbers of panels; those left over go where fewer bytes have gone so far, so that streams stay equally long.
std::vector<Lot> Engine::deal(const Mat& mat) const {
  const size_t count = streams.size();
  const int64_t each = mat.panels / threads;
  std::vector<int64_t> sizes(count, each);
  for (int64_t left = mat.panels % threads; left > 0; left--) {
    size_t least = count;
    for (size_t i = 0; i < count; i++) {
      if (sizes[i] == each && (least == count || streams[i]->used() < streams[least]->used())) least = i;
    }
    sizes[least]++;
  }
  std::vector<Lot> lots(count);
  for (size_t i = 0; i < count; i++) {
    lots[i].begin = i == 0 ? 0 : lots[i - 1].end;
    lots[i].end = lots[i].begin + sizes[i];
  }
  return lots;
}

void Engine::take(const Mat& mat, std::vector<Lot>* lots) {
  for (size_t i = 0; i < lots->size(); i++) {
    Lot& lot = (*lots)[i];
    lot.base = streams[i]->take((lot.end - lot.begin) * mat.panel_bytes) - lot.begin * mat.panel_bytes;
  }
}

// Of a pair, outputs alternate in 16s between gate and up: a panel has 32 of each.
Mat Weight::part_of_row(int64_t row) const {
  const int64_t panel = mat.interleaved ? row % (mat.n / 2) / 32 : row / 64;
  size_t lot = 0;
  while (panel >= lots[lot].end) lot++;
  return part(lot);
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

namespace {

// The bytes of one token of a blob, as they lie (attention_kv.inc has the layout): read and written again, int8 would be
// rounded anew.
void copy_token(const KV& kv, uint8_t* to, int64_t at, const uint8_t* from, int64_t offset) {
  const int64_t bytes = kv.type == KV_FP32 ? 4 : kv.type == KV_BF16 ? 2 : 1, t = 4 / bytes;
  const int64_t dim = (kv.dim + 15) / 16 * 16, size = kv.page_size, half = dim * size * bytes;
  for (int64_t step = 0; step < dim / t; step++) memmove(to + 4 * (step * size + at), from + 4 * (step * size + offset), 4);
  uint8_t* v_to = to + half + at / t * dim * 4 + at % t * bytes;
  const uint8_t* v_from = from + half + offset / t * dim * 4 + offset % t * bytes;
  for (int64_t d = 0; d < dim; d++) memmove(v_to + 4 * d, v_from + 4 * d, static_cast<size_t>(bytes));
  if (kv.type != KV_INT8) return;
  for (int64_t scales : {2 * half, 2 * half + 4 * size}) memmove(to + scales + 4 * at, from + scales + 4 * offset, 4);
}

}  // namespace

void keep_tokens(const Pages& pages, const int32_t* sources, const int32_t* targets, const int32_t* kept, int64_t count) {
  const int64_t size = pages.kv.page_size;
  for (int32_t layer = 0; layer < pages.layers; layer++) {
    for (int32_t head = 0; head < pages.kv.kv_heads; head++, kept += count) {
      for (int64_t i = 0; i < count; i++) {
        const uint8_t* from = pages.blob(layer, sources[kept[i] / size], head);
        copy_token(pages.kv, pages.blob(layer, targets[i / size], head), i % size, from, kept[i] % size);
      }
    }
  }
}

void move_slot(const Pages& pages, int64_t source, int64_t target) {
  const int64_t size = pages.kv.page_size;
  for (int32_t layer = 0; layer < pages.layers; layer++) {
    for (int32_t head = 0; head < pages.kv.kv_heads; head++) {
      const uint8_t* from = pages.blob(layer, source / size, head);
      copy_token(pages.kv, pages.blob(layer, target / size, head), target % size, from, source % size);
    }
  }
}

}  // namespace octavo
