"""What bridges cost: decode time at full depth, and with D3's skipped layers crossed by maps or passed as they are.

A map's numbers change no time, so they are random. Timed is one answer on one thread from its second token on, in the
process's own seconds; of the rounds the fastest counts, since other work on a machine can only slow one down.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.report import main_of, option, print_table
from benchmarks.systems import PROMPT_TOKENS, prompts_for
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.model.bridges import BRIDGES_FILE, Bridge, Bridges, write_bridges
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.accuracy import shape_of
from d3engine.research.evaluation.work import Work, work_of

FULL, BARE, BRIDGED = "full depth", "skipped", "bridged"


@dataclass(frozen=True)
class Settings:
    """What is run: answers of `tokens` tokens at full depth and under D3, `repeats` rounds after one of warming up."""

    model: str = option("smollm2", "a model directory, smollm2 or demo")
    alpha: float = option(0.95, "D3's")
    start: float = option(0.8, "D3's")
    rank: int | None = option(None, "rank of each map (full)")
    tokens: int = option(129, "tokens of an answer, at least 2")
    repeats: int = option(12, "rounds counted, after a warm-up")


def random_bridges(directory: Path, config: ModelConfig, policy: D3, rank: int | None) -> Bridges:
    """A map near nothing for each window of a policy, so that answers stay ordinary text."""
    size, numbers = config.hidden_size, torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return 1e-3 * torch.randn(*shape, generator=numbers)

    found = {}
    for window in policy.schedule(config.num_layers).windows():
        down = None if rank is None else drawn(rank, size)
        found[window] = Bridge(*window, drawn(size, rank or size), drawn(size), down)
    return Bridges(fingerprint(directory), config.num_layers, size, found)


def measure(settings: Settings) -> dict[str, Any]:
    """Run all rounds and return the report, without its environment."""
    torch.set_num_threads(1)
    directory = model_directory(settings.model)
    config = ModelConfig.from_directory(directory)
    bare = D3(settings.alpha, settings.start)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / BRIDGES_FILE
        write_bridges(random_bridges(directory, config, bare, settings.rank), path)
        bridged = replace(bare, bridges=str(path))
        options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 1, "skip_tokenizer_init": True}
        length = PROMPT_TOKENS + settings.tokens
        with Engine(directory, depth=bridged, max_model_len=length, enable_prefix_caching=False, **options) as engine:
            systems = {FULL: FullDepth(), BARE: bare, BRIDGED: bridged}
            seconds, work = _rounds(engine, prompts_for(config, 1)[0], systems, settings)
            executor, held = engine.stats().executor, engine.stats().bridge_bytes
    return {
        "benchmark": "bridge_cost",
        "settings": asdict(settings) | {"prompt_tokens": PROMPT_TOKENS},
        "num_layers": config.num_layers,
        "executor": executor,
        "bridge_bytes": held,
        "systems": evaluate(config, seconds, work, settings.rank),
    }


def _rounds(
    engine: Engine, prompt: list[int], systems: Mapping[str, DepthPolicy], settings: Settings
) -> tuple[dict[str, float], dict[str, Work]]:
    """By system, the seconds of all tokens but the first, and the work of the whole answer."""
    counts = {"first": 1, "all": settings.tokens}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in itertools.product(systems, counts)}
    work: dict[str, Work] = {}
    turns = range(settings.repeats + 1)
    for turn, name, count in tqdm([*itertools.product(turns, systems, counts)], unit="run", disable=None):
        params = SamplingParams(temperature=0.0, max_tokens=counts[count], ignore_eos=True, depth=systems[name])
        begun = time.process_time()
        (output,) = engine.generate(prompt, params, use_tqdm=False)
        if turn:  # the first is a warm-up
            taken[name, count].append(time.process_time() - begun)
        if count == "all":
            work[name] = work_of(output, systems[name], engine.config.num_layers)
    return {name: min(taken[name, "all"]) - min(taken[name, "first"]) for name in systems}, work


def evaluate(
    config: ModelConfig, seconds: Mapping[str, float], work: Mapping[str, Work], rank: int | None
) -> dict[str, dict[str, float]]:
    """Times, and what part of the FLOPs that a system saves is saved in time: its realisation ratio."""
    shape = shape_of(config)
    found = {}
    for name, of_answer in work.items():
        # The first token is full depth's and no part of what was timed; nothing crosses a window for it.
        later = replace(
            of_answer,
            tokens=of_answer.tokens - 1,
            layers=of_answer.layers - config.num_layers,
            heads=of_answer.heads - 1,
        )
        as_full_maps = later.crossings * (1 if rank is None else 2 * rank / config.hidden_size)
        least = later.layers * shape.layer_parameters + later.heads * shape.head_parameters
        full = later.tokens * (config.num_layers * shape.layer_parameters + shape.head_parameters)
        flops_ratio = full / (least + as_full_maps * shape.hidden_size**2)
        speedup = seconds[FULL] / seconds[name]
        found[name] = {
            "milliseconds_per_token": 1000 * seconds[name] / later.tokens,
            "mean_layers": later.layers / later.tokens,
            "crossings_per_token": later.crossings / later.tokens,
            "flops_ratio": flops_ratio,
            "speedup": speedup,
            "realisation_ratio": speedup / flops_ratio,
        }
    return found


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row a system."""
    settings = report["settings"]
    title = f"{settings['model']}, {report['executor']}: bridges of {report['bridge_bytes'] / 2**20:.1f} MiB"
    columns = ("", "ms/token", "layers", "crossings", "speed-up", "FLOPs ratio", "realised")
    forms = {"milliseconds_per_token": ".3f", "mean_layers": ".2f", "crossings_per_token": ".2f"}
    forms |= dict.fromkeys(("speedup", "flops_ratio", "realisation_ratio"), ".3f")
    rows = [
        (name, *(format(figures[one], form) for one, form in forms.items()))
        for name, figures in report["systems"].items()
    ]
    print_table(console, columns, rows, title)


main = main_of("bridge_cost", __doc__, Settings, measure, show, width=100)


if __name__ == "__main__":
    sys.exit(main())
