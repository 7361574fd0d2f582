// The C interface: numbers and pointers, as `library.py` mirrors them. Whoever calls keeps all memory alive.
#pragma once
#include <cstdint>

#define D3_EXPORT extern "C" __attribute__((visibility("default")))

enum D3Kind : int32_t {
    D3_FLOAT32 = 0, D3_BFLOAT16 = 1, D3_INT8 = 2, D3_FP8 = 3, D3_FP8_GROUPS = 4, D3_INT4 = 5, D3_BF12 = 6,
    D3_INT4X16 = 7, D3_INT8X16 = 8  // sixteen rows in lanes, see lanes.py
};

enum D3Status : int32_t {
    D3_OK = 0,
    D3_NO_SUCH_ISA = 1,
    D3_BAD_SHAPE = 2,
    D3_NO_MEMORY = 3,
    D3_BAD_RUN = 4,       // rows or steps beyond what the decoder was made for
    D3_BAD_TOKEN = 5,
    D3_BAD_POSITION = 6,
    D3_BAD_SLOT = 7,
    D3_BAD_BLOCK = 8,     // a layer runs for a row whose table has no block of the pool there
    D3_BUSY = 9,          // another thread is in the same decoder
    D3_BAD_STATE = 10,    // a place is outside the hidden states that the run brings
    D3_BAD_BRIDGE = 11,   // a row leaves out layers for which it has no bridge, or one of other sizes
    D3_BAD_DRAFT = 12,    // a draft is longer than the longest, or than its answer's room
};

// A matrix [rows, columns] as it lies in memory; see quantized.py for int8, fp8 and int4.
// What a packed matrix (packed.py) has besides its values: the exponent before that of code 1, and the weights of other
// exponents, which are bfloat16, row by row and by column.
struct D3Bf12 {
    int32_t exponent;
    const int64_t* starts;  // [rows + 1]: a row's are from here to where those of the next begin
    const int32_t* columns;
    const uint16_t* weights;
};

struct D3Matrix {
    int32_t kind, rows, columns;
    const void* values;
    const float* scales;  // null for floats
    const float* bias;    // [rows], or null
    D3Bf12 bf12;    // of a packed matrix
};

struct D3Layer {
    const float* attention_norm;  // [hidden]
    D3Matrix qkv, output;
    const float* mlp_norm;  // [hidden]
    D3Matrix gate_up, down;
    const float* head_norms;  // [2, head_dim]: of each query head, and of each key head; null without such norms
    const float* rotations;   // [max_positions, head_dim / 2] pairs (cosine, sine); null in a layer without rope
};

struct D3Model {
    int32_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    int32_t block_size, max_blocks, num_blocks;  // entries of a block; blocks of a table's row; blocks of the pool
    int32_t num_slots, max_positions, max_rows, num_threads;
    int32_t isa;  // an index into the instruction sets, see d3_isa_name
    float eps, scale;
    D3Matrix embedding, lm_head;
    const D3Layer* layers;
    const float* final_norm;
    // The cache, [num_blocks, 2, block_size, kv_heads, head_dim]: floats, or, with scales [num_blocks, 2, kv_heads,
    // block_size], 8-bit floats of e4m3 that stand for so many times these.
    void* pool;
    float* pool_scales;
};

// A map in the place of the layers [first, stop): h becomes h + weight h + bias, or h + weight (down h) + bias.
struct D3Bridge {
    int32_t first, stop;
    D3Matrix weight;  // [hidden, hidden], or [hidden, r] beside `down`; its bias is the map's
    D3Matrix down;    // [r, hidden], r at most hidden; without values there is none
};

struct D3Bridges {
    const D3Bridge* bridges;
    int64_t count;
};

// The tokens that a row's penalties are about, each once, and how often each is in its answer. There is room for as
// many more as a run has steps.
struct D3TokenCounts {
    int64_t* tokens;
    int32_t* counts;
    int64_t used;
    int64_t steps;  // of the run whose tokens are in it
};

// Which tokens may come, before any penalties. A mask has a bit for each token, the lowest of its first byte for the
// first.
struct D3LogitMask {
    const int64_t* biased;  // tokens, each once, and what is added to the logit of each
    const float* biases;
    int64_t num_biased;
    const uint8_t* allowed;  // a mask; null: all
    const int64_t* banned;   // tokens that may not come at the generation steps before `banned_until`
    int64_t num_banned, banned_until;
    // Words that may not be completed, as a tree by their tokens from the last but one backwards. Edge e has the token
    // edges[e] and leads to node e + 1; edges first_edges[n] to first_edges[n + 1] leave node n, sorted by token, and
    // the tokens bans[first_bans[n]] to bans[first_bans[n + 1]] complete the words that end there. Node 0 is the root.
    const int64_t *edges, *first_edges, *bans, *first_bans;
    int64_t num_bans;
    const int64_t* recent;  // the last tokens of the answer, at least as many as the longest word has, or all
    int64_t num_recent;
    int32_t has_grammar;  // whether the run's `form` is to be asked
};

// What a row's choice takes beside a temperature.
struct D3Sampling {
    float log_min_p, top_p;  // minus infinity and 1 keep all
    int32_t top_k;           // 0 keeps all
    float repetition, presence, frequency;
    D3TokenCounts* token_counts;      // null: no penalties
    const D3LogitMask* logit_mask;    // null: any token may come
};

// Asked for a row with a form, before the step `taken`: the mask of what may come then, or null where the form is over,
// and with it the row's answer. `token` is the row's own of the step before, -1 at the first. The mask is there until
// the row's next question. Who is asked may be in another thread than who began the run; of each row the questions come
// in order, a step that is taken again asking once more.
typedef const uint8_t* (*D3Grammar)(int32_t row, int32_t taken, int64_t token);

// `steps` steps of `rows` rows. Layer l runs at the n-th of them for the rows with generation + n < cutoffs[row, l].
struct D3Run {
    int32_t rows, steps;
    const int64_t *tokens, *positions, *generation, *slots;  // [rows] each, of the first step
    const int32_t* cutoffs;                                   // [rows, num_layers]
    const int32_t* tables;                                    // [num_slots, num_layers, max_blocks]
    const float* temperatures;        // [rows], 0 for the likeliest token; null: all take the likeliest
    const int64_t *seeds, *indices;   // [rows]; null with `temperatures`
    int64_t* chosen;                  // [steps, rows] written
    float* scores;                    // [steps, rows] written: what the chosen token won with
    float* logits;                    // [steps, rows, vocab] written, or null; see `logit_places`
    const uint8_t* yields;            // [rows], of a single step: which rows are asked for the three above; null: all
    // Two words that others may look at and write while the run goes on, or null: as long as the first is 0 further
    // steps are begun, and the second says how many have been.
    int32_t* control;
    const D3Sampling* sampling;  // [rows], with `temperatures`; null: nobody cuts or has penalties
    // Hidden states that outlive a run, [num_states, hidden], or null: before its layer `kept_layers`, a row leaves its
    // state at `kept_places` + n at the n-th step; and in place of an embedding it begins with that at `resumed_places`
    // + n. A place below 0 stands for none; [rows] each.
    float* states;
    int64_t num_states;
    const int64_t *kept_layers, *kept_places, *resumed_places;
    // The tokens that end a row's answer, [rows, most_ends] filled up with -1, or null: `d3_run` begins no further step
    // once every row has come to one of its own, to the end of its form, or to a score that is not finite.
    const int64_t* ends;
    int64_t most_ends;
    int32_t* taken;  // written by `d3_run`: its steps; or null
    // Where `logits` has not all rows it is [steps, num_logits, vocab], and a row's are at its place [rows]; -1: none.
    const int64_t* logit_places;
    int64_t num_logits;
    D3Grammar grammar;  // null: no row has a form
    // By what a row [rows] crosses each window of layers that it leaves out, which must be among these; null: it passes
    // them as it is.
    const D3Bridges* const* bridges;
};

// Cycles of rows that draft, all tokens of a draft through the same layers, and verify the draft by one pass of it and
// of the token before it. A row comes to its end with a token of its own `ends`, with its room, or where full depth's
// numbers are not finite; further cycles pass it by.
struct D3SpeculativeLoop {
    int32_t rows, iterations;
    int32_t most;                                             // tokens of any draft at most
    const int64_t *tokens, *positions, *generation, *slots;  // [rows] each, of each answer's last token, as in a run
    const int32_t* cutoffs;  // [rows, L]: layer l runs in the drafts that begin at a generation before this
    const int32_t* tables;   // [num_slots, num_layers, max_blocks]
    // [rows, most] and [rows]: what the first drafts have already, and how long they are to be in all.
    const int64_t *begun, *num_begun, *first_lengths;
    // [rows]: how long the later ones are; one more, up to the second, after a draft that was accepted whole where the
    // third is not 0, and one less after any other. A draft that would leave out no layer has no tokens.
    const int64_t *lengths, *most_lengths, *adapts;
    const int64_t* rooms;  // [rows] tokens that each answer may have yet
    const int64_t* ends;   // [rows, most_ends] as in a run, or null
    int64_t most_ends;
    // Where each row's drafts keep their hidden states, [num_states, hidden]: from `places` [rows] on, `most` of each,
    // or below 0 where verification computes all layers again.
    float* states;
    int64_t num_states;
    const int64_t* places;
    int64_t* drafted;  // [cycles, rows, most] written
    // [cycles, rows, 3] written: how many tokens a draft had, how many of them were accepted, and full depth's token
    // behind these, or -1 where its numbers are not finite; all are -1 of a row that had come to its end before.
    int64_t* counts;
    int32_t* control;  // as in a run, of cycles
    int32_t* taken;   // written by `d3_run_cycles`: its cycles, which are fewer if every row comes to its end
    const D3Bridges* const* bridges;  // by what drafts cross the layers that they leave out, as in a run
};

struct D3Decoder;

// How many instruction sets this library holds, best first; what they are called; whether this machine runs one.
D3_EXPORT int32_t d3_num_isas();
D3_EXPORT const char* d3_isa_name(int32_t isa);
D3_EXPORT int32_t d3_isa_runs_here(int32_t isa);
D3_EXPORT int32_t d3_isa_reads_interleaved(int32_t isa);  // whether it knows matrices in lanes
// Of what sources the library was built.
D3_EXPORT const char* d3_source_digest();

// Packs a bfloat16 matrix [rows, columns] into `packed`, and writes what a D3Packing has: room for so many weights, the
// number of which is returned, or -1 for more of them.
struct D3Bf12Target {
    int32_t* exponent;
    int64_t* starts;
    int32_t* columns;
    uint16_t* weights;
};
D3_EXPORT int64_t d3_bf12_pack(const uint16_t* matrix, int32_t rows, int32_t columns, int64_t room, uint8_t* packed,
                               const D3Bf12Target* outliers);

// Rows [start, stop) of a packed matrix as bfloat16, each filled up with zeros to whole groups of 64 columns.
D3_EXPORT void d3_bf12_unpack(const D3Matrix* matrix, int32_t start, int32_t stop, void* to);

D3_EXPORT int32_t d3_create(const D3Model* model, D3Decoder** made);
D3_EXPORT int32_t d3_run(D3Decoder* decoder, const D3Run* run);
// The same in a thread of the decoder's own: `d3_begin` returns at once, and all memory of the run belongs to it until
// `d3_finish` does. `d3_await` returns when so many steps are done; their tokens may be read then. `d3_finish` lets no
// further step begin and waits for the one that is under way. All of these are called in turns.
D3_EXPORT int32_t d3_begin(D3Decoder* decoder, const D3Run* run);
// The same two for cycles: `d3_await` counts them then.
D3_EXPORT int32_t d3_run_speculative_loop(D3Decoder* decoder, const D3SpeculativeLoop* iterations);
D3_EXPORT int32_t d3_begin_speculative_loop(D3Decoder* decoder, const D3SpeculativeLoop* iterations);
D3_EXPORT int32_t d3_await(D3Decoder* decoder, int32_t steps);
// The same for whoever takes all that are done at once, `done` of them, and need not look again for each of them.
D3_EXPORT int32_t d3_gather(D3Decoder* decoder, int32_t steps, int32_t* done);
D3_EXPORT void d3_finish(D3Decoder* decoder);
D3_EXPORT void d3_destroy(D3Decoder* decoder);
