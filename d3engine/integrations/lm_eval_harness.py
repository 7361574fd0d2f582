"""Tasks of lm-evaluation-harness under several depth policies (extra `eval`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import isclose, sqrt
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

from d3engine.depth import DepthPolicy
from d3engine.errors import D3EngineError, InvalidValueError, MissingExtraError
from d3engine.research.analysis.report import Table
from d3engine.research.evaluation.accuracy import Comparison, Interval, paired, shape_of, wilson_interval
from d3engine.research.evaluation.catalogue import NAMES_WITHOUT_HARNESS
from d3engine.research.evaluation.report import Chart, against, cost_table, percent_interval
from d3engine.research.evaluation.work import Cost

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine


@dataclass(frozen=True)
class Metric:
    """One metric of one task. `outcomes` are those of the questions, in order, if `value` is their mean; else None."""

    task: str
    name: str
    value: float
    outcomes: tuple[float, ...] | None

    @property
    def right(self) -> tuple[bool, ...] | None:
        """The outcomes where each is right or wrong; else None."""
        if self.outcomes is None or any(outcome not in (0, 1) for outcome in self.outcomes):
            return None
        return tuple(bool(outcome) for outcome in self.outcomes)

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval: Wilson's for right and wrong, the normal one for other means, else None."""
        if self.right is not None:
            return wilson_interval(sum(self.right), len(self.right))
        if self.outcomes is None or len(self.outcomes) < 2:
            return None
        margin = NormalDist().inv_cdf(0.975) * stdev(self.outcomes) / sqrt(len(self.outcomes))
        return Interval(self.value - margin, self.value + margin)


@dataclass(frozen=True)
class HarnessRun:
    """All tasks under one policy. `cost` is of the generated answers, but its seconds are of the whole run."""

    title: str
    metrics: tuple[Metric, ...]
    cost: Cost


def find_tasks(names: Sequence[str], include_path: str | None) -> Any:
    """An index of the harness's tasks with these; the default tasks, slow to read, only if the folder lacks one.

    Raises `InvalidValueError` for an unknown name, `MissingExtraError` without the harness.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingExtraError(
            "lm-eval", "eval", f"--tasks {','.join(names)}, which is not {NAMES_WITHOUT_HARNESS},"
        ) from error

    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in names):
            return manager
    manager = TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            alike = get_close_matches(name, manager.all_tasks, 5)
            allowed = f"{NAMES_WITHOUT_HARNESS}, or a task of lm-evaluation-harness"
            raise InvalidValueError("--tasks", name, allowed + (f" (such as {', '.join(alike)})" if alike else ""))
    return manager


def run_tasks(
    engine: Engine,
    names: Sequence[str],
    policies: Sequence[tuple[str, DepthPolicy]],
    *,
    shots: int | None,
    limit: int | None,
    seed: int,
    max_gen_toks: int | Callable[[str], int],
    manager: Any,
) -> list[HarnessRun]:
    """Evaluate the tasks under each (title, policy) in turn; raises `D3EngineError` for a task without data."""
    from lm_eval import simple_evaluate

    from d3engine.integrations.lm_eval import D3EngineLM

    runs, unreachable = [], _unreachable_hub()
    for title, policy in policies:
        model = D3EngineLM(engine, depth=policy, max_gen_toks=max_gen_toks)
        engine.reset_prefix_cache()
        began = time.perf_counter()
        try:
            with _as_downloaded_before() if unreachable else nullcontext():
                found = simple_evaluate(
                    model=model,
                    tasks=list(names),
                    num_fewshot=shots,
                    limit=limit,
                    log_samples=True,
                    bootstrap_iters=0,
                    task_manager=manager,
                    fewshot_random_seed=seed,
                )
        except OSError as error:  # of `datasets` without network, and for missing files
            of_the_hub = unreachable if isinstance(error, ConnectionError) else None
            why = of_the_hub or f"{type(error).__name__}: {error}"
            raise D3EngineError(
                f"the data of {', '.join(names)} cannot be loaded ({why}); without network, --data DIR reads gsm8k, "
                "bbh, humaneval and mbpp from a folder, and --include-path DIR takes tasks with data of your own"
            ) from error
        seconds = time.perf_counter() - began
        usage, shape = model.total_usage(), shape_of(engine.config)
        cost = Cost(policy, shape, usage.work, usage.unfinished, usage.nominal_mean_layers, seconds)
        runs.append(HarnessRun(title, _metrics(found), cost))
    return runs


def _unreachable_hub() -> str | None:
    """An error text if the Hugging Face hub is unreachable; None if it is reachable or HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the HTTP library depends on the version
        return f"{constants.ENDPOINT} cannot be reached: {error or type(error).__name__}"
    return None


@contextmanager
def _as_downloaded_before() -> Iterator[None]:
    """Make the hub's library use only its cache: it would try an unreachable hub six times, for half a minute."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # which it reads at every request
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _metrics(found: dict[str, Any]) -> tuple[Metric, ...]:
    """Every metric of every task with samples; groups, which only repeat them, are left out."""
    metrics = []
    for task, samples in found["samples"].items():
        for key, value in found["results"][task].items():
            name, _, chosen_filter = key.partition(",")
            if not chosen_filter or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            own = [sample for sample in samples if sample.get("filter", chosen_filter) == chosen_filter]
            outcomes = [sample.get(name) for sample in sorted(own, key=lambda sample: int(sample["doc_id"]))]
            label = name if chosen_filter == "none" else f"{name} ({chosen_filter})"
            metrics.append(Metric(task, label, float(value), _mean_of(outcomes, float(value))))
    return tuple(metrics)


def _mean_of(outcomes: list[Any], value: float) -> tuple[float, ...] | None:
    """The outcomes as numbers if `value` is their mean, else None."""
    if not outcomes or not all(isinstance(outcome, int | float) for outcome in outcomes):
        return None
    return tuple(map(float, outcomes)) if isclose(fmean(outcomes), value, abs_tol=1e-9) else None


def harness_tables(runs: Sequence[HarnessRun]) -> list[Table]:
    """Tables of every metric of every task by policy, and of the cost of generated answers."""
    rows = []
    for place, first in enumerate(runs[0].metrics):
        for number, run in enumerate(runs):
            own = run.metrics[place]
            comparison = _comparison(first, own)
            blank = ("-",) * 4 if number else ("",) * 4
            compared = against(comparison) if number and comparison else blank
            rows.append((own.task, own.name, run.title, *_figures(own), *compared))
    header = ["task", "metric", "depth", "value", "95 % interval"]
    notes: tuple[str, ...] = ()
    if len(runs) > 1:
        header += ["minus first, points", "only first", "only this", "p"]
        notes = (
            f"Differences from {runs[0].title} are of the same questions, with their 95 % interval, where each is "
            "right or wrong; p is McNemar's exact test, not corrected for the number of comparisons.",
        )
    quality = Table("Tasks of lm-evaluation-harness", header, [row[: len(header)] for row in rows], notes)
    cost = cost_table("Cost", [run.title for run in runs], [run.cost for run in runs])
    about = "Of generated answers; the wall clock is of the whole run. Log-likelihoods generate nothing: full depth."
    return [quality, replace(cost, notes=(about, *cost.notes))]


def harness_charts(runs: Sequence[HarnessRun]) -> list[Chart]:
    """A chart of each metric whose answers are right or wrong, by policy."""
    charts = []
    for place, metric in enumerate(runs[0].metrics):
        points = [
            (_with_layers(run), own.value, own.interval)
            for run in runs
            if (own := run.metrics[place]).right is not None and own.interval is not None
        ]
        if points:
            charts.append(Chart(f"{metric.task}: {metric.name} with its 95 % interval, by depth", points))
    return charts


def _with_layers(run: HarnessRun) -> str:
    return f"{run.title} ({run.cost.realised_mean_layers:.1f} layers per token)" if run.cost.tokens else run.title


def harness_dict(run: HarnessRun, first: HarnessRun) -> dict[str, Any]:
    """A run as JSON; `minus_first` is None in the first one, and where answers are not right or wrong."""
    cost = run.cost
    return {
        "depth": cost.policy.describe(),
        "seconds": cost.seconds,
        "generated": {
            "tokens": cost.tokens,
            "layers": cost.work.layers,
            "lm_head_rows": cost.work.heads,
            "projected_entries": cost.work.projections,
            "unfinished": cost.unfinished,
            "nominal_mean_layers": cost.nominal_mean_layers,
            "realised_mean_layers": cost.realised_mean_layers if cost.tokens else None,
            "nominal_flops_ratio": cost.nominal_flops_ratio,
            "realised_flops_ratio": cost.realised_flops_ratio if cost.tokens else None,
        },
        "metrics": [
            _metric_as_dict(metric, None if run is first else _comparison(of_first, metric))
            for metric, of_first in zip(run.metrics, first.metrics, strict=True)
        ],
    }


def _metric_as_dict(metric: Metric, minus_first: Comparison | None) -> dict[str, Any]:
    return {
        "task": metric.task,
        "metric": metric.name,
        "value": metric.value,
        "questions": None if metric.outcomes is None else len(metric.outcomes),
        "interval_95": None if metric.interval is None else asdict(metric.interval),
        "minus_first": None if minus_first is None else asdict(minus_first),
    }


def _figures(metric: Metric) -> tuple[str, str]:
    if metric.right is not None and metric.interval is not None:
        return f"{metric.value:.1%} ({sum(metric.right)})", percent_interval(metric.interval)
    interval = "-" if metric.interval is None else f"{metric.interval.low:.4g} to {metric.interval.high:.4g}"
    return f"{metric.value:.4g}", interval


def _comparison(first: Metric, own: Metric) -> Comparison | None:
    """Answer by answer, where each is right or wrong."""
    if first.right is None or own.right is None:
        return None
    return paired(first.right, own.right)
