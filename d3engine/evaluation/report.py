"""What an evaluation found, as tables for people and as plain values for machines.

The one idea: every table is made once, of text, and shown on a terminal, in a pipe or on a page; so no two of them can
say different things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from d3engine.evaluation.accuracy import Comparison, Interval, Score, compare, wilson_interval
from d3engine.evaluation.benchmark import Benchmark


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of text, and what has to be said below."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One benchmark under several policies, named for people by `titles`; the others are compared with the first."""

    benchmark: Benchmark
    titles: tuple[str, ...]
    scores: tuple[Score, ...]

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Of each later score with the first."""
        return tuple(compare(self.scores[0], score) for score in self.scores[1:])


def tables(results: Sequence[Result]) -> list[Table]:
    """For each benchmark how good and at what cost, and by task if there are several; then all side by side."""
    found: list[Table] = []
    for result in results:
        found += [quality_table(result), cost_table(result)]
        if len(result.benchmark.tasks) > 1:
            found.append(task_table(result))
    if len(results) > 1:
        found.append(side_by_side(results))
    return found


def quality_table(result: Result) -> Table:
    """Exact match with its interval, and the paired difference from the first policy."""
    blank = ("", "", "", "")
    rows = []
    for number, (title, score) in enumerate(zip(result.titles, result.scores, strict=True)):
        against = _against(compare(result.scores[0], score)) if number else blank
        exact_match = f"{score.accuracy:.1%} ({score.correct})"
        rows.append((title, exact_match, percent_interval(score.interval), *against))
    header = ["depth", "exact match", "95 % interval"]
    notes: tuple[str, ...] = ()
    if len(rows) > 1:
        header += ["minus first, points", "only first", "only this", "p"]
        notes = (
            f"Differences from {result.titles[0]} are of the same questions, with their 95 % interval; "
            "p is McNemar's exact test.",
        )
        if len(rows) > 2:
            notes += ("The p-values are of single comparisons, not corrected for their number.",)
    questions = len(result.scores[0].right)
    title = f"{result.benchmark.name}: {questions} questions, {result.benchmark.about}"
    return Table(title, tuple(header), tuple(row[: len(header)] for row in rows), notes)


def cost_table(result: Result) -> Table:
    """Layers, FLOPs, tokens and time: nominal over the longest answer allowed, realised over what was generated."""
    rows = [
        (
            title,
            f"{score.realised_mean_layers:.2f}",
            f"{score.nominal_mean_layers:.2f}",
            ratio(score.realised_flops_ratio),
            ratio(score.nominal_flops_ratio),
            f"{score.tokens}",
            f"{score.unfinished}",
            f"{score.seconds:.1f} s",
            f"{score.tokens_per_second:.1f}",
        )
        for title, score in zip(result.titles, result.scores, strict=True)
    ]
    header = (
        "depth",
        f"layers of {result.scores[0].num_layers}, realised",
        "nominal",
        "FLOPs ratio, realised",
        "nominal",
        "tokens",
        "cut off",
        "wall clock",
        "tokens/s",
    )
    note = "Nominal: over the maximum length. Realised: over the tokens really generated. FLOPs with the LM head."
    return Table(f"{result.benchmark.name}: cost", header, tuple(rows), (note,))


def task_table(result: Result) -> Table:
    """Exact match of each task, later policies with their change: the form of the D3 paper's Table 8."""
    by_policy = [result.benchmark.by_task(score.right) for score in result.scores]
    rows = [
        (task, f"{len(questions)}", *_with_changes([_share(right[task]) for right in by_policy]))
        for task, questions in result.benchmark.tasks.items()
    ]
    total = len(result.scores[0].right)
    rows.append(("all, by questions", f"{total}", *_with_changes([score.accuracy for score in result.scores])))
    title = f"{result.benchmark.name}: exact match by task, percent"
    return Table(title, ("task", "questions", *result.titles), tuple(rows), ("In brackets: change from the first.",))


def side_by_side(results: Sequence[Result]) -> Table:
    """The figures of the D3 paper's Table 6, for every benchmark and policy."""
    rows = [
        (
            result.benchmark.name,
            title,
            f"{score.accuracy:.2%}",
            f"{score.nominal_mean_layers:.2f}",
            ratio(score.nominal_flops_ratio),
        )
        for result in results
        for title, score in zip(result.titles, result.scores, strict=True)
    ]
    return Table("All benchmarks, nominal", ("benchmark", "depth", "exact match", "mean layers", "FLOPs ratio"), rows)


def as_dict(result: Result) -> dict[str, Any]:
    """A result for machines; `minus_first` is None for the first score."""
    benchmark = result.benchmark
    return {
        "task": benchmark.name,
        "about": benchmark.about,
        "problems": len(result.scores[0].right),
        "scores": [
            _score_as_dict(benchmark, score, None if number == 0 else compare(result.scores[0], score))
            for number, score in enumerate(result.scores)
        ],
    }


def _score_as_dict(benchmark: Benchmark, score: Score, minus_first: Comparison | None) -> dict[str, Any]:
    return {
        "depth": score.policy.describe(),
        "correct": score.correct,
        "exact_match": score.accuracy,
        "interval_95": asdict(score.interval),
        "minus_first": asdict(minus_first) if minus_first else None,
        "num_layers": score.num_layers,
        "nominal_mean_layers": score.nominal_mean_layers,
        "realised_mean_layers": score.realised_mean_layers,
        "nominal_flops_ratio": score.nominal_flops_ratio,
        "realised_flops_ratio": score.realised_flops_ratio,
        "tokens": score.tokens,
        "unfinished": score.unfinished,
        "seconds": score.seconds,
        "tokens_per_second": score.tokens_per_second,
        "tasks": {
            task: {
                "problems": len(right),
                "correct": sum(right),
                "exact_match": _share(right),
                "interval_95": asdict(wilson_interval(sum(right), len(right))),
            }
            for task, right in benchmark.by_task(score.right).items()
        },
    }


def percent_interval(interval: Interval) -> str:
    """ "12.3 % to 45.6 %", without the spaces."""
    return f"{interval.low:.1%} to {interval.high:.1%}"


def ratio(value: float | None) -> str:
    """ "1.234x", or a dash where it is not known."""
    return "-" if value is None else f"{value:.3f}x"


def _against(comparison: Comparison) -> tuple[str, str, str, str]:
    points = [100 * value for value in (comparison.difference, comparison.interval.low, comparison.interval.high)]
    return (
        f"{points[0]:+.1f} ({points[1]:+.1f} to {points[2]:+.1f})",
        f"{comparison.only_first}",
        f"{comparison.only_second}",
        f"{comparison.p_value:.2g}",
    )


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def _with_changes(shares: Sequence[float]) -> list[str]:
    first, *later = (100 * share for share in shares)
    return [f"{first:.2f}", *(f"{share:.2f} ({share - first:+.2f})" for share in later)]
