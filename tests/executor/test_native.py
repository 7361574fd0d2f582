"""Which steps the native executor takes, and that they are the eager executor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ahead import greedy
from tiny_models import TinyLlama

from d3engine import D3, Engine, FullDepth
from d3engine.executor.native import MAX_SINGLE_ROWS
from d3engine.kernels.native.library import LibraryMissing, library

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        library()
    except LibraryMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def engines(tiny_llama: Callable[..., TinyLlama]) -> Iterator[tuple[Engine, Engine]]:
    directory = tiny_llama(seed=11, max_position_embeddings=256).directory
    with Engine(directory, **OPTIONS) as native, Engine(directory, enforce_eager=True, **OPTIONS) as eager:
        yield native, eager


@pytest.mark.parametrize("length", [1, 2, 17, MAX_SINGLE_ROWS])
def test_a_short_prompt_is_native_and_answers_as_an_eager_one(engines: tuple[Engine, Engine], length: int) -> None:
    native, eager = engines
    prompt = [(7 * token + length) % 250 + 3 for token in range(length)]
    before = native.stats().eager_steps
    for policy in (FullDepth(), D3(0.8, 0.3)):
        params = greedy(policy, prompt_logprobs=1)
        found, wanted = (engine.generate([prompt], params, use_tqdm=False)[0] for engine in engines)
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].depths == wanted.outputs[0].depths
        for mine, theirs in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            token = next(iter(theirs))
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    assert native.stats().eager_steps == before
    assert eager.stats().native_steps == 0


def test_a_longer_prompt_is_for_a_matrix_library(engines: tuple[Engine, Engine]) -> None:
    native, _ = engines
    prompt = [token % 250 + 3 for token in range(MAX_SINGLE_ROWS + 1)]
    before = native.stats().eager_steps
    answers = [engine.generate([prompt], greedy(FullDepth()), use_tqdm=False)[0].outputs[0] for engine in engines]
    assert answers[0].token_ids == answers[1].token_ids
    assert native.stats().eager_steps == before + 1


def test_short_prompts_share_a_step_with_answers_under_way(engines: tuple[Engine, Engine]) -> None:
    native, eager = engines
    prompts = {"first": [5, 9, 200, 31], "second": [7] * 20, "third": [11, 12]}
    wanted = {
        name: eager.generate([prompt], greedy(D3(0.9, 0.3), 12), use_tqdm=False)[0].outputs[0]
        for name, prompt in prompts.items()
    }
    before, done = native.stats().eager_steps, {}
    waiting = list(prompts)
    while waiting or native.has_unfinished_requests():
        if waiting:
            name = waiting.pop(0)
            native.add_request(name, prompts[name], greedy(D3(0.9, 0.3), 12))
        done |= {output.request_id: output.outputs[0] for output in native.step() if output.finished}
    for name, answer in wanted.items():
        assert (done[name].token_ids, done[name].depths) == (answer.token_ids, answer.depths)
    assert native.stats().eager_steps == before
