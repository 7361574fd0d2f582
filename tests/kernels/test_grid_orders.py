"""No program of a launch relies on another: on a GPU they run in any order, in the interpreter one after another.
So each operation runs with its programs in order, backwards and shuffled, and gives the same bits. Sizes are those
at which a launch has several programs in every direction."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows
from d3engine.kernels.triton import products, scores

HIDDEN, HEADS, CHANNELS, GATES, VOCABULARY, BLOCK = 64, 2, 16, 40, 96, 4


@contextmanager
def order_of_programs(order: str) -> Iterator[list[int]]:
    """The interpreter's programs in this order within; yields how many each launch had."""
    from triton.runtime.interpreter import interpreter_builder as builder

    launches: list[int] = []
    places: list[tuple[int, int, int]] = []
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx

    def begin(x: int, y: int, z: int) -> None:
        launches.append(prod((x, y, z)))
        places[:] = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        if order == "shuffled":
            random.Random(len(launches)).shuffle(places)
        if order == "in order":
            places.reverse()  # taken from the end
        set_dim(x, y, z)

    builder.set_grid_dim = begin
    builder.set_grid_idx = lambda *given: set_index(*places.pop())
    try:
        yield launches
    finally:
        del builder.set_grid_dim, builder.set_grid_idx


@pytest.fixture(autouse=True)
def interpreted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU has its own order")
    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)
    monkeypatch.setattr(products, "MIN_STEPS", 1)
    monkeypatch.setattr(scores, "TILE", 32)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(rows: int) -> list[Tensor]:
    """Everything of a decoded layer: what it returns and what it writes."""
    hidden, norm, count = numbers(rows, HIDDEN), numbers(HIDDEN, seed=1), torch.tensor([rows], dtype=torch.int32)
    heads, lengths = HEADS * CHANNELS, [149 - 70 * row for row in range(rows)]
    tables = (torch.arange(rows * 38).view(1, rows, 38) + 1).clone()
    pool = numbers(rows * 38 + 1, 2, BLOCK, HEADS, CHANNELS, seed=2)
    keys = torch.tensor(
        [int(tables[0, row, (n - 1) // BLOCK]) * 2 * BLOCK + (n - 1) % BLOCK for row, n in enumerate(lengths)]
    )
    entries = torch.stack((keys, keys + BLOCK), dim=1)
    rotations = torch.polar(torch.ones(rows, CHANNELS // 2), numbers(rows, CHANNELS // 2, seed=3))
    queries = kernels.qkv(
        hidden, norm, 1e-5, numbers(3 * heads, HIDDEN, seed=4), None, rotations, pool, entries, HEADS, num_rows=count
    )
    inputs = kernels.attention_inputs(list(range(rows + 1)), lengths, tables)[0]
    attended = kernels.paged_attention(queries, pool, inputs, 0.25)
    (chunk,) = kernels.attention_inputs([0, rows], [40], tables[:, :1])
    chunked = kernels.paged_attention(queries, pool, chunk, 0.25)
    kernels.linear_residual(attended, numbers(HIDDEN, heads, seed=5), None, hidden, num_rows=count)
    gates = kernels.gate_up(hidden, norm, 1e-5, numbers(2 * GATES, HIDDEN, seed=6), None, num_rows=count)
    return [queries, attended, chunked, pool, hidden, gates]


def ends_of_a_step(rows: int) -> list[Tensor]:
    """What begins a step, and what chooses its tokens."""
    state = DecodeRows.empty(rows, 3, 8, CHANNELS, 2, torch.device("cpu"))
    state.num_rows.fill_(rows)
    state.cutoffs.fill_(5)
    kernels.begin_step(state, torch.polar(torch.ones(32, CHANNELS // 2), numbers(32, CHANNELS // 2)), BLOCK)
    hidden, norm, head = numbers(rows, HIDDEN), numbers(HIDDEN, seed=1), numbers(VOCABULARY, HIDDEN, seed=7)
    ones, ids = torch.ones(rows), torch.arange(rows)
    drawn = kernels.lm_head_sample(hidden, norm, 1e-5, head, ones, ids, ids, state.steps)
    likeliest = kernels.lm_head_argmax(hidden, norm, 1e-5, head)
    logits = kernels.lm_head(hidden, norm, 1e-5, head)
    seen, counts = torch.zeros(rows, VOCABULARY, dtype=torch.uint8), torch.zeros(rows, VOCABULARY, dtype=torch.int32)
    penalties = Penalties(ones * 1.1, ones * 0.1, ones * 0.1, seen, counts)
    asked = SamplingRows(ones, ids, ids, Cuts(ones * 0.01, ids + 5, ones * 0.9), penalties)
    cut = kernels.sample(logits, asked, state.steps)
    kernels.count_tokens(counts, cut[0])
    kernels.end_step(state, *cut)
    return [*vars(state).values(), *drawn, *likeliest, logits, *cut, counts]


@pytest.mark.parametrize(("run", "rows"), [(layer, 3), (ends_of_a_step, 2)])
def test_programs_in_any_order_give_the_same_bits(run: Callable[[int], list[Tensor]], rows: int) -> None:
    found = {}
    for order in ("in order", "backwards", "shuffled"):
        with order_of_programs(order) as launches:
            found[order] = run(rows)
        assert max(launches) > 2
    for order in ("backwards", "shuffled"):
        for nth, (one, other) in enumerate(zip(found["in order"], found[order], strict=True)):
            assert torch.equal(one, other), f"the result {nth} depends on the order: {order}"


def bits() -> str:
    """Of all that these operations return and write."""
    digest = sha256()
    for tensor in (*layer(2), *ends_of_a_step(2)):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_quick_interpreter_gives_the_bits_of_tritons() -> None:
    """The interpreter that tests use gives the bits of the one that Triton brings."""
    # But for the order of sums in products of tiles, which both take row by row.
    code = (
        "from interpreted_dot import multiply_row_by_row; multiply_row_by_row(); "
        "from d3engine.kernels.triton import products, scores; products.MIN_PROGRAMS = 2; products.MIN_STEPS = 1; "
        "scores.TILE = 32; import test_grid_orders; print(test_grid_orders.bits())"
    )
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    plain = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert plain.stdout.split() == [bits()]


def test_a_program_that_relies_on_the_one_before_it_is_seen(device: torch.device) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def count_up(out):
        program = tl.program_id(0)
        tl.store(out + program, tl.load(out + program - 1, mask=program > 0, other=0) + 1)

    counted = {}
    for order in ("in order", "backwards", "shuffled"):
        out = torch.zeros(4, dtype=torch.int32)
        with order_of_programs(order):
            count_up[(4,)](out)
        counted[order] = out.tolist()
    assert counted["in order"] == [1, 2, 3, 4]
    assert counted["backwards"] == [1, 1, 1, 1]
    assert counted["shuffled"] != counted["in order"]
