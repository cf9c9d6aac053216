#include "adapters.h"

#include <string.h>

namespace octavo {
namespace {

constexpr int32_t kMostPlaces = 1024, kMostTargets = 1 << 16;
constexpr int64_t kWidest = int64_t{1} << 24, kMostFactors = int64_t{1} << 20;

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// bf16: lines [rows, width] by pairs, so that a tile or a dot takes both values of a pair; zeros fill up the last one.
void pair_up(uint16_t* to, const void* lines, int64_t rows, int64_t width) {
  const uint16_t* from = static_cast<const uint16_t*>(lines);
  for (int64_t row = 0; row < rows; row += 2, from += 2 * width, to += 2 * width) {
    for (int64_t i = 0; i < width; i++) {
      to[2 * i] = from[i];
      to[2 * i + 1] = row + 1 < rows ? from[width + i] : uint16_t{0};
    }
  }
}

}  // namespace

bool Adapters::open(int32_t places, int32_t rank, const octavo_target* targets, int32_t count, bool half, std::string* error) {
  bool fine = places > 0 && places <= kMostPlaces && rank > 0 && rank <= kMostRank && count > 0 && count <= kMostTargets && targets;
  fine = fine && int64_t{places} * count <= kMostFactors;
  for (int32_t i = 0; fine && i < count; i++) fine = targets[i].n > 0 && targets[i].n <= kWidest && targets[i].k > 0 && targets[i].k <= kWidest;
  if (!fine) return *error = "adapters: a count, a rank or a target is out of range", false;
  places_ = places;
  rank_ = rank;
  half_ = half;
  targets_.assign(targets, targets + count);
  factors_.resize(static_cast<size_t>(places) * static_cast<size_t>(count));
  for (int32_t place = 0; place < places; place++) {
    for (int32_t i = 0; i < count; i++) {
      mine(place, i).a = memory_.take(Arena::checked(tall(targets[i].k), padded(rank) * size()));
      mine(place, i).b = memory_.take(Arena::checked(padded(targets[i].n), high(rank) * size()));
    }
  }
  return true;
}

const char* Adapters::set(int32_t place, int32_t number, int32_t rank, const void* a, const void* b) {
  if (place < 0 || place >= places_ || number < 0 || static_cast<size_t>(number) >= targets_.size()) return "adapters: no such place or target";
  if (rank < 1 || rank > rank_ || a == nullptr || b == nullptr) return "adapters: a rank is out of range, or a factor is missing";
  Factors& own = mine(place, number);
  own.rank = rank;
  own.padded = static_cast<int32_t>(padded(rank));
  const int64_t k = target(number).k, blocks = padded(target(number).n) / 16;
  own.a_bytes = tall(k) * own.padded * size();
  own.b_bytes = blocks * 16 * high(rank) * size();
  if (half_) {
    memset(own.a, 0, static_cast<size_t>(own.a_bytes));
    pair_up(reinterpret_cast<uint16_t*>(own.a), a, k, own.padded);
    for (int64_t i = 0; i < blocks; i++) {
      pair_up(reinterpret_cast<uint16_t*>(own.b) + i * 16 * high(rank), static_cast<const uint16_t*>(b) + i * 16 * rank, rank, 16);
    }
  } else {
    memcpy(own.a, a, static_cast<size_t>(own.a_bytes));
    memcpy(own.b, b, static_cast<size_t>(own.b_bytes));
  }
  return nullptr;
}

bool Adapters::clear(int32_t place) {
  if (place < 0 || place >= places_) return false;
  for (size_t i = 0; i < targets_.size(); i++) mine(place, static_cast<int32_t>(i)).rank = 0;
  return true;
}

}  // namespace octavo
