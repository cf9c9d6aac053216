/* The C ABI of the native CPU backend: plain records in, one call a step.
 *
 * Everything is checked before it starts; kernels cannot fail. A function that can fail returns a negative number (or
 * null) and leaves a sentence in octavo_error(). Handles are owned by the caller: close programs before pools before
 * engines. Sizes are 64-bit; counts in records are int32. One step at a time runs in a process: engines share the
 * thread pool behind a lock; an engine and what belongs to it have one caller at a time. Python calls these through ctypes, which drops its lock for the length of a call. */
#ifndef OCTAVO_NATIVE_H
#define OCTAVO_NATIVE_H
#include <stdint.h>

#define OCTAVO_API __attribute__((visibility("default")))
#define OCTAVO_ABI_VERSION 6
#define OCTAVO_NONE (-1) /* no buffer, no weight, no slot */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct octavo_engine octavo_engine;   /* instruction set, threads, packed weights */
typedef struct octavo_kv octavo_kv;           /* pages of keys and values */
typedef struct octavo_program octavo_program; /* a forward pass, ready to run */
typedef struct octavo_adapters octavo_adapters; /* low-rank adapters of a model, by place */

OCTAVO_API int32_t octavo_abi_version(void);
OCTAVO_API int32_t octavo_most_sink_tokens(void); /* of an ATTENTION; a library without this function has none */
OCTAVO_API const char* octavo_kernel_version(void); /* changes whenever a kernel's rounding does */
OCTAVO_API const char* octavo_error(void);          /* the last failure of this thread */

/* Instruction-set tables that were built and that this CPU runs, best first, separated by spaces. */
OCTAVO_API const char* octavo_isas(void);
/* Threads that this process may use at once: its affinity mask and CPU quota. */
OCTAVO_API int32_t octavo_cpus(void);

/* isa: a table's name, or null for $OCTAVO_NATIVE_ISA, else the best. threads 0: octavo_cpus(). */
OCTAVO_API octavo_engine* octavo_open(const char* isa, int32_t threads);
OCTAVO_API void octavo_close(octavo_engine* engine);
OCTAVO_API const char* octavo_isa(const octavo_engine* engine);
OCTAVO_API int32_t octavo_threads(const octavo_engine* engine);
/* Bytes that weights take in memory so far. */
OCTAVO_API int64_t octavo_weight_bytes(const octavo_engine* engine);

/* ---- weights. Formats are numbered as in kernels.h (0 fp32, 1 bf16, 2 w8g64, 3 w8pc, 4 w4g32, ...). */
typedef struct octavo_matrix {
  int32_t format;
  int32_t interleaved; /* 1: `up` is the second half of a gate/up pair, both [n, k] */
  int64_t n, k;        /* outputs (of one half), inputs */
  const float* data;   /* [n, k] row-major; null when codes are given */
  const float* up;
  /* or stored codes, as if data were scale * code + offset; a pair has the rows of both halves in one, [2 n, k] */
  const int8_t* codes; /* [n, k]: -128..127, or 0..15 where they go in as they are and the format has 4 bits */
  const float* scale;  /* [n, ceil(k / group)], and so is offset, which may be null */
  const float* offset;
  int64_t group; /* inputs that share a scale: the values are rounded anew; 0: the format's own, codes go in without loss */
} octavo_matrix;

/* A matrix, or a half of a pair, as a file holds it: [n, k] row after row, k whole blocks of the type. */
typedef struct octavo_stored {
  int32_t type;   /* GGUF's number: 0 fp32, 1 fp16, 30 bf16, 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0, 10..14 Q2_K..Q6_K */
  int32_t heads;  /* 0, or rows lie as interleaved rope wants them: of the D rows of a head, row 2 i + j is wanted at j D/2 + i */
  int32_t mapped; /* 1: data lies in a read-only mapping of a file, whose pages are given back once they were read */
  int32_t reserved;
  const uint8_t* data;
  int64_t bytes; /* of data: all rows, and nothing else */
} octavo_stored;

/* These return the weight's number. Packing runs on the thread pool; the data is not kept. */
OCTAVO_API int64_t octavo_add_matrix(octavo_engine* engine, const octavo_matrix* matrix);
/* A matrix [n, k] straight from a file's bytes; two halves are a gate/up pair, [n, k] each. Blocks of Q4_0 and Q4_1 go into
 * formats with 4 bits in groups of 32 as they are, everything else as its values. */
OCTAVO_API int64_t octavo_add_stored(octavo_engine* engine, int32_t format, int64_t n, int64_t k, const octavo_stored* halves,
                                     int32_t count);
/* A place of zeros for a matrix that never comes (`data` is not looked at): a program opened over such tells its bytes. */
OCTAVO_API int64_t octavo_declare_matrix(octavo_engine* engine, const octavo_matrix* matrix);
OCTAVO_API int64_t octavo_add_vector(octavo_engine* engine, const float* data, int64_t n);
/* A matrix of octavo_add_stored again, in its place: values times columns [k], those of the last half times rows [n] too;
 * either may be null. No codes go in as they are. Rows that OCTAVO_EMBED looks up have `columns` taken out again. */
OCTAVO_API int32_t octavo_pack_scaled(octavo_engine* engine, int64_t weight, const octavo_stored* halves, int32_t count,
                                      const float* columns, const float* rows);
OCTAVO_API int32_t octavo_set_vector(octavo_engine* engine, int64_t weight, const float* data, int64_t n);
/* Bytes that octavo_add_matrix would take (padding included), or negative for an impossible matrix. */
OCTAVO_API int64_t octavo_matrix_bytes(octavo_engine* engine, const octavo_matrix* matrix);
/* One row of a matrix as the kernels see it: [k] floats. */
OCTAVO_API int32_t octavo_read_row(octavo_engine* engine, int64_t weight, int64_t row, float* out);

/* ---- pages. KV types are numbered as in kernels.h (0 fp32, 1 bf16, 2 int8). */
OCTAVO_API octavo_kv* octavo_kv_open(octavo_engine* engine, int32_t type, int32_t page_size, int32_t kv_heads,
                                     int32_t head_dim, int32_t layers, int64_t pages);
OCTAVO_API void octavo_kv_close(octavo_kv* kv);
OCTAVO_API int64_t octavo_kv_page_bytes(const octavo_kv* kv);
/* Where the bytes of a page lie, all layers of it; null for a page that there is not. */
OCTAVO_API uint8_t* octavo_kv_page(octavo_kv* kv, int32_t page);
/* The same before a pool exists. */
OCTAVO_API int64_t octavo_kv_bytes(octavo_engine* engine, int32_t type, int32_t page_size, int32_t kv_heads,
                                   int32_t head_dim, int32_t layers);
OCTAVO_API int32_t octavo_kv_copy_pages(octavo_kv* kv, const int32_t* pairs, int64_t count);  /* (source, target) */
OCTAVO_API int32_t octavo_kv_move_slots(octavo_kv* kv, const int64_t* moves, int64_t count);  /* (source, target) */
/* Of the tokens in pages `sources`, those in places kept [layers, kv_heads, count] (ascending) go to places 0, 1, .. of pages
 * `targets`, each kv head's own. */
OCTAVO_API int32_t octavo_kv_keep(octavo_kv* kv, const int32_t* sources, int32_t num_sources, const int32_t* targets,
                                  int32_t num_targets, const int32_t* kept, int32_t count);
/* One token of one layer, [kv_heads, head_dim] each. */
OCTAVO_API int32_t octavo_kv_write(octavo_kv* kv, int32_t layer, int64_t slot, const float* k, const float* v);
OCTAVO_API int32_t octavo_kv_read(octavo_kv* kv, int32_t layer, int64_t slot, float* k, float* v);

/* ---- low-rank adapters. A target is a product that they may change: y += (x . a) . b, the scale within b. */
typedef struct octavo_target {
  int64_t n, k; /* outputs, inputs */
} octavo_target;
/* Room for so many adapters of ranks up to `rank`, in fp32, or with half 1 in bf16. Programs that were opened over it end first. */
OCTAVO_API octavo_adapters* octavo_adapters_open(int32_t places, int32_t rank, const octavo_target* targets, int32_t count,
                                                int32_t half);
OCTAVO_API void octavo_adapters_close(octavo_adapters* adapters);
OCTAVO_API int64_t octavo_adapters_bytes(const octavo_adapters* adapters);
/* What a place has for a target; no step may be naming the place. a [k, rank padded to 16], b [n / 16 rounded up, rank, 16]. */
OCTAVO_API int32_t octavo_adapters_set(octavo_adapters* adapters, int32_t place, int32_t target, int32_t rank, const void* a,
                                       const void* b);
OCTAVO_API int32_t octavo_adapters_clear(octavo_adapters* adapters, int32_t place);

/* ---- programs */
enum { /* rows of a buffer */
  OCTAVO_ROWS_T = 0, /* token rows */
  OCTAVO_ROWS_R = 1  /* rows that need logits */
};
typedef struct octavo_buffer { /* float32 [rows of the step, cols] */
  int32_t rows, reserved;
  int64_t cols;
} octavo_buffer;

enum { /* octavo_op.code; in, out: buffers; w: weights; all OCTAVO_NONE where not used */
  OCTAVO_EMBED = 0,  /* out0 = table w0 [ids] * f0 */
  OCTAVO_LINEAR = 1, /* out_j = epilogue(x . w_j + w_{4+j}); x = in0, normed by w8 with eps f0 unless w8 is none.
                        i0: epilogue (kernels.h), i1: matrices (1..4); in1: what an ADD epilogue adds; f1: soft cap.
                        A gate/up pair may have out1 [T, packed columns]: where an adapter changes it, its values go there */
  OCTAVO_NORM = 2,   /* out0 = rms_norm(in0) * w0 (+ in1); eps f0 */
  OCTAVO_LAYER_NORM = 3, /* out0 = layer_norm(in0) * w0 + w1; eps f0 */
  OCTAVO_ADD = 4,        /* out0 = in0 + in1 */
  OCTAVO_SCALE = 5,      /* out0 = in0 * f0 */
  OCTAVO_GATED = 6,      /* out0 = act(in0) * in1; i0: EPI_SILU_MUL or EPI_GELU_MUL */
  OCTAVO_SELECT = 7,     /* out0 [R] = in0 [T] at logit_rows */
  OCTAVO_ROPE_KV = 8,    /* in0 q, in1 k: head norms w0, w1 (eps f0), rotated in place; then k and v (in2) to pages.
                            i0 rope table, i1 layer, i2 head_dim */
  OCTAVO_ATTENTION = 9,  /* out0 = attention(q in0); i1 layer, i2 head_dim, i3 window, f0 scale, f1 soft cap, w0 sinks;
                            i4 sink tokens that a window leaves in sight, i5 the rope table that q is turned back by for them.
                            All attention with sink tokens has the same window and as many of them */
  OCTAVO_MOE = 10,       /* out0 = (in1 +) experts of in0, normed as in LINEAR; in2 router logits [T, E]. i0 first of its
                            `extra` entries (E gate/up pairs, then E downs), i1 E, i2 top_k, i3 normalize, i4 epilogue */
  OCTAVO_LORA = 11, /* after a LINEAR of the same x (in0, w8, f0): what adapters add to its outputs in1..in3, for targets
                       i0..i2 (or none); i3 STORE. Of a gate/up pair: targets i0, i1; in1 the LINEAR's out1 (below), in2 its
                       out0, which is made here; i3 its epilogue. A step without adapters passes over it */
  OCTAVO_OPS = 12
};
typedef struct octavo_op {
  int32_t code;
  int32_t in[4];
  int32_t out[4];
  int32_t w[9];
  int32_t i[6];
  float f[4];
} octavo_op;

typedef struct octavo_rope { /* half rotation: pair j turns by position * inv_freq[j] */
  const double* inv_freq; /* [pairs] */
  double factor;          /* of cosine and sine */
  int64_t pairs;
} octavo_rope;

typedef struct octavo_program_spec {
  int32_t size; /* sizeof(octavo_program_spec): tells an old caller */
  int32_t num_buffers, num_ops, num_ropes, num_layers, num_groups;
  int32_t max_tokens, max_sequences, max_logit_rows, max_positions; /* limits of a step */
  int32_t vocab_size;
  int32_t logits, hidden; /* buffers that a step gives out; hidden may be none */
  int32_t num_extra;
  const octavo_buffer* buffers;
  const octavo_op* ops;
  const octavo_rope* ropes;
  const int32_t* layer_group; /* [layers] KV group of each layer */
  const int32_t* layer_index; /* [layers] its place within the group */
  const int32_t* extra;       /* weights of mixtures */
  const octavo_adapters* adapters; /* that steps may name, or null */
} octavo_program_spec;

/* The program keeps `engine` and `kv`, not the records. */
OCTAVO_API octavo_program* octavo_program_open(octavo_engine* engine, octavo_kv* kv, const octavo_program_spec* spec);
OCTAVO_API void octavo_program_close(octavo_program* program);
OCTAVO_API int64_t octavo_program_bytes(const octavo_program* program); /* of activations and scratch */
OCTAVO_API int32_t octavo_program_barriers(const octavo_program* program, int32_t tokens, int32_t logit_rows);

/* What a row's logits go through before a token is drawn from them: backends/sampling.py has the order and the rounding. */
typedef struct octavo_rules {
  const int32_t* bias_ids; /* [num_bias] logit += bias */
  const double* bias;
  const int32_t* banned;   /* [num_banned] */
  const uint8_t* allowed;  /* bit (id & 7) of byte (id >> 3) set: stays; ids past the end are banned; null: all stay */
  const uint8_t* mask;     /* the same for the grammar */
  const int32_t* prompt;   /* [num_prompt, 2] distinct ids that occur in the prompt, and how often */
  const int32_t* output;   /* [num_output, 2] of the output */
  int64_t allowed_bytes, mask_bytes;
  int32_t num_bias, num_banned, num_prompt, num_output;
  double repetition, frequency, presence; /* penalties; 1, 0, 0: none */
  const int32_t* penalised;  /* [num_penalised] distinct ids: logit -= penalty */
  const double* penalties;
  int64_t num_penalised;
} octavo_rules;

typedef struct octavo_logprobs { /* log-softmax of a row of raw logits */
  int32_t row, token;         /* within a step: those of the draw */
  int32_t top, chosen;        /* how many most likely ids, how many of the caller's */
  const int32_t* chosen_ids;  /* [chosen] */
  int32_t* top_ids;           /* [top] by (logit descending, id ascending) */
  double* values;             /* [1 + top + chosen] of the token, the most likely, the caller's; NaN: not finite logits */
  int64_t rank;               /* of the token, 1: the most likely */
  int32_t found, reserved;    /* of `top`, those that are not banned */
} octavo_logprobs;

typedef struct octavo_shape { /* the rarer samplers, backends/shaping.py; a zero: off */
  double typical_p, top_n_sigma;
  double xtc_probability, xtc_threshold;
  double dynatemp_range, dynatemp_exponent;
} octavo_shape;

typedef struct octavo_sampling { /* one row to draw from: backends/sampling.py has the meaning */
  int32_t row;                   /* of the logits */
  int32_t top_k;                 /* 0: all */
  double temperature;            /* 0: the largest logit */
  double top_p, min_p;
  uint64_t seed;
  uint32_t choice, index, purpose;
  float mirostat; /* bits of surprise that version 2 allows; negative: minus those of version 1; 0: off */
  const octavo_rules* rules; /* or null */
  octavo_logprobs* logprobs; /* or null: filled for the token that is drawn */
  octavo_shape shape;
} octavo_sampling;

typedef struct octavo_step {
  int32_t size; /* sizeof(octavo_step) */
  int32_t tokens, sequences, logit_rows, samples;
  int32_t table_width;        /* columns of a page table row */
  int64_t table_rows;         /* rows of one group's page table */
  const int32_t* token_ids;   /* [tokens] */
  const int32_t* positions;   /* [tokens] consecutive within a sequence, or as its tree says */
  const int32_t* starts;      /* [sequences + 1] sequence s owns tokens starts[s] .. starts[s + 1] */
  const int32_t* table_row;   /* [sequences] its row in the page tables */
  const int32_t* page_table;  /* [groups, table_rows, table_width]; -1: freed, behind the window */
  const uint8_t* no_write;    /* [sequences] 1: its keys and values are stored already; or null */
  const int32_t* rows;        /* [logit_rows] token rows */
  const octavo_sampling* sampling; /* [samples] */
  int32_t* sampled;           /* [samples] token ids; -1: nothing can be drawn */
  /* [tokens] the row of its sequence that each row follows, an earlier one, at its position + 1; -1: the history. Row i of a
   * sequence has the slot of its first position + i. null: every sequence is a chain */
  const int32_t* parent_rows;
  /* declared for later: */
  const uint8_t* grammar_masks; /* must be null: a row's mask is in its rules */
  float* hidden;              /* [tokens, hidden cols] or null */
  /* [layers, kv_heads, positions of the step's one sequence] attention mass: of each key the weights that the step's rows give it,
   * over the query heads that share it; or null. A step that asks for it is slower */
  float* scores;
  const int32_t* adapters;    /* [sequences] place of each one's adapter, or OCTAVO_NONE; null: none has any */
  /* [table_rows] of the sequence of a table row: positions by which its rows turn further than those where their keys lie, because
   * keys before them were left out (octavo_kv_keep); null: 0 of all */
  const int32_t* shifts;
} octavo_step;

/* Runs a step. Nothing has been written when it returns a negative number. */
OCTAVO_API int32_t octavo_run(octavo_program* program, const octavo_step* step);
/* The same, slower: all threads meet around each record, and seconds[num_ops] gets what each record took. */
OCTAVO_API int32_t octavo_run_timed(octavo_program* program, const octavo_step* step, double* seconds);
/* The logits of the last step, [logit_rows, stride]: valid until the next one. */
OCTAVO_API const float* octavo_logits(const octavo_program* program, int64_t* stride);
/* A buffer as the last step left it, [rows, stride]; null where there is none. Token rows lie in another order after a step with
 * adapters in which every sequence had one token and its logits: rows[i] == i of as many. */
OCTAVO_API const float* octavo_values(const octavo_program* program, int32_t buffer, int64_t* stride);
/* Draws from any rows [rows, stride] by the same code as octavo_run, on the pool. */
OCTAVO_API int32_t octavo_sample(octavo_engine* engine, const float* logits, int64_t rows, int64_t stride,
                                 int64_t vocab_size, const octavo_sampling* sampling, int32_t samples, int32_t* sampled);
/* What the rules leave of those rows, sample i's in out[i], [samples, vocab_size]. */
OCTAVO_API int32_t octavo_process(octavo_engine* engine, const float* logits, int64_t rows, int64_t stride,
                                  int64_t vocab_size, const octavo_sampling* sampling, int32_t samples, float* out);
/* Log-softmax of any rows. */
OCTAVO_API int32_t octavo_logprobs_of(octavo_engine* engine, const float* logits, int64_t rows, int64_t stride,
                                      int64_t vocab_size, octavo_logprobs* wanted, int32_t count);
/* Calls of the arena's system allocator so far in this process: a step must not raise it. */
OCTAVO_API int64_t octavo_allocations(void);

/* ---- what the machine gives, for benchmarks: medians of `rounds` on `threads` threads of the pool, of dots the best; negative: failed.
 * bytes a second of reading `bytes` (each thread its part); operations a second of the dots that the engine's kernels are
 * made of (0 int8, 1 bf16, 2 fp32; `repeats` of twelve; 0: unknown for this table); seconds of one barrier (one thread: 0). */
OCTAVO_API double octavo_measure_read(octavo_engine* engine, int32_t threads, int64_t bytes, int32_t rounds);
OCTAVO_API double octavo_measure_dots(octavo_engine* engine, int32_t threads, int32_t kind, int64_t repeats, int32_t rounds);
OCTAVO_API double octavo_measure_barrier(octavo_engine* engine, int32_t threads, int64_t repeats, int32_t rounds);

#ifdef __cplusplus
}
#endif
#endif
