"""Decoding on a CPU: our engine beside llama.cpp and PyTorch at equal bits, by batch, depth and prompt, in turns.

An engine's executor is timed plan by plan while `generate` runs: what steps and prompts take, and what the host adds.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.report import Parser, option, print_table, ratios, settings_of, spread, summary, tell, write_json
from benchmarks.systems import PROMPT_TOKENS, decay_for, in_rounds, model_at, prompts_for, weights_of
from benchmarks.timed_engine import EagerPeer, TimedEngine
from benchmarks.torch_peers import DTYPES, TorchPeer
from d3engine.depth import DepthPolicy, FullDepth, LayerTable
from d3engine.depth.statistics import layer_bound
from d3engine.kernels.native.bf12 import packed
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, in_layout, quantize_weights, with_matrices

PARTS = ("decode", "depth", "prompt")
KINDS = ("f32", "16-bit", "12-bit", "8-bit", "4-bit")
PROMPTS = (512, 2048)
READ_BYTES = 2**30
COLUMNS = 2**12
READS = 3
LLAMA_CPP, TRANSFORMERS, COMPILED, EAGER = "llama.cpp", "transformers", "torch.compile", "eager"
PEERS = (LLAMA_CPP, TRANSFORMERS, COMPILED, EAGER)


@dataclass(frozen=True)
class Settings:
    """What is measured: `repeats` rounds, in each of which every system has one turn."""

    model: str = option("demo", "demo, large or tiny (random weights), or a model's directory")
    kinds: tuple[str, ...] = option(KINDS, "weights", choices=KINDS)
    batches: tuple[int, ...] = option((1, 8, 32), "prompts at once")
    parts: tuple[str, ...] = option(PARTS, choices=PARTS)
    peers: tuple[str, ...] = option(
        PEERS, "beside ours, where installed; eager: ours, without the library", choices=PEERS, nargs="*"
    )
    prompt_tokens: int = option(PROMPT_TOKENS, "tokens before them, of steps (not of --parts prompt)")
    tokens: int = option(64, "new tokens per prompt")
    repeats: int = option(5, "rounds")
    threads: int = option(2)
    activations: str = option("auto", "of ours")
    processor_time: bool = option(
        False, "in place of wall time, where others use the machine; takes --threads 1 and --peers alone"
    )

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.tokens

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds: the wall's, or those that this process's threads were running."""
        return time.process_time if self.processor_time else time.perf_counter


# -- weights ------------------------------------------------------------------------------------------------------


def in_kind(weights: LlamaWeights, kind: str) -> LlamaWeights:
    """Float32 weights with their matrices in a kind; norms stay float32.

    The LM head, and with it an embedding that is the head too, is in bfloat16, or beside quantized matrices in 8 bits.
    In 12 bits all of them are those of 16, packed.
    """
    if kind == "f32":
        return weights
    if kind in ("16-bit", "12-bit"):
        narrow = methodcaller("to", torch.bfloat16)
        narrowed = with_matrices(weights, narrow, narrow)
        return in_layout(narrowed, packed) if kind == "12-bit" else narrowed
    return quantize_weights(weights, {"8-bit": "int8", "4-bit": "int4"}[kind])


def matrix_bytes(weights: LlamaWeights) -> int:
    """Bytes that a step at full depth reads: all layers and the LM head."""
    return sum(tensor.nbytes for layer in weights.layers for tensor in layer.tensors()) + weights.lm_head.nbytes


# -- reading of memory ------------------------------------------------------------------------------------------


class Reader:
    """Float32 numbers, `size` bytes of them (a multiple of 16 KiB), that torch's threads read.

    Sums and products with a vector are the plainest things to be done with all of them. Whichever is faster counts,
    since what is asked for is what memory gives.
    """

    def __init__(self, size: int) -> None:
        self._values = torch.ones(size // (4 * COLUMNS), COLUMNS)
        self._vector = torch.ones(COLUMNS)

    def rate(self, times: int, clock: Callable[[], float]) -> float:
        """Bytes a second of `clock`: the best of `times` sums and as many products."""
        best = float("inf")
        for read in [self._values.sum, lambda: self._values @ self._vector] * times:
            start = clock()
            read()
            best = min(best, clock() - start)
        return self._values.nbytes / best


# -- parts ---------------------------------------------------------------------------------------------------------


def over_peers(systems: dict[str, Any], figure: str) -> dict[str, Any]:
    """How many times as fast as each peer we are, round by round."""
    rounds = {name: own[figure]["rounds"] for name, own in systems.items()}
    ours = rounds.pop("d3engine")
    return {name: summary(ratios(theirs, ours)) for name, theirs in rounds.items()}


def decode(model: Model, kind: str, batch: int, settings: Settings, bar: tqdm[Any]) -> dict[str, Any]:
    """Steps at full depth beside the peers', and the share of the call in which the executor works.

    In every round memory is read too, so that the rate of a step and that of reading are of the same minute.
    """
    prompts, length = prompts_for(model.config, batch, settings.prompt_tokens), settings.length
    reader = Reader(READ_BYTES)
    engine = model.ours(kind, settings, rows=batch, length=length)

    def ours() -> dict[str, float]:
        turn = engine.answer(prompts, settings.tokens, FullDepth())
        rate, read = matrix_bytes(model.weights[kind]) / turn.seconds_per_step, reader.rate(READS, settings.clock)
        return {
            "seconds_per_step": turn.seconds_per_step,
            "host_share": turn.host_share,
            "gigabytes_per_second": rate / 1e9,
            "read_gigabytes_per_second": read / 1e9,
            "share_of_reading": rate / read,
        }

    peers = model.peers(kind, settings, rows=batch, length=length)
    turns: dict[str, Callable[[], dict[str, float]]] = {"d3engine": ours} | {
        name: lambda peer=peer: {"seconds_per_step": peer.answer(prompts, settings.tokens)[1]}  # type: ignore[misc]
        for name, peer in peers.items()
    }
    systems = in_rounds(turns, settings.repeats, bar)
    executor = engine.engine.stats().executor
    for system in (engine, *peers.values()):
        system.close()
    return {
        "model": settings.model,
        "kind": kind,
        "batch": batch,
        "executor": executor,
        "systems": systems,
        "over": over_peers(systems, "seconds_per_step"),
    }


def depth(model: Model, kind: str, batch: int, settings: Settings, bar: tqdm[Any]) -> dict[str, Any]:
    """A step by the number of its layers, and D3 at two thirds of the layers against what it can give."""
    layers = model.config.num_layers
    prompts, length = prompts_for(model.config, batch, settings.prompt_tokens), settings.length
    engine = model.ours(kind, settings, rows=batch, length=length)
    decay = decay_for(layers, settings.tokens)
    counts = sorted({max(1, round(layers * part / 6)) for part in range(2, 7)})
    depths: dict[str, DepthPolicy] = {str(count): lowest(count, layers, settings.tokens) for count in counts} | {
        "d3": decay
    }
    realised: list[int] = []

    def turn_of(policy: DepthPolicy) -> Callable[[], dict[str, float]]:
        def turn() -> dict[str, float]:
            found = engine.answer(prompts, settings.tokens, policy)
            if policy is decay:
                realised[:] = found.depths[1:]
            return {"seconds_per_step": found.seconds_per_step}

        return turn

    systems = in_rounds({name: turn_of(policy) for name, policy in depths.items()}, settings.repeats, bar)
    engine.close()
    weights = model.weights[kind]
    layer_size = sum(tensor.nbytes for tensor in weights.layers[0].tensors())
    bound = layer_bound(realised, num_layers=layers, layer_size=layer_size, head_size=weights.lm_head.nbytes)
    full, skipping = (systems[name]["seconds_per_step"]["rounds"] for name in (str(layers), "d3"))
    speedup = summary(ratios(full, skipping))
    return {
        "model": settings.model,
        "kind": kind,
        "batch": batch,
        "depth": decay.describe(),
        "systems": systems,
        "largest_distance_from_a_line": distance_from_line(
            counts, [systems[str(count)]["seconds_per_step"]["median"] for count in counts]
        ),
        "d3_over_full_depth": speedup,
        "layer_bound": bound,
        "realisation_ratio": summary([value / bound for value in speedup["rounds"]]),
    }


def lowest(count: int, layers: int, steps: int) -> LayerTable:
    """The lowest `count` layers, but for the first generated token, which is the prompt pass's."""
    active = torch.zeros(steps, layers, dtype=torch.bool)
    active[0], active[:, :count] = True, True
    return LayerTable(active.numpy(), on_skip="none")


def distance_from_line(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """The largest relative distance of the times from the line through them with the least squares."""
    design = torch.tensor([[1.0, count] for count in counts], dtype=torch.float64)
    times = torch.tensor(seconds, dtype=torch.float64)
    fitted = design @ torch.linalg.lstsq(design, times).solution
    return float(((times - fitted) / fitted).abs().max())


def prompt(model: Model, kind: str, settings: Settings, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """The pass over one prompt beside the peers'; torch.compile runs steps alone."""
    rows = []
    for tokens in PROMPTS:
        if tokens >= model.config.max_length:
            continue
        prompts = [(prompts_for(model.config, 1)[0] * tokens)[:tokens]]
        engine = model.ours(kind, settings, rows=1, length=tokens + 2)
        peers = model.peers(kind, settings, rows=1, length=tokens + 2, without=(COMPILED,))
        turns: dict[str, Callable[[], dict[str, float]]] = {
            "d3engine": lambda e=engine, p=prompts: {"seconds": e.answer(p, 1, FullDepth()).prompt_seconds}  # type: ignore[misc]
        } | {
            name: lambda peer=peer, p=prompts: {"seconds": peer.answer(p, 1)[0]}  # type: ignore[misc]
            for name, peer in peers.items()
        }
        systems = in_rounds(turns, settings.repeats, bar)
        for system in (engine, *peers.values()):
            system.close()
        found = {"model": settings.model, "kind": kind, "tokens": tokens, "systems": systems}
        rows.append({**found, "over": over_peers(systems, "seconds")})
    return rows


# -- a run -----------------------------------------------------------------------------------------------------------


class Model:
    """A model in every kind of weights, and as files for llama.cpp in a folder that goes with it."""

    def __init__(self, directory: Path, settings: Settings, folder: Path) -> None:
        self.directory, self._folder = directory, folder
        self.config = ModelConfig.from_directory(directory)
        self._float = weights_of(directory, self.config)
        self.weights = {kind: in_kind(self._float, kind) for kind in settings.kinds}

    def ours(self, kind: str, settings: Settings, *, rows: int, length: int) -> TimedEngine:
        """Our engine with a kind of weights."""
        return TimedEngine(
            self.directory,
            self.weights[kind],
            threads=settings.threads,
            rows=rows,
            length=length,
            clock=settings.clock,
            activations=settings.activations,
        )

    def peers(
        self, kind: str, settings: Settings, *, rows: int, length: int, without: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The peers that were asked for, are installed and know this kind of weights."""
        found: dict[str, Any] = {}
        wanted = [name for name in settings.peers if name not in without]
        if LLAMA_CPP in wanted:
            with suppress(ImportError):
                from benchmarks.gguf_writing import write_gguf
                from benchmarks.llama_cpp import LlamaCpp

                path = self._folder / f"{kind}.gguf"
                if not path.exists():
                    write_gguf(path, self.config, self._float, kind)
                found[LLAMA_CPP] = LlamaCpp(path, threads=settings.threads, rows=rows, length=length)
        if kind in DTYPES:
            found |= {
                name: TorchPeer(self.directory, self._float, kind, compiled=name == COMPILED, rows=rows, length=length)
                for name in (TRANSFORMERS, COMPILED)
                if name in wanted
            }
        if EAGER in wanted:
            sizes = {"threads": settings.threads, "rows": rows, "length": length}
            found[EAGER] = EagerPeer(self.directory, self.weights[kind], **sizes)
        return found


def measure(settings: Settings, keep: Callable[[dict[str, Any]], None] = lambda report: None) -> dict[str, Any]:
    """Run all parts and return the report, without its environment; `keep` is given what there is of it after each.

    Sets torch's number of threads.
    """
    torch.set_num_threads(settings.threads)
    report: dict[str, Any] = {
        "benchmark": "cpu",
        "settings": vars(settings),
        "llama_cpp": _peer_version(),
        **{part: [] for part in settings.parts},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        model_at(settings.model, max(*PROMPTS, settings.length) + 2) as directory,
        tqdm(unit="turn", disable=None) as bar,
    ):
        model = Model(directory, settings, Path(folder))
        for kind in settings.kinds:
            for batch in settings.batches:
                for part, run in (("decode", decode), ("depth", depth)):
                    if part in settings.parts:
                        bar.set_description(f"{part}, {kind}, batch {batch}")
                        report[part].append(run(model, kind, batch, settings, bar))
                        keep(report)
                        gc.collect()
            if "prompt" in settings.parts:
                bar.set_description(f"prompt, {kind}")
                report["prompt"] += prompt(model, kind, settings, bar)
                keep(report)
    return report


def _peer_version() -> str | None:
    with suppress(ImportError):
        from benchmarks.llama_cpp import version

        return version()
    return None


# -- the page ---------------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table for each part."""
    settings = report["settings"]
    clock = "processor" if settings["processor_time"] else "wall"
    console.print(
        f"{settings['model']}: {settings['threads']} threads, {settings['repeats']} rounds, {settings['tokens']} tokens"
        f" after {settings['prompt_tokens']}, {clock} time. Medians, least and most of the rounds."
        f" llama.cpp: {report['llama_cpp'] or 'not installed'}"
    )
    peers = settings["peers"]
    over = [f"over {peer}" for peer in peers]
    ours = {part: [(row, row.get("systems", {}).get("d3engine")) for row in report.get(part) or ()] for part in PARTS}
    tables = {
        ("weights", "batch", "ms a step", *over, "GB/s", "of reading", "of the call"): [
            (
                *(row["kind"], str(row["batch"]), spread(own["seconds_per_step"], 1e3), *_over(row, peers)),
                *(spread(own[one]) for one in ("gigabytes_per_second", "share_of_reading", "host_share")),
            )
            for row, own in ours["decode"]
        ],
        ("weights", "batch", "D3 over full depth", "layer bound", "realisation ratio", "off a line, at most"): [
            (
                *(row["kind"], str(row["batch"]), spread(row["d3_over_full_depth"]), f"{row['layer_bound']:.2f}"),
                *(spread(row["realisation_ratio"]), f"{100 * row['largest_distance_from_a_line']:.1f} %"),
            )
            for row, _ in ours["depth"]
        ],
        ("weights", "tokens", "ms", *over): [
            (row["kind"], str(row["tokens"]), spread(own["seconds"], 1e3), *_over(row, peers))
            for row, own in ours["prompt"]
        ],
    }
    for columns, rows in tables.items():
        if rows:
            print_table(console, columns, rows, left=("weights",), no_wrap=True)


def _over(row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    """How many times as fast as each peer, as cells; a peer that was not there has none."""
    return [spread(row["over"][peer]) if peer in row["over"] else "-" for peer in peers]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser("cpu", __doc__, arguments, Settings)
    given = parser.given()
    settings = settings_of(Settings, given)
    if settings.processor_time and (settings.peers or settings.threads > 1):
        parser.error(
            "--processor-time must come with --threads 1, for threads that wait take it too, and with --peers and no"
            f" names, for theirs is wall time; got --threads {settings.threads} --peers {' '.join(settings.peers)}"
        )
    where = {"environment": parser.environment()}

    def keep(report: dict[str, Any]) -> None:
        if given.json:
            write_json(report | where, given.json)

    tell(measure(settings, keep) | where, show, width=150, file=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
