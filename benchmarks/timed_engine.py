"""An engine whose executor is timed from outside, plan by plan, while `generate` runs as it does for users."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.engine.engine import Engine
from d3engine.executor.interface import Computed
from d3engine.executor.native import NativeExecutor
from d3engine.model.weights import LlamaWeights
from d3engine.request.params import SamplingParams
from d3engine.scheduling.plan import Plan


@dataclass
class Turn:
    """One call of `generate`: seconds by plan that was run, and by call."""

    prompt_seconds: float = 0.0
    step_seconds: float = 0.0
    steps: int = 0
    call_seconds: float = 0.0
    depths: list[int] = field(default_factory=list)

    @property
    def seconds_per_step(self) -> float:
        """What the executor takes for a decode step."""
        return self.step_seconds / self.steps

    @property
    def host_share(self) -> float:
        """How much of the call's time the executor was at work: 1 where planning and output cost nothing."""
        return (self.prompt_seconds + self.step_seconds) / self.call_seconds


class TimedEngine:
    """An engine whose executor is timed, by `clock`, which tells seconds."""

    def __init__(
        self,
        directory: Path,
        weights: LlamaWeights,
        *,
        threads: int,
        rows: int,
        length: int,
        clock: Callable[[], float] = time.perf_counter,
        enforce_eager: bool = False,
        activations: str = "auto",
    ) -> None:
        self.engine = Engine(
            directory,
            weights=weights,
            device="cpu",
            dtype="float32",
            max_model_len=length,
            max_num_seqs=rows,
            max_num_batched_tokens=max(2048, rows * length),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            num_threads=threads,
            enforce_eager=enforce_eager,
            activations=activations,
        )
        self._clock, self._turn = clock, Turn()
        executor = self.engine.executor
        self._run: Callable[[Plan], Computed] = executor.run
        executor.run = self._timed  # type: ignore[method-assign, union-attr]
        if isinstance(executor, NativeExecutor):  # whose steps of prompts may have a run behind them in the same plan
            self._single = executor._single
            executor._single = self._until_single  # type: ignore[method-assign]

    def _timed(self, plan: Plan) -> Computed:
        start = self._clock()
        computed = self._run(plan)
        end = self._clock()
        steps, prompt_end = computed.carried_out(plan).num_steps, start
        if (plan.steps < 0).any():
            opens = plan.multi_step is not None and plan.multi_step.opens
            steps, prompt_end = steps - 1, self._single_end if opens else end
        self._turn.prompt_seconds += prompt_end - start
        self._turn.step_seconds += end - prompt_end
        self._turn.steps += steps
        return computed

    def _until_single(self, plan: Plan) -> Any:
        found = self._single(plan)
        self._single_end = self._clock()
        return found

    def answer(self, prompts: list[list[int]], tokens: int, depth: DepthPolicy) -> Turn:
        """Generate `tokens` tokens for every prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, depth=depth)
        self._turn = turn = Turn()
        start = self._clock()
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        turn.call_seconds = self._clock() - start
        turn.depths = list(outputs[0].outputs[0].depths)
        return turn

    def close(self) -> None:
        """Give back its memory."""
        self.engine.close()


class EagerPeer:
    """The engine without the native library, by PyTorch's operations: what a machine without a compiler has."""

    def __init__(self, directory: Path, weights: LlamaWeights, *, threads: int, rows: int, length: int) -> None:
        self._timed = TimedEngine(directory, weights, threads=threads, rows=rows, length=length, enforce_eager=True)
        self.close = self._timed.close

    def answer(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Seconds of the prompt pass, and seconds per step of the `tokens` - 1 steps after it."""
        turn = self._timed.answer(prompts, tokens, FullDepth())
        return turn.prompt_seconds, turn.seconds_per_step if turn.steps else 0.0
