"""How much text bridges need, of which rank they may be, and whether those fitted to one kind of text serve another.

Sums are additive: one pass over a kind's texts gives the fit of every amount, and a map of any rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks.report import option, print_table, run_benchmark
from d3engine.cli.bridge_texts import PROMPT_TOKENS
from d3engine.model.bridges import Bridge, Window
from d3engine.research.analysis.answers import open_model
from d3engine.research.bridges.fitting import CHOOSING_EVERY, Fit
from d3engine.research.bridges.judging import FullText, Reading, window_schedule
from d3engine.research.bridges.passage import Passage
from d3engine.research.bridges.texts import TextReader, shuffled
from d3engine.utils.progress import hides_bars


def _window(words: str) -> Window:
    first, _, stop = words.partition(":")
    return int(first), int(stop)


@dataclass(frozen=True)
class Settings:
    """Fitted to each of `texts` (files), judged on `held_out_texts` of each of `held_out`, both of `text_tokens` tokens
    at most. `positions` are the amounts, `ranks` those of a map fitted to the largest."""

    texts: tuple[str, ...] = option(
        help="a file to fit to; may be repeated", flag="--text", metavar="TEXT", action="append", nargs=None
    )
    held_out: tuple[str, ...] = option(help="a file to judge on; may be repeated", action="append", nargs=None)
    model: str = option("smollm2")
    windows: tuple[Window, ...] = option(
        ((3, 9),),
        "A:B, the layers A to B - 1; may be repeated (3:9)",
        **{
            "flag": "--window",
            "metavar": "WINDOW",
            "action": "append",
            "nargs": None,
            "type": _window,
        },
    )
    positions: tuple[int, ...] = option((1_000, 3_000, 10_000, 30_000))
    ranks: tuple[int, ...] = option((256, 128, 64, 32), flag="--rank", metavar="RANK", nargs="*")
    held_out_texts: int = option(4)
    text_tokens: int = option(256)
    dtype: str = option("bfloat16")


def measure(settings: Settings) -> dict[str, Any]:
    """Fit and judge everything, and return the report without its environment."""
    options = {"device": "cpu", "dtype": settings.dtype, "num_threads": 1, "kv_cache_memory_bytes": 2**26}
    engine, observer = open_model(settings.model, options)
    passage = Passage(observer)
    reader = TextReader(engine.directory, engine.get_tokenizer(), settings.text_tokens)
    firsts = {first for first, _ in settings.windows}
    held_out = {
        name: [
            FullText(passage, Reading(reader.encode(line), PROMPT_TOKENS), firsts)
            for line in shuffled(reader.lines(Path(name), "--held-out"), settings.held_out_texts, seed=1)
        ]
        for name in settings.held_out
    }
    rows = []
    for name in settings.texts:
        lines = reader.lines(Path(name), "--text")
        texts = (reader.encode(line) for line in shuffled(lines, len(lines), seed=0))
        for rank, positions, bridges in _fits(passage, texts, settings, name):
            for kind, full in held_out.items():
                about = {
                    "fitted_to": Path(name).stem,
                    "positions": positions,
                    "rank": rank,
                    "held_out": Path(kind).stem,
                }
                rows += [about | _judged(full, bridge) for bridge in bridges]
    return {"benchmark": "bridge_texts", "settings": asdict(settings), "rows": rows}


def _judged(texts: Sequence[FullText], bridge: Bridge) -> dict[str, Any]:
    """A bridge on texts of one kind."""
    schedule = window_schedule([bridge.window], texts[0].passage.config.num_layers)
    found = np.concatenate([text.judge(schedule, {bridge.window: bridge}) for text in texts], axis=1)
    means = {"kl": float(found[0].mean()), "agreement": float(found[2].mean())}
    return {"window": list(bridge.window), **means, "judged": found.shape[1]}


def _fits(passage: Passage, texts: Any, settings: Settings, name: str) -> Any:
    """Yields rank, positions and bridges: full maps of every amount that is reached, then the ranks of the last."""
    fit, wanted, last = Fit(passage, settings.windows), sorted(settings.positions), 0
    with tqdm(total=wanted[-1], desc=Path(name).stem, unit="position", disable=hides_bars(), leave=False) as bar:
        for text in texts:
            if not wanted:
                break
            fit.gather(text)
            bar.update(fit.num_positions - bar.n)
            if fit.num_positions >= wanted[0] and fit.num_texts >= CHOOSING_EVERY:
                last = fit.num_positions
                wanted = [one for one in wanted if one > last]
                yield None, last, _bridges(fit, None)
    if fit.num_positions > last and fit.num_texts >= CHOOSING_EVERY:
        yield None, fit.num_positions, _bridges(fit, None)
    if fit.num_texts >= CHOOSING_EVERY:
        for rank in settings.ranks:
            yield rank, fit.num_positions, _bridges(fit, rank)


def _bridges(fit: Fit, rank: int | None) -> list[Bridge]:
    return [one.bridge for one in fit.solve(rank)]


def show(report: dict[str, Any], console: Console) -> None:
    """A row for each fit and window, a column for each kind that it was judged on."""
    kinds = list(dict.fromkeys(row["held_out"] for row in report["rows"]))
    judged = {row["held_out"]: row["judged"] for row in report["rows"]}
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in report["rows"]:
        first, stop = row["window"]
        place = (row["fitted_to"], f"{row['positions']:,}", str(row["rank"] or "full"), f"[{first}, {stop})")
        found.setdefault(place, {})[row["held_out"]] = f"{row['kl']:.3f}, {row['agreement']:.1%}"
    columns = ("fitted to", "positions", "rank", "window", *(f"{kind} ({judged[kind]})" for kind in kinds))
    rows = [(*place, *(cells[kind] for kind in kinds)) for place, cells in found.items()]
    print_table(console, columns, rows, "KL divergence from full depth and agreement, held out")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return run_benchmark("bridge_texts", __doc__, Settings, measure, show, arguments, width=120)


if __name__ == "__main__":
    sys.exit(main())
