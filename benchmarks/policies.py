"""All depth policies at one mean depth on the demo model: what each costs in right answers, and what it gains in time.

Each system sets its own parameter such that answers to validation problems run as many layers a token as the model's
calibrated D3; drafts have that depth. Then all answer the same test problems, and a few of them in rounds for time,
a fixed number of tokens each.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from benchmarks.report import Parser, option, print_table, settings_of, summary
from d3engine.depth import (
    D3,
    DepthPolicy,
    EarlyExit,
    EvenSkip,
    FullDepth,
    Lossless,
    SelfSpeculative,
    SkipDecode,
    Speculative,
    TailSkip,
    UnifiedSkip,
)
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.engine.stats import EngineStats
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.accuracy import Score, compare, measure, take_problems
from d3engine.research.evaluation.word_problems import Problem, format_prompt

CALIBRATED = D3(0.9, 0.7)
"""The demo model's own setting; what it runs per token is the depth that all systems are brought to."""

BISECTIONS = 7
DRAFT_LENGTH = 4


@dataclass(frozen=True)
class Settings:
    """What is run: test `problems` for quality, `timed` of them for time in each of `repeats` rounds, `calibration`
    problems of the validation split to find each system's parameter; `batch` answers at once."""

    problems: int = option(200)
    timed: int = option(16)
    calibration: int = option(24)
    repeats: int = option(5)
    batch: int = option(8)
    max_tokens: int = option(96)
    threads: int = option(1)


@dataclass
class Budget:
    """How a system finds the parameter that brings it to the target depth.

    `lengths` are the tokens of full depth's answers to the calibration problems, so the mean of a schedule over them
    needs no run. In `folder` a system may leave what its policy needs.
    """

    engine: Engine
    given: list[Problem]
    params: SamplingParams
    folder: Path
    lengths: list[int] = field(default_factory=list)
    target: float = 0.0

    @property
    def num_layers(self) -> int:
        return self.engine.config.num_layers

    def timed_params(self) -> SamplingParams:
        """As many tokens as full depth's answers have on average, for everybody: answers that a policy has broken go on
        to the limit, and would spread the prompt pass over more tokens."""
        tokens = round(sum(self.lengths) / len(self.lengths))
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def scheduled_mean(self, policy: DepthPolicy) -> float:
        """Mean layers per token over answers as long as full depth's."""
        schedule = policy.schedule(self.num_layers)
        return sum(int(schedule.depths(length).sum()) for length in self.lengths) / sum(self.lengths)

    def depth_of(self, policy: DepthPolicy) -> float:
        """Mean layers per token of the answers that the policy really gives."""
        return measure(self.engine, self.given, policy, self.params).realised_mean_layers

    def nearest(self, candidates: Iterable[DepthPolicy]) -> DepthPolicy:
        """The candidate whose schedule comes nearest to the target; of equal ones the first."""
        return min(candidates, key=lambda policy: abs(self.scheduled_mean(policy) - self.target))

    def early_exit(self, **options: Any) -> DepthPolicy:
        """The threshold, by bisection over runs: a higher one lets tokens go deeper."""
        low, high = 0.0, 1.2
        tried: list[tuple[float, EarlyExit]] = []
        for _ in range(BISECTIONS):
            policy = EarlyExit((low + high) / 2, **options)
            mean = self.depth_of(policy)
            tried.append((abs(mean - self.target), policy))
            low, high = (low, policy.threshold) if mean > self.target else (policy.threshold, high)
        return min(tried, key=lambda item: item[0])[1]


@dataclass(frozen=True)
class System:
    """One row of the table, and how it finds its policy."""

    name: str
    policy: Callable[[Budget], DepthPolicy]


def _tail_skip(budget: Budget) -> DepthPolicy:
    steps = budget.params.max_tokens
    tenths = range(10 * budget.num_layers // 2, 10 * budget.num_layers)
    return budget.nearest(TailSkip(tenth / 10, steps) for tenth in tenths)


def _skip_decode(budget: Budget) -> DepthPolicy:
    """Decays over as many steps as answers have, and more; the lowest depth is what is left to choose."""
    steps = range(sum(budget.lengths) // len(budget.lengths), budget.params.max_tokens + 1, 4)
    return budget.nearest(
        SkipDecode(count, lowest) for count in steps for lowest in range(budget.num_layers // 4, budget.num_layers)
    )


def _regular(kind: Callable[[str], DepthPolicy]) -> Callable[[Budget], DepthPolicy]:
    """Of policies that keep k of L layers, the one nearest to the target."""
    return lambda b: b.nearest(kind(f"{b.num_layers}/{kept}") for kept in range(2, b.num_layers + 1))


def save_lowest_layers(model: str, count: int, directory: Path) -> Path:
    """Write the `count` lowest layers of `model` with its embedding, final norm and LM head as a separate model.

    `model` has its weights in one file. Its tokenizer comes along, so that an engine can see that both have the same.
    """
    source = model_directory(model)
    directory.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    weights = load_file(source / "model.safetensors")
    gone = tuple(f"model.layers.{layer}." for layer in range(count, config["num_hidden_layers"]))
    save_file({name: weights[name] for name in weights if not name.startswith(gone)}, directory / "model.safetensors")
    return directory


def _speculative(budget: Budget) -> DepthPolicy:
    """No second model was trained for this vocabulary, so it is made of as many of the model's own lowest layers."""
    layers = round(budget.target)
    directory = save_lowest_layers("demo", layers, budget.folder / f"the lowest {layers} layers of demo")
    return Speculative(str(directory), DRAFT_LENGTH)


FULL = "full depth"
SYSTEMS: list[System] = [
    System(FULL, lambda budget: FullDepth()),
    System("D3", lambda budget: CALIBRATED),
    System("tail skip", _tail_skip),
    System("SkipDecode", _skip_decode),
    System("unified skipping", _regular(UnifiedSkip)),
    System("even skipping", _regular(EvenSkip)),
    System("early exit, softmax", lambda budget: budget.early_exit()),
    System("early exit, softmax, upper half", lambda b: b.early_exit(min_layer=b.num_layers // 2)),
    System("early exit, softmax, batch_min", lambda b: b.early_exit(min_layer=b.num_layers // 2, batch="batch_min")),
    System("early exit, cosine", lambda budget: budget.early_exit(confidence="cosine")),
    System("self-speculative, tail skip", lambda budget: SelfSpeculative(_tail_skip(budget), DRAFT_LENGTH)),
    System("lossless D3", lambda budget: Lossless(CALIBRATED, DRAFT_LENGTH)),
    System("speculative, own lowest layers", _speculative),
]
"""Add a system here, and it stands in every table; at the target depth unless its name says otherwise."""


def measure_all(settings: Settings, systems: Sequence[System] = SYSTEMS) -> dict[str, Any]:
    """All figures of one run; the first system is the one that ratios and differences are against."""
    torch.set_num_threads(settings.threads)
    params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    given = take_problems("test", 0, settings.problems)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = stack.enter_context(_engine(settings, FullDepth()))
        budget = Budget(shared, take_problems("validation", 0, settings.calibration), params, folder)
        bar = stack.enter_context(tqdm(total=(2 + settings.repeats) * len(systems), desc="policies", unit="run"))
        _set_target(budget)
        policies, engines = {}, {}
        for system in systems:
            bar.set_postfix_str(f"{system.name}: depth")
            policy = policies[system.name] = system.policy(budget)
            # A second model is loaded by an engine whose own policy it is.
            own = stack.enter_context(_engine(settings, policy)) if isinstance(policy, Speculative) else shared
            engines[system.name] = own
            bar.update()
        scores, rows = {}, {}
        for system in systems:
            bar.set_postfix_str(f"{system.name}: answers")
            before = engines[system.name].stats()
            scores[system.name] = measure(engines[system.name], given, policies[system.name], params)
            rows[system.name] = _row(engines[system.name], scores[system.name], before, scores[systems[0].name])
            bar.update()
        rates: dict[str, list[float]] = {system.name: [] for system in systems}
        for _ in range(settings.repeats):
            for system in systems:
                bar.set_postfix_str(f"{system.name}: time")
                timed = given[: settings.timed]
                score = measure(engines[system.name], timed, policies[system.name], budget.timed_params())
                rates[system.name].append(score.tokens / score.seconds)
                rows[system.name]["timed_mean_layers"] = score.realised_mean_layers
                bar.update()
        num_layers = shared.config.num_layers
    for name, own_rates in rates.items():
        rows[name]["tokens_per_second"] = summary(own_rates)
        pairs = zip(own_rates, rates[systems[0].name], strict=True)
        rows[name]["speed_over_first"] = summary([one / first for one, first in pairs])
    return {
        "settings": asdict(settings),
        "model": {"name": "demo", "layers": num_layers},
        "target_mean_layers": budget.target,
        "systems": rows,
    }


def _engine(settings: Settings, depth: DepthPolicy) -> Engine:
    return Engine("demo", device="cpu", depth=depth, max_num_seqs=settings.batch, enable_prefix_caching=False)


def _set_target(budget: Budget) -> None:
    """The lengths of full depth's answers, and the depth of the calibrated setting over them."""
    params = SamplingParams(temperature=0.0, max_tokens=budget.params.max_tokens, depth=FullDepth())
    outputs = budget.engine.generate([format_prompt(p.question) for p in budget.given], params, use_tqdm=False)
    budget.lengths = [len(output.outputs[0].token_ids) for output in outputs]
    budget.target = budget.scheduled_mean(CALIBRATED)


def _row(engine: Engine, score: Score, before: EngineStats, first: Score) -> dict[str, Any]:
    after = engine.stats()
    difference = compare(first, score)
    described = score.policy.describe()
    if isinstance(score.policy, Speculative):
        described["draft_model"] = Path(score.policy.draft_model).name
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    verifications = after.verifications - before.verifications
    return {
        "policy": described,
        "exact_match": score.accuracy,
        "interval_95": asdict(score.interval),
        "difference": difference.difference,
        "difference_interval_95": asdict(difference.interval),
        "realised_mean_layers": score.realised_mean_layers,
        "flops_ratio": score.realised_flops_ratio,  # what a second model computes is not known: None
        "tokens": score.tokens,
        "kv_bytes_saved_an_answer": (after.kv_bytes_saved_at_end - before.kv_bytes_saved_at_end) / len(score.right),
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_verification": 1 + accepted / verifications if verifications else None,
    }


COLUMNS = (
    "system",
    "layers per token",
    "exact match (95 %)",
    "tok/s",
    "layers, timed",
    "speed over full depth",
    "FLOPs ratio",
    "KV saved, KiB",
    "accepted",
    "tokens per verification",
)


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """A system's row as it stands in the table, one text for each of `COLUMNS`."""
    interval, speed = row["interval_95"], row["speed_over_first"]
    return [
        name,
        f"{row['realised_mean_layers']:.2f}",
        f"{row['exact_match']:.1%} ({interval['low']:.1%} to {interval['high']:.1%})",
        f"{row['tokens_per_second']['median']:.0f}",
        f"{row['timed_mean_layers']:.2f}",
        f"{speed['median']:.2f} ({speed['min']:.2f}-{speed['max']:.2f})",
        _or_blank(row["flops_ratio"], ".2f"),
        f"{row['kv_bytes_saved_an_answer'] / 1024:.0f}",
        _or_blank(row["acceptance_rate"], ".0%"),
        _or_blank(row["tokens_per_verification"], ".2f"),
    ]


def _or_blank(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(report: dict[str, Any]) -> str:
    """The table as a page has it."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(name, row) for name, row in report["systems"].items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _print_markdown(report: dict[str, Any], console: Console) -> None:
    print(markdown(report))


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row a system."""
    settings = report["settings"]
    console.print(
        f"demo, {report['model']['layers']} layers, float32, {settings['threads']} threads, {settings['batch']} answers"
        f" at once; target {report['target_mean_layers']:.2f} layers per token; {settings['problems']} problems,"
        f" {settings['repeats']} rounds of {settings['timed']} for time"
    )
    rows = [cells(name, row) for name, row in report["systems"].items()]
    print_table(console, COLUMNS, rows, left=("system",))
    console.print(
        "Timed: whole calls, prompts included, as many tokens for all. KV saved: what an answer no longer holds."
    )
    console.print(
        "FLOPs: full depth over this one with one LM head per token; a softmax confidence runs it at every look."
    )
    console.print(
        "Layers of a token that was drafted: its share of all rows of drafts and verifications; a second model's not."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = Parser("policies", __doc__, arguments, Settings)
    parser.add_argument("--markdown", action="store_true", help="print the table as a page has it")
    options = parser.given()
    shown = _print_markdown if options.markdown else show
    parser.publish(measure_all(settings_of(Settings, options)), shown, width=160)
    return 0


if __name__ == "__main__":
    sys.exit(main())
