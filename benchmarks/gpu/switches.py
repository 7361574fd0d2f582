"""Every choice of the kernels that only a device can settle, run each way: what the code takes, and what else it could.

A question is one operation on one set of inputs, a variant settings of modules under which the same call runs. Most
worth comes first. While time is left, machine code says how many bytes each variant keeps under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import kernels as part_kernels
from benchmarks.gpu.cases import BLOCK_SIZE, EPS, SHAPES, TINY, Case, Draw, Shape, cases, in_float64, quantized_cases
from benchmarks.gpu.common import (
    LEAST_S,
    Fill,
    Round,
    Row,
    fill_rows,
    require_device,
    synchronize,
    takes_scales_of_rows,
    timed,
)
from benchmarks.gpu.device import launched_as_in_engines
from d3engine.kernels import reference
from d3engine.kernels.quantized import Fp8Weight

KIB_IN_FLIGHT = (8, 16, 32, 64)
"""Bytes under way a processor at which reading is timed: what kernels have, and about twice what Hopper needs."""
LAUNCHED_LAYERS = 100
"""Layers that have fewer kernels than a stream holds before the host must wait."""
LAUNCHED_ROWS = 32
FP8_ROWS_ERROR = 0.08
"""Of a product of normal numbers whose rows are rounded to 8-bit floats: 0.026, and twice that in the interpreter,
which rounds the largest of a row down."""

Settings = tuple[tuple[str, str, Any], ...]
"""Attributes of modules of `d3engine.kernels.triton`: (module, name, value)."""


@dataclass(frozen=True)
class Question:
    """One case, and the settings under which it runs; the first variant is what the code does today."""

    name: str
    shape: Shape
    case: Case
    variants: dict[str, Settings]
    line: str | None = None  # of the table of tiles, which the answer judges
    rounding: Mapping[str, float] = field(default_factory=dict)  # relative errors of variants that round further


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in the rates of reading, and one row a question; a variant that fails is recorded, and fails the part."""
    if not current.has_triton:
        report["skipped"] = "Triton is not installed"
        return
    with launched_as_in_engines(current):
        _run(report, current)


def _run(report: dict[str, Any], current: Round) -> None:
    torch.manual_seed(0)
    for name, measure in (("reading", reading), ("launching", launching)):
        if name not in report:
            current.keep(report | {name: None})  # which a process behind one that dies of it leaves out
            report[name] = measure(current)
    launched: list[tuple[Row, list[Any]]] = []

    def begin(make: Callable[[], Iterable[Question]]) -> Iterator[tuple[Row, Fill]]:
        for question in make():
            row = {"question": question.name, "shape": question.shape.name, "today": next(iter(question.variants))}
            if question.line is not None:
                row["line"] = question.line
            yield row | {"variants": {}}, partial(ask, question=question, current=current, launched=launched)

    fill_rows(report, (partial(begin, make) for make in questions(current)), {"question": "", "shape": ""}, current)
    for found, launches in launched:
        if current.on_gpu and current.left() > LEAST_S:
            found["kernels"] = [_machine_code(launch) for launch in launches]
            current.keep(report)
    failed = [row for row in report["rows"] if any(map(_has_failed, (row, *row.get("variants", {}).values())))]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(report['rows'])} questions have a variant that failed; see `error`")


def reading(current: Round) -> list[dict[str, float]]:
    """The rate of reading at each number of bytes under way, and the latency of a load that it speaks of."""
    from benchmarks.gpu.reading import TILE, read

    processors = torch.cuda.get_device_properties(current.device).multi_processor_count if current.on_gpu else 2
    source = torch.ones(2**29 if current.on_gpu else 2**14, dtype=torch.int32, device=current.device)
    rows = []
    for kib in KIB_IN_FLIGHT:
        stages = kib * 1024 // (4 * TILE) + 1
        num_read = source.numel() // (processors * TILE) * TILE * processors
        if int(read(source, processors, stages).sum()) != num_read:
            raise RuntimeError(f"the reading kernel with {stages} stages has not read every number once")
        times = timed([lambda stages=stages: read(source, processors, stages)], current)  # type: ignore[misc]
        rate = 4 * num_read / (times["device_s"] or times["eager_s"])
        rows.append({"in_flight": kib * 1024, "bytes_per_s": rate, "latency_s": kib * 1024 * processors / rate})
    return rows


def launching(current: Round) -> dict[str, Any]:
    """Seconds that the host takes to launch a small layer, as the code does it and with nothing kept of calls before.

    The device is faster at such a layer, and waits.
    """
    from d3engine.kernels import triton as kernels

    case = _layer(TINY[0], LAUNCHED_ROWS if current.on_gpu else 3, current)
    inputs = case.prepare(kernels, case.inputs)
    ways: dict[str, Settings] = {"by_recipe": (), "anew": (("operations", "_recipe", lambda *_: None),)}
    found = {}
    for name, settings in ways.items():
        with switched(settings):
            case.call(kernels, case.inputs, inputs)
            synchronize(current.device)
            start = time.perf_counter()
            calls = LAUNCHED_LAYERS if current.on_gpu else 1
            for _ in range(calls):
                case.call(kernels, case.inputs, inputs)
            found[name] = (time.perf_counter() - start) / calls
            synchronize(current.device)
    return found


def ask(row: Row, question: Question, current: Round, launched: list[tuple[Row, list[Any]]]) -> None:
    """Fill in error and time of each variant; `launched` takes what each has launched, without any memory."""
    from d3engine.kernels import triton as kernels

    case = question.case
    row["bytes_moved"] = case.bytes_moved
    exact = case.results(reference, {name: in_float64(value) for name, value in case.inputs.items()})
    usual = part_kernels._errors(case, reference, exact).get("relative_error", [])
    for name, settings in question.variants.items():
        if current.left() < LEAST_S:
            break
        found = row["variants"][name] = {}
        try:
            with switched(settings):
                found["programmatic"] = programmatic_launches()
                with recorded() as launches:
                    found |= part_kernels._errors(case, kernels, exact)
                if current.on_gpu:
                    found |= part_kernels._times(case, kernels, current)
            found["grids"] = [launch.grid for launch in launches]
            launched.append((found, launches))
            least = question.rounding.get(name, 1e-6)
            pairs = zip(found.get("relative_error", []), usual, strict=True)
            found["is_far"] = any(not error <= max(part_kernels.FAR * other, least) for error, other in pairs)
        except Exception as error:
            # Where a tile does not fit the device, that is its answer.
            kind = "does_not_fit" if type(error).__name__ == "OutOfResources" else "error"
            found[kind] = f"{type(error).__name__}: {error}"[:500]
            require_device(current)


def programmatic_launches() -> bool:
    """Whether kernels are launched that way now."""
    launches = import_module("d3engine.kernels.triton.launches")
    return bool(launches.PROGRAMMATIC)


@contextmanager
def switched(settings: Settings) -> Iterator[None]:
    """Within it modules of `d3engine.kernels.triton` have these attributes."""
    from d3engine.kernels.triton import operations

    with ExitStack() as stack:
        stack.callback(operations.forget)
        for module, name, value in settings:
            stack.enter_context(patch.object(import_module(f"d3engine.kernels.triton.{module}"), name, value))
        operations.forget()
        yield


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """The launches that read weights or the cache within it, with tensors that have no memory."""
    from d3engine.kernels.triton.launches import Launch

    found: list[Any] = []
    run_it = Launch.run

    def record(launch: Launch) -> None:
        run_it(launch)
        if launch.streams:
            arguments = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in launch.arguments.items()}
            found.append(replace(launch, arguments=arguments))

    with patch.object(Launch, "run", record):
        yield found


def _machine_code(launch: Any) -> dict[str, Any]:
    """What a launch has under way on this device, by its machine code; or why that cannot be said."""
    from d3engine.kernels.ahead_of_time import needs

    major, minor = torch.cuda.get_device_capability()
    try:
        found = needs(launch, 10 * major + minor)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {name: found[name] for name in ("in_flight", "registers", "shared", "stack")}


def _has_failed(found: dict[str, Any]) -> bool:
    return "error" in found or bool(found.get("is_far"))


def questions(current: Round) -> Iterator[Callable[[], Iterable[Question]]]:
    """Makers of all questions, those first whose answers are worth most."""

    def one(make: Callable[..., Question], *given: Any) -> Callable[[], Iterable[Question]]:
        return lambda: [make(*given)]

    shape, grouped = SHAPES if current.on_gpu else (TINY[0], TINY[0])
    few, many = (8, 64) if current.on_gpu else (3, 3)
    yield one(_dependent_launch, "a kernel with next to no work", shape, partial(_short_norm, shape, current))
    for rows in (1, few) if current.on_gpu else (few,):
        yield one(_dependent_launch, f"a layer, {rows} rows", shape, partial(_layer, shape, rows, current))
    long, short = (4096, 64) if current.on_gpu else (200, 9)
    for each in dict.fromkeys((shape, grouped)):
        uneven = [long] + [short] * (15 if current.on_gpu else 2)
        yield one(_splits, "one long row among short ones", each, uneven, current)
        yield one(_splits, "one row", each, [long // 4], current)
        yield one(_splits, "even rows", each, [long // 8] * many, current)
        yield one(_stages, "even rows", each, [long // 8] * many, current)
    # Float weights meet cuBLAS early; small ones save it reading them as floats, and pay for each 128 rows again.
    blocks = current.blocks[0]
    borders: dict[str, tuple[int, ...]] = {"int8": (3,)}
    if current.on_gpu:
        borders = {"": (24, 64, 128), "int8": (128, 512), "int4": (128, 512), blocks: (128, 512)}
    for scheme, counts in borders.items():
        for rows in counts:
            yield partial(_borders, shape, rows, scheme, current)
    if "fp8" in current.schemes:
        yield partial(_prompts, shape, 2048 if current.on_gpu else few, current)
    for rows in (1, few, many) if current.on_gpu else (few,):
        for scheme in ("", "int8", "int4", blocks) if current.on_gpu else ("", blocks):
            yield partial(_tiles, shape, rows, scheme, current)


def _dependent_launch(name: str, shape: Shape, make: Callable[[], Case]) -> Question:
    today = programmatic_launches()
    variants: dict[str, Settings] = {
        f"PDL {'on' if way else 'off'}": (("launches", "PROGRAMMATIC", way),) for way in (today, not today)
    }
    return Question(f"{name}: PDL", shape, make(), variants)


def _short_norm(shape: Shape, current: Round) -> Case:
    draw = Draw(current)
    return Case(
        "rms_norm",
        {"x": draw.normal(1, shape.channels), "norm": draw.norm(shape.channels)},
        lambda kernels, i, _: kernels.rms_norm(i["x"], i["norm"], EPS),
        6 * shape.channels,
    )


def _layer(shape: Shape, rows: int, current: Round) -> Case:
    """All launches of a layer in a row, on the residual stream."""
    products = {case.operation: case for case in cases(shape, rows, current)}
    one, two, three, four = (
        products[name].inputs for name in ("qkv", "linear_residual o", "gate_up", "linear_residual down")
    )
    attend = products[f"paged_attention {shape.contexts[0]}"]

    def call(kernels: Any, i: Any, inputs: Any) -> None:
        rotated = (i["rotations"], i["pool"], i["entries"], shape.heads)
        queries = kernels.qkv(i["residual"], i["norm"], EPS, i["qkv"], None, *rotated)
        attended = kernels.paged_attention(queries, i["pool"], inputs, shape.channels**-0.5)
        kernels.linear_residual(attended, i["o"], None, i["residual"])
        gates = kernels.gate_up(i["residual"], i["norm"], EPS, i["gate_up"], None)
        kernels.linear_residual(gates, i["down"], None, i["residual"])

    tables = attend.inputs["tables"]
    keys = tables[0, :, -1] * 2 * BLOCK_SIZE + BLOCK_SIZE - 1  # type: ignore[index]
    names = ("qkv", "linear_residual o", "gate_up", "linear_residual down")
    return Case(
        "layer",
        {
            "residual": two["residual"],
            "norm": one["norm"],
            "qkv": one["weight"],
            "rotations": one["rotations"],
            "pool": attend.inputs["pool"],
            "tables": tables,
            "entries": torch.stack((keys, keys + BLOCK_SIZE), dim=1),
            "o": two["weight"],
            "gate_up": three["weight"],
            "down": four["weight"],
        },
        call,
        sum(products[name].bytes_moved for name in names) + attend.bytes_moved,
        written=lambda i: i["residual"],
        prepare=attend.prepare,
    )


def _attention(shape: Shape, lengths: list[int], current: Round) -> Case:
    """Decoding rows of these lengths; each has blocks of its own, in random order."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = torch.randperm(sum(counts), device=current.device)
    tables = torch.zeros(1, len(lengths), max(counts), dtype=torch.int64, device=current.device)
    for row, own in enumerate(blocks.split(counts)):
        tables[0, row, : len(own)] = own
    draw, rows = Draw(current), len(lengths)
    pool = draw.normal(sum(counts), 2, BLOCK_SIZE, shape.kv_heads, shape.channels)
    return Case(
        "paged_attention",
        {"queries": draw.normal(rows, shape.heads, shape.channels), "pool": pool, "tables": tables},
        lambda kernels, i, inputs: kernels.paged_attention(i["queries"], i["pool"], inputs, shape.channels**-0.5),
        (sum(lengths) * shape.kv_heads + rows * shape.heads) * 2 * shape.channels * pool.element_size(),
        rotated="pool",
        prepare=lambda kernels, i: kernels.attention_inputs(
            list(range(rows + 1)), lengths, i["tables"].to(kernels.TABLE_DTYPE)
        )[0],
    )


def _splits(name: str, shape: Shape, lengths: list[int], current: Round) -> Question:
    variants: dict[str, Settings] = {"today": ()}
    for entries in (64, 256, 512, 2**20) if current.on_gpu else (256,):  # the last: no row is split
        variants[f"{entries} entries a split"] = (("paged_attention", "SPLIT", entries),)
    for programs in (2, 3, 4) if current.on_gpu else ():
        variants[f"{programs} programs a processor"] = _tuned(programs=programs)
    return Question(f"attention, {name}: splits", shape, _attention(shape, lengths, current), variants)


def _stages(name: str, shape: Shape, lengths: list[int], current: Round) -> Question:
    variants: dict[str, Settings] = {"today": ()}
    for stages in (1, 2, 3, 4, 5) if current.on_gpu else (2,):
        variants[f"{stages} stages"] = _tuned(num_stages=stages)
    return Question(f"attention, {name}: pipelining", shape, _attention(shape, lengths, current), variants)


def _tuned(**changes: int) -> Settings:
    """Attention with the tile of today but for some of its fields."""
    tune = import_module("d3engine.kernels.triton.paged_attention").tune_single_rows
    return (("paged_attention", "tune_single_rows", lambda *given: replace(tune(*given), **changes)),)


def _borders(shape: Shape, rows: int, scheme: str, current: Round) -> Iterator[Question]:
    """From how many rows on each matrix is better left to cuBLAS."""
    products = import_module("d3engine.kernels.triton.products")
    borders = ("MATMUL_ROWS", "UNPACK_ROWS")  # of float weights, and of quantized ones beside half precision
    reads_small = scheme != "" and current.dtype != torch.float32
    ways = {"own kernel": 10**9, "cuBLAS": 0}
    first = "own kernel" if rows <= getattr(products, borders[reads_small]) else "cuBLAS"
    names = sorted(ways, key=lambda name: name != first)
    variants: dict[str, Settings] = {name: tuple(("products", each, ways[name]) for each in borders) for name in names}
    for case in _matrices(shape, rows, scheme, current):
        yield Question(f"{case.operation}, {rows} rows: border", shape, case, variants)


def _prompts(shape: Shape, rows: int, current: Round) -> Iterator[Question]:
    """8-bit floats unpacked for cuBLAS, or met by rows of 8-bit floats, or read by the own kernel."""
    unpacked = tuple(("products", border, 0) for border in ("MATMUL_ROWS", "UNPACK_ROWS"))
    variants: dict[str, Settings] = {
        "unpacked": unpacked,
        "8-bit rows": (*unpacked, ("matmul", "Fp8RowsWeight", Fp8Weight)),
        "own kernel": tuple((module, border, 10**9) for module, border, _ in unpacked),
    }
    if not current.on_gpu and not takes_scales_of_rows():
        del variants["8-bit rows"]
    for case in _matrices(shape, rows, "fp8", current):
        name = f"{case.operation}, {rows} rows: prompts"
        yield Question(name, shape, case, variants, rounding={"8-bit rows": FP8_ROWS_ERROR})


def _tiles(shape: Shape, rows: int, scheme: str, current: Round) -> Iterator[Question]:
    """Outputs a program, stages and parts around the tile of today."""
    products = import_module("d3engine.kernels.triton.products")
    for case in _matrices(shape, rows, scheme, current):
        operation = case.operation.split()[0]
        splits = operation == "linear_residual" or (operation == "qkv" and rows > products.FEW_ROWS.value)
        may_split = {"may_split": True} if splits else {}
        weight = case.inputs["weight"]
        today = products.product_tile(rows, weight, current.dtype, **may_split)
        least = 2 if rows == 1 else 16  # of outputs: pairs of channels stay together, tensor cores take 16
        changes = {f"{n} outputs": {"outputs": n} for n in (today.outputs // 2, today.outputs * 2) if n >= least}
        changes |= {f"{n} stages": {"stages": n} for n in (1, 2, 4, 6) if n != today.stages}
        if may_split and rows > 1:
            changes |= {f"{n} parts": {"parts": n} for n in (1, 2, 4) if n != today.parts}
        variants: dict[str, Settings] = {"today": ()}
        for name, change in changes.items():
            tile = replace(today, **change)
            tile = replace(tile, parts=-(-weight.shape[1] // tile.part_columns(weight.shape[1])))  # none is empty
            variants[name] = ((operation, "product_tile", lambda *_, tile=tile, **__: tile),)
        line = None
        if rows > 1:
            kernel = "few rows" if rows <= products.FEW_ROWS.value else "product"
            kernel += " of float32" if current.dtype == torch.float32 else ""
            line = f"{kernel}, {import_module('d3engine.kernels.triton.tiles').form_of(weight)}, {rows} rows"
        yield Question(f"{case.operation}, {rows} rows: tile", shape, case, variants, line)


def _matrices(shape: Shape, rows: int, scheme: str, current: Round) -> Iterator[Case]:
    """The products of a layer; the head is shaped like the first."""
    found = cases(shape, rows, current) if scheme == "" else quantized_cases(shape, rows, current, scheme)
    wanted = ("qkv", "linear_residual o", "gate_up", "linear_residual down")
    wanted = wanted if current.on_gpu else wanted[:2]
    for case in found:
        if case.operation.removesuffix(scheme).strip() in wanted:
            yield case
        if case.operation.startswith("lm_head"):
            return
