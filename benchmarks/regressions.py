"""Compare ratios of processor times within one run with those that are stored for the instruction set.

    python -m benchmarks.regressions           # exit status 1 for a ratio that is off by more than a factor of 1.6
    python -m benchmarks.regressions --store   # replaces this processor's, of the instruction sets that run here

A processor without stored ratios is compared with all others', by a wider bound. Only ratios of one thread's processor
time compare at all, so a regression of all parts alike is not seen. What is read fits into the second cache but for
float32, so that neighbours on the machine disturb little.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.native_steps import BYTE_ACTIVATIONS, FORMATS, NativeSteps, Sizes
from benchmarks.report import Parser, cpuinfo, positive, print_table, write_json
from d3engine.kernels.native.library import isas_here, reads_interleaved_blocks

STORED = Path(__file__).parent / "results" / "ratios.json"
BOUND, BOUND_ELSEWHERE = 1.6, 2.0
"""Factors that a ratio may be off by: from this processor's, or beyond those of all others."""
ROUNDS = 25
STORED_OF = 5  # measurements, of which the medians are stored
SIZES = Sizes(layers=2, hidden=256, intermediate=256, heads=4, kv_heads=1, head_dim=64, rows=8, context=1088)
STEPS, LONG, DRAFT = 16, 1024, 4
RATIOS = {
    "8 rows / 1 row": ("8 rows", "int8"),
    "float32 / bfloat16": ("float32", "bfloat16"),
    "bf12 / bfloat16": ("bf12", "bfloat16"),
    "int8 / bfloat16": ("int8", "bfloat16"),
    "int4 / bfloat16": ("int4", "bfloat16"),
    "fp8 / bfloat16": ("fp8", "bfloat16"),
    "Q8_0 / bfloat16": ("Q8_0", "bfloat16"),
    "Q4_K / bfloat16": ("Q4_K", "bfloat16"),
    "Q6_K / bfloat16": ("Q6_K", "bfloat16"),
    "Q4_K, 8-bit activations / Q4_K": ("Q4_K" + BYTE_ACTIVATIONS, "Q4_K"),
    "half the layers / all": ("half the layers", "int8"),
    f"context {LONG} / {STEPS}": ("long context", "int8"),
    "fp8 cache / float32 cache": ("long context, fp8", "long context"),
    f"draft of {DRAFT} and verification / step": ("drafts", "int8"),
    "adapter / none": ("adapter", "int8"),
}
"""What is over what, by the names of `cases`."""


def cases(isa: str) -> dict[str, Callable[[], object]]:
    """`STEPS` steps each, or as many drafts."""
    wanted = {name for pair in RATIOS.values() for name in pair}
    formats = wanted & set(FORMATS)
    if not reads_interleaved_blocks(isa):
        formats = {name for name in formats if BYTE_ACTIVATIONS not in name}
    models = {name: NativeSteps(SIZES, name, isa=isa) for name in sorted(formats)}
    plain, narrow = models["int8"], NativeSteps(SIZES, "int8", kv_cache_dtype="fp8", isa=isa)

    def drafts() -> None:
        for _ in range(STEPS):
            plain.draft_and_verify(1, DRAFT, skipped=[1])

    found: dict[str, Callable[[], object]] = {
        name: partial(model.step, model.rows(1), STEPS) for name, model in models.items()
    }
    found |= {
        "8 rows": partial(plain.step, plain.rows(8), STEPS),
        "half the layers": partial(plain.step, plain.rows(1, skipped=[1]), STEPS),
        "long context": partial(plain.step, plain.rows(1, context=LONG), STEPS),
        "long context, fp8": partial(narrow.step, narrow.rows(1, context=LONG), STEPS),
        "drafts": drafts,
        "adapter": partial(plain.step, plain.rows(1, adapters=[plain.adapter(8)]), STEPS),
    }
    assert found.keys() <= wanted
    return found


def measure(isa: str, rounds: int) -> dict[str, float]:
    """The ratios for an instruction set: of the least processor time of each case, the cases taking turns."""
    timed = cases(isa)
    least = dict.fromkeys(timed, float("inf"))
    for _ in range(rounds):
        for name, run in timed.items():
            began = time.thread_time()
            run()
            least[name] = min(least[name], time.thread_time() - began)
    return {name: least[over] / least[under] for name, (over, under) in RATIOS.items() if over in least}


def medians(isa: str, rounds: int, times: int) -> dict[str, float]:
    """The median of each ratio over as many measurements."""
    found = [measure(isa, rounds) for _ in range(times)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def processor() -> str:
    """The processor, so far as its ratios depend on it: names alone are shared by several generations."""
    fields, wanted = cpuinfo(), ("vendor_id", "cpu family", "model", "stepping", "cache size")
    return ", ".join(f"{name} {fields[name]}" for name in wanted if name in fields) or platform.processor()


def stored() -> dict[str, dict[str, dict[str, float]]]:
    """The stored ratios by processor and instruction set."""
    found: dict[str, dict[str, dict[str, float]]] = json.loads(STORED.read_text(encoding="utf-8"))["processors"]
    return found


def comparable(isa: str) -> tuple[list[dict[str, float]], float]:
    """The ratios that those of an instruction set are compared with here, and the factor that they may be off by."""
    known = stored() if STORED.exists() else {}
    own = [known[processor()][isa]] if isa in known.get(processor(), {}) else []
    return (own, BOUND) if own else ([of[isa] for of in known.values() if isa in of], BOUND_ELSEWHERE)


def differences(found: dict[str, float], known: Sequence[dict[str, float]], bound: float) -> list[str]:
    """Names of ratios that are off by more than a factor of `bound`, below the least known or above the most."""
    ends = {name: (min(one[name] for one in known), max(one[name] for one in known)) for name in found}
    return [name for name, value in found.items() if not ends[name][0] / bound <= value <= ends[name][1] * bound]


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each ratio, with the stored values and the factor that it may be off by."""
    rows = []
    for isa, found in report["ratios"].items():
        known, bound = comparable(isa)
        for name, value in found.items():
            there = " to ".join(f"{one:.3g}" for one in sorted({one[name] for one in known if name in one}))
            rows.append((isa, name, f"{value:.3g}", there or "none", f"{bound:g}"))
    print_table(console, ("instruction set", "ratio", "here", "stored", "bound"), rows, "ratios of processor time")


def judged(ratios: dict[str, dict[str, float]], rounds: int, bound: float | None = None) -> list[str]:
    """What is wrong with the ratios; one that is off counts where a second measurement finds it off too.

    `bound` None takes that of `comparable`.
    """
    failures = []
    for isa, found in ratios.items():
        known, usual = comparable(isa)
        factor = bound or usual
        if not known:
            failures.append(f"no ratios are stored for {isa}: --store keeps those of this machine")
        elif off := differences(found, known, factor):
            again = differences(measure(isa, rounds), known, factor)
            failures += [f"{isa}: {name} is off by more than a factor of {factor:g}" for name in off if name in again]
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare, and store where that is asked for."""
    parser = Parser("regressions", __doc__, arguments)
    parser.add_argument("--isa", nargs="+", choices=isas_here(), default=isas_here()[:1], help="of them [best]")
    default = f"[{BOUND:g}; {BOUND_ELSEWHERE:g} where this processor has none stored]"
    parser.add_argument("--bound", type=float, help=f"factor that a ratio may be off by {default}")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"turns of each case [{ROUNDS}]")
    parser.add_argument("--store", action="store_true", help="keep the ratios of these instruction sets")
    options = parser.given()
    report: dict[str, Any] = {
        "benchmark": "regressions",
        "processor": processor(),
        "ratios": {isa: medians(isa, options.rounds, STORED_OF if options.store else 1) for isa in options.isa},
    }
    parser.publish(report, show, width=110)
    if options.store:
        kept = stored() if STORED.exists() else {}
        own = kept.get(processor(), {}) | report.pop("ratios")
        write_json(report | {"processors": kept | {processor(): own}}, STORED)
        return 0
    failures = judged(report["ratios"], options.rounds, options.bound)
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
