"""An 8-bit KV cache: the reference's bytes are written, and read as a cache of their floats."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape, at_places, isas, prompt_rows
from torch import Tensor

from d3engine.kernels.kv_pool import FP8, Fp8Pool, KVPool, quantized, read_blocks
from d3engine.kernels.native.library import Decoder
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Rows

SPECIAL = {
    "ties go to the even one": [448.0, 17.0, -19.0, 0.5 * 2**-9, 1.5 * 2**-9, -2.5 * 2**-9, 1.0625, -1.1875],
    "what is next to ties": [448.0, 17.000002, 16.999998, 0.50001 * 2**-9, 0.49999 * 2**-9, 2**-6, 0.99 * 2**-6, 2e-9],
    "zeros of both signs": [0.0, -0.0] * 4,
    "less than the smallest magnitude": [1e-38, -1e-40, 1e-45, 0.0, 1e-31, -1e-31, 2**-101, 1e-39],
    "the largest floats": [3.4028235e38, -3.4028235e38, 1e38, 1.0, -1e35, 7e35, 8e35, 0.0],
    "an infinity": [1.0, float("inf"), -2.0, 0.0, -0.0, 3.0, 4.0, 5.0],
    "infinities alone": [float("inf"), -float("inf")] * 4,
    "what is not a number, and smaller things behind it": [1.0, float("nan"), -2.0, 0.0, 1e30, 3.0, 4.0, 5.0],
    "a number beside infinities": [float("-inf"), float("nan"), 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}


def decoded(case: Case, pool: KVPool, rows: Rows, steps: int = 1, **changes: Any) -> Any:
    """Logits [steps, rows, V] of a run that writes into `pool`."""
    slots, _, blocks = case.rows.tables.shape
    options: dict[str, Any] = {"max_rows": 64, "num_threads": 1, **changes}
    decoder = Decoder(replace(case.model, pool=pool), max_blocks=blocks, num_slots=slots, **options)
    logits = np.full((steps, len(rows.tokens), case.shape.vocab), np.nan, np.float32)
    decoder.run(rows, steps, logits=logits)
    return logits


def zeros(pool: Tensor) -> Fp8Pool:
    blocks, _, size, heads, _ = pool.shape
    return Fp8Pool(torch.zeros(pool.shape, dtype=torch.uint8).view(FP8), torch.zeros(blocks, 2, heads, size))


def small(pool: Tensor) -> Fp8Pool:
    """A pool of floats, rounded to 8 bits."""
    values, scales = quantized(pool)
    return Fp8Pool(values, scales.transpose(2, 3).contiguous())


def large(pool: Fp8Pool) -> Tensor:
    """The floats that a pool stands for."""
    return read_blocks(pool, torch.arange(2 * pool.shape[0]), torch.float32).view(pool.shape)


def copy(pool: Fp8Pool) -> Fp8Pool:
    return Fp8Pool(pool.values.view(torch.uint8).clone().view(FP8), pool.scales.clone())


def magnitudes(values: Tensor) -> Tensor:
    return values.view(torch.uint8) & 0x7F


def assert_same_entries(found: Fp8Pool, wanted: Fp8Pool) -> None:
    """To the bit, except for the sign of NaN."""
    torch.testing.assert_close(found.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)
    of_found, of_wanted = (pool.values.view(torch.uint8) for pool in (found, wanted))
    is_nan = magnitudes(wanted.values) == 0x7F
    assert torch.equal(of_found | is_nan * 0x80, of_wanted | is_nan * 0x80)


def assert_as_a_cache_of_floats_is_written(case: Case, isa: str) -> None:
    """Of one layer, whose keys and values depend on no cached ones."""
    floats, found = torch.zeros_like(case.pool), zeros(case.pool)
    rows = prompt_rows(case, (0, 0, 20), (1, 3, 9))
    decoded(case, floats, rows, isa=isa, num_threads=2)
    decoded(case, found, rows, isa=isa, num_threads=2)
    written = floats.flatten(3).ne(0).any(dim=-1)
    assert written.sum() == 2 * 29
    wanted = small(floats)
    wanted.values.view(torch.uint8)[~written] = 0
    wanted.scales.transpose(2, 3)[~written] = 0
    assert_same_entries(found, wanted)


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 6, 18, 64, 80])
@pytest.mark.parametrize("isa", isas())
def test_8bit_keys_and_values_match_the_reference(isa: str, head_dim: int, head_norms: bool) -> None:
    case = Case(
        Shape(layers=1, heads=6, kv_heads=3, head_dim=head_dim, rows=2, bias=True, head_norms=head_norms, windows=(9,))
    )
    assert_as_a_cache_of_floats_is_written(case, isa)


@pytest.mark.parametrize("head_dim", [8, 20])
@pytest.mark.parametrize("isa", isas())
def test_extreme_numbers_match_the_reference(isa: str, head_dim: int) -> None:
    """Written as biases of keys and values with zero weights, so that they arrive unchanged."""
    heads = len(SPECIAL)
    shape = Shape(layers=1, heads=heads, kv_heads=heads, head_dim=head_dim, rows=2, bias=True, layers_without_rope=(0,))
    case = Case(shape)
    qkv = case.model.layers[0].qkv
    assert isinstance(qkv.weight, Tensor)
    assert qkv.bias is not None
    wanted = torch.tensor([(numbers * 3)[:head_dim] for numbers in SPECIAL.values()])
    qkv.weight.zero_()
    qkv.bias.copy_(torch.cat([wanted.flatten()] * 2 + [wanted.flip(0).flatten()]))
    assert_as_a_cache_of_floats_is_written(case, isa)


def exact_keys_and_values(case: Case) -> None:
    """Keys and values are numbers that 8 bits represent exactly."""
    kv_size = case.shape.kv_heads * case.shape.head_dim
    for layer in case.model.layers:
        assert isinstance(layer.qkv.weight, Tensor)
        assert layer.qkv.bias is not None
        layer.qkv.weight[-2 * kv_size :] = 0
        heads = layer.qkv.bias[-2 * kv_size :].view(-1, case.shape.head_dim)
        heads.copy_(quantized(heads)[0].float() / 256)


def bits(array: Any) -> Any:
    return array.view(np.int32)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("isa", isas())
def test_logits_equal_those_of_a_float_cache_to_the_bit(isa: str, group: int) -> None:
    head_dim = {1: 2, 2: 64, 3: 20, 4: 34}.get(group, 12)
    shape = Shape(
        heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        block_size=8,
        max_positions=600,
        rows=4,
        bias=True,
        layers_without_rope=(0, 1),
        seed=group,
    )
    case = Case(shape)
    exact_keys_and_values(case)
    pool = small(case.pool)
    case.rows.positions[:2] = [590, 255]
    floats = large(pool)
    wanted = decoded(case, floats, case.rows, 3, isa=isa)
    for threads in (1, 3):  # three threads share the longest context by spans
        found = copy(pool)
        logits = decoded(case, found, case.rows, 3, isa=isa, num_threads=threads)
        np.testing.assert_array_equal(bits(logits), bits(wanted))
        assert torch.equal(large(found), floats)
    assert not np.array_equal(wanted, decoded(case, case.pool.clone(), case.rows, 3, isa=isa)), "8 bits change it"


@pytest.mark.parametrize("isa", isas())
def test_rows_alone_and_prompts_in_chunks_find_the_same_bits(isa: str) -> None:
    case = Case(Shape(rows=6, head_dim=24, heads=6, kv_heads=2, block_size=8, max_positions=150))
    pool = small(case.pool)
    whole_pool = copy(pool)
    together = decoded(case, whole_pool, case.rows, 3, isa=isa, num_threads=3)
    for row in range(6):
        own = decoded(case, copy(pool), at_places(case.rows, [row]), 3, isa=isa)
        np.testing.assert_array_equal(bits(own[:, 0]), bits(together[:, row]))
    whole, cut = copy(pool), copy(pool)
    logits = decoded(case, whole, prompt_rows(case, (2, 70, 60)), isa=isa, num_threads=2)
    parts = [decoded(case, cut, prompt_rows(case, (2, *chunk)), isa=isa) for chunk in ((70, 1), (71, 22), (93, 37))]
    np.testing.assert_array_equal(bits(np.concatenate(parts, axis=1)), bits(logits))
    assert_same_entries(cut, whole)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
@pytest.mark.parametrize("isa", isas())
def test_a_scale_that_is_not_finite_spoils_its_row_and_no_other(isa: str, spoilt: float) -> None:
    case = Case(Shape(rows=4, max_positions=100))
    pool = small(case.pool)
    healthy = decoded(case, copy(pool), case.rows, 2, isa=isa)
    pool.scales[case.rows.tables[case.rows.slots[1], 0, 0]] = spoilt
    pool.values.view(torch.uint8)[case.rows.tables[case.rows.slots[1], 0, 0]] = 0x7F  # as from infinities
    pool.scales[0] = spoilt
    logits = decoded(case, pool, case.rows, 2, isa=isa)
    assert np.isnan(logits[:, 1]).all()
    others = [0, 2, 3]
    np.testing.assert_array_equal(bits(logits[:, others]), bits(healthy[:, others]))


def test_scales_must_be_floats_and_plain_memory() -> None:
    case = Case(Shape())
    pool = small(case.pool)
    for wrong in (pool.scales.double(), pool.scales.transpose(2, 3)):
        with pytest.raises(NativeError, match=r"is not contiguous torch\.float32 on the CPU"):
            decoded(case, Fp8Pool(pool.values, wrong), case.rows)
