"""With `batch_invariant` no bit of what a row becomes depends on its neighbours, nor on how its sequence was cut."""

import importlib
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import llama_config
from quantized_weights import fp8_of_groups
from stepping import see_steps
from torch import Tensor

import d3engine.kernels.triton as any_kernels
import d3engine.kernels.triton.batch_invariant as kernels
from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.engine import resolve
from d3engine.executor.interface import Computed
from d3engine.kernels.kv_pool import NO_WINDOW
from d3engine.kernels.quantized import quantize_fp8, quantize_int4, quantize_int8
from d3engine.kernels.triton import products
from d3engine.model.config import ModelConfig
from d3engine.model.weights import random_weights
from d3engine.scheduling.plan import Chosen, Plan

# The package has the operation under this name; here its module is meant.
paged_attention: Any = importlib.import_module("d3engine.kernels.triton.paged_attention")

HEADS, KV_HEADS, CHANNELS, HIDDEN, VOCABULARY, BLOCK = 4, 2, 16, 128, 70, 4
WEIGHTS = {
    "floats": lambda matrix: matrix,
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
    "fp8 groups": fp8_of_groups,
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MIN_PROGRAMS", 1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("form", WEIGHTS)
def test_a_row_becomes_the_same_bits_alone_and_among_any_others(form: str, device: torch.device) -> None:
    given, norm = numbers(90, HIDDEN).to(device), numbers(HIDDEN, seed=1).to(device)
    wide, narrow = (WEIGHTS[form](numbers(count, HIDDEN, seed=2).to(device)) for count in (VOCABULARY, HIDDEN))

    def results(table: Any, rows: list[int]) -> list[Tensor]:
        hidden = given[rows].clone()
        residual = given[rows].clone()
        table.linear_residual(hidden, narrow, None, residual)
        gated = table.gate_up(hidden, norm, 1e-5, wide, None)
        logits = table.lm_head(hidden, norm, 1e-5, wide)
        return [residual, gated, logits, *table.lm_head_argmax(hidden, norm, 1e-5, wide)]

    wanted = results(kernels, list(range(90)))
    for rows in ([7], [*range(60, 77)]):
        for found, expected in zip(results(kernels, rows), wanted, strict=True):
            assert torch.equal(found, expected[rows])
    if form == "floats":
        assert not torch.equal(results(any_kernels, [7])[2], wanted[2][[7]]), "a free choice of tiles would do as well"


@pytest.mark.parametrize("form", WEIGHTS)
def test_programs_share_columns_for_any_rows(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that share columns do so alike for any number of rows."""
    monkeypatch.setattr(products, "MIN_PROGRAMS", 4)
    columns = 1024
    given, norm = numbers(90, columns).to(device), numbers(columns, seed=1).to(device)
    heads = WEIGHTS[form](numbers((HEADS + 2 * KV_HEADS) * CHANNELS, columns, seed=2).to(device))
    narrow = WEIGHTS[form](numbers(HIDDEN, columns, seed=3).to(device))
    residual = numbers(90, HIDDEN, seed=4).to(device)
    rotations = torch.polar(torch.ones(90, CHANNELS // 2), torch.rand(90, CHANNELS // 2)).to(device)
    entries = torch.stack([torch.arange(90) + torch.arange(90) // BLOCK * BLOCK] * 2, 1).to(device)
    entries[:, 1] += BLOCK
    for count in (1, 90):
        tile = products.product_tile(count, narrow, torch.bfloat16, may_split=True, batch_invariant=True)
        assert tile is not None
        assert tile.parts > 1

    def results(rows: list[int]) -> list[Tensor]:
        hidden, added = given[rows].clone(), residual[rows].clone()
        kernels.linear_residual(hidden, narrow, None, added)
        pool = torch.zeros(23, 2, BLOCK, KV_HEADS, CHANNELS, dtype=torch.bfloat16, device=device)
        queries = kernels.qkv(hidden, norm, 1e-5, heads, None, rotations[rows], pool, entries[rows], HEADS)
        written = pool.view(-1, KV_HEADS, CHANNELS)[entries[rows]]
        assert written.count_nonzero() > 0
        return [added, queries, written]

    wanted = results(list(range(90)))
    for rows in ([7], [*range(60, 77)]):
        for found, expected in zip(results(rows), wanted, strict=True):
            assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("window", [NO_WINDOW, 1, 20, 100])
def test_row_attends_in_the_same_bits_however_it_is_cut(
    window: int, kv_heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row attends in the same bits however its sequence is cut."""
    # Prompts whole, in pieces of any size or row by row, answers decoded or replayed in pieces, and both in one.
    monkeypatch.setattr(paged_attention, "ROWS_IN_TURN", 3)
    prompt, length = 127, 131  # rows of the answer have a split, or two
    pool = numbers(40, 2, BLOCK, kv_heads, CHANNELS).to(device)
    table = torch.randperm(39, generator=torch.Generator().manual_seed(1))[None, None, :36].to(device) + 1
    queries = numbers(length, 2, CHANNELS, seed=2).to(device)

    def attended(pieces: list[tuple[int, int]]) -> Tensor:
        """Rows [start, stop) of the sequence as chunks of one batch."""
        starts = [0, *accumulate(stop - start for start, stop in pieces)]
        tables = table.expand(1, len(pieces), -1)
        inputs = kernels.attention_inputs(
            starts, [stop for _, stop in pieces], tables, prompt_lengths=[prompt] * len(pieces)
        )
        mine = torch.cat([queries[start:stop] for start, stop in pieces])
        found = kernels.paged_attention(mine, pool, inputs[0], CHANNELS**-0.5, window=window)
        assert inputs[0].room._parts is not None
        assert inputs[0].room._parts.numel() <= 3 * 2 * 2 * (CHANNELS + 1), "a replay of many rows needs no more room"
        return found

    wanted = attended([(0, length)])
    for cut in ([(row, row + 1) for row in (3, 126, 127, 128)], [(120, 130), (1, 4), (128, 131)]):
        places = [row for start, stop in cut for row in range(start, stop)]
        assert torch.equal(attended(cut), wanted[places])


# -- the whole engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    heads = {"hidden_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = llama_config(2, vocab_size=VOCABULARY, eos_token_id=None, **heads)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def make(model: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine with graphs on Triton's kernels, in bfloat16."""
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs")
    weights = random_weights(ModelConfig.from_directory(model), dtype=torch.bfloat16, device=device, seed=3)

    def make(**arguments: Any) -> Engine:
        given: dict[str, Any] = {"max_num_seqs": 2, "block_size": BLOCK, "depth": FullDepth(), "batch_invariant": True}
        given |= {"backend": "triton", "skip_tokenizer_init": True, "device": device, "dtype": "bfloat16"}
        given |= {"weights": weights}
        return Engine(model, **(given | arguments))

    return make


def scores_of_tokens(engine: Engine) -> dict[tuple[str, int], float]:
    """Filled while the engine runs: the logit with which each request's token at each step was chosen, greedily."""
    found: dict[tuple[str, int], float] = {}

    def look(plan: Plan, computed: Computed) -> None:
        logits = computed.logits
        for nth, chunk in enumerate(plan.sampled.tolist()):
            sequence = plan.sequences[chunk]
            if isinstance(logits, Chosen):
                scores = logits.scores[:, nth].tolist()
            else:
                scores = [logits[nth].max().item()]
            for taken, score in enumerate(scores):
                found[sequence.request_id, sequence.step + taken] = score

    see_steps(engine, after=look)
    return found


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_tokens_and_logits_keep_their_bits_in_any_batch(make: Callable[..., Engine], cache: str) -> None:
    """Tokens and logits keep their bits in any batch, cut, preempted or cached."""
    together = make(max_num_batched_tokens=4, kv_cache_dtype=cache)
    scores, preempted = scores_of_tokens(together), set[str]()
    prompts = [[9, 8, 7, 6, 5, 0], [9, 8, 7, 6, 5, 1]]
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, depth=depth)
        for depth in (D3(0.7, 0.3), FullDepth())
    ]
    waiting, tokens = [0, 1], {}
    while waiting or together.has_unfinished_requests():
        if waiting:
            nth = waiting.pop(0)
            together.add_request(str(nth), prompts[nth], params[nth])
        for output in together.step():
            tokens[int(output.request_id)] = output.outputs[0].token_ids
        for sequence in together.scheduler.running:
            if sequence.step == 2 and sequence.request_id not in {"0", *preempted}:
                preempted.add(sequence.request_id)
                together.scheduler._preempt(sequence)
    stats = together.stats()
    assert stats.num_preemptions >= 1
    assert stats.cached_prompt_tokens > 0
    assert stats.graph_steps > 0
    alone = make(enable_prefix_caching=False, kv_cache_dtype=cache)
    wanted = scores_of_tokens(alone)
    for nth, prompt in enumerate(prompts):
        (output,) = alone.generate(prompt, params[nth], use_tqdm=False)
        assert tokens[nth] == output.outputs[0].token_ids
        own = {step: score for (request, step), score in scores.items() if request == str(nth)}
        assert own == {step: score for (_, step), score in wanted.items()}
        wanted.clear()
