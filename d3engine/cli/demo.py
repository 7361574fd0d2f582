"""The demo of `d3engine generate`: a word problem at full depth and with depth decay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import typer

from d3engine.cli.answers import Answer, Run, depths_of, run_answers, show_tokens
from d3engine.cli.commands import ExitCode, as_typed, note
from d3engine.cli.depth_options import AUTO, Depth
from d3engine.cli.engine_options import Options, open_engine, sampling_params
from d3engine.cli.terminal import DepthColours, Writer, layers_by_token, new_console
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.depth.labels import policy_in_words
from d3engine.errors import require, require_integer
from d3engine.research.evaluation.word_problems import Problem, extract_answer, format_prompt, problems

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.params import SamplingParams


MOST_ROUNDS = 9
ENOUGH_SECONDS = 5.0


@dataclass(frozen=True)
class Speedup:
    """The median over rounds of one way's time over the other's."""

    ratio: float
    rounds: int

    @property
    def words(self) -> str:
        """ "1.7x faster"."""
        factor, way = (self.ratio, "faster") if self.ratio >= 1 else (1 / self.ratio, "slower")
        return "as fast" if f"{factor:.1f}" == "1.0" else f"{factor:.1f}x {way}"

    def __str__(self) -> str:
        """ "1.7x faster (median of 9 turns)"."""
        return f"{self.words} (median of {self.rounds} turns)" if self.rounds > 1 else f"{self.words} (one turn each)"


def speedups(
    slow: Callable[[], Sequence[float]],
    fast: Callable[[], Sequence[float]],
    *,
    most_rounds: int = MOST_ROUNDS,
    enough_seconds: float = ENOUGH_SECONDS,
) -> list[Speedup]:
    """How much faster `fast` is than `slow` in each of the seconds that both tell; each call runs one and returns them.

    Ends after `most_rounds` rounds, or with the round in which `enough_seconds` have gone by. Every other round begins
    with the other one.
    """
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < most_rounds and (not rounds or time.perf_counter() - began < enough_seconds):
        if len(rounds) % 2:
            after = fast()
            before = slow()
        else:
            before = slow()
            after = fast()
        rounds.append([a / b for a, b in zip(before, after, strict=False)])
    return [Speedup(median(ratios), len(ratios)) for ratios in zip(*rounds, strict=False)]


WARM_UP_TOKENS = 4
"""Tokens that warm the engine up before the first answer of the demo."""


def show_problem(
    engine_options: Options,
    sampling: Options,
    depth: Depth,
    model: str,
    seed: int,
    *,
    color_depth: bool,
    depth_suffix: bool,
    as_json: bool,
) -> None:
    """Show the problem of this seed, and its answers at full depth and under `depth`."""
    require_integer("--problem-seed", seed, 0)
    require(sampling.get("n", 1) == 1, "--n", sampling.get("n"), "1 without a prompt, since the answer is checked")
    problem = next(problems("test", seed))
    engine = open_engine(model, engine_options)
    params = sampling_params(engine, sampling)
    demo = _Demo(engine, problem, params, color_depth, depth_suffix, as_json)
    demo.show(list(dict.fromkeys([FullDepth(), engine.depth if depth == AUTO else depth])), seed)


@dataclass
class _Demo:
    """Shows one problem and its answers."""

    engine: Engine
    problem: Problem
    params: SamplingParams
    color_depth: bool
    depth_suffix: bool
    as_json: bool

    def __post_init__(self) -> None:
        self.prompt = format_prompt(self.problem.question)
        self.console = new_console()
        self.writer = Writer(self.console, wrap=True, indent="  ")
        self.text = Writer(self.console, wrap=True)

    def show(self, policies: list[DepthPolicy], seed: int) -> None:
        """The problem, an answer by each policy, and what the second one saved."""
        layers = self.engine.config.num_layers
        if not self.as_json:
            self.text.write_words(
                f"A word problem that the model ({layers} layers) has never seen, answered"
                + (" at full depth, then with depth decay." if len(policies) > 1 else " at full depth.")
            )
            self.text.end_line()
            self.writer.write_words(self.problem.question)
        self._warm_up()
        runs = [self._show_answer(policy) for policy in policies]
        if self.as_json:
            self._print_json(policies, runs, seed)
            return
        self.text.end_line()
        if len(runs) > 1:
            found = speedups(*(partial(self._seconds_of_a_token, policy) for policy in policies))
            self.text.write_words(self._comparison(runs[0], runs[1], found))
        another = as_typed("generate", "--problem-seed", str(seed + 1))
        self.text.write_words(f"Another problem:        {another}")
        self.text.write_words(f"How often it is right:  {as_typed('eval', 'demo', *_flags(policies[-1]))}")

    def _warm_up(self) -> None:
        """A few tokens that are not shown: the first steps of a process are slower than any other."""
        params = replace(self.params, depth=FullDepth(), min_tokens=0, max_tokens=WARM_UP_TOKENS)
        if run_answers(self.engine, [self.prompt], params).interrupted:
            raise typer.Exit(ExitCode.INTERRUPTED)

    def _show_answer(self, policy: DepthPolicy) -> Run:
        if self.as_json:
            return self._answer(policy)
        params = replace(self.params, depth=policy)
        wanted = self.color_depth and not self.depth_suffix
        colours = DepthColours(depths_of(self.engine, params), self.console, wanted=wanted)
        self.text.end_line()
        self.text.write_words(self._heading(policy))

        def show(answer: Answer) -> None:
            show_tokens(answer, self.writer, colours, suffix=self.depth_suffix)

        run = self._answer(policy, show)
        self.writer.end_line()
        if run.interrupted:
            note(run.summary())
            raise typer.Exit(ExitCode.INTERRUPTED)
        self.writer.write_words(self._verdict(run))
        self.writer.write_words(f"{run.summary()}.")
        if colours.enabled:
            self.console.out("  ", end="", highlight=False)
            colours.legend(run.num_layers)
        else:
            self.writer.write_words(layers_by_token(run.depths))
        return run

    def _heading(self, policy: DepthPolicy) -> str:
        depths = depths_of(self.engine, replace(self.params, depth=policy))
        if min(depths) == max(depths):
            return f"{policy_in_words(policy)}: every token runs all {max(depths)} layers."
        later = "as many as each needs" if policy.exit_rule(max(depths)) else "fewer for later ones"
        falls = f"{max(depths)} layers for the first token, {later}, down to {min(depths)}"
        return f"{policy_in_words(policy)}: {falls}."

    def _answer(self, policy: DepthPolicy, show: Callable[[Answer], None] = lambda answer: None) -> Run:
        self.engine.reset_prefix_cache()  # or the second answer would find the prompt computed
        return run_answers(self.engine, [self.prompt], replace(self.params, depth=policy), show)

    def _given(self, run: Run) -> int | None:
        return extract_answer(run.answers[0].text)

    def _verdict(self, run: Run) -> str:
        given, right = self._given(run), self.problem.answer
        if given == right:
            return f"RIGHT, it is {right}."
        return f"WRONG, it is {right}" + ("; no answer was given." if given is None else f", not {given}.")

    def _seconds_of_a_token(self, policy: DepthPolicy) -> list[float]:
        """Of an answer that is not shown: of all of its tokens, and of those after the first, if they took time.

        The first one's time is the prompt's, which runs all layers whatever the policy.
        """
        self.engine.reset_prefix_cache()
        began = time.perf_counter()
        (output,) = self.engine.generate([self.prompt], replace(self.params, depth=policy), use_tqdm=False)
        whole, tokens = time.perf_counter() - began, len(output.outputs[0].token_ids)
        later = output.metrics.decode_seconds if tokens > 1 else None
        return [whole / tokens, *([later / (tokens - 1)] if later else [])]

    def _comparison(self, full: Run, run: Run, found: list[Speedup]) -> str:
        fewer = 1 - run.mean_layers / full.mean_layers
        whole, *later = found
        after = f"; from its second token on, {later[0].words}" if later else ""
        return (
            f"The second answer ran {fewer:.0%} fewer layers per token, held {self._kv_fraction(run):.0%} less KV "
            f"cache at its end, and was {whole}{after}."
        )

    def _kv_fraction(self, run: Run) -> float:
        lengths = run.prompt_tokens["prompt-0"] + len(run.depths) - 1
        entry = 2 * self.engine.config.kv_size * self.engine.dtype.itemsize
        block = self.engine.scheduler.cache.block_size
        return run.kv_bytes_saved / (-(-lengths // block) * block * run.num_layers * entry)

    def _print_json(self, policies: list[DepthPolicy], runs: list[Run], seed: int) -> None:
        for policy, run in zip(policies, runs, strict=True):
            answer = run.answers[0]
            report = {
                "problem_seed": seed,
                "depth": policy.describe(),
                "right": self._given(run) == self.problem.answer,
                "answer": self.problem.answer,
                "seconds": run.seconds,
                "kv_bytes_saved": run.kv_bytes_saved,
                **answer.as_dict(run.num_layers, self.prompt),
            }
            typer.echo(json.dumps(report))


def _flags(policy: DepthPolicy) -> list[str]:
    """The flags that measure a policy of the demo."""
    if isinstance(policy, D3):
        return ["--compare-full", "--depth", f"d3 alpha={policy.alpha} start={policy.start}"]
    return []
