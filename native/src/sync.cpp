#include "sync.h"

#include <algorithm>

namespace octavo {
namespace {

uint8_t bit_of(Owner owner) { return static_cast<uint8_t>(1u << static_cast<int>(owner)); }

// Accesses of `before` (bits) by threads other than the owner's.
bool foreign(uint8_t before, Owner owner) {
  if (owner == Owner::kAny) return before != 0;
  return (before & ~bit_of(owner)) != 0;
}

}  // namespace

bool SyncState::needs_barrier(const std::vector<Access>& accesses) const {
  return std::any_of(accesses.begin(), accesses.end(), [&](const Access& a) {
    const size_t i = static_cast<size_t>(a.buffer);
    const uint8_t written = written_[i] == kNever ? 0 : static_cast<uint8_t>(1u << written_[i]);
    return foreign(written, a.owner) || (a.write && foreign(read_[i], a.owner));
  });
}

void SyncState::barrier() {
  std::fill(written_.begin(), written_.end(), kNever);
  std::fill(read_.begin(), read_.end(), uint8_t{0});
}

void SyncState::apply(const std::vector<Access>& accesses) {
  for (const Access& a : accesses) {
    const size_t i = static_cast<size_t>(a.buffer);
    if (a.write) {
      written_[i] = static_cast<int8_t>(a.owner);
    } else {
      read_[i] = static_cast<uint8_t>(read_[i] | bit_of(a.owner));
    }
  }
}

}  // namespace octavo
