// Attention plans over random batches, some with common pages: whatever is shared and cut, each (token, head, chunk) is read
// exactly once, from the token's own pages, results are merged where they were made in parts, and threads have equal work.
#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "check.h"
#include "plan.h"

using namespace octavo;

namespace {

struct Batch {
  std::vector<int32_t> positions, starts{0}, rows, table, parents;
  int32_t width = 0, page = 0;
  octavo_step step{};

  const int32_t* pages(int32_t s) const { return table.data() + rows[static_cast<size_t>(s)] * width; }
  int32_t sequence_of(int64_t token) const {
    return static_cast<int32_t>(std::upper_bound(starts.begin(), starts.end(), token) - starts.begin()) - 1;
  }
};

// Sequences of `tokens` tokens from `begins` on, on their pages.
Batch batch_of(int32_t page, const std::vector<std::vector<int32_t>>& pages, const std::vector<int32_t>& begins, const std::vector<int32_t>& tokens) {
  Batch b;
  b.page = page;
  const int32_t count = static_cast<int32_t>(pages.size());
  for (size_t s = 0; s < pages.size(); s++) {
    for (int32_t t = 0; t < tokens[s]; t++) b.positions.push_back(begins[s] + t);
    b.starts.push_back(b.starts.back() + tokens[s]);
    b.width = std::max(b.width, static_cast<int32_t>(pages[s].size()));
  }
  b.table.assign(pages.size() * static_cast<size_t>(b.width), -1);
  for (int32_t s = 0; s < count; s++) {
    b.rows.push_back(count - 1 - s);
    std::copy(pages[static_cast<size_t>(s)].begin(), pages[static_cast<size_t>(s)].end(), b.table.begin() + int64_t{count - 1 - s} * b.width);
  }
  b.step.tokens = b.starts.back(), b.step.sequences = count;
  b.step.positions = b.positions.data(), b.step.starts = b.starts.data();
  b.step.table_row = b.rows.data(), b.step.table_width = b.width, b.step.table_rows = count;
  return b;
}

// Sequences in families that have a prefix of pages in common, perhaps a longer one with some of them.
Batch random_batch(check::Random* rng, int32_t page, int32_t most_sequences, int32_t most_tokens) {
  const int32_t count = static_cast<int32_t>(rng->between(1, most_sequences));
  const bool decode = rng->below(2) == 0;
  std::vector<std::vector<int32_t>> known;
  std::vector<int32_t> begins, all;
  int32_t fresh = 0, used = 0;
  for (int32_t s = 0; s < count; s++) {
    const int32_t left = most_tokens - used - (count - s - 1);
    const int32_t tokens = decode || rng->below(3) > 0 ? 1 : static_cast<int32_t>(rng->between(1, std::min<int32_t>(left, 90)));
    const int32_t begin = static_cast<int32_t>(rng->below(rng->below(2) ? 3000 : 400));
    std::vector<int32_t> pages(static_cast<size_t>((begin + tokens + page - 1) / page));
    for (int32_t& p : pages) p = fresh++;
    if (!known.empty() && rng->below(4) > 0) {
      const std::vector<int32_t>& other = known[static_cast<size_t>(rng->below(static_cast<int64_t>(known.size())))];
      const int64_t same = rng->between(0, std::min<int64_t>(static_cast<int64_t>(other.size()), begin / page));
      std::copy(other.begin(), other.begin() + same, pages.begin());
      if (same > 0 && rng->below(4) == 0) pages[static_cast<size_t>(rng->below(same))] = fresh++;  // one in the middle is another
    }
    known.push_back(pages), begins.push_back(begin), all.push_back(tokens);
    used += tokens;
  }
  return batch_of(page, known, begins, all);
}

// Some of the sequences become trees; rows of the others follow each other.
void plant(check::Random* rng, Batch* b) {
  for (int32_t s = 0; s < b->step.sequences; s++) {
    const int32_t first = b->starts[static_cast<size_t>(s)], count = b->starts[static_cast<size_t>(s) + 1] - first;
    const bool tree = rng->below(2) == 0;
    for (int32_t t = 0; t < count; t++) {
      const bool follows = !tree || (t + 1 < count && rng->below(8) > 0);  // deep ones, whose last row is not the deepest
      const int32_t parent = follows ? t - 1 : static_cast<int32_t>(rng->below(t + 1)) - 1;
      b->parents.push_back(parent);
      const int32_t begin = b->positions[static_cast<size_t>(first)];
      b->positions[static_cast<size_t>(first + t)] = parent < 0 ? begin : b->positions[static_cast<size_t>(first + parent)] + 1;
    }
  }
  b->step.parent_rows = b->parents.data();
}

using Key = std::tuple<int64_t, int32_t, int64_t>;  // token, head, chunk

struct Seen {
  std::map<Key, int> reads;
  std::map<std::pair<int64_t, int32_t>, int> parts, merges;
  bool pages_right = true, behind = true, few = true, whole = true, shared = false, cut = false;
};

void read_unit(const Batch& b, const AttentionPlan& plan, const Unit& unit, Seen* seen) {
  seen->shared = seen->shared || unit.shared;
  seen->cut = seen->cut || (unit.parts && !unit.shared && unit.chunk0 == 0);
  for (int32_t i = 0; i < unit.rows; i++) {
    const int64_t token = unit.shared ? plan.token(unit)[i] : unit.first + i;
    const int64_t position = b.positions[static_cast<size_t>(token)];
    const int32_t own = b.sequence_of(token);
    seen->behind = seen->behind && (!unit.shared || b.positions[static_cast<size_t>(b.starts[static_cast<size_t>(own)])] >= unit.chunk1 * kChunk);
    seen->few = seen->few && (!unit.shared || b.starts[static_cast<size_t>(own) + 1] - b.starts[static_cast<size_t>(own)] <= 8);
    if (unit.shared) seen->pages_right = seen->pages_right && plan.position(unit)[i] == position;
    const bool all = unit.first == b.starts[static_cast<size_t>(own)] && unit.first + unit.rows == b.starts[static_cast<size_t>(own) + 1];
    seen->whole = seen->whole && (unit.shared || all || !is_tree(b.step, own));
    const int64_t end = unit.chunk1 > 0 ? std::min<int64_t>(unit.chunk1, position / kChunk + 1) : position / kChunk + 1;
    for (int64_t chunk = unit.chunk0; chunk < end; chunk++) {
      seen->reads[{token, unit.head, chunk}]++;
      for (int64_t p = chunk * kChunk; p <= std::min(position, chunk * kChunk + kChunk - 1); p++) {
        seen->pages_right = seen->pages_right && b.pages(unit.sequence)[p / b.page] == b.pages(own)[p / b.page];
      }
    }
    if (unit.parts) seen->parts[{token, unit.head}] = 1;
  }
}

void check_plan(const Batch& b, const AttentionPlan& plan, int threads, int32_t heads, Seen* seen) {
  for (int64_t i = 0; i < plan.begin(threads); i++) read_unit(b, plan, plan.unit(i), seen);
  for (int64_t i = 0; i < plan.merges(); i++) {
    const Merge& m = plan.merge(i);
    for (int32_t t = m.first; t < m.first + m.rows; t++) seen->merges[{t, m.head}]++;
  }
  bool once = true;
  size_t wanted = 0;
  for (int64_t token = 0; token < b.step.tokens; token++) {
    for (int32_t head = 0; head < heads; head++) {
      for (int64_t chunk = 0; chunk <= b.positions[static_cast<size_t>(token)] / kChunk; chunk++, wanted++) {
        const auto found = seen->reads.find({token, head, chunk});
        once = once && found != seen->reads.end() && found->second == 1;
      }
    }
  }
  CHECK(once && seen->reads.size() == wanted);
  CHECK(seen->pages_right);
  CHECK(seen->behind);
  CHECK(seen->few);  // the reads of many tokens serve many rows anyhow
  CHECK(seen->whole);  // a tree's rows are one unit
  CHECK(seen->parts == seen->merges);
}

// No thread has much more than its part: a piece that cannot be cut, and what cuts cost.
void check_shares(const AttentionPlan& plan, const Batch& b, int threads, bool by_chunks) {
  int64_t most = 0, all = 0, largest = 0;
  for (int thread = 0; thread < threads; thread++) {
    int64_t own = 0;
    for (int64_t i = plan.begin(thread); i < plan.begin(thread + 1); i++) {
      const Unit& u = plan.unit(i);
      const int64_t last = u.shared ? u.chunk1 * kChunk : b.positions[static_cast<size_t>(u.first)] + u.rows / 2 + 1;
      const int64_t end = u.chunk1 > 0 ? std::min<int64_t>(last, u.chunk1 * kChunk) : last;
      const int64_t cost = (end - u.chunk0 * kChunk + 64) * (u.rows + 2);
      own += cost;
      largest = std::max(largest, by_chunks ? std::min<int64_t>(cost, (kChunk + 64) * (u.rows + 2)) : cost);
    }
    most = std::max(most, own);
    all += own;
  }
  CHECK(most <= all / threads + 2 * largest);
}

// One sequence of one token: each thread reads a run of chunks, about the same one of every head.
void check_runs(const AttentionPlan& plan, int threads, int32_t heads) {
  for (int thread = 0; thread < threads; thread++) {
    int32_t first = INT32_MAX, last_first = 0, end = INT32_MAX, last_end = 0;
    for (int64_t i = plan.begin(thread); i < plan.begin(thread + 1); i++) {
      const Unit& u = plan.unit(i);
      first = std::min(first, u.chunk0), last_first = std::max(last_first, u.chunk0);
      end = std::min(end, u.chunk1), last_end = std::max(last_end, u.chunk1);
    }
    CHECK(plan.begin(thread + 1) - plan.begin(thread) == heads);
    CHECK(last_first - first <= 1 && last_end - end <= 1);
  }
  CHECK(plan.merges() == heads);
}

void test_random(check::Random* rng) {
  int shared = 0, cut = 0;
  for (int turn = 0; turn < 300; turn++) {
    const int32_t page = 16 << rng->below(3), heads = static_cast<int32_t>(rng->between(1, 4)), threads = static_cast<int32_t>(rng->between(1, 4));
    Batch b = random_batch(rng, page, 12, 256);
    if (rng->below(3) == 0) plant(rng, &b);
    const bool parts = rng->below(4) > 0;
    const int64_t room = turn % 9 == 0 ? 5000 : int64_t{1} << 20, state = 100;
    AttentionPlan plan;
    plan.open({threads, heads, page, 256, 12, room, state});
    for (int again = 0; again < 2; again++) plan.make(b.step, b.table.data(), 0, parts);
    Seen seen;
    check_plan(b, plan, threads, heads, &seen);
    check_shares(plan, b, threads, parts && turn % 9 != 0);
    CHECK(parts || !(seen.shared || seen.cut || plan.merges()));
    CHECK(seen.parts.empty() || b.step.tokens * heads * plan.part_chunks() * state <= room);
    CHECK(plan.fits(b.table.data()));
    shared += seen.shared, cut += seen.cut;
    std::vector<int32_t> other = b.table;
    for (int32_t& p : other) p = static_cast<int32_t>(&p - other.data());
    CHECK(plan.fits(other.data()) != seen.shared);
  }
  CHECK(shared > 20 && cut > 20);
}

// One sequence of one token, far on.
void test_one() {
  for (const int32_t position : {5000, 8064, 8191}) {
    std::vector<int32_t> pages(static_cast<size_t>(position / 16 + 1));
    for (size_t i = 0; i < pages.size(); i++) pages[i] = static_cast<int32_t>(i);
    const Batch b = batch_of(16, {pages}, {position}, {1});
    for (int threads = 2; threads <= 4; threads++) {
      AttentionPlan plan;
      plan.open({threads, 5, 16, 8, 1, int64_t{1} << 20, 100});
      plan.make(b.step, b.table.data(), 0, true);
      Seen seen;
      check_plan(b, plan, threads, 5, &seen);
      check_shares(plan, b, threads, true);
      check_runs(plan, threads, 5);
    }
  }
}

// Sequence s has the first `common(s)` chunks of 512 positions in the pages of all, of family `family(s)`; then pages of its own.
template <class Common, class Family>
void check_families(int32_t count, int32_t begin, int32_t tokens, const Common& common, const Family& family) {
  constexpr int32_t kPage = 64;
  int32_t fresh = 1000;
  std::vector<std::vector<int32_t>> pages;
  for (int32_t s = 0; s < count; s++) {
    std::vector<int32_t> own;
    for (int32_t p = 0; p <= begin / kPage + 8; p++) own.push_back(p / 8 >= common(s) ? fresh++ : p / 8 == 0 ? 100 * family(s) + p : p);
    pages.push_back(own);
  }
  const Batch b = batch_of(kPage, pages, std::vector<int32_t>(pages.size(), begin), std::vector<int32_t>(pages.size(), tokens));
  for (int threads = 1; threads <= 4; threads++) {
    AttentionPlan plan;
    plan.open({threads, 2, kPage, count * tokens, count, int64_t{1} << 24, 100});
    plan.make(b.step, b.table.data(), 0, true);
    Seen seen;
    check_plan(b, plan, threads, 2, &seen);
    CHECK(seen.shared);
  }
}

}  // namespace

int main() {
  check::Random rng(5);
  test_random(&rng);
  test_one();
  const auto all = [](int32_t) { return 0; };
  for (const int32_t tokens : {1, 8}) {
    check_families(9, 5120, tokens, [](int32_t s) { return 9 - s; }, all);  // ever fewer go on together: more readers than there is room for
    check_families(6, 5120, tokens, [](int32_t) { return 3; }, [](int32_t s) { return s % 3; });  // the same pages after another past
    check_families(4, 1530, tokens, [](int32_t) { return 3; }, all);  // the third chunk is not behind them yet
  }
  return check::finish("test_plan");
}
