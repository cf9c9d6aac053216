// Where the threads must meet. Each record says which buffers it reads and writes and how its work is shared; a barrier
// goes in front of a record that touches what another thread may still be making, or may still be reading.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace octavo {

// How the rows of a product are shared.
enum class Mode : int8_t {
  kFew = 0,     // every thread prepares all operands for itself, panels are split
  kPanels = 1,  // rows of operands are split, then panels
  kRows = 2,    // rows are split throughout
};
// How attention is shared.
enum class Share : int8_t {
  kUnits = 0,  // by units of several tokens
  kItems = 1,  // (sequence, head) units: their threads also own the queries, keys and values
  kParts = 2,  // units of which several make one result
};
constexpr int kPlans = 3 * 3 * 3;
constexpr int plan_number(Mode t, Mode r, Share share) {
  return (static_cast<int>(t) * 3 + static_cast<int>(r)) * 3 + static_cast<int>(share);
}

// Two accesses of one owner kind need no barrier between them: the same thread makes both. kAny needs one.
enum class Owner : int8_t { kAny = 0, kRowT = 1, kRowR = 2, kItem = 3 };

struct Access {
  int32_t buffer;
  Owner owner;
  bool write;
};

// What has happened to each buffer since the last barrier.
class SyncState {
 public:
  explicit SyncState(size_t buffers) : written_(buffers, kNever), read_(buffers, 0) {}
  bool needs_barrier(const std::vector<Access>& accesses) const;
  void barrier();
  void apply(const std::vector<Access>& accesses);

 private:
  static constexpr int8_t kNever = -1;
  std::vector<int8_t> written_;
  std::vector<uint8_t> read_;  // bit per owner kind
};

}  // namespace octavo
