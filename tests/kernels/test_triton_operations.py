"""Operations that are bound to tensors by a recipe do, and hand to the driver, what they do when described anew."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from addressed_interpreter import Addressed
from fixture_types import MakeEngine
from quantized_weights import fp8_of_groups
from torch import Tensor

import d3engine.kernels.triton as kernels
from d3engine import D3, FullDepth, SamplingParams, UnifiedSkip
from d3engine.kernels.quantized import quantize_fp8, quantize_int4, quantize_int8
from d3engine.kernels.triton import operations, products
from d3engine.kernels.triton.launches import Launch

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU every test runs by recipes")


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[operations._Recipe]:
    """The recipes by which operations are performed from here on; the interpreter's launches have them too."""
    run, perform = Launch.run, operations._Recipe.perform
    found: list[operations._Recipe] = []

    def compiled(launch: Launch) -> Addressed | None:
        run(launch)
        return Addressed(launch) if all(launch.grid) else None

    def counted(recipe: operations._Recipe, tensors: list[Tensor], addresses: list[int]) -> Tensor | None:
        found.append(recipe)
        return perform(recipe, tensors, addresses)

    monkeypatch.setattr(Launch, "run", compiled)
    monkeypatch.setattr(operations._Recipe, "perform", counted)
    return found


@interpreted
@pytest.mark.parametrize("given", [{}, {"kv_cache_dtype": "fp8"}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("matmul_rows", [64, 8])
def test_an_engine_answers_bit_for_bit_as_without_recipes(
    given: dict[str, Any],
    matmul_rows: int,
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("D3ENGINE_KERNELS", "triton")
    monkeypatch.setattr(products, "MATMUL_ROWS", matmul_rows)  # chunks have 16 rows
    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)
    monkeypatch.setattr(
        importlib.import_module("d3engine.kernels.triton.paged_attention"), "SPLIT", 16
    )  # of a block: rows have several, which meet
    prompts = [list(range(20, 24)), list(range(1, 31)), list(range(9, 20))]
    depths = [UnifiedSkip(2, on_skip="copy"), FullDepth(), D3(0.7, 0.2)]
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, depth=one) for one in depths]

    def answers() -> list[Any]:
        engine = make_engine(enforce_eager=True, block_size=16, max_num_batched_tokens=16, **given)
        return [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]

    wanted = answers()
    performed = request.getfixturevalue("performed")
    for one, other in zip(answers(), wanted, strict=True):
        assert one == other
    assert len(performed) > 100
    by_torch = {any(isinstance(step, operations._BoundCall) for step in recipe.steps) for recipe in performed}
    assert by_torch == ({False, True} if matmul_rows == 8 and "batch_invariant" not in given else {False})


@interpreted
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "fp8_groups"])
@pytest.mark.parametrize("rows", [1, 5, 19, 43])
def test_quantized_products_are_bound_with_their_scales(
    kind: str, rows: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last by torch, on a matrix that a kernel has unpacked."""
    monkeypatch.setattr(products, "MATMUL_ROWS", 40)
    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)
    quantize = {"int8": quantize_int8, "int4": quantize_int4, "fp8": quantize_fp8, "fp8_groups": fp8_of_groups}[kind]
    norm = torch.randn(136)
    given = [(torch.randn(rows, 136), quantize(torch.randn(outputs, 136))) for outputs in (48, 64, 48)]

    def results() -> list[Tensor]:
        found = []
        for x, weight in given:
            residual = torch.ones(rows, weight.shape[0])
            kernels.linear_residual(x, weight, None, residual)
            found += [residual, kernels.gate_up(x, norm, 1e-5, weight, None)]
        return found

    wanted = results()
    performed = request.getfixturevalue("performed")
    for one, other in zip(results(), wanted, strict=True):
        assert torch.equal(one, other)
    assert len(performed) == 2  # the last two operations, for the shapes of the first two


def test_a_driver_is_told_the_same_by_a_recipe_as_by_triton() -> None:
    """Kernels compiled for a GPU, a driver that only writes down what it is told; with and without PDL."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "tests/support/told_by_recipe.py")]
    result = subprocess.run(command, env=environment | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for case in found:
        assert case["is_known"]
        assert case["by_recipe"] == case["anew"]
    one_row, shifted, *_ = found
    assert one_row["anew"][0][4] != shifted["anew"][0][4]  # another kernel
    assert [len(case["anew"]) for case in found] == [1, 1, 1, 1, 1, 2, 5] * 2


def test_memory_that_no_argument_holds_for_sure_is_never_bound() -> None:
    """A description's tensor that lies in two arguments may lie in one alone the next time."""
    memory = torch.arange(8.0)
    numbers = operations._Numbers([memory[:6], memory[4:]])
    assert numbers.place(memory[2:4]) == (0, 8)
    assert numbers.place(memory[6:]) == (1, 8)
    for shared in (memory[4:6], memory[3:7]):  # in both, in none as a whole
        with pytest.raises(operations._UnboundError):
            numbers.place(shared)
    described = []

    @operations.performed
    def copy(x: Tensor) -> tuple[Tensor, list[operations.Step]]:
        described.append(x)
        out = torch.empty(2)
        return out, [operations.TorchCall(_copy, (out, x[2:4]))]

    for _ in range(2):
        assert copy(memory).tolist() == [2, 3]
    assert len(described) == 2


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


@operations.performed
def copied(x: Tensor) -> tuple[Tensor, list[operations.Step]]:
    out = torch.empty(x.shape, device=x.device)
    return out, [operations.TorchCall(_copy, (out, x))]


def test_a_recipe_is_for_its_device_alone() -> None:
    for device in ("cpu", "meta", "cpu", "meta"):
        assert copied(torch.ones(3, device=device)).device.type == device


def test_no_more_recipes_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_RECIPES", 3)
    for size in (1, 2, 3, 4, 5, 1, 2, 5):
        x = torch.randn(size)
        assert torch.equal(copied(x), x)
        assert len(operations._recipes) <= 3
