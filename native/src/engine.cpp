#include "engine.h"

#include <string.h>

namespace octavo {
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
