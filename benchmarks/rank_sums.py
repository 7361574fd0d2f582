"""What the sums between ranks cost: counted, and timed on rank 0 while the engine answers at full depth and under D3.

A layer that depth skips saves its two sums. Between processes of one machine a sum is mostly waiting for the slower
rank; beside the clock stands what rank 0 computes meanwhile.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import main_of, option, print_table, spread, summary
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.engine.engine import Engine
from d3engine.model.shard import Collectives
from d3engine.request.params import SamplingParams

KINDS = ("", "cpu_")
"""Of times: by the clock, and of rank 0 on the processor."""
PROMPT = list(range(5, 21))


@dataclass(frozen=True)
class Settings:
    """Answers of `tokens` tokens to `batch` prompts, by ranks that share a model; D3 has `alpha` and `start`."""

    model: str = option("demo")
    ranks: int = option(2)
    batch: int = option(1)
    tokens: int = option(64)
    repeats: int = option(5)
    alpha: float = option(0.9)
    start: float = option(0.6)


class Timed:
    """Collectives that count their sums, and the seconds of all they do: by the clock, and of the processor."""

    def __init__(self, own: Collectives) -> None:
        self._own = own
        self.sums = 0
        self.seconds = np.zeros(2)

    def sum_(self, tensor: Tensor) -> None:
        self.sums += 1
        self._count(self._own.sum_, tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        return self._count(self._own.gather, tensor)

    def agree_(self, tensor: Tensor) -> None:
        self._count(self._own.agree_, tensor)

    def _count(self, call: Any, tensor: Tensor) -> Any:
        start = now()
        try:
            return call(tensor)
        finally:
            self.seconds += now() - start


def now() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds by the clock, and of this process on the processor."""
    return np.array([perf_counter(), process_time()])


def turn(engine: Engine, timed: Timed, depth: DepthPolicy, settings: Settings) -> dict[str, float]:
    """The figures of one answer to each prompt, per step."""
    tokens = settings.tokens
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, depth=depth)
    sums, seconds, start = timed.sums, timed.seconds.copy(), now()
    engine.generate([PROMPT] * settings.batch, params, use_tqdm=False)
    within, whole = 1000 * (timed.seconds - seconds) / tokens, 1000 * (now() - start) / tokens
    return {
        "sums": (timed.sums - sums) / tokens,
        "sum_ms": float(within[0]),
        "ms": float(whole[0]),
        "sum_cpu_ms": float(within[1]),
        "cpu_ms": float(whole[1]),
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Every round has a turn of each depth; one round before them counts for nothing."""
    depths: dict[str, DepthPolicy] = {"full depth": FullDepth(), "D3": D3(settings.alpha, settings.start)}
    rounds: list[dict[str, dict[str, float]]] = []
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False}
    options |= {"skip_tokenizer_init": True, "max_num_seqs": settings.batch}
    with Engine(settings.model, tensor_parallel_size=settings.ranks, **options) as engine:
        running = engine.executor.model
        assert running.ranks is not None
        timed = Timed(running.ranks.collectives)
        running.ranks = replace(running.ranks, collectives=timed)
        for _ in tqdm(range(settings.repeats + 1), unit="round", disable=None):
            rounds.append({name: turn(engine, timed, depth, settings) for name, depth in depths.items()})
    del rounds[0]
    figures = {
        name: {figure: summary([one[name][figure] for one in rounds]) for figure in rounds[0][name]}
        | {f"{kind}share": _shares([one[name] for one in rounds], kind) for kind in KINDS}
        for name in depths
    }
    saved = [{name: one["full depth"][name] - one["D3"][name] for name in one["D3"]} for one in rounds]
    return {
        "benchmark": "rank_sums",
        "settings": asdict(settings),
        "depths": figures,
        "faster": summary([one["full depth"]["ms"] / one["D3"]["ms"] for one in rounds]),
        "share_of_saved": _shares(saved, ""),
        "cpu_share_of_saved": _shares(saved, "cpu_"),
    }


def _shares(turns: list[dict[str, float]], kind: str) -> dict[str, Any]:
    return summary([one[f"sum_{kind}ms"] / one[f"{kind}ms"] for one in turns])


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each depth, and what D3 saves."""
    columns = ("depth", "sums a step", "ms a step", "of it between ranks", "CPU ms of rank 0", "of it between ranks")
    rows = [
        (name, *(spread(figures[one]) for one in ("sums", "ms", "share", "cpu_ms", "cpu_share")))
        for name, figures in report["depths"].items()
    ]
    print_table(console, columns, rows, left=("depth",))
    console.print(
        f"D3 is {spread(report['faster'])} times as fast; of the time that it saves, what ranks do between them is"
        f" {spread(report['share_of_saved'])}, of CPU time {spread(report['cpu_share_of_saved'])}"
    )


main = main_of("rank_sums", __doc__, Settings, measure, show, width=120)


if __name__ == "__main__":
    sys.exit(main())
