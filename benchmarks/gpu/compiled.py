"""Compile what the round will launch, on all processors: later parts find it in the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import kernels as part_kernels
from benchmarks.gpu import switches
from benchmarks.gpu.cases import SHAPES, TINY, Case, cases, quantized_cases
from benchmarks.gpu.common import LEAST_S, Round
from benchmarks.gpu.device import launched_as_in_engines
from d3engine.kernels.target import TARGETS, target_of
from d3engine.model.quantization_config import QUANTIZATION_SCHEMES

Work = tuple[Any, int | str, bool]
"""A launch, its target, and whether launching is programmatic, which a switch may have turned off for it."""


@dataclass(frozen=True)
class Described(Round):
    """A round on tensors without memory: it launches nothing."""

    of_gpu: bool = True

    @property
    def on_gpu(self) -> bool:
        return self.of_gpu

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def schemes(self) -> tuple[str, ...]:
        return QUANTIZATION_SCHEMES


def run(report: dict[str, Any], current: Round) -> None:
    """Compile all launches of `kernels`, `switches` and the engines; in a rehearsal they are only counted."""
    if not current.has_triton:
        report["skipped"] = "Triton is not installed"
        return
    arch = target_of(current.device).arch if current.on_gpu else 90
    if arch not in TARGETS:
        report["skipped"] = f"nothing is known of {arch}"
        return
    with launched_as_in_engines(current):
        described = Described(
            torch.device("meta"), current.smoke, current.budget, current.started, of_gpu=current.on_gpu
        )
        if not current.on_gpu:  # the interpreter and the compiler cannot share a process
            report["launches"] = sum(1 for _ in launches_of(described, report))
            return
        _works[:] = distinct(launches_of(described, report), arch)
        report.update(launches=len(_works), compiled=0, failed=[])
        current.keep(report)
        begun, processes = time.monotonic(), max(1, (os.cpu_count() or 1) - 2)
        with get_context("fork").Pool(processes) as pool:
            for name, fault in pool.imap_unordered(_compile, range(len(_works))):
                if fault is None:
                    report["compiled"] += 1
                else:
                    report["failed"].append({"kernel": name, "error": fault})  # a tile that does not fit, perhaps
                report["seconds"] = time.monotonic() - begun
                current.keep(report)
                if current.left() < LEAST_S:
                    report["stopped"] = "time"
                    pool.terminate()
                    break


def launches_of(current: Described, report: dict[str, Any]) -> Iterator[Any]:
    """What the cases of later parts launch, and what `inspect` compiles for the models of the round."""
    from d3engine.kernels.triton import launches, operations

    shapes = SHAPES if current.on_gpu else TINY
    for shape in shapes:
        blocks = current.blocks[:1] if shape is shapes[0] else ()  # of the engine that has such
        for form in ("", *launches.QUANTIZED, *blocks) if current.on_gpu else ("int4",):
            names = launches.MODULES if form == "" else launches.PROJECTIONS
            for _, _, launch in launches.registered(launches.SHAPES[shape.name], current.dtype, form, names):
                yield launch
    for case, settings in _cases(current):
        try:
            with switches.switched(settings), ExitStack() as stack:
                found: list[Any] = []
                stack.enter_context(
                    patch.object(launches.Launch, "run", lambda launch, found=found: found.append(launch))
                )
                stack.enter_context(patch.object(operations.TorchCall, "run", lambda call: None))
                yield from _described(case, found)
        except Exception as error:
            report.setdefault("not_described", []).append(f"{case.operation}: {type(error).__name__}: {error}"[:300])


def _cases(current: Described) -> Iterator[tuple[Case, switches.Settings]]:
    for make in switches.questions(current):
        for question in make():
            for settings in question.variants.values():
                yield question.case, settings
    shapes = SHAPES if current.on_gpu else TINY
    for shape in shapes:
        blocks = current.blocks if shape is shapes[-1] else ()
        for rows in shape.rows:
            yield from ((case, ()) for case in cases(shape, rows, current))
            for scheme in (*current.schemes, *blocks) if current.on_gpu else (*current.schemes[:1], *blocks):
                yield from ((case, ()) for case in quantized_cases(shape, rows, current, scheme))
    if current.on_gpu:  # what the sanitizer runs, under which nothing should be compiled
        for rows in TINY[0].rows:
            yield from ((case, ()) for case in cases(TINY[0], rows, current))


def _described(case: Case, found: list[Any]) -> list[Any]:
    from d3engine.kernels import triton as kernels

    case.results(kernels, part_kernels.copies_of(case.inputs))
    return found


def distinct(found: Iterator[Any], arch: int | str) -> list[Work]:
    """One launch of each that is compiled to the same, of those that the target has."""
    from d3engine.kernels.ahead_of_time import specialization

    works: dict[str, Work] = {}
    for launch in found:
        if TARGETS[arch].has(launch.least_capability):
            key = repr((launch.kernel.fn.__module__, launch.kernel.fn.__name__, specialization(launch, arch)))
            works.setdefault(key, (launch, arch, switches.programmatic_launches()))
    return list(works.values())


_works: list[Work] = []  # what the forked processes find by number


def _compile(number: int) -> tuple[str, str | None]:
    from benchmarks.gpu import absent
    from d3engine.kernels.triton import launches

    launch, arch, launches.PROGRAMMATIC = _works[number]
    # A forked process must not use CUDA: Triton's own way then compiles for a device that it does not touch. What
    # `ahead_of_time.py` compiles is the same code under another key of the cache.
    absent.install(arch)
    arguments, options = launch.for_target(TARGETS[arch])
    try:
        launch.kernel.warmup(grid=launch.grid, **arguments, **options)
    except Exception as error:
        return launch.kernel.fn.__name__, f"{type(error).__name__}: {error}"[:300]
    return launch.kernel.fn.__name__, None
