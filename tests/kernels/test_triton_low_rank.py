"""Low-rank maps of rows against the reference in float64; rows without one keep every bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import save_all
from tiny_models import random_prompts
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine import Engine, SamplingParams
from d3engine.kernels import reference
from d3engine.kernels.low_rank import LowRankMap, RowMaps
from d3engine.kernels.triton import batch_invariant
from d3engine.kernels.triton.low_rank import maps_launches

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rows_apart")

EPS = 1e-5
HIDDEN, OUTPUTS, HEADS, CHANNELS = 43, 64, 4, 8
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
OPERATIONS = ("qkv", "gate_up", "linear_residual", "lm_head")


def row_maps(stops: tuple[int, ...], rows: int, dtype: torch.dtype, device: torch.device) -> RowMaps:
    """Three adapters of several ranks, one of which lacks its second part, and rows with any of them or none."""
    generator = torch.Generator().manual_seed(1)
    table = torch.zeros(3, len(stops), 3, dtype=torch.int64)
    maps: list[tuple[LowRankMap | None, ...]] = []
    for adapter in range(3):
        own: list[LowRankMap | None] = []
        for part, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
            rank = (4, 9, 16)[(adapter + part) % 3]
            one = LowRankMap(*(torch.randn(rank, n, generator=generator) * 0.3 for n in (HIDDEN, stop - start)))
            own.append(None if (adapter, part) == (1, 1) else one.to(dtype, device))
            if (held := own[-1]) is not None:
                table[adapter, part] = torch.tensor([held.down.data_ptr(), held.up.data_ptr(), rank])
        maps.append(tuple(own))
    adapters = torch.tensor([7 * row % 4 - 1 for row in range(rows)], dtype=torch.int32)
    return RowMaps(adapters.to(device), maps.__getitem__, stops, table.to(device), 16)


def run(operation: str, ops: Any, given: dict[str, Tensor], maps: RowMaps | None, **more: Any) -> list[Tensor]:
    """What an operation returns and writes."""
    x, norm, weight, bias = (given[name] for name in ("x", "norm", "weight", "bias"))
    if maps is not None:
        more["maps"] = maps
    if operation == "gate_up":
        return [ops.gate_up(x, norm, EPS, weight, bias, **more)]
    if operation == "lm_head":
        return [ops.lm_head(x, norm, EPS, weight, **more)]
    if operation == "linear_residual":
        residual = given["residual"].clone()
        ops.linear_residual(x, weight, bias, residual, **more)
        return [residual]
    pool = torch.zeros(4, 2, 16, 2, CHANNELS, dtype=x.dtype, device=x.device)
    queries = ops.qkv(x, norm, EPS, weight, bias, given["rotations"], pool, given["entries"], HEADS, **more)
    return [queries.flatten(1), pool.view(-1, 2 * CHANNELS)[given["entries"].view(-1)].view(x.shape[0], -1)]


def inputs(rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(device, dtype)

    places = torch.arange(rows) // 16 * 32 + torch.arange(rows) % 16
    angles = torch.rand(rows, CHANNELS // 2, generator=generator)
    return (
        {"x": randn(rows, HIDDEN), "norm": randn(HIDDEN), "weight": randn(OUTPUTS, HIDDEN, scale=0.2)}
        | {"bias": randn(OUTPUTS), "residual": randn(rows, OUTPUTS)}
        | {"rotations": torch.polar(torch.ones_like(angles), angles).to(device)}
        | {"entries": torch.stack((places, places + 16), dim=1).to(device)}
    )


STOPS = {"qkv": (32, 48, 64), "gate_up": (32, 64), "linear_residual": (64,), "lm_head": (64,)}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (19, torch.float32), (5, torch.bfloat16)])
@pytest.mark.parametrize("ops", [kernels, batch_invariant], ids=["any", "batch invariant"])
def test_rows_gain_what_their_own_adapter_makes_of_them(
    operation: str, rows: int, dtype: torch.dtype, ops: Any, device: torch.device
) -> None:
    given, maps = inputs(rows, dtype, device), row_maps(STOPS[operation], rows, dtype, device)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    wide["rotations"] = given["rotations"].to(torch.complex64)
    plain = run(operation, ops, given, None)
    for found, expected, without in zip(
        run(operation, ops, given, maps), run(operation, reference, wide, maps), plain, strict=True
    ):
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        assert error < LIMITS[dtype], f"relative error {error:.2e}"
        none = maps.adapters < 0
        assert torch.equal(found[none], without[none])
        if rows > 1:
            assert not torch.equal(found[~none], without[~none])


def test_columns_are_shared_by_several_programs(device: torch.device) -> None:
    columns, generator = 1100, torch.Generator().manual_seed(0)
    x, down, up = (torch.randn(*sizes, generator=generator) for sizes in ((3, columns), (5, columns), (5, 70)))
    one = LowRankMap(down, up).to(torch.float32, device)
    table = torch.tensor([[[one.down.data_ptr(), one.up.data_ptr(), 5]]], device=device)
    adapters = torch.tensor([0, -1, 0], dtype=torch.int32, device=device)
    target = torch.zeros(3, 70, device=device)
    maps = RowMaps(adapters, lambda number: (one,), (70,), table, 8)
    first, second = maps_launches(x.to(device), maps, target, None)
    assert first.grid == (1, 1, 3)
    first.run()
    second.run()
    expected = x.double() @ down.double().t() @ up.double()
    expected[1] = 0
    assert float((target.cpu().double() - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_does_not_depend_on_its_neighbours(operation: str, device: torch.device) -> None:
    rows = 19
    given, maps = inputs(rows, torch.float32, device), row_maps(STOPS[operation], rows, torch.float32, device)
    found = run(operation, batch_invariant, given, maps)
    for row in (2, 17):
        by_row = ("x", "residual", "rotations", "entries")
        own = {name: value[row : row + 1] if name in by_row else value for name, value in given.items()}
        alone = run(operation, batch_invariant, own, maps.rows(slice(row, row + 1)))
        for one, other in zip(alone, found, strict=True):
            assert torch.equal(one[0], other[row])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_beyond_those_that_live_are_left(operation: str, device: torch.device) -> None:
    given, maps = inputs(5, torch.float32, device), row_maps(STOPS[operation], 5, torch.float32, device)
    live = torch.tensor([3], dtype=torch.int32, device=device)
    found = run(operation, kernels, given, maps, num_rows=live)
    whole = run(operation, kernels, given, maps)
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one[:3], other[:3])
    if operation == "linear_residual":
        assert torch.equal(found[0][3:], given["residual"][3:])


def test_engine_on_these_kernels_answers_as_pefts_merged_models(tmp_path: Path, device: torch.device) -> None:
    adapted, prompt = save_all(tmp_path), random_prompts([5])[0]
    names: list[str | None] = [None, "all", "some"]
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**20, "max_model_len": 16, "max_num_seqs": 4}
    options |= {"dtype": "float32", "backend": "triton", "lora_modules": adapted.paths, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with Engine(adapted.model, device=device, **options) as engine:
        found = engine.generate([prompt] * 3, params, use_tqdm=False, lora_request=names)
        assert engine.stats().backend == "triton"
    assert [one.outputs[0].token_ids for one in found] == [adapted.answer(name, prompt, 2) for name in names]
