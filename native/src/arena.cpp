#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace octavo {
namespace {

constexpr int64_t kHuge = int64_t{2} << 20;
constexpr int64_t kLine = 64;
constexpr int64_t kMost = int64_t{1} << 46;

// Under the address sanitizer a line that nobody may touch stands behind everything that is taken.
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kGuard = kLine;
void forbid(const void* begin, int64_t bytes) { __asan_poison_memory_region(begin, static_cast<size_t>(bytes)); }
void permit(const void* begin, int64_t bytes) { __asan_unpoison_memory_region(begin, static_cast<size_t>(bytes)); }
#else
constexpr int64_t kGuard = 0;
void forbid(const void*, int64_t) {}
void permit(const void*, int64_t) {}
#endif

std::atomic<int64_t> calls{0};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

int64_t Arena::system_calls() { return calls.load(); }

int64_t Arena::checked(int64_t count, int64_t size) {
  int64_t bytes;
  if (count < 0 || size < 0 || __builtin_mul_overflow(count, size, &bytes) || bytes > kMost) throw std::bad_alloc();
  return bytes;
}

Arena::~Arena() {
  for (const Block& block : blocks_) {
    permit(block.base, block.bytes);
    munmap(block.base, static_cast<size_t>(block.bytes));
  }
}

void Arena::open_block(int64_t bytes) {
  const int64_t size = round_up(bytes, kHuge);
  calls.fetch_add(1);
  blocks_.reserve(blocks_.size() + 1);
  void* base = mmap(nullptr, static_cast<size_t>(size + kHuge), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  blocks_.push_back({base, size + kHuge});
  next_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<int64_t>(base), kHuge));
  left_ = size;
  forbid(next_, size);
#ifdef MADV_HUGEPAGE
  if (size >= kHuge) madvise(next_, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
}

uint8_t* Arena::take(int64_t bytes) {
  if (bytes < 0 || bytes > kMost) throw std::bad_alloc();
  const int64_t size = std::max(round_up(bytes, kLine), kLine) + kGuard;
  if (size > left_) open_block(std::max(size, chunk_));
  uint8_t* taken = next_;
  permit(taken, size - kGuard);
  next_ += size;
  left_ -= size;
  used_ += size;
  return taken;
}

}  // namespace octavo
