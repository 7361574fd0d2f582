"""Rows rounded to 8-bit floats for a matrix of them: when that is chosen, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama, Randn
from kernel_errors import relative_error
from tiny_models import random_prompts
from torch import Tensor

import d3engine.kernels.triton as kernels
from benchmarks.gpu.common import takes_scales_of_rows
from d3engine import Engine, FullDepth, SamplingParams
from d3engine.engine import device as engine_device
from d3engine.engine import executors, resolve
from d3engine.engine.executors import matrix_form
from d3engine.errors import InvalidValueError
from d3engine.kernels.kv_pool import FP8, quantized
from d3engine.kernels.quantized import Fp8RowsWeight, Fp8Weight, for_fp8_rows, quantize_fp8, takes_fp8_rows
from d3engine.kernels.target import NO_TARGET, TARGETS
from d3engine.kernels.triton import fp8_rows, matmul
from d3engine.kernels.triton.launches import meta_weight
from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights, quantize_weights

pytestmark = pytest.mark.usefixtures("poisoned_memory", "few_programs")

EPS = 1e-5
MATMUL_ROWS = 20
MANY, OUTPUTS, COLUMNS = 37, 48, 208
ROUNDED_ONCE = 4e-3
"""Relative error of results in bfloat16."""


@pytest.fixture
def weight(randn: Randn) -> Fp8RowsWeight:
    return Fp8RowsWeight(*quantize_fp8(randn(OUTPUTS, COLUMNS, dtype=torch.float32, scale=0.1)).tensors)


@pytest.fixture
def scales_of_rows(device: torch.device) -> None:
    """For tests of torch's product of 8-bit floats, which on a CPU takes one scale for all rows in torch 2.11."""
    if device.type == "cpu" and not takes_scales_of_rows():
        pytest.skip("torch's product of 8-bit floats takes no scales of rows on this CPU")


def rounded(x: Tensor) -> Tensor:
    values, scales = quantized(x)
    return values.double() * scales.double()[:, None]


@pytest.mark.parametrize(
    ("weights", "outputs", "columns", "dtype", "arch", "chosen"),
    [
        ("fp8", 4096, 4096, torch.bfloat16, 90, True),
        ("fp8", 4096, 4096, torch.bfloat16, 89, True),
        ("fp8", 4096, 4096, torch.bfloat16, 120, True),
        ("fp8", 4096, 4096, torch.bfloat16, 86, False),
        ("fp8", 4096, 4096, torch.bfloat16, "gfx942", False),
        ("fp8", 4096, 4096, torch.float16, 90, False),
        ("fp8", 4096, 4096, torch.float32, 90, False),
        ("fp8", 4096, 4100, torch.bfloat16, 90, False),
        ("fp8", 4100, 4096, torch.bfloat16, 90, False),
        ("fp8_groups", 4096, 4096, torch.bfloat16, 90, False),
        ("int8", 4096, 4096, torch.bfloat16, 90, False),
        ("bf16", 4096, 4096, torch.bfloat16, 90, False),
    ],
)
def test_fp8_rows_are_chosen_where_scales_and_card_allow(
    weights: str, outputs: int, columns: int, dtype: torch.dtype, arch: int | str, chosen: bool
) -> None:
    """One scale an output, whole sixteens, bfloat16, and NVIDIA's from 8.9 on; nothing without a GPU."""
    matrix = meta_weight(outputs, columns, dtype=torch.bfloat16, weights=weights)
    assert takes_fp8_rows(matrix, dtype, TARGETS[arch]) is chosen
    assert isinstance(for_fp8_rows(matrix, dtype, TARGETS[arch]), Fp8RowsWeight) is chosen
    assert not takes_fp8_rows(matrix, dtype, NO_TARGET)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [32, 208, 320, 5000])
def test_rows_are_rounded_as_the_cache_rounds_its_heads(
    dtype: torch.dtype, columns: int, randn: Randn, device: torch.device
) -> None:
    """Values and scales are the reference's, of rows of zeros and of rows that lie apart too."""
    x = randn(5, columns + 16, dtype=dtype, scale=3.0)[:, :columns]
    x[2] = 0.0
    values = torch.empty(5, columns, dtype=FP8, device=device)
    scales = torch.empty(5, 1, dtype=torch.float32, device=device)
    fp8_rows.fp8_rows_launch(x, values, scales).run()
    wanted, of_rows = quantized(x)
    # A GPU divides with an error of its last bits.
    torch.testing.assert_close(scales[:, 0], of_rows, rtol=0.0 if device.type == "cpu" else 5e-7, atol=0.0)
    if device.type == "cpu":
        assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert relative_error(values.float(), wanted.double()) < 0.01


@pytest.mark.usefixtures("scales_of_rows")
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_of_fp8_rows_is_that_of_what_they_stand_for(
    has_bias: bool, weight: Fp8RowsWeight, randn: Randn
) -> None:
    """Sums are exact enough for the result's dtype; against rows that were not rounded there is their error."""
    x = randn(MANY, COLUMNS, dtype=torch.bfloat16)
    bias = randn(OUTPUTS, dtype=torch.bfloat16) if has_bias else None
    out = matmul.matmul(x, weight, bias)
    added = 0.0 if bias is None else bias.double()
    matrix = weight.dequantize(torch.float64).t()
    assert relative_error(out, rounded(x) @ matrix + added) < ROUNDED_ONCE
    assert 0.01 < relative_error(out, x.double() @ matrix + added) < 0.05


@pytest.mark.usefixtures("scales_of_rows")
def test_many_rows_of_every_projection_are_rounded(weight: Fp8RowsWeight, randn: Randn, device: torch.device) -> None:
    """The residual, the gates and the logits of many rows; a few rows meet the matrix as they are."""
    x, norm = randn(MANY, COLUMNS, dtype=torch.bfloat16), 1 + randn(COLUMNS, dtype=torch.bfloat16, scale=0.1)
    residual = randn(MANY, OUTPUTS, dtype=torch.bfloat16)
    matrix = weight.dequantize(torch.float64).t()
    normed = kernels.rms_norm(x, norm, EPS)
    product = rounded(normed) @ matrix

    found = residual.clone()
    kernels.linear_residual(x, weight, None, found)
    assert relative_error(found, residual.double() + rounded(x) @ matrix) < ROUNDED_ONCE
    found = residual.clone()
    kernels.linear_residual(x, weight, None, found, num_rows=torch.tensor([9], dtype=torch.int32, device=device))
    assert torch.equal(found[9:], residual[9:])
    assert relative_error(found[:9], (residual.double() + rounded(x) @ matrix)[:9]) < ROUNDED_ONCE
    assert relative_error(kernels.lm_head(x, norm, EPS, weight), product) < ROUNDED_ONCE
    gate, up = product.chunk(2, dim=1)
    gates = torch.nn.functional.silu(gate) * up
    assert relative_error(kernels.gate_up(x, norm, EPS, weight, None), gates) < 2 * ROUNDED_ONCE

    few = kernels.gate_up(x[:3], norm, EPS, weight, None)
    assert torch.equal(few, kernels.gate_up(x[:3], norm, EPS, Fp8Weight(*weight.tensors), None))


@pytest.mark.usefixtures("scales_of_rows")
def test_trial_of_fp8_products_says_what_is_wrong(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes here; a library that raises, and one whose results are far, are named."""
    assert fp8_rows.fault(device, torch.bfloat16) is None
    multiply = torch._scaled_mm

    def far(*given: Any, out: Tensor, **options: Any) -> Tensor:
        return multiply(*given, out=out, **options).mul_(1.1)

    def raising(*given: Any, **options: Any) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on\nothers")

    monkeypatch.setattr(torch, "_scaled_mm", far)
    assert str(fp8_rows.fault(device, torch.bfloat16)).startswith("its relative error is 0.")
    monkeypatch.setattr(torch, "_scaled_mm", raising)
    assert fp8_rows.fault(device, torch.bfloat16) == "RuntimeError: torch._scaled_mm is only supported on"


SETTINGS = SimpleNamespace(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    kernels="triton",
    config=SimpleNamespace(quantization="fp8"),
    batch_invariant=False,
    tensor_parallel_size=1,
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"dtype": torch.float16}, "got 'fp8'"),
        ({"kernels": "torch"}, "got 'fp8'"),
        ({"config": SimpleNamespace(quantization="fp8_groups")}, "a scale for each row"),
        ({"config": SimpleNamespace(quantization=None)}, "a scale for each row"),
        ({"batch_invariant": True}, "beside batch_invariant=True"),
        ({"tensor_parallel_size": 2}, "beside tensor_parallel_size=2"),
    ],
)
def test_engine_refuses_fp8_activations_that_do_nothing(
    changes: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a made-up Hopper they are taken where products are made of them, and refused by name elsewhere."""
    settings: Any = SimpleNamespace(**(vars(SETTINGS) | changes))
    with pytest.raises(InvalidValueError, match=r"^activations must be .*got 'fp8'"):
        resolve.check_fp8_rows(settings, is_random=False)  # without a GPU
    monkeypatch.setattr(resolve, "target_of", lambda device: TARGETS[90])
    if says is None:
        resolve.check_fp8_rows(settings, is_random=False)
    else:
        with pytest.raises(InvalidValueError, match=f"^activations must be .*{says}"):
            resolve.check_fp8_rows(settings, is_random=False)


@pytest.mark.usefixtures("scales_of_rows")
def test_matrices_get_their_rows_after_a_trial(weight: Fp8RowsWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's matrices take such rows if the device passes the trial; else the argument is refused."""
    settings: Any = SimpleNamespace(**vars(SETTINGS), activations="fp8", weight_compression="none", executor="graphs")
    monkeypatch.setattr(executors, "target_of", lambda device: TARGETS[90])
    form = matrix_form(settings)
    assert form is not None
    plain = Fp8Weight(*weight.tensors)
    assert isinstance(form(plain), Fp8RowsWeight)
    uneven = replace(plain, values=plain.values[:, :-8])
    assert form(uneven) is uneven
    monkeypatch.setattr(fp8_rows, "fault", lambda *given: "it is broken")
    with pytest.raises(InvalidValueError, match=r"since its trial failed: it is broken; got 'fp8'"):
        engine_device.check_fp8_products(torch.device("cpu"), torch.bfloat16)


@pytest.mark.usefixtures("scales_of_rows")
def test_engine_reads_prompts_by_rows_of_fp8(tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product of a prompt is made so, and its log-probabilities stay near those of an engine without."""
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs")
    for module in (resolve, executors):
        monkeypatch.setattr(module, "target_of", lambda device: TARGETS[90])
    layers, sizes = 2, {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
    directory = tiny_llama(num_hidden_layers=layers, **sizes).directory
    config = ModelConfig.from_directory(directory)
    weights = quantize_weights(load_weights(directory, config, dtype=torch.bfloat16, device="cpu"), "fp8")
    multiply, rows = torch._scaled_mm, list[int]()

    def counted(*given: Any, **options: Any) -> Tensor:
        rows.append(len(given[0]))
        return multiply(*given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    prompt, found = random_prompts([24])[0], []
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    given: dict[str, Any] = {"weights": weights, "dtype": "bfloat16", "backend": "triton", "device": "cpu"}
    for activations in ("float32", "fp8"):
        with Engine(directory, skip_tokenizer_init=True, activations=activations, depth=FullDepth(), **given) as engine:
            (output,) = engine.generate([prompt], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        found.append(
            torch.tensor([one.logprob for known in output.prompt_logprobs[1:] for one in (known or {}).values()])
        )
    assert rows.count(len(prompt)) == 4 * layers
    assert 0.004 < relative_error(found[1], found[0]) < 0.04
