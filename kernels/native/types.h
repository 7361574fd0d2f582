// The structures of the C interface, mirrored by `library.py`: numbers and pointers. The caller keeps all memory alive.
#pragma once
#include <cstdint>

// The formats of blocks: name, columns of a block, its bytes, and those that it has among interleaved rows, where
// scales of six bits have a byte each. kernels/blocks.py has the same table.
#define D3_BLOCK_FORMATS(FORMAT) \
    FORMAT(Q4_0, 32, 18, 18) FORMAT(Q4_1, 32, 20, 20) FORMAT(Q5_0, 32, 22, 22) FORMAT(Q5_1, 32, 24, 24) \
    FORMAT(Q8_0, 32, 34, 34) FORMAT(Q2_K, 256, 84, 84) FORMAT(Q3_K, 256, 110, 114) FORMAT(Q4_K, 256, 144, 148) \
    FORMAT(Q5_K, 256, 176, 180) FORMAT(Q6_K, 256, 210, 210) FORMAT(IQ4_NL, 32, 18, 18) FORMAT(IQ4_XS, 256, 136, 138) \
    FORMAT(U4_32, 32, 20, 20) FORMAT(U4_128, 128, 68, 68) FORMAT(U8_32, 32, 36, 36) FORMAT(U8_128, 128, 132, 132)

enum D3Kind : int32_t {
    D3_FLOAT32 = 0, D3_BFLOAT16 = 1, D3_INT8 = 2, D3_FP8 = 3, D3_FP8_GROUPS = 4, D3_INT4 = 5, D3_BF12 = 6,
    D3_INT4X16 = 7, D3_INT8X16 = 8,  // 16 rows interleaved, see kernels/interleaved.py
    D3_FLOAT16 = 9,
    D3_BFLOAT16_PAIRS = 10,  // bfloat16 that meets vectors rounded to bfloat16, two columns at a time
    // Rows of blocks, see kernels/blocks.py: D3_Q4_0 is 11.
#define D3_KIND(NAME, COLUMNS, BYTES, INTERLEAVED) D3_##NAME,
    D3_BLOCK_FORMATS(D3_KIND)
#undef D3_KIND
    // The same, 16 rows interleaved: they are multiplied by vectors of 8 bits, see formats/interleaved_blocks.inc.
#define D3_KIND(NAME, COLUMNS, BYTES, INTERLEAVED) D3_##NAME##X16,
    D3_BLOCK_FORMATS(D3_KIND)
#undef D3_KIND
    D3_NUM_KINDS
};

enum D3Status : int32_t {
    D3_OK = 0,
    D3_NO_SUCH_ISA = 1,
    D3_BAD_SHAPE = 2,
    D3_NO_MEMORY = 3,
    D3_BAD_RUN = 4,  // more rows or steps than the decoder was made for
    D3_BAD_TOKEN = 5,
    D3_BAD_POSITION = 6,
    D3_BAD_SLOT = 7,
    D3_BAD_BLOCK = 8,    // a layer runs for a row whose table has no block of the pool there
    D3_BUSY = 9,         // another thread uses the decoder
    D3_BAD_STATE = 10,   // a place is outside the hidden states of the run, or a hook outside its rows or the layers
    D3_BAD_BRIDGE = 11,  // a row skips layers without a bridge over them, or with one of other sizes
    D3_BAD_DRAFT = 12,   // a draft is longer than the longest, or than its answer's room
    D3_BAD_TEXT = 13,    // the tokens of an answer, or the tables of the draft model, are too few
    D3_BAD_MAP = 14,     // a map has other sizes than its matrix, or a rank above D3_MAX_RANK
};

// The exponent below that of code 1, and the outliers (bfloat16, by row, then by column): see kernels/bf12.py.
struct D3Bf12 {
    int32_t exponent;
    const int64_t* starts;  // [rows + 1]: the outliers of row n are [starts[n], starts[n + 1])
    const int32_t* columns;
    const uint16_t* weights;
};

struct D3Matrix {
    int32_t kind, rows, columns;
    const void* values;
    const float* scales;  // null for floats
    const float* bias;    // [rows], or null
    D3Bf12 bf12;          // of a bf12 matrix
    const D3Matrix* below;  // further rows, of another kind; or null
    const int32_t* order;   // [columns]: the input channel of each column; null: they are in order
};

enum D3Activation : int32_t { D3_SILU = 0, D3_GELU_TANH = 1 };

struct D3Layer {
    const float* attention_norm;  // [hidden]; null: the sublayer takes the hidden state as it is
    D3Matrix qkv, output;
    const float* mlp_norm;  // [hidden], or null
    D3Matrix gate_up, down;
    const float* head_norms;  // [2, head_dim]: for query heads, for key heads; null without such norms
    const float* rotations;   // [max_positions, head_dim / 2] pairs (cosine, sine); null without RoPE
    int32_t window;           // positions that one attends to at most, itself included
    // [heads * head_dim + kv_heads * head_dim]: of all queries of a row together, and of all its keys; or null.
    const float* projection_norms;
    const float *attention_post_norm, *mlp_post_norm;  // [hidden], of a product before it is added; or null
};

struct D3Model {
    int32_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    int32_t block_size, max_blocks, num_blocks;  // positions per block; blocks per row of a table; blocks of the pool
    int32_t num_slots, max_positions, max_rows, num_threads;
    int32_t isa;  // an index into the instruction sets, see d3_isa_name
    float eps, scale;
    D3Matrix embedding, lm_head;
    // [num_head_tokens] ascending: the tokens of a shortened head's rows, for draft models; null: all tokens.
    const int64_t* head_tokens;
    int64_t num_head_tokens;
    const D3Layer* layers;
    const float* final_norm;
    // The KV cache, [num_blocks, 2, block_size, kv_heads, head_dim]: floats, or e4m3 with scales [num_blocks, 2,
    // kv_heads, block_size].
    void* pool;
    float* pool_scales;
    int32_t activation;               // a D3Activation, of the gates
    float embedding_scale;            // multiplies rows of the embedding
    float attention_cap, logit_cap;   // soft caps of scores and logits, cap * tanh(x / cap); 0: none
};

// A linear shortcut over the layers [first, stop): h becomes h + weight h + bias, or h + weight (down h) + bias.
struct D3Bridge {
    int32_t first, stop;
    D3Matrix weight;  // [hidden, hidden], or [hidden, r] with `down`; it has a bias
    D3Matrix down;    // [r, hidden], r at most hidden; null values without it
};

struct D3Bridges {
    const D3Bridge* bridges;
    int64_t count;
};

// A low-rank map, added to a matmul of x (LoRA) or, in steering, to x itself: (x down^T) up. Rows of `down` [rank,
// columns] and `up` [rank, outputs] are `down_stride` and `up_stride` values apart: behind the columns stand zeros up
// to a multiple of 16, and 16 values may be read from any output on. A rank of 0 is no map.
struct D3LowRank {
    int32_t kind, rank, columns, outputs;  // D3_FLOAT32, D3_BFLOAT16 or D3_FLOAT16
    int64_t down_stride, up_stride;
    const void *down, *up;
};
constexpr int32_t D3_MAX_RANK = 512;

// The maps of a layer, in this order; those of an adapter are [num_layers, D3_LAYER_MAPS], and that of the LM head.
enum D3Map : int32_t {
    D3_MAP_Q = 0, D3_MAP_K = 1, D3_MAP_V = 2, D3_MAP_OUTPUT = 3, D3_MAP_GATE = 4, D3_MAP_UP = 5, D3_MAP_DOWN = 6,
    D3_LAYER_MAPS = 7
};

// The distinct tokens of a prompt and its answer, and how often each is in the answer. The arrays have room for one
// more token per step of the run.
struct D3TokenCounts {
    int64_t* tokens;
    int32_t* counts;
    int64_t used;
    int64_t steps;  // of the run that are counted
};

// Which tokens are allowed, before penalties. A mask has one bit per token, from the lowest bit of its first byte on.
struct D3LogitMask {
    const int64_t* biased;  // distinct tokens, and what is added to the logit of each
    const float* biases;
    int64_t num_biased;
    const uint8_t* allowed;  // a mask; null: all
    const int64_t* banned;   // tokens that are excluded at generation steps before `banned_until`
    int64_t num_banned, banned_until;
    // Words that must not be completed: a tree of their tokens, from the last but one backwards. Edge e has the token
    // edges[e] and leads to node e + 1. Edges first_edges[n] to first_edges[n + 1] leave node n, sorted by token.
    // Tokens bans[first_bans[n]] to bans[first_bans[n + 1]] complete the words that end there. Node 0 is the root.
    const int64_t *edges, *first_edges, *bans, *first_bans;
    int64_t num_bans;
    const int64_t* recent;  // the last tokens of the answer: all, or as many as the longest word has
    int64_t num_recent;
    int32_t has_grammar;  // whether the run's `grammar` is called
    const uint8_t* also_allowed;  // another mask that must allow a token; null: none
};

// What a row samples with besides its temperature.
struct D3Sampling {
    float log_min_p, top_p;  // minus infinity and 1 keep all
    int32_t top_k;           // 0 keeps all
    float repetition, presence, frequency;
    D3TokenCounts* token_counts;    // null: no penalties
    const D3LogitMask* logit_mask;  // null: all tokens are allowed
};

// Called for a row with a grammar before the step `taken`: returns the mask of that step, or null if the answer ends
// here. `token` is the row's token of the step before, -1 at the first. The mask lives until the row's next call. Calls
// may come from another thread than the run's; those of one row come in order. A repeated step calls again.
typedef const uint8_t* (*D3Grammar)(int32_t row, int32_t taken, int64_t token);

// A row's hidden state that a run copies out in front of a layer; the number of layers: its last state.
struct D3Capture {
    int32_t layer, row;
};

// What a row's hidden state gains in front of a layer, at the positions start, start + step, ... below `stop`: a vector
// [hidden] or a map of hidden by hidden channels; the other one is null.
struct D3Steering {
    int32_t layer, row;
    int64_t start, stop, step;
    const float* vector;
    const D3LowRank* map;
};

// `steps` steps of `rows` rows. Layer l runs at the n-th of them for the rows with generation + n < cutoffs[row, l].
struct D3Run {
    int32_t rows, steps;
    const int64_t *tokens, *positions, *generation, *slots;  // [rows] each, of the first step
    const int32_t* cutoffs;                                   // [rows, num_layers]
    const int32_t* tables;                                    // [num_slots, num_layers, max_blocks]
    const float* temperatures;  // [rows], 0 for the likeliest token; null: 0 for all
    const int64_t *seeds, *indices;   // [rows]; null with `temperatures`
    int64_t* chosen;                  // [steps, rows] written
    float* scores;  // [steps, rows] written: the score of the chosen token
    float* logits;                    // [steps, rows, vocab] written, or null; see `logit_places`
    const uint8_t* yields;  // [rows], of a single step: the rows that need the three above; null: all
    // Two words that other threads may read and write during the run, or null: steps begin as long as the first is 0;
    // the second counts those that have begun.
    int32_t* control;
    const D3Sampling* sampling;  // [rows], with `temperatures`; null: temperatures only
    // Hidden states that outlive a run, [num_states, hidden], or null. At the n-th step a row saves its state below
    // layer `kept_layers` at `kept_places` + n, and starts from the state at `resumed_places` + n instead of an
    // embedding. A negative place means none; [rows] each.
    float* states;
    int64_t num_states;
    const int64_t *kept_layers, *kept_places, *resumed_places;
    // The tokens that end a row's answer, [rows, most_ends] padded with -1, or null. `d3_run` stops early once every
    // row has met one of its ends, the end of its grammar, or a score that is not finite.
    const int64_t* ends;
    int64_t most_ends;
    int32_t* taken;  // written by `d3_run`: the steps that it ran; or null
    // [rows], or null: the place of a row's logits in `logits` [steps, num_logits, vocab]; -1: none.
    const int64_t* logit_places;
    int64_t num_logits;
    D3Grammar grammar;  // null: no row has a grammar
    // [rows], or null: bridges over each window of layers that a row skips. With null the row's state passes unchanged.
    const D3Bridges* const* bridges;
    // [steps, rows] written, or null: the probability of the likeliest token at the row's temperature.
    float* confidences;
    const D3LowRank* const* adapters;  // [rows], or null: the maps of each row's adapter, null for a row without one
    // Both in ascending order of layers; in front of a layer a row is steered before it is captured.
    const D3Steering* steerings;
    int64_t num_steerings;
    const D3Capture* captures;
    int64_t num_captures;
    float* captured;  // [steps, num_captures, hidden] written
};

// What drafts cost and how often they are right, for `DraftCosts` in draft_costs.h. The loop reads and updates it.
constexpr int32_t D3_COST_ROWS = 64;        // rows of the longest step that is timed
constexpr int32_t D3_CONFIDENCE_BINS = 16;
struct D3DraftCosts {
    double verify[D3_COST_ROWS + 1];  // seconds of a full-depth step, by its rows
    double draft[D3_COST_ROWS + 1];   // and of the draft model; zeros without one
    // Of drafted tokens that were judged: how many were right, and how many there were; older ones count less.
    double right[2][D3_CONFIDENCE_BINS], judged[2][D3_CONFIDENCE_BINS];  // [0]: the draft model's, [1]: lookups
    double model_right, model_judged;  // the draft model's, whatever its confidence
    double gain;   // tokens per second lately, over those of steps without drafts
    int64_t idle;  // iterations without a draft since the last one with
    double mask;   // seconds of a grammar's mask
};

// Called for a row with a grammar: returns the mask behind `tokens`, those that the loop has added to the answer and
// then `num_drafted` of its draft, or null if nothing may follow. The mask lives until the row's next call with as many
// drafted tokens. Calls may come from another thread than the loop's. A repeated iteration calls again.
typedef const uint8_t* (*D3DraftGrammar)(int32_t row, const int64_t* tokens, int64_t num_added, int64_t num_drafted);

struct D3Decoder;

// Who drafted, in `counts`.
enum D3Drafter : int64_t { D3_OWN_LAYERS = 0, D3_DRAFT_MODEL = 1, D3_LOOKUP = 2 };
constexpr int32_t D3_LOOP_COUNTS = 5;

// Draft-and-verify iterations. One step verifies all tokens of a draft together with the token before them: each row of
// it chooses as it would without drafts, by its own seed, index and step, and drafted tokens are accepted as long as
// they are the chosen ones. A row ends with one of its `ends`, with its room, or where the logits at full depth
// are not finite. Further iterations skip it.
struct D3SpeculativeLoop {
    int32_t rows, iterations;
    int32_t most;  // tokens of the longest draft
    const int64_t *tokens, *positions, *generation, *slots;  // [rows] each, of each answer's last token, as in a run
    const int32_t* cutoffs;  // [rows, L]: layer l runs in drafts that begin at a generation below this
    const int32_t* tables;   // [num_slots, num_layers, max_blocks]
    // [rows, most] and [rows]: tokens that the first drafts have already, and how many they are to have.
    const int64_t *begun, *num_begun, *first_lengths;
    // [rows]: the length of later drafts. Where `adapts` is not 0 it grows by 1, up to `most_lengths`, after a draft
    // that was accepted whole, and shrinks by 1 after any other. A draft that would skip no layer has no tokens.
    const int64_t *lengths, *most_lengths, *adapts;
    const int64_t* rooms;  // [rows]: tokens that each answer may still get
    const int64_t* ends;   // [rows, most_ends] as in a run, or null
    int64_t most_ends;
    // Where the drafts keep their hidden states, [num_states, hidden]: `most` of each row from `places` [rows] on. With
    // a negative place verification computes all layers again.
    float* states;
    int64_t num_states;
    const int64_t* places;
    int64_t* drafted;  // [iterations, rows, most] written
    // [iterations, rows, D3_LOOP_COUNTS] written: tokens of a draft, how many of them were accepted, the next token at
    // full depth, -1 if its logits are not finite; who drafted, and the positions that the draft model has computed.
    // All are -1 for a row that had ended before.
    int64_t* counts;
    int32_t* control;                 // as in a run, counting iterations
    int32_t* taken;                   // written by `d3_run_speculative_loop`: its iterations, fewer if every row ended
    const D3Bridges* const* bridges;  // over the layers that drafts skip, as in a run
    // As in a run; null: every row takes its likeliest token. Token counts need no room for more tokens.
    const float* temperatures;
    const int64_t *seeds, *indices;
    const D3Sampling* sampling;
    // [rows, text_room]: the tokens of prompt and answer, `positions` + 1 of them given; the loop writes new ones. For
    // rows with `drafters`, a sum of 1 (the draft model drafts) and 2 (lookups in the row's text do), or 0: own layers.
    int64_t* texts;
    int64_t text_room;
    const int64_t* drafters;
    D3Decoder* draft_model;          // or null
    const int32_t* draft_tables;     // as `tables`, of the draft model
    const int64_t* draft_positions;  // [rows]: positions of each text that the draft model has computed
    const int64_t* history;          // [history_length]: other texts, where lookups may find continuations; or null
    int64_t history_length;
    // [rows], or null: a draft of the draft model ends with a token whose place had a lower confidence.
    const float* stops;
    D3DraftCosts* costs;  // null: drafts are as long as `lengths` say
    // [iterations, rows, most + 1, vocab] written for the verified tokens of rows where `reports` [rows] is not 0; or
    // null.
    float* logits;
    const uint8_t* reports;
    const D3LowRank* const* adapters;  // [rows], as in a run; the draft model has none
    D3DraftGrammar grammar;            // null: no row has a grammar
};
