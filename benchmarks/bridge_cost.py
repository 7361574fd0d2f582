"""What bridges cost: decode time at full depth, and with D3's skipped layers crossed by maps or passed as they are.

A map's numbers change no time, so random ones serve, and nothing has to be fitted. The windows are those
of D3's schedule. What is timed is one answer at batch 1 on one thread, from its second token on: the prompt and the
first token, timed by themselves, are taken off. Seconds are the process's own, the systems take turns in rounds, and
of the rounds the fastest counts, since whatever else a machine does can only slow one down.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.report import Parser, positive, tell
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

    model: str = "smollm2"
    alpha: float = 0.95
    start: float = 0.8
    rank: int | None = None
    tokens: int = 129
    repeats: int = 12


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


def measure(settings: Settings, *, show_progress: bool | None = None) -> dict[str, Any]:
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
            seconds, work = _rounds(engine, prompts_for(config, 1)[0], systems, settings, show_progress)
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
    engine: Engine,
    prompt: list[int],
    systems: Mapping[str, DepthPolicy],
    settings: Settings,
    show_progress: bool | None,
) -> tuple[dict[str, float], dict[str, Work]]:
    """By system, the seconds of all tokens but the first, and the work of the whole answer."""
    counts = {"first": 1, "all": settings.tokens}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in itertools.product(systems, counts)}
    work: dict[str, Work] = {}
    turns = range(settings.repeats + 1)
    hidden = None if show_progress is None else not show_progress
    for turn, name, count in tqdm([*itertools.product(turns, systems, counts)], unit="run", disable=hidden):
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
    table = Table(title=title, title_justify="left")
    for column in ("", "ms/token", "layers", "crossings", "speed-up", "FLOPs ratio", "realised"):
        table.add_column(column, justify="right")
    for name, figures in report["systems"].items():
        table.add_row(
            name,
            f"{figures['milliseconds_per_token']:.3f}",
            f"{figures['mean_layers']:.2f}",
            f"{figures['crossings_per_token']:.2f}",
            f"{figures['speedup']:.3f}",
            f"{figures['flops_ratio']:.3f}",
            f"{figures['realisation_ratio']:.3f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser("bridge_cost", __doc__, arguments)
    default = Settings()
    parser.add_argument("--model", default=default.model, help="a model directory, smollm2 or demo")
    parser.add_argument("--alpha", type=float, default=default.alpha, help="D3's")
    parser.add_argument("--start", type=float, default=default.start, help="D3's")
    parser.add_argument("--rank", type=positive, help="rank of each map (full)")
    parser.add_argument("--tokens", type=positive, default=default.tokens, help="tokens of an answer, at least 2")
    parser.add_argument("--repeats", type=positive, default=default.repeats, help="rounds counted, after a warm-up")
    options = vars(parser.given())
    file = options.pop("json")
    report = measure(Settings(**options))
    report["environment"] = parser.environment()
    tell(report, show, width=100, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
