"""What 8-bit cache entries cost or save a CPU in time: a native decode step over them and over float32, in turns.

A step's time does not depend on its entries, so these are random; times are of the processor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.report import in_turns, option, print_table, run_benchmark, spread
from d3engine.engine.engine import Engine
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.native import native_model
from d3engine.kernels.kv_pool import KVPool, values_and_scales
from d3engine.kernels.native.library import Decoder
from d3engine.kernels.native.runs import Rows

CACHES = {"float32": "auto", "fp8": "fp8"}
FOREVER = 2**30


@dataclass(frozen=True)
class Settings:
    """Which model, how many texts of which lengths; `rounds` turns of each cache, each of `steps` steps."""

    model: str = option("smollm2", "a directory, or a model known by name")
    contexts: tuple[int, ...] = option((128, 1024, 4096), "tokens of each text")
    batches: tuple[int, ...] = option((1, 8), "texts at once")
    steps: int = option(4, "of a turn")
    rounds: int = option(9, "turns of each cache")


class Cached:
    """A model with one kind of cache, full of random entries, on one thread."""

    def __init__(self, settings: Settings, kind: str) -> None:
        rows, length = max(settings.batches), max(settings.contexts) + settings.steps
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weight_dtype": "bfloat16"}
        options |= {"kv_cache_dtype": CACHES[kind], "enforce_eager": True, "max_num_seqs": rows}
        with Engine(settings.model, max_model_len=length, kv_cache_memory_bytes=2**20, **options) as probe:
            layers, size = probe.config.num_layers, probe.settings.block_size
            memory = rows * layers * -(-length // size) * probe.settings.block_bytes
        self._engine = Engine(settings.model, max_model_len=length, kv_cache_memory_bytes=memory, **options)
        eager = self._engine.executor
        assert isinstance(eager, EagerExecutor)
        _fill(eager.pool)
        blocks = -(-length // size)
        self._decoder = Decoder(native_model(eager), max_blocks=blocks, num_slots=rows, max_rows=rows, num_threads=1)
        order = np.random.default_rng(0).permutation(rows * layers * blocks) + 1
        self._tables = order.astype(np.int32).reshape(rows, layers, blocks)
        self.bytes_a_token = layers * probe.settings.block_bytes // size
        self.isa = self._decoder.isa

    def seconds(self, context: int, batch: int, steps: int) -> float:
        """Of processor time for a step of `batch` texts of `context` tokens, of some steps."""
        ones = np.ones(batch, np.int64)
        cutoffs = np.full((batch, self._tables.shape[1]), FOREVER, np.int32)
        rows = Rows(ones, context * ones, ones, np.arange(batch), cutoffs, self._tables)
        began = process_time()
        self._decoder.run(rows, steps)
        return (process_time() - began) / steps

    def close(self) -> None:
        self._engine.close()


def _fill(pool: KVPool) -> None:
    values, scales = values_and_scales(pool)
    if scales is None:
        values.normal_()
    else:
        values.view(torch.uint8).random_(0, 127)
        scales.fill_(0.01)


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of a step over both caches, and fp8's over float32's within a round, by context and batch."""
    caches = {kind: Cached(settings, kind) for kind in CACHES}
    rows = []
    for context in settings.contexts:
        for batch in settings.batches:
            turns = {name: partial(kind.seconds, context, batch, settings.steps) for name, kind in caches.items()}
            steps, ratio = in_turns(turns, settings.rounds, f"context {context}, batch {batch}")
            rows.append({"context": context, "batch": batch, "steps": steps, "ratio": ratio})
    about = {kind: {"bytes_a_token": cache.bytes_a_token, "isa": cache.isa} for kind, cache in caches.items()}
    for cache in caches.values():
        cache.close()
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    return run_benchmark("kv_cache_time", __doc__, Settings, measure, show, arguments, width=100)


if __name__ == "__main__":
    sys.exit(main())
