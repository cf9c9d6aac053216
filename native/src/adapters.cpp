#include "adapters.h"

#include <string.h>

namespace octavo {
namespace {

constexpr int32_t kMostPlaces = 1024, kMostTargets = 1 << 16;
constexpr int64_t kWidest = int64_t{1} << 24;

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace

bool Adapters::open(int32_t places, int32_t rank, const octavo_target* targets, int32_t count, bool half, std::string* error) {
  bool fine = places > 0 && places <= kMostPlaces && rank > 0 && rank <= kMostRank && count > 0 && count <= kMostTargets && targets;
  for (int32_t i = 0; fine && i < count; i++) fine = targets[i].n > 0 && targets[i].n <= kWidest && targets[i].k > 0 && targets[i].k <= kWidest;
  if (!fine) return *error = "adapters: a count, a rank or a target is out of range", false;
  places_ = places;
  rank_ = rank;
  half_ = half;
  targets_.assign(targets, targets + count);
  factors_.resize(static_cast<size_t>(places) * static_cast<size_t>(count));
  for (int32_t place = 0; place < places; place++) {
    for (int32_t i = 0; i < count; i++) {
      mine(place, i).a = memory_.take(Arena::checked(targets[i].k, padded(rank) * size()));
      mine(place, i).b = memory_.take(Arena::checked(padded(targets[i].n), rank * size()));
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
  memcpy(own.a, a, static_cast<size_t>(target(number).k * own.padded * size()));
  memcpy(own.b, b, static_cast<size_t>(padded(target(number).n) * rank * size()));
  return nullptr;
}

bool Adapters::clear(int32_t place) {
  if (place < 0 || place >= places_) return false;
  for (size_t i = 0; i < targets_.size(); i++) mine(place, static_cast<int32_t>(i)).rank = 0;
  return true;
}

}  // namespace octavo
