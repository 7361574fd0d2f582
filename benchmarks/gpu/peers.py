"""The engine beside its peers: transformers and torch.compile, on the same weights, prompts and numbers of tokens.

All systems answer in turn in one process. A peer that fails, or takes too long to compile, is named with its error.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.common import Round, host_seconds, time_limit
from benchmarks.gpu.end_to_end import BBH
from benchmarks.gpu.models import Model, graph_figures, new_engine, params_for, random_model
from benchmarks.gpu.plain_llama import PlainLlama, compiled
from benchmarks.systems import first_difference, generated, prompts_for, transformers_model
from d3engine.depth import DepthPolicy, FullDepth
from d3engine.engine.engine import Engine

Answer = Callable[[int], list[list[int]]]
"""Answers the prompts of a case with a number of tokens each."""

CASES = ((1, 16), (8, 512), (1, 2048))  # batch, context
SMOKE_CASES = ((2, 12),)
ROUNDS = 3
COMPILE_LIMIT_S = 110.0
LEAST_S = 12.0
ENGINE = "d3engine"


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in one row for each batch size and context, every system in it."""
    cases, tokens = (CASES, 129) if current.on_gpu else (SMOKE_CASES, 6)
    report.update(tokens=tokens, mode=current.mode, cases=[])
    with random_model("llama2-7b", current) as model:
        report["model"] = model.card()
        engine = new_engine(
            model,
            current,
            max_num_seqs=max(batch for batch, _ in cases),
            max_model_len=max(context for _, context in cases) + tokens + 16,
            kv_tokens=max(batch * (context + tokens + 16) for batch, context in cases),
            max_num_batched_tokens=max(batch * context for batch, context in cases) + 16,
        )
        peer = transformers_model(model.directory, model.config, model.weights).to(current.device)
        report["attention_of_transformers"] = peer.config._attn_implementation
        for batch, context in cases:
            if current.left() < LEAST_S:
                report["stopped"] = f"time: before batch {batch}, context {context}"
                break
            row: dict[str, Any] = {"batch": batch, "context": context, "systems": {}}
            report["cases"].append(row)
            measure(row, systems(engine, peer, model, batch, context, tokens, current), tokens, current, report)
        report["graphs"] = graph_figures(engine)
        engine.close()
    failed = [name for row in report["cases"] for name, found in row["systems"].items() if "error" in found]
    if failed:
        raise RuntimeError(f"without figures: {', '.join(failed)}; see their `error`")


def systems(
    engine: Engine, peer: Any, model: Model, batch: int, context: int, tokens: int, current: Round
) -> dict[str, Answer]:
    """Every system by name, ready to answer the prompts of one case; compiling happens at the first answer."""
    prompts = prompts_for(model.config, batch, context)
    given = torch.tensor(prompts, device=current.device)

    def ours(policy: DepthPolicy) -> Answer:
        def answer(count: int) -> list[list[int]]:
            outputs = engine.generate(prompts, params_for(policy, count), use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        return answer

    found = {ENGINE: ours(FullDepth()), f"{ENGINE}, D3({BBH.alpha:g}, {BBH.start:g})": ours(BBH)}
    found["transformers"] = with_dynamic_cache(peer, given)
    found["transformers, static cache, torch.compile"] = with_static_cache(peer, given, context + tokens)
    found["plain PyTorch, torch.compile"] = plain(model, given, context + tokens, current)
    return found


def with_dynamic_cache(peer: Any, given: torch.Tensor) -> Answer:
    """transformers' greedy `generate` as it is by default."""
    from transformers import DynamicCache

    return lambda count: generated(peer, given, count, DynamicCache(config=peer.config))


def with_static_cache(peer: Any, given: torch.Tensor, length: int) -> Answer:
    """The same with a static cache, which `generate` runs under torch.compile on a GPU (only there)."""
    from transformers import CompileConfig, StaticCache

    cache = StaticCache(config=peer.config, max_cache_len=length)
    options = {"compile_config": CompileConfig(dynamic=False)} if given.is_cuda else {}

    def answer(count: int) -> list[list[int]]:
        if any(layer.is_initialized for layer in cache.layers):
            cache.reset()
        return generated(peer, given, count, cache, **options)

    return answer


def plain(model: Model, given: torch.Tensor, length: int, current: Round) -> Answer:
    """`PlainLlama` with its step compiled and captured; in a rehearsal only traced, as compiling takes too long."""
    plain_model: list[Any] = []

    def answer(count: int) -> list[list[int]]:
        if not plain_model:
            llama = PlainLlama(model.config, model.weights, batch=given.shape[0], length=length)
            options = {"mode": "reduce-overhead"} if current.on_gpu else {"backend": "eager"}
            plain_model.extend((llama, compiled(llama, **options)))
        llama, step = plain_model
        found: list[list[int]] = llama.generate(given, count, step)
        return found

    return answer


def measure(
    row: dict[str, Any], answers: dict[str, Answer], tokens: int, current: Round, report: dict[str, Any]
) -> None:
    """Warm every system up, each within its limit, then let them answer in turn; `row["systems"]` is filled."""
    given: dict[str, list[list[int]]] = {}
    for name, answer in answers.items():
        found: dict[str, Any] = {"call_s": [], "prompt_s": []}
        row["systems"][name] = found
        limit = min(COMPILE_LIMIT_S, current.left() - LEAST_S)
        try:
            start = time.monotonic()
            with time_limit(limit):
                answer(tokens)
                found["warm_up_s"] = time.monotonic() - start
                answer(1)
                given[name] = answer(tokens)
        except Exception:
            found["error"] = traceback.format_exc()[-4000:]
        current.keep(report)
    row["cudagraphs_skipped"] = _cudagraphs_skipped()
    for _ in range(ROUNDS):
        if current.left() < LEAST_S / 2:
            break
        for name in given:
            found = row["systems"][name]
            found["prompt_s"].append(host_seconds(lambda name=name: answers[name](1), current.device))  # type: ignore[misc]
            found["call_s"].append(host_seconds(lambda name=name: answers[name](tokens), current.device))  # type: ignore[misc]
        current.keep(report)
    for name in given:
        if row["systems"][name]["call_s"]:
            evaluate(row, name, given, tokens)
    current.keep(report)


def evaluate(row: dict[str, Any], name: str, given: dict[str, list[list[int]]], tokens: int) -> None:
    """Rates of one system, the engine's speed over its own, and how many rows have the engine's tokens."""
    found = row["systems"][name]
    call, prompt = statistics.median(found["call_s"]), statistics.median(found["prompt_s"])
    found["tokens_per_s"] = row["batch"] * tokens / call
    found["step_s"] = (call - prompt) / (tokens - 1)
    engine = row["systems"].get(ENGINE, {})
    if engine.get("call_s"):
        pairs = zip(found["call_s"], engine["call_s"], strict=False)
        found["engine_is_faster_by"] = statistics.median(theirs / ours for theirs, ours in pairs)
        places = [first_difference(*pair) for pair in zip(given[name], given[ENGINE], strict=True)]
        found["rows_with_equal_tokens"] = places.count(None)
        found["first_differences"] = places


def _cudagraphs_skipped() -> int:
    """How often torch.compile was to capture a graph in this process and did not, which makes a peer slower."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])
