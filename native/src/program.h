// A forward pass as a list of records that all threads walk, with a barrier only where one thread needs what another
// made. Everything a step touches was allocated and checked when the program was opened; a step's own numbers are
// checked before it starts.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "adapters.h"
#include "engine.h"
#include "plan.h"
#include "pool.h"
#include "sampling.h"
#include "sync.h"

namespace octavo {

constexpr int kMaxMatrices = 4;
constexpr int64_t kRowBlock = 256;       // rows whose operands stay in the second-level cache beside a panel
constexpr int64_t kSplitRows = 32;       // per thread: from here on threads split rows instead of panels
constexpr int64_t kFewRows = 2;          // up to here every thread prepares all rows itself instead of waiting
constexpr int64_t kSharedPanelRows = 8;  // from here on a panel left over is shared by rows
constexpr int64_t kAheadBytes = 128 << 10;  // of its next weights that a waiting thread fetches: they stay in the second-level cache
constexpr int64_t kJoinedPanels = 8;  // after which adapters add to what they gave, which the second-level cache still has
constexpr int64_t kMostStates = 4 << 20;  // floats of attention states that a program keeps room for

#ifdef OCTAVO_ABLATE_CLAIMS
inline std::atomic<int64_t> claims[1024][Pool::kMaxThreads];  // of (record, lot): panels that threads have taken in this step
#endif

// A record with its weights looked up.
struct Op {
  octavo_op record;
  int count = 0;  // matrices
  const Weight* mats[kMaxMatrices] = {};
  const float* bias[kMaxMatrices] = {};
  int64_t least = 0;            // panels that every thread has at least
  const float* norm = nullptr;  // of the operands
  const float* vectors[2] = {};
  Act act{};                    // layout of the operands
  int32_t next = OCTAVO_NONE;   // of a LINEAR: the one that follows
  int32_t coming = OCTAVO_NONE; // this or the next LINEAR: its weights are fetched while a thread waits or does something else
  int32_t adds = OCTAVO_NONE;   // of a LINEAR: the LORA behind it that adds to its outputs
  bool joined = false;          // of a LORA: in the running step its LINEAR does it, a few panels at a time
  bool adapted = false;         // of a LORA and the pair before it: the running step has an adapter that changes it
  const Weight* const* experts = nullptr;  // E gate/up pairs, then E downs
  Act inner{};                  // layout of a mixture's second operands
};

// What a mixture needs between its phases, for max_tokens * top_k (row, expert) pairs.
struct MoeScratch {
  int32_t* expert = nullptr;    // [T, k] chosen experts
  float* share = nullptr;       // [T, k]
  int32_t* place = nullptr;     // [T, k] where the pair lies when pairs are sorted by expert
  int32_t* source = nullptr;    // [T * k] the token row of each sorted pair
  int32_t* begin = nullptr;     // [E + 1] first pair of each expert
  float* inner = nullptr;       // [T * k, I]
  float* outer = nullptr;       // [T * k, H]
  int64_t ld_inner = 0, ld_outer = 0, pairs = 0;
};

// Rows [begin, end) of operands, which are the rows from base + begin on of the buffers.
struct RowRange {
  int64_t begin, end, base;
};

// Rows of one place, or without an adapter.
struct AdapterUnit {
  int32_t place, count;
  int32_t rows[kAdapterRows];
};

// Outputs that panels [p0, p1) of a record's matrix give.
struct Outputs {
  int matrix;
  int64_t p0, p1;
};

// Working memory of one thread.
struct alignas(64) ThreadScratch {
  uint8_t* operands;   // an Act of kRowBlock rows
  float* scale;        // [rows] inverse root mean squares
  uint8_t* attention;
  float* row;          // one row of the widest buffer
  float* adapted;      // [kAdapterRows, widest] normed rows, if there are adapters
  float* inner;        // [kRowBlock, 3, padded rank], if there are adapters
  SampleScratch sample;
  Ahead ahead;       // weights of record `ahead_of` that this thread will multiply
  int32_t ahead_of;
};

class Program {
 public:
  Program(Engine* engine, Pages* pages) : engine_(engine), pages_(pages), kernels_(engine->kernels) {}

  bool open(const octavo_program_spec& spec, std::string* error);
  bool run(const octavo_step& step, std::string* error, double* op_seconds = nullptr);
  const float* logits(int64_t* stride) const;
  const float* values(int32_t buffer, int64_t* stride) const;
  int64_t bytes() const { return memory_.used(); }
  int barriers(int64_t tokens, int64_t logit_rows) const;

 private:
  // open: program_open.cpp
  bool check_spec(const octavo_program_spec& spec, std::string* error) const;
  bool check_tables(const octavo_program_spec& spec, std::string* error) const;
  const char* wrong(const octavo_op& op) const;
  const char* wrong_shapes(const octavo_op& op) const;
  const char* wrong_linear(const octavo_op& op) const;
  const char* wrong_pages(const octavo_op& op) const;
  const char* wrong_sinks(const octavo_op& op) const;
  bool sinks_agree() const;
  bool rope_fits(int32_t table) const;
  const char* wrong_mixture(const octavo_op& op) const;
  const char* wrong_lora(const octavo_op& op) const;
  bool indices_exist(const octavo_op& op) const;
  void resolve(const octavo_op& record);
  void resolve_linear(Op* op);
  void resolve_mixture(Op* op);
  void note_windows();
  void allocate();
  void allocate_threads();
  void allocate_plans();
  void allocate_mixture();
  void plan_barriers();
  bool buffer_is(int32_t buffer, int64_t cols, int32_t rows = OCTAVO_ROWS_T) const;
  bool vector_is(int32_t weight, int64_t n, bool optional) const;
  int64_t cols(int32_t buffer) const { return buffers_[static_cast<size_t>(buffer)].cols; }

  // one step: step.cpp
  bool check_step(const octavo_step& step, std::string* error) const;
  const char* wrong_step(const octavo_step& step) const;
  const char* wrong_sequence(const octavo_step& step, int32_t sequence) const;
  void bind(const octavo_step& step);
  void plan_attention();
  void note_turns();
  void note_turn(int32_t position);
  static bool has_adapters(const octavo_step& step);
  const char* wrong_adapters(const octavo_step& step) const;
  const octavo_step* in_order(const octavo_step& given);
  void sort_places(const octavo_step& step);
  void deal_places(const octavo_step& step);
  void gather_adapters();
  void deal_rows(int64_t first, int64_t last, int64_t most, int thread, int threads);
  bool changes(const Op& op, int32_t place) const;

  // what threads do: run.cpp, run_linear.cpp, run_lora.cpp, run_attention.cpp, run_mass.cpp, run_moe.cpp
  static void thread_main(void* program, int thread);
  void walk(int thread);
  void execute(const Op& op, int thread);
  void execute_timed(size_t index, int thread);
  void turn_tables(int thread);
  void embed(const Op& op, int thread);
  void norm(const Op& op, int thread);
  void elementwise(const Op& op, int thread);
  void select(const Op& op, int thread);
  void rope_kv(const Op& op, int thread);
  void rope_unit(const Op& op, int64_t row, int32_t sequence, int32_t head);
  void attention(const Op& op, int thread);
  AttnItem attention_item(const Op& op, int32_t sequence, int32_t head, int32_t rows) const;
  void give_rows(const Op& op, AttnItem* item, int64_t token) const;
  void run_units(const Op& op, const AttentionPlan& plan, int thread);
  void merge_parts(const Op& op, const AttentionPlan& plan, int thread);
  void merge_row(const Op& op, const AttentionPlan& plan, const Merge& merge, int32_t row, int64_t head, int64_t end);
  void read_ahead(const Op& op, const AttentionPlan& plan, int64_t next, int64_t end, AttnItem* a) const;
  void mass(const Op& op, int thread);
  void mass_of_head(const Op& op, int32_t head);
  void add_mass(const Op& op, int32_t head, int64_t first, int64_t last, float* mass, int64_t seen);
  void read_keys(const Op& op, int32_t head, int64_t first, int64_t count, float* keys);
  int32_t shift_of(int32_t sequence) const { return step_->shifts == nullptr ? 0 : step_->shifts[step_->table_row[sequence]]; }
  float* states_of(const Op& op, const AttentionPlan& plan, int32_t head) const;
  const AttentionPlan& plan_of(const Op& op) const;
  const int32_t* page_row(const Op& op, int32_t sequence) const;
  void linear(const Op& op, int thread);
  void few_rows(const Op& op, int thread);
  void by_panels(const Op& op, int thread);
  void by_rows(const Op& op, int thread);
  void prepare(const Op& op, const Act& act, float* scale, RowRange rows);
  int64_t panels(const Op& op, int lot) const;
  void multiply(const Op& op, const Act& act, RowRange rows, int lot, int64_t p0, int64_t p1, const uint8_t* next);
  void multiply_share(const Op& op, const Act& act, int64_t rows, int thread);
  const uint8_t* next_panel(const Op& op, int thread) const;
  Ahead first_weights(const Op& op, int thread) const;
  Ahead* ahead(const Op& op, int thread);
  void lora(const Op& op, int thread);
  static bool adds_to(const octavo_op& lora, const octavo_op& linear);
  void multiply_joined(const Op& op, const Act& act, RowRange rows, int lot, const uint8_t* next, int thread);
  void shrink(const Op& op, const Act& act, int64_t base, int thread);
  void shrink_unit(const Op& op, const AdapterUnit& unit, float* u, const uint8_t* ready, int64_t apart, int thread);
  void expand(const Op& op, Outputs of, int thread);
  void expand_unit(const Op& op, const AdapterUnit& unit, const float* u, Outputs of);
  const Factors* factors(const Op& op, int32_t place, int target) const;
  void moe(const Op& op, int thread);
  void route(const Op& op, int thread);
  void sort_pairs(const Op& op);
  void experts(const Op& op, int thread, bool down);
  void expert_operands(const Op& op, int thread, bool down);
  void combine(const Op& op, int thread);
  void sample(int thread);
  void give_hidden(int thread);

  int64_t rows(int32_t buffer) const;
  int32_t domain(const Op& op) const { return buffers_[static_cast<size_t>(op.record.out[0])].rows; }
  float* data(int32_t buffer) const { return base_[static_cast<size_t>(buffer)]; }
  int64_t stride(int32_t buffer) const { return stride_[static_cast<size_t>(buffer)]; }
  Mode mode(int32_t rows_of) const { return rows_of == OCTAVO_ROWS_R ? mode_r_ : mode_t_; }
  Mode mode_for(int64_t rows) const;
  int64_t act_bytes(const Act& layout, int64_t rows) const;
  Act place(const Act& layout, uint8_t* memory, int64_t rows) const;
  int64_t shared_rows() const { return kSplitRows * engine_->threads; }  // from here on threads have operands of their own
  int64_t most_rows() const { return limits_.max_tokens > limits_.max_logit_rows ? limits_.max_tokens : limits_.max_logit_rows; }
  const Weight& weight(int32_t number) const { return engine_->weights[static_cast<size_t>(number)]; }
  const float* vector(int32_t number) const { return number == OCTAVO_NONE ? nullptr : weight(number).values; }
  int64_t part(int64_t n, int thread) const { return n * thread / engine_->threads; }

  Engine* engine_;
  Pages* pages_;
  const Kernels* kernels_;
  Arena memory_{int64_t{2} << 20};

  // fixed when opened
  octavo_program_spec limits_{};
  std::vector<octavo_buffer> buffers_;
  std::vector<Op> ops_;
  std::vector<int32_t> layer_group_, layer_index_, extra_;
  std::vector<int32_t> group_window_;  // -1: no layer of the group attends
  std::vector<int32_t> group_sinks_;   // first tokens that its windows leave in sight
  int32_t turned_back_ = 0;            // position p is turned back by p - turned_back_ for them; 0: there are none
  std::vector<const Weight*> expert_mats_;
  struct Rope {
    std::vector<double> inv_freq;
    double factor;
    float* turns;  // [max_positions, 2, pairs] cosines and sines of the positions that steps have had so far
  };
  std::vector<Rope> ropes_;
  std::vector<ThreadScratch> scratch_;
  std::vector<uint8_t> barriers_[2][kPlans];  // of steps without adapters, with some
  const Adapters* adapters_ = nullptr;
  uint8_t* act_memory_ = nullptr;
  uint8_t* inner_memory_ = nullptr;
  uint8_t* values_ = nullptr;  // all buffers
  float* states_ = nullptr;    // of attention in parts
  std::vector<uint8_t> turned_;  // [max_positions] 1: `turns` has it
  MoeScratch moe_;

  // of the running step
  const octavo_step* step_ = nullptr;
  double* op_seconds_ = nullptr;  // null: records are not timed
  bool adapted_ = false;
  std::vector<std::vector<AdapterUnit>> units_;  // [threads]
  std::vector<int32_t> by_place_;       // sequences
  std::vector<int32_t> thread_of_;      // [max_sequences]
  octavo_step ordered_{};               // the step, where its sequences go in another order
  std::vector<int32_t> ordered_arrays_; // [5, max_sequences]
  std::vector<float*> base_;
  std::vector<int64_t> stride_;
  std::vector<int32_t> sequence_of_;    // [max_tokens]
  std::vector<const int32_t*> table_;   // [groups]
  AttentionPlan plans_[2];              // of groups that see all positions; of others
  std::vector<uint8_t> plan_of_group_;  // [groups]
  std::vector<int32_t> turns_;          // [max_tokens] positions new to `turns`
  int64_t num_turns_ = 0;
  Mode mode_t_ = Mode::kFew, mode_r_ = Mode::kFew;
  Share share_ = Share::kUnits;
};

}  // namespace octavo
