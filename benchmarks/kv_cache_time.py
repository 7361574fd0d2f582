"""What 8-bit cache entries cost or save a CPU in time: a native decode step over them and over float32, in turns.

A step's time depends neither on its entries nor on its weights: both are random, of a model's sizes; times are of the
processor.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from time import process_time
from typing import Any

from rich.console import Console

from benchmarks.native_steps import NativeSteps, Sizes
from benchmarks.report import in_turns, main_of, option, print_table, spread
from d3engine.engine.model_directory import model_directory
from d3engine.model.config import ModelConfig

CACHES = ("float32", "fp8")


@dataclass(frozen=True)
class Settings:
    """Which model, how many texts of which lengths; `rounds` turns of each cache, each of `steps` steps."""

    model: str = option("smollm2", "a directory, or a model known by name")
    contexts: tuple[int, ...] = option((128, 1024, 4096), "tokens of each text")
    batches: tuple[int, ...] = option((1, 8), "texts at once")
    steps: int = option(4, "of a turn")
    rounds: int = option(9, "turns of each cache")


def steps_over(cache: str, settings: Settings) -> NativeSteps:
    """A model of these sizes on one thread, its matrices in bfloat16, over a cache full of random entries."""
    config = ModelConfig.from_directory(model_directory(settings.model))
    sizes = Sizes(
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        rows=max(settings.batches),
        context=max(settings.contexts) + settings.steps,
    )
    return NativeSteps(sizes, "bfloat16", head_format="bfloat16", kv_cache_dtype=cache)


def seconds(model: NativeSteps, context: int, batch: int, steps: int) -> float:
    """Of processor time for a step of `batch` texts of `context` tokens, of some steps."""
    rows = model.rows(batch, context=context + 1)
    began = process_time()
    model.step(rows, steps)
    return (process_time() - began) / steps


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of a step over both caches, and fp8's over float32's within a round, by context and batch."""
    models = {cache: steps_over(cache, settings) for cache in CACHES}
    rows = []
    for context, batch in product(settings.contexts, settings.batches):
        turns = {cache: partial(seconds, model, context, batch, settings.steps) for cache, model in models.items()}
        steps, ratio = in_turns(turns, settings.rounds, f"context {context}, batch {batch}")
        rows.append({"context": context, "batch": batch, "steps": steps, "ratio": ratio})
    about = {
        cache: {"bytes_a_token": model.sizes.layers * model.entry_bytes, "isa": model.decoder.isa}
        for cache, model in models.items()
    }
    return {"settings": asdict(settings), "caches": about, "rows": rows}


def show(report: dict[str, Any], console: Console) -> None:
    """A row for each context and batch; ranges are of all rounds."""
    columns = ("context", "batch", *CACHES, "fp8 / float32")
    rows = [
        (
            *(str(row[name]) for name in columns[:2]),
            *(spread(row["steps"][name], 1000) for name in CACHES),
            spread(row["ratio"]),
        )
        for row in report["rows"]
    ]
    title = "a native decode step, ms of processor time: median (least-most)"
    print_table(console, columns, rows, title, left=columns)


main = main_of("kv_cache_time", __doc__, Settings, measure, show, width=100)


if __name__ == "__main__":
    sys.exit(main())
