"""Rows that do not live cost nothing: their programs write nothing, and read little more than how many rows live.
Results cannot show it. What is computed in vain ends in a mask, or in scratch that is not read, and on a GPU it
would only be slow. So what every launch loads and stores is counted, which only the interpreter can."""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton

import d3engine.kernels.triton as kernels
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows
from d3engine.kernels.triton import products, scores
from d3engine.kernels.triton.launches import Launch

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only the interpreter can count")

EPS = 1e-5
A_PROGRAM_MAY_LOAD = 7
"""Numbers with which a program finds out that it has nothing to do: of rows, and where chunks begin and end."""


@dataclass
class AdmissionControl:
    """Elements loaded and stored, and programs launched."""

    loaded: int = 0
    stored: int = 0
    programs: int = 0


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> AdmissionControl:
    """What the interpreter moves from here on."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, store, run = builder.create_masked_load, builder.create_masked_store, Launch.run
    found = AdmissionControl()

    def count_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        found.loaded += int(mask.data.sum())
        return load(self, pointers, mask, *others)

    def count_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        found.stored += int(mask.data.sum())
        return store(self, pointers, value, mask, *others)

    def count_programs(self: Launch) -> None:
        found.programs += math.prod(self.grid)
        run(self)

    monkeypatch.setattr(builder, "create_masked_load", count_load)
    monkeypatch.setattr(builder, "create_masked_store", count_store)
    monkeypatch.setattr(Launch, "run", count_programs)
    return found


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of every operation and path on small tensors, products split."""
    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)
    monkeypatch.setattr(products, "MIN_STEPS", 1)
    monkeypatch.setattr(products, "MATMUL_ROWS", 40)
    monkeypatch.setattr(scores, "TILE", 64)


Call = Callable[[int, torch.Tensor | None], object]
"""Runs an operation on so many rows, of which the tensor says how many live; None: all."""


def operations() -> dict[str, Call]:
    width, heads, kv_heads, channels, vocab = 32, 2, 1, 16, 150
    norm, matrix = torch.ones(width), torch.ones(64, width)
    pool = torch.ones(50, 2, 16, kv_heads, channels)

    def draws(rows: int) -> SamplingRows:
        return SamplingRows(torch.ones(rows), torch.arange(rows), torch.arange(rows))

    def sample(rows: int, live: torch.Tensor | None) -> None:
        floats, seen = torch.full((rows,), 0.5), torch.zeros(rows, vocab, dtype=torch.int32)
        given = replace(
            draws(rows),
            cuts=Cuts(floats * 0.1, torch.full((rows,), 40), floats),
            penalties=Penalties(floats, floats, floats, seen.byte(), seen),
        )
        logits = torch.linspace(0, 1, vocab).repeat(rows, 1)
        kernels.sample(logits, given, torch.arange(rows), num_rows=live)

    def qkv(rows: int, live: torch.Tensor | None) -> None:
        entries = torch.arange(2 * rows).view(rows, 2)
        rotations = torch.ones(rows, channels // 2, dtype=torch.complex64)
        hidden = torch.ones(rows, width)
        kernels.qkv(hidden, norm, EPS, matrix, None, rotations, pool, entries, heads, num_rows=live)

    def attention(lengths: list[int], starts: list[int]) -> Callable[[int, torch.Tensor | None], None]:
        inputs = kernels.attention_inputs(starts, lengths, torch.arange(20).view(1, 2, 10))[0]
        call = partial(kernels.paged_attention, pool=pool, inputs=inputs, scale=0.25)
        call(torch.ones(starts[-1], heads, channels))  # the first layer of a step lists the splits of all rows
        return lambda rows, live: call(torch.ones(rows, heads, channels), num_rows=live)

    def head_draw(rows: int, live: torch.Tensor | None) -> None:
        given = draws(rows)
        numbers = (given.temperature, given.seeds, given.indices, torch.arange(rows))
        kernels.lm_head_sample(torch.ones(rows, width), norm, EPS, matrix, *numbers, num_rows=live)

    return {
        "rms_norm": lambda rows, live: kernels.rms_norm(
            torch.ones(rows, width), norm, EPS, residual=torch.ones(rows, width), num_rows=live
        ),
        "add_norm": lambda rows, live: kernels.add_norm(
            torch.ones(rows, width), norm, EPS, torch.ones(rows, width), num_rows=live
        ),
        "qkv": qkv,
        "paged_attention, single rows": attention([150, 150], [0, 1, 2]),
        "paged_attention, long chunks": attention([150, 150], [0, 3, 6]),
        "linear_residual": lambda rows, live: kernels.linear_residual(
            torch.ones(rows, 512), torch.ones(32, 512), None, torch.ones(rows, 32), num_rows=live
        ),
        "gate_up": lambda rows, live: kernels.gate_up(torch.ones(rows, width), norm, EPS, matrix, None, num_rows=live),
        "lm_head": lambda rows, live: kernels.lm_head(torch.ones(rows, width), norm, EPS, matrix, num_rows=live),
        "lm_head_argmax": lambda rows, live: kernels.lm_head_argmax(
            torch.ones(rows, width), norm, EPS, matrix, num_rows=live
        ),
        "lm_head_sample": head_draw,
        "sample": sample,
        "count_tokens": lambda rows, live: kernels.count_tokens(
            torch.zeros(rows, vocab, dtype=torch.int32), torch.arange(rows), num_rows=live
        ),
        "copy_entries": lambda rows, live: kernels.copy_entries(
            pool, torch.arange(rows), torch.arange(rows) + rows, num_rows=live
        ),
    }


def sizes() -> Iterator[tuple[str, int]]:
    """Rows to call each operation with: one for each path of the products, the last through torch.matmul."""
    for name in operations():
        if name.startswith("paged_attention"):
            yield name, 2 if "single" in name else 6
        elif name.split("_")[0] in ("qkv", "linear", "gate", "lm"):
            yield from ((name, rows) for rows in (1, 5, 20, 40, 43))
        else:
            yield name, 5


@pytest.mark.parametrize(("name", "rows"), sizes())
def test_without_live_rows_nothing_is_written(name: str, rows: int, traffic: AdmissionControl) -> None:
    """Without a row that lives nothing is written, and next to nothing read."""
    call = operations()[name]
    traffic.loaded = traffic.stored = traffic.programs = 0
    call(rows, torch.zeros(1, dtype=torch.int32))
    assert traffic.programs > 0 or name.startswith("lm_head")  # of many rows and torch's product: no kernel is left
    assert traffic.stored == 0
    assert traffic.loaded <= A_PROGRAM_MAY_LOAD * traffic.programs


@pytest.mark.parametrize("name", [name for name in operations() if not name.startswith("paged_attention")])
def test_live_rows_move_what_they_move_without_others(name: str, traffic: AdmissionControl) -> None:
    """Rows that live move what they would move without the others."""
    call = operations()[name]
    traffic.loaded = traffic.stored = traffic.programs = 0
    call(3, None)
    alone = replace(traffic)
    call(5, torch.tensor([3], dtype=torch.int32))
    assert traffic.stored == 2 * alone.stored
    assert 0 <= traffic.loaded - 2 * alone.loaded <= A_PROGRAM_MAY_LOAD * (traffic.programs - alone.programs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cuts_nothing_is_not_searched_for_its_border(temperature: float, traffic: AdmissionControl) -> None:
    logits, zeros = torch.linspace(0, 1, 150).repeat(2, 1), torch.zeros(2, dtype=torch.int64)
    nothing = Cuts(zeros.float(), zeros, zeros.float() + 1)
    some = Cuts(zeros.float() + 0.5, zeros + 3, zeros.float() + 0.5)  # of a greedy row it means nothing
    rows = SamplingRows(zeros.float() + temperature, zeros, zeros)
    kernels.sample(logits, rows, zeros)
    before = replace(traffic)
    kernels.sample(logits, replace(rows, cuts=nothing if temperature else some), zeros)
    assert traffic.stored - 2 * before.stored == 0
    assert traffic.loaded - 2 * before.loaded <= A_PROGRAM_MAY_LOAD * (traffic.programs - before.programs)


@pytest.mark.parametrize("heads", [1, 2])
def test_entries_of_a_long_row_are_shared_by_all_programs(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of a long row among short ones are shared by all programs."""
    # A layer takes as long as the program that reads most.
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, attention = builder.create_masked_load, importlib.import_module("d3engine.kernels.triton.paged_attention")
    read: Counter[int] = Counter()

    def count_tiles(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        read[self.grid_idx[0]] += mask.data.ndim == 2 and int(mask.data.sum())
        return load(self, pointers, mask, *others)

    monkeypatch.setattr(builder, "create_masked_load", count_tiles)
    monkeypatch.setattr(attention, "processors_of", lambda _: 1)
    lengths = [11 * 128, 20, 9]
    inputs = kernels.attention_inputs([0, 1, 2, 3], lengths, torch.zeros(1, 3, 88, dtype=torch.int64))[0]
    for _ in range(2):  # the first lists the splits as well
        read.clear()
        kernels.paged_attention(torch.ones(3, heads, 16), torch.ones(1, 2, 16, 1, 16), inputs, 0.25)
    assert len(read) in (2, 3)
    assert max(read.values()) < 1.25 * sum(read.values()) / len(read)


def test_every_operation_with_rows_that_may_not_live_is_here() -> None:
    found = {name.split(",")[0] for name in operations()}
    of_whole_steps = {"attention_inputs", "decode_attention_inputs", "begin_step", "end_step"}
    assert found == set(kernels.__all__) - of_whole_steps - {"embed"}  # which looks up whatever token stands there


def test_the_ends_of_a_step_leave_rows_that_do_not_live_alone(traffic: AdmissionControl) -> None:
    layers = 3
    rows = DecodeRows.empty(5, layers, 4, 8, 2, "cpu")
    kernels.begin_step(rows, torch.ones(8, 4, dtype=torch.complex64), 16)
    assert traffic.stored == layers  # how many rows run each
    kernels.end_step(rows, torch.ones(5, dtype=torch.int64), torch.ones(5))
    assert traffic.stored == layers + 1  # steps taken
    assert traffic.loaded <= A_PROGRAM_MAY_LOAD * traffic.programs
