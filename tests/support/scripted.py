"""An engine whose model is scripted: an executor that makes each request say what the test wants.
So text, stops and faults are exact. Scheduler, cache, sampler, tokenizer and the engine around them are the real
ones."""

import math
from pathlib import Path
from typing import Any

import torch
from configs import llama_config

import d3engine
from d3engine import Engine, SamplingParams
from d3engine.executor.interface import Computed, ExecutorStats
from d3engine.scheduling.plan import Plan

DEMO = Path(d3engine.__file__).parent / "demo_model"
VOCABULARY, EOS, LAYERS = 800, 2, 4  # the embedding has more rows than the tokenizer has pieces
CONFIG = llama_config(LAYERS, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, eos_token_id=EOS)
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 2}
Scripts = dict[tuple[int, ...], list[int]]


class Scripted:
    """An executor that makes each sequence generate the script of its prompt, and EOS after it."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.stats = ExecutorStats()
        self.fault: BaseException | None = None
        self.poisoned: set[str] = set()
        self.poisoned_answer: int | None = None  # None: all answers of those

    def run(self, plan: Plan) -> Computed:
        if self.fault is not None:
            raise self.fault
        logits = torch.zeros(len(plan.logit_rows), VOCABULARY)
        for row, chunk in enumerate(plan.sampled.tolist()):
            sequence = plan.sequences[chunk]
            script = [*self.scripts.get(tuple(sequence.prompt_token_ids), range(100, 200)), EOS, EOS, EOS, EOS]
            logits[row, script[sequence.step]] = 30.0
            if sequence.request_id in self.poisoned and self.poisoned_answer in (None, sequence.index):
                logits[row, 5] = math.nan
        return Computed(logits)

    def prepare_next(self) -> bool:
        """There is nothing to prepare."""
        return False

    def close(self) -> None:
        """There is nothing to let go of."""


def executor_of(engine: Engine) -> Scripted:
    executor = engine.executor
    assert isinstance(executor, Scripted)
    return executor


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def likeliest(max_tokens: int, **more: Any) -> SamplingParams:
    """As `greedy`, but drawn: so there may be several answers, all the same."""
    return SamplingParams(top_k=1, max_tokens=max_tokens, **more)


def ids(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, add_special_tokens=False)
