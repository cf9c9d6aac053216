// The seam between what runs a step (program.cpp) and what computes (one kernel source per family, compiled once for
// each instruction set). A kernel set is a table of function pointers; every pointer is filled in every table.
//
// Rules that every kernel keeps (the same bytes, always):
//   - a row's result depends on that row, the weights, the format and the table alone, never on its neighbours, the
//     tile it lands in, the range of rows or panels of the call, or the thread;
//   - K is summed in ascending order in one chain per output lane; lanes are reduced in one fixed tree;
//   - no allocation, no exception, no standard-library template in these files; sizes are int64_t.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace octavo {

enum Format : int32_t { FMT_FP32 = 0, FMT_BF16 = 1, FMT_W8G64 = 2, FMT_W8PC = 3, FMT_W4G32 = 4, FMT_W4G64 = 5,
                        FMT_W4G128 = 6, FMT_W4A16G32 = 7, FMT_W4A16G64 = 8, FMT_W4A16G128 = 9, FMT_COUNT = 10 };
enum KVType : int32_t { KV_FP32 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_COUNT = 3 };
enum Epi : int32_t { EPI_STORE = 0, EPI_ADD = 1, EPI_SILU_MUL = 2, EPI_GELU_MUL = 3 };

// A packed matrix W [n, k]: panels of 64 columns (a column = an output), each one contiguous stream of K-steps with the
// scales of a group right after it. n is padded to 64 and k to kp at pack time; kernels see no tails.
// interleaved: columns alternate in 16s between gate and up ([I, k] each): n = 2 I rounded up, a panel gives 32 outputs.
struct Mat {
  int32_t fmt;
  int32_t interleaved;
  int64_t n, k, kp, panels;
  int64_t panel_bytes;
  const uint8_t* base;  // 64-byte aligned; panel p at base + p * panel_bytes
};

// Rows of activations as a format's kernel wants them. q: [rows][lda bytes]; per (row, group): z = start of the integer
// accumulator, s = scale. Layout and group count follow from (fmt, k).
struct Act {
  int32_t fmt;
  int32_t groups;
  int64_t k, kp, lda, ldg;
  uint8_t* q;
  int32_t* z;
  float* s;
};

// What happens to a finished tile. out[row][col] for columns below n (EPI_*_MUL: below n / 2).
struct Epilogue {
  int32_t kind;
  float* out;
  int64_t ldo;
  const float* bias;  // [n] or null (interleaved: in packed order)
  const float* res;   // EPI_ADD: out = res + value
  int64_t ldr;
  float soft_cap;     // > 0: c * tanh(v / c), after the bias
};

// One KV pool. A page holds, for every layer of its group and kv head, one blob: K of page_size tokens, V of them, scales.
// Blob layout by type (P = page_size tokens, D = head dim, both products run without shuffles):
//   KV_FP32  K [D][P] f32, V [P][D] f32
//   KV_BF16  K [D/2][P][2] bf16, V [P/2][D][2] bf16
//   KV_INT8  K [D/4][P][4] u8 = k + 128 with f32 scale per token [P]; V [P/4][D][4] s8 with f32 scale per token [P]
struct KV {
  int32_t type;
  int32_t page_size;   // 16 * 2^i
  int32_t kv_heads, dim;
  int64_t blob_bytes;  // one (layer, kv head), a multiple of 64
  int64_t layer_bytes; // kv_heads * blob_bytes
  int64_t page_bytes;  // layers of a group * layer_bytes
  uint8_t* base;       // page p at base + p * page_bytes
};

// A run of query tokens of one sequence against one kv head: `rows` tokens at consecutive positions pos0 .., `group` query
// heads each. Softmax blocks of 64 absolute positions, chunks of 512, ascending; masked lanes are selected away.
struct AttnItem {
  const KV* kv;
  const int32_t* pages;  // page table of the sequence (-1: freed, never read)
  int64_t layer_in_group;
  int32_t kv_head, group;
  int64_t rows, pos0;
  const float* q;        // [rows][ldq], this item's `group` heads are contiguous: group * dim floats
  int64_t ldq;
  float* out;            // [rows][ldo]
  int64_t ldo;
  float scale, soft_cap;
  int32_t window;        // 0: none; position p sees (p - window, p]
  const float* sinks;    // [group] or null: a logit that joins the denominator only
  const int32_t* parents; // tree rows: parent of each row within the item (-1: the history), always an earlier one; null:
                          // a chain. Row i stands at pos0 + its depth; its K/V lie in the slot of position pos0 + i.
  float* scores;         // exported attention probabilities or null (declared; later issue)
  uint8_t* scratch;      // attn_scratch(group, dim) bytes, 64-byte aligned, of this thread
  const uint8_t* prefetch; // first page blob that the next item of this thread reads, or null

  // Optional (zero: the plain item). A part of the keys, for several threads on one sequence; rows of several sequences
  // that share the pages of these chunks, which are then read once. The bits stay those of the plain item.
  int64_t chunk0, chunk1;     // chunks [chunk0, chunk1) of 512 absolute positions only; 0, 0: all
  const int64_t* positions;   // [rows] absolute position of each row, in any order; null: pos0 + i
  const int64_t* row_index;   // [rows] row i is row row_index[i] of q, out and partial; null: i
  float* partial;             // not null: states go here and attention_merge makes `out` of them:
  int64_t partial_chunks;     // [row][partial_heads][partial_chunks][attn_partial(dim)], by absolute chunk
  const int32_t* prefetch_pages;  // the next item's page table from the page of `prefetch` on, and how many of them it reads;
  int64_t prefetch_count;         // null: that page alone is fetched
  int32_t heads;                  // > 1, at most attn_heads: kv heads kv_head, kv_head + 1, .. of one token (rows is 1); q, out,
                                  // sinks and partial go on from head to head. Their blobs lie side by side in a page
  int64_t partial_heads;          // query heads of a row of `partial`; 0: group

  int32_t sink_tokens;   // 0: none. With a window: positions [0, sink_tokens), at most 64, are seen as well, as a chunk before
  int64_t pairs;         // the others; for them q is turned back by max(0, p - (sink_tokens + window - 1)) positions, whose
  const float* turns;    // cosines and sines are turns[2 * position * pairs + ..]
};

constexpr int kBlock = 64;            // logits of a block, words of 16 Philox calls
constexpr int kLimits = 8;            // of mass_from
constexpr int kFrom = 4;              // of sum_exp
constexpr float kOctaves = 3.0f;      // between them
constexpr float kHopeless = -22.9f;   // no Gumbel value makes up for more

// Coordinates of noise beside the token id: backends/random.py.
struct Noise {
  uint64_t seed;
  uint32_t choice, index, purpose;
};

// What a token has to beat: (x - top) * inverse + its noise > bar. Blocks whose maximum is below `least` are passed over.
struct Hopes {
  const float* blocks;
  int64_t count;
  float top, inverse, bar, least;
  Noise at;
};

// Of a first-level data cache; the library sets it when it looks for tables (dispatch.cpp). Work is cut by it, bits never depend on it.
inline int64_t first_level_bytes = 32 << 10;

struct Kernels {
  const char* name;  // "generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni_bf16", "amx", "neon", ...

  // ---- matrices (gemm.inc)
  int64_t (*mat_layout)(Mat* m);                   // fills kp, panels, panel_bytes from fmt, n, k, interleaved; bytes, or -1
  void (*pack)(const Mat* m, uint8_t* dst, int64_t panel0, int64_t panel1, const float* w, const float* up);  // w [n, k] rows
  // a stored group format goes in without loss: codes [n, k] (0..15 or int8), scale and offset [n, k / group]: w = scale * code + offset
  void (*pack_codes)(const Mat* m, uint8_t* dst, int64_t panel0, int64_t panel1, const uint8_t* codes, const float* scale, const float* offset);
  void (*unpack_row)(const Mat* m, int64_t row, float* out);  // dequantised [k]; embeddings read it
  int64_t (*act_layout)(Act* a, int64_t rows);     // fills groups, kp, lda, ldg from fmt, k; bytes of q (then z, s follow, 64-aligned), or -1
  // rows [r0, r1) of x * mul * row_scale -> act. mul [k] or null; row_scale [rows] or null
  void (*quantize)(const Act* a, int64_t r0, int64_t r1, const float* x, int64_t ldx, const float* mul, const float* row_scale);
  // rows [r0, r1) x panels [p0, p1) by one thread. next: what to prefetch towards the end (the following op's panel) or null
  void (*gemm)(const Mat* m, const Act* a, int64_t r0, int64_t r1, int64_t p0, int64_t p1, const Epilogue* e, const uint8_t* next);

  // ---- rows (rows.inc)
  void (*inv_rms)(const float* x, int64_t ldx, int64_t r0, int64_t r1, int64_t n, float eps, float* out);   // 1 / sqrt(mean(x^2) + eps)
  void (*add_rows)(float* dst, const float* a, const float* b, int64_t n);
  void (*scale_mul)(float* dst, const float* x, const float* mul, float k, int64_t n);  // dst = x * k * mul (mul may be null)
  void (*layer_norm)(float* dst, const float* x, const float* w, const float* b, float eps, int64_t n);
  void (*rope)(float* x, int64_t heads, int64_t dim, int64_t rotary, const float* cos, const float* sin);   // half rotation, in place
  void (*qk_norm)(float* x, int64_t heads, int64_t dim, const float* w, float eps);                         // in place
  void (*gated)(float* dst, const float* gate, const float* up, int32_t kind, int64_t n);                   // EPI_SILU_MUL / EPI_GELU_MUL

  // ---- attention and pages (attention.inc)
  int64_t (*kv_layout)(KV* kv);                    // fills blob_bytes, layer_bytes; bytes of a layer, or -1
  void (*kv_write)(const KV* kv, uint8_t* blob, int64_t offset, const float* k, const float* v);            // one token of one kv head
  void (*kv_read)(const KV* kv, const uint8_t* blob, int64_t offset, float* k, float* v);
  int64_t (*attn_scratch)(int32_t group, int32_t dim);
  void (*attention)(const AttnItem* item);

  // ---- sampling (sampling.inc): one row of n logits, in blocks of kBlock
  float (*maxima)(const float* x, int64_t n, float* blocks);                                                // of each block; returns the largest of all, or a NaN where there is one
  double (*sum_exp)(const float* x, int64_t n, float top, float inverse, float* weights, float* from);      // of w = exp((x - top) * inverse), fixed order; not null: weights [n] gets each, from [kFrom] about the sums of w >= 2^-(kOctaves * (j + 1))
  int64_t (*gather)(const float* x, int64_t n, const float* blocks, float least, float most, int32_t* ids); // ids with least <= x <= most, ascending; writes kBlock places more
  void (*mass_from)(const float* x, const float* weights, int64_t n, const float* limits, double* sums);    // of x >= limits[j], kLimits descending; weights null: 1 each
  int64_t (*rank_of)(const float* x, int64_t n, int64_t id);                                                // 1: the largest, of equals the first
  void (*mask_row)(float* dst, const float* x, int64_t n, const uint8_t* mask, int64_t bytes);              // -inf where the bit (id & 7) of byte id / 8 is not set
  void (*noise_words)(uint32_t* bits, const int32_t* ids, int64_t n, const Noise* at);                      // as backends/random.py
  int64_t (*next_hopeful)(const Hopes* h, int64_t from, uint32_t* bits);                                    // first block that may hold the winner and its words [kBlock], or h->count
  int64_t (*hopeful)(const Hopes* h, const float* x, const uint32_t* bits, int64_t n, int32_t* which);      // those of n values and words that may win, by index

  // ---- attention in parts
  int64_t (*attn_partial)(int32_t dim);            // floats of one (row, head, chunk)
  void (*attention_merge)(const AttnItem* item);   // partial -> out, once the items of all chunks that its rows see have run
  int64_t (*attn_heads)(const KV* kv, int32_t group);  // kv heads that an item of one token may have

  // ---- what benchmarks are read against (measure.inc)
  void (*read_bytes)(const uint8_t* p, int64_t bytes);  // bytes: a multiple of 256
  double (*dots)(int32_t kind, int64_t repeats);        // operations done; 0 int8, 1 bf16, 2 fp32; 0: unknown

  // ---- weights as files store them (stored.inc); types by GGUF's numbers
  int64_t (*stored_row_bytes)(int32_t type, int64_t k);  // of a row of k values, or -1: no such type, or no whole blocks
  void (*stored_decode)(int32_t type, const uint8_t* row, int64_t k0, int64_t k1, float* out);  // values [k0, k1), whole blocks
  // Q4_0 and Q4_1: codes [k], scale and offset [k / 32]; false where float16 does not hold one
  bool (*stored_codes)(int32_t type, const uint8_t* row, int64_t k, uint8_t* codes, float* scale, float* offset);

  // ---- low-rank adapters (lora.inc): up to eight rows with one of them
  void (*lora_shrink)(float* u, int64_t ldu, const float* const* x, int64_t rows, int64_t k, const uint8_t* a, int64_t rank, bool half, const uint8_t* ready, int64_t apart);  // u = x . a [k, rank: a multiple of 16], fp32 or bf16; ready: null, or the rows as operands of a bf16 product, which are read instead where lora_takes_operands
  void (*lora_expand)(float* const* y, int64_t step, const float* u, int64_t ldu, int64_t rows, const uint8_t* b, int64_t rank, int64_t blocks, bool half);  // y += u . b [blocks, rank, 16]; blocks of y are `step` apart
  bool lora_takes_operands;  // of bf16: `ready` is looked at
  void (*gate_pairs)(float* dst, const float* pairs, int32_t kind, int64_t n);  // act(gate) * up of a packed pair's sums
};

extern "C" const Kernels* octavo_kernels_generic();
// one such function per table: octavo_kernels_avx2, _avx2_vnni, _avx512, _avx512_vnni_bf16, _amx, _neon, ...; null-returning when not built

}  // namespace octavo
