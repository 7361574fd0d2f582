"""An evaluation as tables, and as a page of HTML that needs nothing else, with policies as
points over layers run, drawn as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import chain
from operator import eq
from textwrap import wrap
from typing import Any

from d3engine.research.analysis.report import Table
from d3engine.research.evaluation.accuracy import Comparison, Interval, Score, compare, paired, wilson_interval
from d3engine.research.evaluation.benchmark import Asked, Benchmark, Question, Verdict
from d3engine.research.evaluation.chat_form import ChatQuestion
from d3engine.research.evaluation.work import Cost, has_second_model, is_known_beforehand

STYLE = """
:root { color-scheme: light dark; --line: #8888; --mark: #0072b2; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt { opacity: .7; } dd { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:nth-child(even) { background: var(--soft); } p.note { font-size: .9rem; opacity: .8; margin: .4rem 0; }
svg { max-width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .mark { stroke: var(--mark); fill: var(--mark); stroke-width: 2; }
"""

WIDTH, MARGIN, LINE, BAR, AXIS = 960, 24, 18, 26, 26
"""Pixels: of the chart, beside the scale, of a line of a label, of the bar below a label, of the scale's own text."""

LABEL = 110
"""Letters in a line of a label: as many as are surely narrower than the chart."""


def page(title: str, facts: Mapping[str, str], charts: Sequence[Chart], tables: Sequence[Table]) -> str:
    """The whole page; everything that came from outside is escaped."""
    said = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    drawn = "".join(_chart(chart) for chart in charts)
    body = "".join(_table(table) for table in tables)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<dl>{said}</dl>\n{drawn}{body}</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{notes}\n"
    )


def _chart(chart: Chart) -> str:
    """Each value with its interval on a scale from 0 to 100 %, below its label, however long that is."""
    marks, y = [], 0
    for label, value, interval in chart.points:
        for line in wrap(label, LABEL):
            y += LINE
            marks.append(f'<text x="{MARGIN}" y="{y}">{escape(line)}</text>')
        middle = y + BAR // 2
        low, high = _x(interval.low), _x(interval.high)
        marks.append(f'<line class="mark" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
        marks.append(f'<circle class="mark" cx="{_x(value)}" cy="{middle}" r="5"/>')
        y += BAR
    grid = []
    for percent in range(0, 101, 20):
        x = _x(percent / 100)
        grid.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{y}"/>')
        grid.append(f'<text x="{x}" y="{y + LINE}" text-anchor="middle">{percent} %</text>')
    caption, height = escape(chart.caption), y + AXIS
    return (
        f'<h2>{caption}</h2>\n<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{caption}">{"".join(grid + marks)}</svg>\n'
    )


def _x(share: float) -> float:
    """Where a share of 0 to 1 stands, in pixels."""
    return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)


def told_answer(question: Question) -> object:
    """What `Question` does not ask for, but those of d3engine's tasks have, under one of two names; else None."""
    inner = question.question if isinstance(question, Asked | ChatQuestion) else question
    return getattr(inner, "target", getattr(inner, "answer", None))


def commonest(answers: Sequence[object]) -> object:
    """The commonest of these answers, the first of equally common ones; None where none is given."""
    told = Counter(answer for answer in answers if answer is not None)
    return told.most_common(1)[0][0] if told else None


def right_by_constant(questions: Sequence[Question]) -> tuple[bool, ...]:
    """Of the questions of one task, whether each is right by the commonest answer of the half that it is not in."""
    answers = [told_answer(question) for question in questions]
    constants = commonest(answers[1::2]), commonest(answers[::2])
    return tuple(answer is not None and answer == constants[place % 2] for place, answer in enumerate(answers))


@dataclass(frozen=True)
class Result:
    """One benchmark under several policies, named for people by `titles`; the others are compared with the first."""

    benchmark: Benchmark
    titles: tuple[str, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Chart:
    """Policies as points of a proportion with its interval; `points` are (label, value, interval)."""

    caption: str
    points: Sequence[tuple[str, float, Interval]]


def chart(result: Result) -> Chart:
    """Exact match by policy."""
    points = [
        (f"{title} ({score.realised_mean_layers:.1f} layers)", score.accuracy, score.interval)
        for title, score in zip(result.titles, result.scores, strict=True)
    ]
    name = result.benchmark.name
    return Chart(f"{name}: exact match with its 95 % interval, by depth (layers per token, realised)", points)


def tables(results: Sequence[Result]) -> list[Table]:
    """For each benchmark how good and at what cost, and by task if there are several; then all side by side."""
    found = [table for result in results for table in benchmark_tables(result)]
    return found if len(results) < 2 else [*found, side_by_side(results)]


def benchmark_tables(result: Result) -> list[Table]:
    cost = cost_table(f"{result.benchmark.name}: cost", result.titles, result.scores)
    by_task = [task_table(result)] if len(result.benchmark.tasks) > 1 else []
    return [quality_table(result), cost, *by_task]


def quality_table(result: Result) -> Table:
    """Exact match with its interval, and the paired difference from the first policy."""
    blank = ("", "", "", "")
    rows = []
    for number, (title, score) in enumerate(zip(result.titles, result.scores, strict=True)):
        compared = against(compare(result.scores[0], score)) if number else blank
        exact_match = f"{score.accuracy:.1%} ({score.correct})"
        rows.append((title, exact_match, percent_interval(score.interval), *compared))
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
    notes += _verdict_note(result) + _constant_note(result) + _prompt_note(result.scores)
    questions = len(result.scores[0].right)
    title = f"{result.benchmark.name}: {questions} questions, {result.benchmark.about}"
    return Table(title, tuple(header), tuple(row[: len(header)] for row in rows), notes)


def _verdict_note(result: Result) -> tuple[str, ...]:
    if all({Verdict.RIGHT, Verdict.WRONG}.issuperset(score.verdicts) for score in result.scores):
        return ()
    counts = [
        f"{title}: " + ", ".join(f"{number} {verdict}" for verdict, number in counted(score.verdicts).items())
        for title, score in zip(result.titles, result.scores, strict=True)
    ]
    return (f"{'; '.join(counts)}.",)


def counted(verdicts: Sequence[Verdict]) -> dict[str, int]:
    return {verdict.value: verdicts.count(verdict) for verdict in Verdict if verdict in verdicts}


def _constants(benchmark: Benchmark) -> tuple[bool, ...]:
    return tuple(chain.from_iterable(map(right_by_constant, benchmark.tasks.values())))


def _constant_note(result: Result) -> tuple[str, ...]:
    """What needs no reading of the question, where answers are alike; a score near it says nothing of the model."""
    right = _constants(result.benchmark)
    if not any(right):
        return ()
    difference, *_ = against(paired(result.scores[0].right, right))
    return (
        "The commonest answer to each task, found in the other half of its questions, would be right on "
        f"{share(right):.1%} ({sum(right)}): {difference} points from {result.titles[0]}.",
    )


def _prompt_note(scores: Sequence[Score]) -> tuple[str, ...]:
    total, cached = sum(score.prompt_tokens for score in scores), sum(score.cached_tokens for score in scores)
    if not cached:
        return ()
    return (f"Of {total:,} tokens of prompts {cached:,} ({cached / total:.1%}) came from the prefix cache.",)


def cost_table(title: str, titles: Sequence[str], costs: Sequence[Cost]) -> Table:
    """Layers, FLOPs, tokens and time: nominal over the longest answer allowed, realised over what was generated."""
    crosses = any(cost.work.crossings for cost in costs)
    columns = [(heading, cell) for heading, cell in _COST_COLUMNS if crosses or heading != "with bridges"]
    rows = [(name, *(cell(cost) for _, cell in columns)) for name, cost in zip(titles, costs, strict=True)]
    headings = [heading.format(costs[0].num_layers) for heading, _ in columns]
    return Table(title, ("depth", *headings), rows, _cost_notes(costs))


_TIME_COLUMNS: Sequence[tuple[str, Callable[[Cost], str]]] = (
    ("wall clock", lambda cost: f"{cost.seconds:.1f} s"),
    ("tokens/s", lambda cost: f"{cost.tokens_per_second:.1f}"),
)

_COST_COLUMNS: Sequence[tuple[str, Callable[[Cost], str]]] = (
    ("layers of {}, realised", lambda cost: layers(cost.realised_mean_layers if cost.tokens else None)),
    ("with bridges", lambda cost: layers(cost.realised_layers_with_bridges if cost.tokens else None)),
    ("nominal", lambda cost: layers(cost.nominal_mean_layers)),
    ("FLOPs ratio, realised", lambda cost: ratio(cost.realised_flops_ratio if cost.tokens else None)),
    ("nominal", lambda cost: ratio(cost.nominal_flops_ratio)),
    ("tokens", lambda cost: f"{cost.tokens}"),
    ("cut off", lambda cost: f"{cost.unfinished}"),
    *_TIME_COLUMNS,
)


def _cost_notes(costs: Sequence[Cost]) -> tuple[str, ...]:
    """What the figures of these policies mean; of policies that are not in the table nothing is said."""
    num_layers = costs[0].num_layers
    policies = [cost.policy for cost in costs]
    notes = ["Nominal: over the maximum length. Realised: over the tokens really generated. FLOPs with the LM head."]
    if any(cost.work.crossings for cost in costs):
        notes.append("With bridges: and each crossing of a window as the share of a layer that a full map is.")
    if not all(is_known_beforehand(policy, num_layers) for policy in policies):
        notes.append("No nominal figures where the tokens themselves decide: early exits and drafts.")
    if any(policy.exit_rule(num_layers) for policy in policies):
        notes.append("Early exit: the LM head of every look and the projected cache entries count as FLOPs.")
    if any(policy.drafts for policy in policies):
        notes.append(
            "Drafts: all drafted and verified rows count, rejected ones too, so a token may take more layers than "
            "there are and the FLOPs ratio may be below 1. What drafts save is passes over the weights."
        )
    if any(has_second_model(policy, num_layers) for policy in policies):
        notes.append("A second model's layers are not counted, so its FLOPs ratio is left out.")
    return tuple(notes)


def task_table(result: Result) -> Table:
    """Exact match of each task with intervals, later policies with their change: the form of the D3 paper's Table 8."""
    by_policy = [result.benchmark.by_task(score.right) for score in result.scores]
    rows = [
        (task, f"{len(questions)}", *_with_changes([right[task] for right in by_policy]))
        for task, questions in result.benchmark.tasks.items()
    ]
    total = len(result.scores[0].right)
    rows.append(("all, by questions", f"{total}", *_with_changes([score.right for score in result.scores])))
    title = f"{result.benchmark.name}: exact match by task, percent"
    notes = ["In brackets: the 95 % interval."]
    if len(result.scores) > 1:
        notes = [
            f"In brackets: of {result.titles[0]} the 95 % interval, of the others the change from it in points and its "
            "paired 95 % interval, which is not corrected for the number of tasks."
        ]
    return Table(title, ("task", "questions", *result.titles), tuple(rows), tuple(notes))


def side_by_side(results: Sequence[Result]) -> Table:
    """The figures of the D3 paper's Table 6, for every benchmark and policy, and what they were in truth."""
    columns: Sequence[tuple[str, Callable[[Score], str]]] = (
        ("exact match", lambda score: f"{score.accuracy:.2%}"),
        ("95 % interval", lambda score: percent_interval(score.interval)),
        ("mean layers, nominal", lambda score: layers(score.nominal_mean_layers)),
        ("FLOPs ratio", lambda score: ratio(score.nominal_flops_ratio)),
        ("mean layers, realised", lambda score: layers(score.realised_mean_layers)),
        ("FLOPs ratio", lambda score: ratio(score.realised_flops_ratio)),
        *_TIME_COLUMNS,
    )
    rows = [
        (result.benchmark.name, title, *(cell(score) for _, cell in columns))
        for result in results
        for title, score in zip(result.titles, result.scores, strict=True)
    ]
    return Table("All benchmarks", ("benchmark", "depth", *(heading for heading, _ in columns)), rows)


def as_dict(result: Result) -> dict[str, Any]:
    """A result for machines; `minus_first` is None for the first score."""
    benchmark = result.benchmark
    return {
        "task": benchmark.name,
        "about": benchmark.about,
        "problems": len(result.scores[0].right),
        "right_by_constant_answers": sum(_constants(benchmark)),
        "scores": [
            _score_as_dict(benchmark, score, result.scores[0] if number else None)
            for number, score in enumerate(result.scores)
        ],
    }


def _score_as_dict(benchmark: Benchmark, score: Score, first: Score | None) -> dict[str, Any]:
    first_by_task = benchmark.by_task(first.right) if first else {}
    return {
        "depth": score.policy.describe(),
        "correct": score.correct,
        "verdicts": counted(score.verdicts),
        "exact_match": score.accuracy,
        "interval_95": asdict(score.interval),
        "minus_first": asdict(compare(first, score)) if first else None,
        "same_answers": sum(map(eq, first.texts, score.texts)) if first else None,
        "num_layers": score.num_layers,
        "nominal_mean_layers": score.nominal_mean_layers,
        "realised_mean_layers": score.realised_mean_layers,
        "nominal_flops_ratio": score.nominal_flops_ratio,
        "realised_flops_ratio": score.realised_flops_ratio,
        "tokens": score.tokens,
        "layers_run": score.work.layers,
        "realised_mean_layers_with_bridges": score.realised_layers_with_bridges,
        "crossings": score.work.crossings,
        "lm_head_rows": score.work.heads,
        "projected_entries": score.work.projections,
        "unfinished": score.unfinished,
        "prompt_tokens": score.prompt_tokens,
        "cached_prompt_tokens": score.cached_tokens,
        "seconds": score.seconds,
        "tokens_per_second": score.tokens_per_second,
        "tasks": {
            task: {
                "problems": len(right),
                "correct": sum(right),
                "exact_match": share(right),
                "interval_95": asdict(wilson_interval(sum(right), len(right))),
                "minus_first": asdict(paired(first_by_task[task], right)) if first else None,
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


def layers(value: float | None) -> str:
    """ "24.68", or a dash where it is not known."""
    return "-" if value is None else f"{value:.2f}"


def against(comparison: Comparison) -> tuple[str, str, str, str]:
    """The difference in points with its interval, how many are right in one alone, and the p-value."""
    points = [100 * value for value in (comparison.difference, comparison.interval.low, comparison.interval.high)]
    return (
        f"{points[0]:+.1f} ({points[1]:+.1f} to {points[2]:+.1f})",
        f"{comparison.only_first}",
        f"{comparison.only_second}",
        f"{comparison.p_value:.2g}",
    )


def _with_changes(rights: Sequence[Sequence[bool]]) -> list[str]:
    """Percent of each policy: the first's with its interval, the others' with their change and its interval."""
    interval = wilson_interval(sum(rights[0]), len(rights[0]))
    cells = [f"{100 * share(rights[0]):.2f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"]
    for right in rights[1:]:
        change = paired(rights[0], right)
        low, high = 100 * change.interval.low, 100 * change.interval.high
        cells.append(f"{100 * share(right):.2f} ({100 * change.difference:+.2f}: {low:+.1f} to {high:+.1f})")
    return cells


def share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)
