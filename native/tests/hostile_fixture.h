// What tests of wrong numbers share: sizes, refusals, and arrays beyond whose end nothing may be read.
#pragma once
#include <string.h>
#include <sys/mman.h>

#include <limits>
#include <string>

#include "program_fixture.h"

namespace check {

constexpr int32_t kLeast32 = INT32_MIN, kMost32 = INT32_MAX;
constexpr int64_t kLeast64 = INT64_MIN, kMost64 = INT64_MAX;
inline const int64_t kSizes[] = {kLeast64, kLeast64 / 2, int64_t{kLeast32} - 1, kLeast32, -2, -1, 0, 1, 2, 3, 7, 1 << 20, (1 << 24) + 1, kMost32, int64_t{1} << 32, int64_t{1} << 46, kMost64 / 2, kMost64};

inline long refusals = 0;

// Every refusal says something of its own: the text of another call does not stand.
inline void forget_error(octavo_engine* engine) { octavo_read_row(engine, -1, 0, nullptr); }
inline bool refused(octavo_engine* engine, bool failed) {
  if (!failed) return false;
  refusals++;
  const std::string said = octavo_error();
  forget_error(engine);
  return said.size() > 10 && said != octavo_error();
}
#define REFUSED(engine, call) CHECK(refused(engine, (call) < 0))
#define NO_HANDLE(engine, call) CHECK(refused(engine, (call) == nullptr))

// An array that ends where memory ends: whoever reads beyond it ends the process.
template <class T>
class Fenced {
 public:
  explicit Fenced(size_t count) : count_(count) {
    const size_t inner = (count * sizeof(T) + kUnit - 1) / kUnit * kUnit;
    whole_ = inner + kUnit;
    memory_ = mmap(nullptr, whole_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(memory_ != MAP_FAILED)) exit(1);
    uint8_t* fence = static_cast<uint8_t*>(memory_) + inner;
    CHECK(mprotect(fence, kUnit, PROT_NONE) == 0);
    values_ = reinterpret_cast<T*>(fence - count * sizeof(T));
  }
  Fenced(const Fenced&) = delete;
  ~Fenced() { munmap(memory_, whole_); }
  // The same values, fenced; null stays null.
  const T* copy(const T* from) {
    if (from == nullptr) return nullptr;
    return static_cast<const T*>(memcpy(values_, from, count_ * sizeof(T)));
  }

 private:
  static constexpr size_t kUnit = 1 << 16;  // the largest page of a system
  size_t count_, whole_;
  void* memory_;
  T* values_;
};

}  // namespace check
