"""Compiles the Triton kernels ahead of time and prints what they cost: no GPU is needed.

    python -m d3engine.kernels.inspect [--arch 80,90,100] [--shapes llama2-7b,llama3-8b] [--dtype bf16] [--weights all]
        [--operations qkv,gate_up] [--rows 1,16] [--spills-only] [--no-pdl]
        [--batch-invariant] [--matmul-rows 256] [--jobs 2] [--json]
    python -m d3engine.kernels.inspect --tiles

Every launch that `kernels/triton/launches.py` knows is compiled to a cubin with the specializations that the launcher
would get at run time. What was compiled stays in Triton's cache: a run that was cut off goes on from there.

The exit code is 1 if a kernel uses local memory or a stack: then registers were spilled, and a kernel whose limit is
memory bandwidth pays for that twice. It is 1 too if a kernel wants more shared memory than a program may have (the
column `shared` has both, in KiB); if one that streams weights or the cache keeps too little of them in flight (see
`machine_code.py`); if the last program of a row waits at too many barriers until the parts of its splits are one; if
attention waits too long before each split (the column `waits`: loads one behind another, and barriers); and if one
loads more than weights before it waits for the kernel in front of it, which from 9.0 on has not ended yet unless
`--no-pdl` says so. Of AMD's targets only shared memory is judged. It is 2 if something is asked for that is not known.
The interpreter's flag must be off: the two cannot share a process.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from d3engine.kernels.ahead_of_time import TRITON_NAMES, needs, specialization
from d3engine.kernels.target import PROCESSORS, TARGETS

if TYPE_CHECKING:
    from d3engine.kernels.triton.launches import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEAST_IN_FLIGHT = 16 * 1024
"""Bytes that a processor must have under way: 132 of them then read 3.7 TB/s at 800 cycles a load, about what an H200
can give. With less, waiting is the limit and not the memory."""
MOST_BARRIERS = 128
"""Behind which the last program of a row may wait, one after another: all other programs have ended by then. A turn of
one load and its barriers takes about half a microsecond."""
MOST_WAITS, MOST_BARRIERS_BEFORE = 2, 4
"""Loads, one behind another, and barriers for which attention may wait before each split: it has nothing under way."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled kernel needs; sizes in bytes, registers a thread."""

    arch: int | str
    shape: str
    weights: str
    operation: str
    label: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    stack: int
    local: int
    shared: int
    widest_load: int  # bytes of one thread's widest load from global memory
    wide_loads: float  # share of the statically loaded bytes that come in loads of 16 bytes
    streams: bool = False  # whether bandwidth is its limit
    in_flight: int = 0  # bytes that a processor has under way in the mean
    instructions: float = 0.0  # that a warp takes for a byte that is read once, in the loop that loads most
    barriers: int = 0  # of the last program of a row, where it puts the parts of 64 splits together
    waits: int = 0  # loads, one behind another, before each split's first wide load
    barriers_before: int = 0  # before it
    too_early: tuple[str, ...] = ()  # what it does before it waits for the kernel in front of it, and may not

    @property
    def kind(self) -> str:
        """Its weights and its rows, as `int8:32`."""
        return f"{self.weights}:{self.label.rpartition('rows=')[2]}"

    @property
    def spills(self) -> bool:
        """Whether the kernel touches local memory; of AMD's nothing is claimed."""
        return TARGETS[self.arch].is_cuda and (self.stack > 0 or self.local > 0)

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that one program may have there."""
        return TARGETS[self.arch].shared_kib * 1024

    @property
    def fits(self) -> bool:
        """Whether the shared memory of one program suffices."""
        return self.shared <= self.most_shared

    @property
    def starves(self) -> bool:
        """Whether it waits for memory with too few loads under way, on a device that its grid fills."""
        return self.streams and math.prod(self.grid) >= PROCESSORS and self.in_flight < LEAST_IN_FLIGHT

    @property
    def faults(self) -> list[str]:
        """What makes the exit code 1."""
        found = {
            "SPILLS": self.spills,
            "DOES NOT FIT": not self.fits,
            "STARVES": self.starves,
            "TOO EARLY": bool(self.too_early),
            "MEETS SLOWLY": self.barriers > MOST_BARRIERS,
            "BEGINS SLOWLY": self.waits > MOST_WAITS or self.barriers_before > MOST_BARRIERS_BEFORE,
        }
        return [name for name, is_so in found.items() if is_so]


def main(arguments: list[str] | None = None) -> int:
    """Print a table or JSON of all launches; return 1 if any has a fault not said to be known, 2 for bad input."""
    options = _parse(arguments)
    if options.tiles:
        from d3engine.kernels.triton import tiles

        print(tiles.table())
        return 0
    dtype = DTYPES[options.dtype]
    given = (options.weights, options.operations, options.jobs, not options.no_pdl, options.rows, options.spills_only)
    more = options.batch_invariant, options.matmul_rows
    try:
        usages = list(inspect(options.shapes, options.arch, dtype, *given, *more))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        names = ("most_shared", "spills", "fits", "faults")
        shown = [asdict(usage) | {name: getattr(usage, name) for name in names} for usage in usages]
        print(json.dumps(shown, indent=1))
    else:
        print(_table(usages))
    return int(any(set(u.faults) - ({"STARVES"} if u.kind in options.may_starve else set()) for u in usages))


def inspect(
    shapes: Iterable[str],
    archs: Iterable[int | str],
    dtype: torch.dtype,
    weights: Iterable[str] = (),
    operations: Iterable[str] = (),
    jobs: int = 1,
    programmatic: bool = True,
    rows: Iterable[int] = (),
    spills_only: bool = False,
    batch_invariant: bool = False,
    matmul_rows: int | None = None,
) -> Iterator[Usage]:
    """Compile every registered launch of the named shapes (of `operations` only, if any) and yield what it needs.

    `weights` names the forms of the matrices: that of `dtype` ("bf16"), "int8", "fp8", "fp8_groups", "int4", and types
    of blocks such as "Q4_K"; only the first if there is none. What does not depend on them is compiled once, as is
    every specialization that several launches share. Of launches for several row counts there are those for `rows`
    alone, if any. With `spills_only` what a kernel has in flight is not inspected. With `batch_invariant` projections
    are those of `batch_invariant.py`; with `matmul_rows` also those of up to this number of rows that torch would get.
    `programmatic`: launched so where the device has it. `jobs` processes compile.
    Raises `ValueError` for an unknown name or row count, and `RuntimeError` where kernels cannot be compiled.
    """
    # Imported late: `--help` needs no Triton, and nothing but this module may import it without a GPU.
    import triton

    from d3engine.kernels.triton import launches, products

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled in the same process")
    float_name, wanted, archs, rows = TRITON_NAMES[dtype], list(operations), list(archs), list(rows)
    forms = list(weights) or [float_name]
    _need_known("shapes", shapes := list(shapes), launches.SHAPES)
    _need_known("weights", forms, (float_name, *launches.QUANTIZED, *launches.BLOCKS))
    _need_known("operations", wanted, launches.MODULES)
    _need_known("arch", archs, TARGETS)
    _need_known("rows", rows, launches.ROW_COUNTS)
    others = tuple(f"rows={count}" for count in launches.ROW_COUNTS if rows and count not in rows)

    if matmul_rows is not None:
        products.MATMUL_ROWS = matmul_rows
    asked = []
    for arch in archs:
        launches.PROGRAMMATIC = programmatic and TARGETS[arch].has_programmatic_launch  # which some tiles depend on
        asked += [(arch, words, launch) for words, launch in _launches(shapes, forms, dtype, wanted, batch_invariant)]
    launches.PROGRAMMATIC = programmatic
    asked = [
        (arch, words, replace(launch, streams=launch.streams and not spills_only))
        for arch, words, launch in asked
        if TARGETS[arch].has(launch.least_capability) and not words["label"].endswith(others)
    ]
    works: dict[str, tuple[Launch, int | str]] = {}
    keys = []
    for arch, _, launch in asked:
        key = repr((launch.kernel.fn.__module__, launch.kernel.fn.__name__, specialization(launch, arch), arch))
        works.setdefault(key, (launch, arch))
        keys.append(key)
    results = dict(zip(works, _compile_all(list(works.values()), jobs), strict=True))
    for (arch, words, launch), key in zip(asked, keys, strict=True):
        yield Usage(arch=arch, grid=launch.grid, warps=launch.num_warps, **words, **results[key])


def _launches(
    shapes: list[str], forms: list[str], dtype: torch.dtype, operations: list[str], batch_invariant: bool
) -> Iterator[tuple[dict[str, Any], Launch]]:
    """All launches of these models, and the words of `Usage` that tell each from the others."""
    from d3engine.kernels.triton import launches

    for shape in shapes:
        for form in forms:
            # Every form has the projections; the rest comes with the first.
            every = operations or launches.MODULES
            names = every if form == forms[0] else [name for name in every if name in launches.PROJECTIONS]
            for operation, label, launch in launches.registered(
                launches.SHAPES[shape], dtype, form, names, batch_invariant=batch_invariant
            ):
                kind = form if operation in launches.PROJECTIONS else ""
                yield {"shape": shape, "weights": kind, "operation": operation, "label": label}, launch


def _need_known(field: str, values: Iterable[Any], allowed: Iterable[Any]) -> None:
    for value in values:
        if value not in (known := list(allowed)):
            raise ValueError(f"{field} must be one of {', '.join(map(str, sorted(known)))}; got {value!r}")


_works: list[tuple[Launch, int | str]] = []  # what the forked processes of `_compile_all` find by number


def _compile_all(works: list[tuple[Launch, int | str]], jobs: int) -> list[dict[str, Any]]:
    """What each kernel needs, by `Usage`'s names. Processes are forked: a launch cannot be sent to another process."""
    _works[:] = works
    if jobs == 1:
        return list(_told(map(_needs, range(len(works)))))
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return list(_told(pool.imap(_needs, range(len(works)))))


def _needs(number: int) -> dict[str, Any]:
    return needs(*_works[number])


def _told(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same, each tenth of all on the standard error."""
    for count, one in enumerate(found, start=1):
        if 10 * count // len(_works) > 10 * (count - 1) // len(_works):
            print(f"{count} of {len(_works)} kernels", file=sys.stderr, flush=True)
        yield one


def _table(usages: list[Usage]) -> str:
    from d3engine.kernels.triton.tiles import aligned

    header = ["arch", "shape", "weights", "operation", "launch", "grid", "warps"]
    header += ["regs", "stack", "local", "shared", "load", "16 B loads", "a byte", "barriers", "waits", "in flight"]
    rows = [
        (
            str(usage.arch),
            usage.shape,
            usage.weights,
            usage.operation,
            usage.label,
            "x".join(map(str, usage.grid)),
            str(usage.warps),
            str(usage.registers),
            str(usage.stack),
            str(usage.local),
            f"{usage.shared / 1024:.1f} of {usage.most_shared // 1024}",
            f"{usage.widest_load} B",
            f"{usage.wide_loads:.0%}",
            f"{usage.instructions:.2f}" if usage.streams else "",
            str(usage.barriers or ""),
            f"{usage.waits}+{usage.barriers_before}" if usage.barriers else "",
            " ".join([f"{usage.in_flight / 1024:.0f} KB" if usage.streams else "", *usage.faults]),
        )
        for usage in usages
    ]
    return aligned([header, *rows])


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m d3engine.kernels.inspect", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--arch", type=_archs, default=[90], help="compute capabilities without their point, or gfx942 and gfx950"
    )
    parser.add_argument("--shapes", type=_names, default=["llama2-7b", "llama3-8b"], help="names with commas")
    parser.add_argument("--operations", type=_names, default=[], help="names with commas; all if left out")
    parser.add_argument("--rows", type=_numbers, default=[], help="row counts with commas; all if left out")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of activations, and of weights that are not quantized"
    )
    parser.add_argument(
        "--weights",
        type=_names,
        default=[],
        help="the dtype, int8, fp8, fp8_groups, int4, types of blocks such as Q4_K; all: the dtype, int8, fp8, int4;"
        " the dtype if left out",
    )
    parser.add_argument(
        "--may-starve",
        type=_names,
        default=[],
        help="weights and rows, as int8:32, of which STARVES is printed, but is no failure",
    )
    parser.add_argument(
        "--spills-only", action="store_true", help="not what is in flight: machine code is slow to disassemble"
    )
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch, from 90 on")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="projections whose sums do not depend on the number of rows"
    )
    parser.add_argument(
        "--matmul-rows", type=int, help="leave products to torch of more rows alone, not of more than 64"
    )
    parser.add_argument("--tiles", action="store_true", help="compile nothing: print the table of tiles and why")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.weights == ["all"]:
        options.weights = [options.dtype, "int8", "fp8", "int4"]
    return options


def _archs(text: str) -> list[int | str]:
    return [int(name) if name.isdecimal() else name for name in _names(text)]


def _numbers(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
