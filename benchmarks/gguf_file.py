"""A GGUF file as it is, here and in llama.cpp with its own defaults: tokens a second, prompts, loading, memory.

Both take turns, and transformers if asked for, each round in a new process, so that loading and memory are its own.
Answers have a fixed length, and no text is made; llama.cpp chooses no token. The reading rate is of a copy of the
file's bytes: the bound of one row.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks.children import checkout_environment
from benchmarks.report import Parser, interval, option, print_table, settings_of
from d3engine.utils.children import python_command

OURS, EXACT = "d3engine", "d3engine, float32 activations"
LLAMA_CPP, TRANSFORMERS = "llama.cpp", "transformers"


@dataclass(frozen=True)
class Settings:
    """Which file, how many answers at once, how long prompts and answers are, and how many rounds."""

    model: str = option("", "a GGUF file")
    rows: tuple[int, ...] = option((1, 8, 32), "answers at once")
    prompts: tuple[int, ...] = option((512, 2048), "lengths of prompts", nargs="*")
    context: int = 64
    tokens: int = option(32, "of each answer")
    rounds: int = option(3)
    threads: int = option(2)


def tokens_of(length: int, nth: int) -> list[int]:
    """A prompt of random tokens: no two begin alike, so that no cache of prompts helps anybody."""
    return [int(token) for token in np.random.default_rng(nth).integers(1000, 20_000, length)]


# -- one system in a process of its own ------------------------------------------------------------------------


def measure_ours(settings: Settings, activations: str) -> dict[str, float]:
    """Seconds and bytes of an engine."""
    import torch

    from d3engine import Engine, SamplingParams

    torch.set_num_threads(settings.threads)
    begun = time.perf_counter()
    longest = max([*settings.prompts, settings.context + settings.tokens]) + 16
    options: dict[str, Any] = {"max_num_seqs": max(settings.rows), "max_model_len": longest}
    engine = Engine(
        settings.model, activations=activations, num_threads=settings.threads, enable_prefix_caching=False, **options
    )
    found = {"load": time.perf_counter() - begun}

    def answer(rows: int, context: int, tokens: int) -> float:
        prompts: list[Any] = [{"prompt_token_ids": tokens_of(context, nth)} for nth in range(rows)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    with engine:
        found |= _measured(settings, answer)
    return found | {"bytes": _resident()}


def measure_llama_cpp(settings: Settings) -> dict[str, float]:
    """The same of llama.cpp."""
    from benchmarks.llama_cpp import LlamaCpp

    found: dict[str, float] = {}
    for rows in settings.rows:
        begun = time.perf_counter()
        length = max([*settings.prompts, settings.context + settings.tokens])
        peer = LlamaCpp(
            Path(settings.model),
            threads=settings.threads,
            rows=rows,
            length=length if rows == 1 else settings.context + settings.tokens,
            has_own_defaults=True,
        )
        found.setdefault("load", time.perf_counter() - begun)

        def answer(rows: int, context: int, tokens: int, peer: LlamaCpp = peer) -> float:
            prompt, step = peer.answer([tokens_of(context, nth) for nth in range(rows)], tokens)
            return prompt + step * (tokens - 1)

        of_rows = Settings(**asdict(settings) | {"rows": (rows,), "prompts": settings.prompts if rows == 1 else ()})
        found |= _measured(of_rows, answer)
        peer.close()
    return found | {"bytes": _resident()}


def measure_transformers(settings: Settings) -> dict[str, float]:
    """The same of transformers, in float32; it chooses its tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    begun, file = time.perf_counter(), Path(settings.model)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    found = {"load": time.perf_counter() - begun}

    def answer(rows: int, context: int, tokens: int) -> float:
        ids = torch.tensor([tokens_of(context, nth) for nth in range(rows)])
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=1.0, **lengths)
        return time.perf_counter() - start

    return found | _measured(settings, answer) | {"bytes": _resident()}


def _measured(settings: Settings, answer: Callable[[int, int, int], float]) -> dict[str, float]:
    """Tokens a second by rows, and seconds by the length of a prompt, each after one run that is not timed."""
    found = {}
    for rows in settings.rows:
        answer(rows, settings.context, 4)
        short, long = (answer(rows, settings.context, 1 + settings.tokens * part) for part in (0, 1))
        found[f"rows {rows}"] = rows * settings.tokens / (long - short)
    for length in settings.prompts:
        found[f"prompt {length}"] = answer(1, length, 1)
    return found


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def reading_rate(size: int, threads: int) -> float:
    """Bytes a second that `threads` threads read from `size` bytes of memory."""
    import torch

    torch.set_num_threads(threads)
    memory = torch.ones(size // 8, dtype=torch.int64)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        memory.sum()
        rates.append(memory.nbytes / (time.perf_counter() - start))
    return max(rates)


# -- all of them, in turns -------------------------------------------------------------------------------------

_SYSTEMS: dict[str, Callable[[Settings], dict[str, float]]] = {
    OURS: lambda settings: measure_ours(settings, "auto"),
    EXACT: lambda settings: measure_ours(settings, "float32"),
    LLAMA_CPP: measure_llama_cpp,
    TRANSFORMERS: measure_transformers,
}


def measure(settings: Settings, systems: Sequence[str]) -> dict[str, Any]:
    """Every round of every system; `figures` has the median of the rounds, the least and the most."""
    rounds: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    with tqdm(total=settings.rounds * len(systems), unit="run") as bar:
        for _ in range(settings.rounds):
            for system in systems:
                given = json.dumps({"system": system, "settings": asdict(settings)})
                command = python_command("-m", "benchmarks.gguf_file", "--one", given)
                done = subprocess.run(
                    command, env=checkout_environment(), check=True, stdout=subprocess.PIPE, text=True
                )
                rounds[system].append(json.loads(done.stdout.splitlines()[-1]))
                bar.update()
    figures = {
        system: {
            name: dict(
                zip(("low", "value", "high"), np.quantile([one[name] for one in found], (0, 0.5, 1)), strict=True)
            )
            for name in found[0]
        }
        for system, found in rounds.items()
    }
    size = Path(settings.model).stat().st_size
    kept = asdict(settings) | {"model": Path(settings.model).name}
    report = {"benchmark": "gguf_file", "settings": kept, "file_bytes": size, "figures": figures}
    return report | {"reading_rate": reading_rate(size, settings.threads)}


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each figure, and how many times as good ours is."""
    settings, figures = report["settings"], report["figures"]
    title = f"{settings['model']}: {report['file_bytes'] / 1e9:.2f} GB, memory is read at"
    columns = ("", *figures, *([f"over {LLAMA_CPP}"] if LLAMA_CPP in figures else []))
    rows = []
    for name in figures[OURS]:
        row = [_LABELS.get(name.split()[0], "{}").format(name.partition(" ")[2])]
        row += [interval(of[name], ".3g", 1e-9 if name == "bytes" else 1.0) for of in figures.values()]
        if LLAMA_CPP in figures:
            ours, theirs = (figures[system][name]["value"] for system in (OURS, LLAMA_CPP))
            row.append(f"{ours / theirs if name.startswith('rows') else theirs / ours:.2f}")
        rows.append(row)
    print_table(console, columns, rows, f"{title} {report['reading_rate'] / 1e9:.1f} GB/s", left=("",))


_LABELS = {
    "load": "until it can answer, s",
    "rows": "{} at once, tokens/s",
    "prompt": "prompt of {}, s",
    "bytes": "memory, GB",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, or a system of it as the process of a round does."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["--one"]:
        given = json.loads(words[1])
        print(json.dumps(_SYSTEMS[given["system"]](Settings(**given["settings"]))))
        return 0
    from benchmarks.random_gguf import SHAPES, write_random  # whose libraries' memory would count as llama.cpp's

    parser = Parser("gguf_file", __doc__, words, Settings)
    parser.add_argument("--random", choices=list(SHAPES), help="make that file, of random weights in Q4_K_M, and end")
    parser.add_argument("--with-transformers", action="store_true", help="also transformers")
    parser.add_argument("--without", nargs="*", default=[], choices=list(_SYSTEMS), help="systems that are left out")
    options = parser.given()
    settings = settings_of(Settings, options)
    if not settings.model:
        parser.error("--model is missing")
    if options.random is not None:
        write_random(SHAPES[options.random], Path(settings.model))
        return 0
    left_out = [*options.without, *([] if options.with_transformers else [TRANSFORMERS])]
    report = measure(settings, [system for system in _SYSTEMS if system not in left_out])
    parser.publish(report, show, width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
