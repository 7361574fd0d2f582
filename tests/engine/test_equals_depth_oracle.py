"""Under every schedule the engine's tokens are those of a slow oracle on transformers' own layers, one for one.
The engine leaves out work in many ways at once: rows of a batch that sleep, blocks it frees, aliases or never takes.
The oracle does none of it, so equality says that none of it changes a token."""

import random
from dataclasses import replace
from typing import Any

import pytest
from configs import llama3_rope
from depth_oracle import (
    ActiveLayers,
    DepthAnswer,
    d3,
    greedy_at_depth,
    layer_table,
    nested,
    skip_decode,
    tail_skip,
    unified_skip,
)
from fixture_types import MakeLlama, MakePrompts
from stepping import generated
from stepping import greedy as asked
from transformers_oracle import assert_answers, assert_same_tokens, greedy

from d3engine import Engine, SamplingParams
from d3engine.depth import D3, DepthPolicy, FixedSkip, FullDepth, LayerTable, Nested, SkipDecode, TailSkip, UnifiedSkip
from d3engine.depth.schedule import OnSkip

NUM_TOKENS = 40
NESTED_TOKENS = 32
LAYERS = 10
NESTED_WINDOWS = [[2, 4], [6, 7], [4, 6]]
LENGTHS = [1, 30]  # with the answer, each crosses borders of blocks of 4 and of 16 entries

# A deep model of grouped heads with llama3 rope beyond its trained length.
DEEP: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "head_dim": 12}
DEEP["rope_parameters"] = llama3_rope(64, factor=4.0, rope_theta=10_000.0)

# One of each shape: those of `MIXED` below stand for their policies as well.
NESTED: dict[str, tuple[DepthPolicy, ActiveLayers]] = {
    **{
        f"D3 alpha={alpha} start={start} tail={tail}": (D3(alpha, start, tail), d3(LAYERS, alpha, start, tail))
        for alpha, start, tail in [
            (0.9, 0.6, 0),
            (0.99, 0.3, 0),
            (0.95, 0.29, 3),
            (0.5, 0.7, 3),  # first + tail is L: no layer may go
            (0.9, 0.05, 0),  # first is 0: in the end no layer runs at all
        ]
    },
    "SkipDecode from 8 to 2 in 30": (
        SkipDecode(30, 2, max_layers=8, warmup=2),
        skip_decode(LAYERS, 30, 2, max_layers=8, warmup=2),
    ),
    "SkipDecode to 1 without warmup": (SkipDecode(32, 1, warmup=0), skip_decode(LAYERS, 32, 1, warmup=0)),
    "TailSkip of 6.4": (TailSkip(6.4, NESTED_TOKENS), tail_skip(LAYERS, NESTED_TOKENS, 6.4)),
    "TailSkip of 3": (TailSkip(3, 20), tail_skip(LAYERS, 20, 3)),
    "FixedSkip": (FixedSkip([2, 7, 8]), lambda step: set(range(LAYERS)) - {2, 7, 8}),
    "Nested windows": (Nested(0.95, NESTED_WINDOWS), nested(LAYERS, 0.95, NESTED_WINDOWS)),
    "UnifiedSkip 1.4": (UnifiedSkip(1.4), unified_skip(LAYERS, 1.4)),
}

ALL = list(range(LAYERS))


def waking_rows() -> list[list[int]]:
    """Layers sleep for 1 to 20 steps and wake, in the middle of blocks and at their borders; layer 0 always runs."""
    asleep: list[tuple[int, set[int]]] = [
        (2, set()),
        (4, {4, 5, 6}),  # a window that opens
        (1, {6, 7}),  # shifts for one step
        (5, {2, 3, 4, 5, 6, 7, 8}),
        (1, set()),  # closes
        (18, {1, 2, 9}),  # the last layer sleeps over whole blocks
        (2, {2, 5, 9}),
        (3, set(range(1, LAYERS))),  # only layer 0 runs
        (2, {3, 4, 8}),
        (1, {3, 8}),
    ]
    rows = [[layer for layer in ALL if layer not in sleeping] for count, sleeping in asleep for _ in range(count)]
    return [*rows, ALL]


def alternating_rows() -> list[list[int]]:
    """Even and odd layers take turns, so that every layer always wakes to an entry that is not its own."""
    return [ALL, *([0, *(layer for layer in ALL if layer % 2 == step % 2 and layer)] for step in range(NUM_TOKENS))]


def layer_0_sleeps_rows() -> list[list[int]]:
    """Only "project" can say what layer 0 holds when it sleeps."""
    return [ALL, ALL[2:], ALL[2:], ALL[:5], [], ALL, *([ALL[4:], ALL] * 20)]


def random_rows(seed: int) -> list[list[int]]:
    """Any layers but layer 0 for 1 to 9 steps, then any others."""
    numbers = random.Random(seed)
    rows = [ALL]
    while len(rows) < NUM_TOKENS:
        share = numbers.choice([0.2, 0.5, 0.8, 1.0])
        rows += [[0, *(layer for layer in ALL[1:] if numbers.random() < share)]] * numbers.randint(1, 9)
    return rows


TABLES = {"waking": waking_rows(), "alternating": alternating_rows()} | {
    f"random {k}": random_rows(k) for k in range(3)
}
TABLES["layer 0 sleeps"] = layer_0_sleeps_rows()
TABLE_RULES = [  # and the size of blocks: each rule with both
    ("waking", "copy", 4),
    ("waking", "project", 16),
    ("alternating", "copy", 16),
    ("alternating", "project", 4),
    ("random 0", "copy", 4),
    ("random 0", "project", 4),
    ("layer 0 sleeps", "project", 16),
]


def test_oracle_at_full_depth_is_transformers_own_generate(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    tiny = tiny_llama(**DEEP)
    for prompt in make_prompts(LENGTHS):
        expected = greedy(tiny.model, prompt, 24)
        assert_same_tokens(greedy_at_depth(tiny.model, prompt, 24, lambda _: set(ALL)).token_ids, expected)


@pytest.mark.parametrize("name", NESTED)
def test_nested_schedules_equal_the_oracle(name: str, tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """Nested schedules equal the oracle whatever skipped layers hold."""
    tiny = tiny_llama(**DEEP)
    policy, active = NESTED[name]
    prompts = make_prompts(LENGTHS)
    expected = [greedy_at_depth(tiny.model, prompt, NESTED_TOKENS, active) for prompt in prompts]
    rules = [("none", 4), ("project", 16)] + [("copy", 4)] * (0 in active(10**9))  # "copy" needs a layer below
    for rule, block_size in rules:
        skipping = replace(policy, on_skip=rule)  # type: ignore[type-var]
        outputs = generated(tiny.directory, prompts, asked(NESTED_TOKENS, depth=skipping), block_size=block_size)
        assert_answers(outputs, expected)


@pytest.mark.parametrize(("name", "on_skip", "block_size"), TABLE_RULES)
def test_tables_whose_layers_wake_again_equal_the_oracle(
    name: str, on_skip: OnSkip, block_size: int, tiny_llama: MakeLlama, make_prompts: MakePrompts
) -> None:
    tiny = tiny_llama(**DEEP)
    rows = TABLES[name]
    policy = LayerTable(rows, on_skip=on_skip)
    assert not policy.schedule(LAYERS).is_nested
    prompts = make_prompts(LENGTHS)
    expected = [greedy_at_depth(tiny.model, prompt, NUM_TOKENS, layer_table(rows), on_skip) for prompt in prompts]
    outputs = generated(tiny.directory, prompts, asked(NUM_TOKENS), depth=policy, block_size=block_size)
    assert_answers(outputs, expected)


def test_entries_of_a_skipped_layer_decide_later_tokens(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """The entries that a skipped layer holds decide the tokens once it runs again."""
    # So that the test before would notice wrong entries: "copy", "project" and none at all tell different stories.
    tiny = tiny_llama(**DEEP)
    (prompt,) = make_prompts([20])
    for name in ("waking", "alternating", "layer 0 sleeps"):
        rows = TABLES[name]
        rules = ("project", "none") if name == "layer 0 sleeps" else ("copy", "project", "none")
        stories = {tuple(greedy_at_depth(tiny.model, prompt, 32, layer_table(rows), rule).token_ids) for rule in rules}
        assert len(stories) == len(rules)


def test_the_depths_of_an_answer_are_those_of_the_formula(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    tiny = tiny_llama(**DEEP)
    depths = {
        D3(0.9, 0.6): [10, 9, 8, 7, 6, 6, 6, 6, 6, 6],
        D3(0.9, 0.3, tail=2): [10, 9, 8, 7, 6, 5, 5, 5, 5, 5],
        SkipDecode(9, 2): [10, 9, 8, 7, 6, 5, 4, 3, 2, 2],
    }
    prompts = make_prompts([5] * len(depths))
    outputs = generated(tiny.directory, prompts, [asked(10, depth=policy) for policy in depths])
    assert [output.outputs[0].depths for output in outputs] == list(depths.values())


# Who is who in a batch where everybody has a schedule of its own.
MIXED: list[tuple[DepthPolicy, ActiveLayers, OnSkip]] = [
    (D3(0.9, 0.6), d3(LAYERS, 0.9, 0.6), "none"),
    (FullDepth(), lambda _: set(ALL), "none"),
    (LayerTable(TABLES["waking"], on_skip="copy"), layer_table(TABLES["waking"]), "copy"),
    (SkipDecode(40, 3), skip_decode(LAYERS, 40, 3), "none"),
    (LayerTable(TABLES["random 1"], on_skip="project"), layer_table(TABLES["random 1"]), "project"),
    (UnifiedSkip(2), unified_skip(LAYERS, 2), "none"),
    (D3(0.97, 0.2, tail=1, on_skip="copy"), d3(LAYERS, 0.97, 0.2, 1), "none"),
    (LayerTable(TABLES["alternating"], on_skip="project"), layer_table(TABLES["alternating"]), "project"),
    (D3(0.8, 0.7, on_skip="project"), d3(LAYERS, 0.8, 0.7), "none"),
    (LayerTable(TABLES["random 2"], on_skip="copy"), layer_table(TABLES["random 2"]), "copy"),
    (Nested(0.95, NESTED_WINDOWS), nested(LAYERS, 0.95, NESTED_WINDOWS), "none"),
]
MIXED_LENGTHS = [17, 5, 40, 1, 22, 9, 31, 3, 12, 26, 7]


@pytest.fixture(scope="module")
def mixed(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> list[tuple[list[int], SamplingParams, DepthAnswer]]:
    """Each of `MIXED` with a prompt and what the oracle answers."""
    model = tiny_llama(**DEEP).model
    prompts = make_prompts(MIXED_LENGTHS, seed=2)
    return [
        (prompt, asked(NUM_TOKENS, depth=policy), greedy_at_depth(model, prompt, NUM_TOKENS, active, rule))
        for prompt, (policy, active, rule) in zip(prompts, MIXED, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 16, "block_size": 16},
        {"max_num_seqs": 16, "block_size": 4, "max_num_batched_tokens": 16},
        {"max_num_seqs": 4, "block_size": 5, "max_num_batched_tokens": 7},
    ],
    ids=["all at once", "in pieces", "four at a time, in pieces"],
)
def test_a_batch_of_many_schedules_equals_the_oracle(
    options: dict[str, int], mixed: list[tuple[list[int], SamplingParams, DepthAnswer]], tiny_llama: MakeLlama
) -> None:
    prompts, params, expected = zip(*mixed, strict=True)
    assert_answers(generated(tiny_llama(**DEEP).directory, list(prompts), params, **options), expected)


def test_preempted_and_replayed_sequences_equal_the_oracle(
    mixed: list[tuple[list[int], SamplingParams, DepthAnswer]], tiny_llama: MakeLlama
) -> None:
    """Sequences that are preempted and replayed equal the oracle."""
    # A pool of one and a half of the longest sequences, so that the others are thrown out again and again.
    tiny = tiny_llama(**DEEP)
    entry = 2 * 2 * 12 * 4  # bytes: keys and values of two heads of 12 float32
    most = LAYERS * max(len(prompt) + NUM_TOKENS for prompt, _, _ in mixed) * entry
    with Engine(
        tiny.directory, skip_tokenizer_init=True, block_size=4, max_num_seqs=5, kv_cache_memory_bytes=most * 3 // 2
    ) as engine:
        outputs = engine.generate([one[0] for one in mixed], [one[1] for one in mixed], use_tqdm=False)
        assert engine.stats().num_preemptions > 5
    assert_answers(outputs, [expected for _, _, expected in mixed])


def test_shared_prompt_is_read_at_full_depth_by_every_rule(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    tiny = tiny_llama(**DEEP)
    (prompt,) = make_prompts([30], seed=3)
    with Engine(tiny.directory, skip_tokenizer_init=True, block_size=4) as engine:
        for place, (policy, active, rule) in enumerate(MIXED[:6]):
            (output,) = engine.generate([prompt], asked(32, depth=policy), use_tqdm=False)
            assert output.num_cached_tokens == (28 if place else 0)
            assert_answers([output], [greedy_at_depth(tiny.model, prompt, 32, active, rule)])
