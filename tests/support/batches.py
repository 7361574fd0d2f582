"""Requests of every kind, run together: what they answer must be what each answers alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from configs import llama_config

from d3engine import D3, EarlyExit, Engine, FullDepth, LayerTable, SamplingParams, SkipDecode, TailSkip, UnifiedSkip
from d3engine.depth import DepthPolicy
from d3engine.model.weights import LayerWeights, LlamaWeights
from d3engine.request.hidden_states import HiddenStates
from d3engine.request.outputs import RequestOutput

BeforeStep = Callable[[Engine], object]

LAYERS, VOCABULARY, MAX_LENGTH, BLOCK = 6, 300, 64, 4
CONFIG = llama_config(LAYERS, vocab_size=VOCABULARY, max_position_embeddings=MAX_LENGTH, eos_token_id=7)
EVERY = list(range(LAYERS))
WAKING = [EVERY, [0, 5], [0, 1, 5], [0, 1], EVERY, [0, 2, 4], [0, 2, 4], EVERY, [0], [0, 3, 4, 5]]
POLICIES: list[DepthPolicy] = [
    FullDepth(),
    EarlyExit(0.9),
    D3(0.9, 0.5),
    EarlyExit(0.9, on_skip="copy"),
    EarlyExit(0.9, "cosine"),
    D3(0.8, 0.3, tail=1),
    D3(0.7, 0.2),
    D3(0.9, 0.5, on_skip="copy"),
    D3(0.8, 0.5, on_skip="project"),
    SkipDecode(12, 2),
    EarlyExit(0.8, "softmax_diff", min_layer=1, every=2, on_skip="copy"),
    TailSkip(4.5, 16),
    SkipDecode(12, 2, on_skip="copy"),
    SkipDecode(9, 3, on_skip="project"),
    UnifiedSkip(1.5),
    UnifiedSkip(2, on_skip="copy"),
    UnifiedSkip(2, on_skip="project"),
    LayerTable(WAKING, on_skip="copy"),
    LayerTable(WAKING, on_skip="project"),
    LayerTable([EVERY, [0, 1, 2, 3], [0, 1, 2], [0, 1]], on_skip="none"),
]


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    lora: str | None = None


def wide(weights: LlamaWeights) -> LlamaWeights:
    """Random weights made so large that layers matter and the likeliest token stands far from the next."""

    def layer(given: LayerWeights) -> LayerWeights:
        return replace(
            given, qkv=given.qkv * 15, output=given.output * 60, gate_up=given.gate_up * 10, down=given.down * 60
        )

    return LlamaWeights(
        weights.embedding * 50, tuple(map(layer, weights.layers)), weights.final_norm, weights.lm_head * 50
    )


def moved(weights: LlamaWeights, device: str) -> LlamaWeights:
    """The very same numbers on another device; of weights without biases that are not quantized."""

    def layer(given: LayerWeights) -> LayerWeights:
        return replace(given, **{name: tensor.to(device) for name, tensor in vars(given).items() if tensor is not None})

    head = weights.lm_head
    assert isinstance(head, torch.Tensor)
    return LlamaWeights(
        weights.embedding.to(device), tuple(map(layer, weights.layers)), weights.final_norm.to(device), head.to(device)
    )


def block_bytes(cache: str = "auto") -> int:
    head = 8 * 4 if cache == "auto" else 8 + 4  # channels of float32, or of a byte and their scale
    return 2 * BLOCK * 2 * head  # keys and values, entries, kv heads


def some_requests(seed: int, count: int, *, longest: int = 24, **fixed: Any) -> list[Request]:
    """Requests of every kind, many with a common beginning; the same for a seed."""
    numbers = random.Random(seed)
    bases = [[numbers.randrange(VOCABULARY) for _ in range(longest)] for _ in range(2)]
    requests = []
    for nth in range(count):
        length = numbers.randint(1, longest)
        shared = numbers.choice([0, 0, length, 2 * length // 3])
        own = [numbers.randrange(VOCABULARY) for _ in range(length - shared + 1)]
        params: dict[str, Any] = (
            {"depth": POLICIES[(nth + seed) % len(POLICIES)], "max_tokens": numbers.randint(1, 22)}
            | {"temperature": numbers.choice([0.0, 0.0, 1.0, 3.0]), "seed": numbers.randrange(2**63)}
            | {"logprobs": numbers.choice([None, None, 0, 3]), "ignore_eos": numbers.random() < 0.5}
        )
        if numbers.random() < 0.2:
            params |= {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
        if numbers.random() < 0.15:
            params["prompt_logprobs"] = 2
        if numbers.random() < 0.2:
            params["n"] = numbers.randint(2, 3)
        params |= fixed
        if params["temperature"] == 0:
            params["n"] = 1  # greedy answers would all be the same, and are refused
        prompt = (numbers.choice(bases)[:shared] + own)[:longest]
        requests.append(Request(tuple(prompt), SamplingParams(**params), numbers.choice([0, 0, 0, 1, -1])))
    return requests


def assert_same(found: RequestOutput, wanted: RequestOutput) -> None:
    assert found.finished
    assert len(found.outputs) == len(wanted.outputs)
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.depths == other.depths
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert_close_logprobs(one.logprobs, other.logprobs)
        assert_close_states(one.hidden_states, other.hidden_states)
    assert_close_logprobs(found.prompt_logprobs, wanted.prompt_logprobs)


def generate_as_alone(
    engine: Engine, requests: list[Request], solo: Callable[[Request], RequestOutput]
) -> list[RequestOutput]:
    """The outputs of `generate` for these requests, each of which is what `solo` says."""
    prompts, params = [list(one.prompt) for one in requests], [one.params for one in requests]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert output.prompt_token_ids == list(request.prompt)
        assert_same(output, solo(request))
    return outputs


def step_as_alone(
    engine: Engine,
    requests: list[Request],
    solo: Callable[[Request], RequestOutput],
    asked: list[SamplingParams],
    before_step: BeforeStep = bool,
) -> None:
    """Ask all `requests` at once with the parameters `asked`, and step to the end; each is what `solo` says of it."""
    for nth, (request, params) in enumerate(zip(requests, asked, strict=True)):
        engine.add_request(str(nth), list(request.prompt), params, request.priority)
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        before_step(engine)
        done |= {int(output.request_id): output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    for nth, request in enumerate(requests):
        assert_same(done[nth], solo(request))


def assert_close_logprobs(found: list[Any] | None, wanted: list[Any] | None) -> None:
    assert (found is None) == (wanted is None)
    for row, other in zip(found or [], wanted or [], strict=True):
        assert (row is None) == (other is None)
        for token, logprob in (row or {}).items():
            assert logprob.logprob == pytest.approx(other[token].logprob, abs=2e-3)


def assert_close_states(found: HiddenStates | None, wanted: HiddenStates | None) -> None:
    if found is None or wanted is None:
        assert found is wanted
        return
    assert found.layers == wanted.layers
    for layer in found.layers:
        assert np.allclose(found[layer], wanted[layer], atol=1e-4)


def preempting(numbers: random.Random, share: float) -> Callable[[Engine], None]:
    """For `before_step`: preempts each running sequence with this probability."""

    def disturb(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            if numbers.random() < share:
                engine.scheduler._preempt(sequence)

    return disturb


def run_together(
    engine: Engine,
    requests: list[Request],
    numbers: random.Random,
    *,
    before_step: Callable[[Engine], None] = lambda engine: None,
) -> dict[int, RequestOutput]:
    """Add the requests at random moments of one run; returns their last outputs."""
    waiting, done = dict(enumerate(requests)), {}
    for _ in range(1500):
        while waiting and (numbers.random() < 0.3 or not engine.has_unfinished_requests()):
            nth = min(waiting)
            request = waiting.pop(nth)
            engine.add_request(str(nth), list(request.prompt), request.params, request.priority, request.lora)
        before_step(engine)
        done |= {int(output.request_id): output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
        if not waiting and not engine.has_unfinished_requests():
            return done
    raise AssertionError("the engine does not finish")


def kv_is_back(engine: Engine) -> bool:
    engine.reset_prefix_cache()
    return engine.stats().kv_blocks_in_use == 0 and engine.scheduler.cache.pool.num_held == 0
