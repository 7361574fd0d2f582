"""From logits to tokens, and from tokens to text: the sampler and the detokenizer beside the plainest rivals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from d3engine.depth import FullDepth
from d3engine.engine.model_directory import model_directory
from d3engine.executor.sampler import Sampler
from d3engine.request.params import SamplingParams
from d3engine.scheduling.sequence import Sequence
from d3engine.text.detokenizer import Detokenizer
from d3engine.text.tokenizer import load_tokenizer

VOCABULARY = 32000
SAMPLED = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
}


def logits_of(batch: int) -> torch.Tensor:
    return 3 * torch.randn(batch, VOCABULARY, generator=torch.Generator().manual_seed(0))


def plan_of(batch: int, params: SamplingParams) -> Any:
    """What the sampler reads of a plan: sequences that have each generated 64 tokens."""
    sequences = [
        Sequence(
            request_id=str(row),
            index=0,
            prompt_token_ids=[1, 2, 3],
            params=params,
            schedule=FullDepth().schedule(1),
            eos_token_ids=frozenset(),
            seed=row,
            priority=0,
            arrival=row,
            max_length=128,
            token_ids=list(range(64)),
        )
        for row in range(batch)
    ]
    return SimpleNamespace(sampled=np.arange(batch), sequences=sequences, greedy=params.greedy, prompt_rows=())


@pytest.mark.parametrize("system", ["ours", "torch.argmax"])
@pytest.mark.parametrize("batch", [1, 64])
def test_greedy(benchmark: BenchmarkFixture, batch: int, system: str) -> None:
    benchmark.group = f"greedy, {batch} x {VOCABULARY}"
    logits, plan, sampler = logits_of(batch), plan_of(batch, SamplingParams(temperature=0.0)), Sampler()
    if system == "ours":
        benchmark(sampler, logits, plan)
    else:
        benchmark(lambda: logits.argmax(dim=-1).tolist())


@pytest.mark.parametrize("kind", [*SAMPLED, "torch.multinomial"])
@pytest.mark.parametrize("batch", [1, 64])
def test_sampled(benchmark: BenchmarkFixture, batch: int, kind: str) -> None:
    benchmark.group = f"sampled, {batch} x {VOCABULARY}"
    logits, sampler = logits_of(batch), Sampler()
    if kind == "torch.multinomial":
        benchmark(lambda: torch.multinomial((logits / 0.8).softmax(dim=-1), 1).tolist())
    else:
        options: dict[str, Any] = SAMPLED[kind]
        benchmark(sampler, logits, plan_of(batch, SamplingParams(**options)))


@pytest.mark.parametrize("system", ["ours", "ours, with a stop string", "decode everything again at every token"])
def test_detokenise(benchmark: BenchmarkFixture, system: str) -> None:
    """256 tokens of the demo model's kind of text, the text wanted after each."""
    benchmark.group = "256 tokens to text, shown token by token"
    tokenizer = load_tokenizer(model_directory("demo"))
    text = "Nina has 12 marbles. Tom gives Nina 7. How many marbles does Nina have now? "
    ids = (tokenizer.encode(text, add_special_tokens=False) * 32)[:256]

    def ours() -> str:
        detokenizer = Detokenizer(tokenizer, stop=["never"] if "stop" in system else [])
        return "".join(detokenizer.append(token) for token in ids) + detokenizer.finish()

    def again() -> str:
        return [tokenizer.decode(ids[: count + 1]) for count in range(len(ids))][-1]

    benchmark(again if system.startswith("decode") else ours)
