"""Windows are crossed natively, in runs as in single steps, whatever the maps are held in."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridge_files import some_maps, write_maps
from fixture_types import MakeLlama
from multi_step import greedy, unread

from d3engine import D3, Engine, FullDepth, Lossless, RequestOutput, SamplingParams, SelfSpeculative
from d3engine.model.bridges import BRIDGES_FILE
from d3engine.weights_tools.quantize import quantize_model

LAYERS, SIZE, RANK = 6, 64, 9
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
BRIDGED = (D3(0.9, 0.3, bridges="auto"), D3(0.8, 0.5, bridges="auto"), D3(0.95, 0.3, tail=1, bridges="auto"))
PROMPTS = [[5, 9, 200, 31], [7] * 20, [11, 12], [5, 9, 200, 8]]

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture(scope="module")
def model(tiny_llama: MakeLlama, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A directory with weights of a kind, and bridges of a rank beside them (0: full)."""
    made = tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=96, seed=3)
    parent = tmp_path_factory.mktemp("bridged")

    def directory(kind: str, rank: int) -> Path:
        target = parent / f"{kind}-{rank}"
        if not target.exists():
            if kind in ("int8", "int4"):
                quantize_model(made.directory, target, kind)
            else:
                shutil.copytree(made.directory, target)
            write_maps(some_maps(LAYERS, SIZE), target, target / BRIDGES_FILE, rank or None)
        return target

    return directory


def asked(count: int = 18, **changes: Any) -> list[SamplingParams]:
    return [unread(greedy(policy, count, **changes)) for policy in (*BRIDGED, FullDepth())]


@pytest.mark.parametrize(
    ("kind", "rank"), [("float32", 0), ("float32", RANK), ("bfloat16", 0), ("int8", RANK), ("int4", 0)]
)
def test_native_bridged_answers_are_the_eager_ones(model: Callable[[str, int], Path], kind: str, rank: int) -> None:
    """Bridged answers run ahead natively and are the eager ones."""
    options = OPTIONS | ({"weight_dtype": "bfloat16"} if kind == "bfloat16" else {})
    answers: list[list[RequestOutput]] = []
    for enforce_eager in (False, True):
        with Engine(model(kind, rank), enforce_eager=enforce_eager, **options) as engine:
            answers.append(engine.generate(PROMPTS, asked(logprobs=1), use_tqdm=False))
            stats = engine.stats()
            assert stats.bridge_bytes == expected_bytes(kind, rank)
            assert (stats.native_steps == 0) == enforce_eager
            assert (stats.eager_steps == 0) == (not enforce_eager)
    for mine, theirs in zip(*answers, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.outputs[0].depths == theirs.outputs[0].depths
        for token, found, wanted in zip(
            mine.outputs[0].token_ids, mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True
        ):
            assert found[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


def expected_bytes(kind: str, rank: int) -> int:
    """What all maps take, in the kind of the engine's matrices, int8 beside int4; offsets and scales are float32."""
    size = {"float32": 4, "bfloat16": 2}.get(kind, 1)
    shapes = [(SIZE, rank), (rank, SIZE)] if rank else [(SIZE, SIZE)]
    of_map = sum(rows * columns * size + (4 * rows if size == 1 else 0) for rows, columns in shapes) + 4 * SIZE
    return of_map * LAYERS * (LAYERS + 1) // 2


def test_whole_runs_of_bridged_rows_are_taken_at_once(model: Callable[[str, int], Path]) -> None:
    with Engine(model("float32", 0), **OPTIONS) as engine:
        engine.add_request("one", PROMPTS[0], asked(160)[0])
        before = engine.stats().native_steps
        engine.step()
        assert engine.stats().native_steps - before == 128


def test_bridged_rows_alone_in_a_batch_and_read_keep_bits(model: Callable[[str, int], Path]) -> None:
    """Bridged rows have the same bits alone in a batch and read step by step."""

    def logprobs(output: RequestOutput) -> list[float]:
        answer = output.outputs[0]
        return [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs or [], strict=True)]

    with Engine(model("float32", RANK), **OPTIONS) as engine:
        params = asked(logprobs=0)
        together = engine.generate(PROMPTS, params, use_tqdm=False)
        for prompt, own, output in zip(PROMPTS, params, together, strict=True):
            (alone,) = engine.generate(prompt, own, use_tqdm=False)
            *_, streamed = engine.stream(prompt, own)
            assert logprobs(alone) == logprobs(output) == logprobs(streamed)
        assert engine.stats().eager_steps == 0


@pytest.mark.parametrize("policy", [Lossless, SelfSpeculative])
def test_drafts_cross_their_windows_natively_and_change_no_token(
    model: Callable[[str, int], Path], policy: type[Lossless | SelfSpeculative]
) -> None:
    drafted = []
    for enforce_eager in (False, True):
        with Engine(model("float32", 0), enforce_eager=enforce_eager, **OPTIONS) as engine:
            found = engine.generate(PROMPTS, greedy(policy(BRIDGED[0], 4), 24), use_tqdm=False)
            wanted = engine.generate(PROMPTS, greedy(FullDepth(), 24), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
            stats = engine.stats()
            drafted.append((stats.drafted_tokens, stats.accepted_tokens))
            assert (stats.eager_steps == 0) == (not enforce_eager)
    assert drafted[0] == drafted[1]
    assert drafted[0][0] > drafted[0][1]


def test_maps_held_in_fewer_bits_are_near_those_of_the_file(model: Callable[[str, int], Path]) -> None:
    """A map of int8 is off by less than a hundredth, one of bfloat16 by less than that of its own values."""
    weights, _ = some_maps(LAYERS, SIZE)[0, 1]
    state = torch.randn(5, SIZE)
    with Engine(model("int8", 0), depth=BRIDGED[0], **OPTIONS) as engine:
        store = engine.executor._eager.bridges  # type: ignore[attr-defined]
        crossed = state.clone()
        store.bridges("auto")[0, 1].cross(engine.executor._eager.kernels, crossed)  # type: ignore[attr-defined]
    wanted = state + state @ weights.T + some_maps(LAYERS, SIZE)[0, 1][1]
    assert np.linalg.norm(crossed - wanted) < 0.01 * np.linalg.norm(wanted - state)
