// What attention has to do in one step, as units of about equal cost for each thread. The bits do not depend on it.
//
// A plain plan has one unit for each (sequence, kv head, 32 tokens). For layers that see all positions it goes further:
// sequences of few tokens that name the same pages for whole chunks of 512 positions read these together, once; and a unit
// that would leave the threads unequal is cut, by tokens or by chunks: of few tokens, all heads of a sequence at about the
// same chunk. What is read in parts is merged after a barrier.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "octavo_native.h"

namespace octavo {

constexpr int64_t kChunk = 512;  // positions whose softmax state stands alone (attention.inc)

// One call of the attention kernel: tokens first .. first + rows - 1 of the step; entries of `readers` where it is shared.
struct Unit {
  int32_t sequence, head;  // the sequence whose page table is read
  int32_t first, rows;
  int32_t chunk0, chunk1;  // 0, 0: all that the tokens see
  bool shared, parts;      // parts: states are left for a merge
};

// Tokens whose states of all chunks become their result.
struct Merge {
  int32_t sequence, head, first, rows;
};

struct PlanLimits {
  int32_t threads, kv_heads, page_size, max_tokens, max_sequences;
  int64_t part_floats;   // room for states
  int64_t state_floats;  // of one (token, kv head, chunk)
};

// Whether its rows are no chain: then they share slots that are not those of their positions, and make one unit for each head.
bool is_tree(const octavo_step& step, int32_t sequence);

class AttentionPlan {
 public:
  void open(const PlanLimits& limits);
  // For one KV group's table [rows, width] of a checked step. window > 0: of its layers. `parts`: shared reads and cuts by
  // chunks are wanted.
  void make(const octavo_step& step, const int32_t* table, int32_t window, bool parts);
  // Whether sequences that share pages in this plan share them in another group's table, too.
  bool fits(const int32_t* table) const;

  const Unit& unit(int64_t i) const { return dealt_[static_cast<size_t>(i)]; }
  const Merge& merge(int64_t i) const { return merges_[static_cast<size_t>(i)]; }
  int64_t begin(int thread) const { return begin_[static_cast<size_t>(thread)]; }  // units of a thread: up to begin(thread + 1)
  int64_t merges() const { return num_merges_; }
  int64_t part_chunks() const { return part_chunks_; }                             // of one token's states
  const int64_t* token(const Unit& unit) const { return reader_token_.data() + unit.first; }
  const int64_t* position(const Unit& unit) const { return reader_position_.data() + unit.first; }

 private:
  // Sequences whose chunks [chunk0, chunk1) lie in the same pages, as do those of `parent` before them.
  struct Class {
    int32_t leader, parent, members, tokens;
    int32_t chunk0, chunk1;
    int64_t first;  // of its readers
  };
  // The same while one chunk is looked through, and the class that it became or made longer.
  struct Found {
    int32_t leader, parent, members, tokens;
    int32_t becomes;
  };

  const int32_t* pages(const int32_t* table, int32_t sequence) const {
    return table + int64_t{step_->table_row[sequence]} * step_->table_width;
  }
  int32_t tokens(int32_t s) const { return step_->starts[s + 1] - step_->starts[s]; }
  int64_t first_position(int32_t s) const { return step_->positions[step_->starts[s]]; }
  int64_t chunks(int32_t s) const;
  bool may_cut_tokens(const Unit& unit) const;
  bool may_share(int32_t s, int32_t chunk) const;
  bool same_pages(const int32_t* table, int32_t a, int32_t b, int32_t chunk0, int32_t chunk1) const;
  void find_shared();
  bool look_through(int32_t chunk);
  int32_t find(int32_t sequence, int32_t chunk);
  int32_t keep(const Found& found, int32_t chunk);
  void list_readers();
  void list_shared();
  void list_own(int32_t sequence);
  void list(const Unit& unit);
  void deal();
  int64_t heads_end(int64_t first) const;
  bool crosses(int64_t first, int64_t room) const;
  bool cut_heads(int64_t* first, int64_t room, int64_t* reached);
  int64_t take_chunks(Unit* unit, int32_t chunks);
  int32_t last_chunk(const Unit& unit) const { return unit.chunk1 > 0 ? unit.chunk1 : static_cast<int32_t>(chunks(unit.sequence)); }
  void take(const Unit& unit);
  bool cut(Unit* unit, int64_t wanted, Unit* rest);
  bool cut_tokens(Unit* unit, int64_t wanted, Unit* rest) const;
  int64_t cost(const Unit& unit) const;
  void note_merge(const Unit& unit);

  PlanLimits limits_{};
  const octavo_step* step_ = nullptr;
  const int32_t* table_ = nullptr;
  int32_t window_ = 0;
  bool parts_ = false;
  std::vector<Unit> listed_, dealt_;
  std::vector<Merge> merges_;
  std::vector<int64_t> begin_;
  std::vector<int32_t> taken_;  // [heads] chunks that a border leaves to the thread before it
  int64_t num_listed_ = 0, num_dealt_ = 0, num_merges_ = 0, part_chunks_ = 0;
  std::vector<int64_t> reader_token_, reader_position_;
  int64_t num_readers_ = 0;
  std::vector<int32_t> class_of_, found_of_, own_from_;  // [sequences]
  std::vector<Class> classes_;
  std::vector<Found> found_;
  int32_t num_classes_ = 0, num_found_ = 0;
  struct Entry {
    int32_t page, found;
  };
  std::vector<Entry> entries_;  // what was found, by the last page of its chunk; open addressing
};

}  // namespace octavo
