// Low-rank adapters in memory: a place for each, with room for both factors of every target up to the largest rank.
#pragma once
#include <string>
#include <vector>

#include "arena.h"
#include "octavo_native.h"

namespace octavo {

constexpr int32_t kMostRank = 512;
constexpr int64_t kAdapterRows = 8;  // that go through an adapter together

// What an adapter has for a target; rank 0: nothing.
struct Factors {
  int32_t rank = 0, padded = 0;
  int64_t a_bytes = 0, b_bytes = 0;
  uint8_t* a = nullptr;  // fp32: [k, padded]; bf16: [k padded to 32 / 2, padded, 2]
  uint8_t* b = nullptr;  // fp32: [blocks, rank, 16]; bf16: [blocks, rank / 2 rounded up, 16, 2]
};

class Adapters {
 public:
  bool open(int32_t places, int32_t rank, const octavo_target* targets, int32_t count, bool half, std::string* error);
  const char* set(int32_t place, int32_t target, int32_t rank, const void* a, const void* b);
  bool clear(int32_t place);
  int32_t places() const { return places_; }
  int64_t wide() const { return (rank_ + 15) / 16 * 16; }  // of the largest rank, padded
  bool half() const { return half_; }
  size_t num_targets() const { return targets_.size(); }
  const octavo_target& target(int32_t number) const { return targets_[static_cast<size_t>(number)]; }
  const Factors& at(int32_t place, int32_t target) const { return factors_[static_cast<size_t>(place) * targets_.size() + static_cast<size_t>(target)]; }
  int64_t bytes() const { return memory_.used(); }

 private:
  Factors& mine(int32_t place, int32_t target) { return factors_[static_cast<size_t>(place) * targets_.size() + static_cast<size_t>(target)]; }

  int32_t places_ = 0, rank_ = 0;
  bool half_ = false;  // bf16
  int64_t size() const { return half_ ? 2 : 4; }
  int64_t tall(int64_t k) const { return half_ ? (k + 31) / 32 * 32 : k; }
  int64_t high(int64_t rank) const { return half_ ? (rank + 1) / 2 * 2 : rank; }
  std::vector<octavo_target> targets_;
  std::vector<Factors> factors_;  // [places, targets]
  Arena memory_{int64_t{2} << 20};
};

}  // namespace octavo

struct octavo_adapters {
  octavo::Adapters adapters;
};
