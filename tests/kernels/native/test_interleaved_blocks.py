"""Interleaved blocks times vectors of 8 bits: the numbers of the reference, and no row depends on the batch."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import CONFIG
from block_matrices import constant_blocks, random_blocks
from native_models import Case, Shape, assert_same_bits_in_any_chunks, assert_same_bits_in_batches, with_matrices

from d3engine import D3, Engine, FullDepth, InvalidValueError, SamplingParams
from d3engine.engine import resolve
from d3engine.engine.resolve import ROUNDED_HIDDEN_SIZE, resolve_activations
from d3engine.kernels.blocks import (
    BLOCK_TYPES,
    INTEGER_TYPES,
    BlockLanesWeight,
    BlockWeight,
    StackedWeight,
    blocks_in_lanes,
    in_eight_bits,
    stacked,
)
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.library import byte_isa, isas_here, read_block_rows, reads_interleaved_blocks
from d3engine.model.config import ModelConfig

pytestmark = [
    pytest.mark.usefixtures("native_library"),
    pytest.mark.skipif(byte_isa() is None, reason="no instruction set of this machine multiplies bytes"),
]
READERS = [isa for isa in isas_here() if reads_interleaved_blocks(isa)]
SHAPE = Shape(rows=60, hidden=256, intermediate=512, heads=4, head_dim=64, vocab=320, bias=True)


def block_case(*types: str, **changes: Any) -> Case:
    """A case with random blocks: those of one layer, which the next one repeats, and a head that is the embedding."""
    numbers = iter(range(100))

    def random(rows: int, columns: int) -> Any:
        nth = next(numbers)
        return random_blocks(types[nth % len(types)], rows, columns, seed=nth, deviation=columns**-0.5)

    def of(weight: Weight) -> Any:
        rows, columns = weight.shape
        sizes = [rows - 128, 128] if rows == 512 else [rows]  # queries, keys and values are stacked
        return blocks_in_lanes(stacked([random(size, columns) for size in sizes]))

    case = Case(replace(SHAPE, **changes))
    model = with_matrices(case.model, of)
    case.model = replace(model, embedding=model.lm_head)
    return case


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_interleaved_rows_are_those_of_the_blocks(type_name: str) -> None:
    weight = random_blocks(type_name, rows=64)
    wanted = weight.dequantize(torch.float32)
    made = blocks_in_lanes(weight)
    assert isinstance(made, BlockLanesWeight)
    assert made.shape == weight.shape
    assert torch.equal(made.dequantize(torch.float32), wanted)
    assert torch.equal(made.rows(5, 40).dequantize(torch.bfloat16), wanted[5:40].bfloat16())
    assert torch.equal(made.at(torch.tensor([40, 3, 3])).dequantize(torch.float32), wanted[[40, 3, 3]])
    assert torch.equal(read_block_rows(made, 16, 17), wanted[16:17])


def test_rows_that_fill_no_lanes_stay_in_their_blocks() -> None:
    weight = random_blocks("Q4_K", rows=48)
    assert blocks_in_lanes(weight) is weight
    both = blocks_in_lanes(stacked([weight, random_blocks("Q6_K", rows=32)]))
    assert isinstance(both, StackedWeight)
    assert [type(part).__name__ for part in both.parts] == ["BlockWeight", "BlockLanesWeight"]


def test_eight_bits_keep_a_group_within_half_a_step() -> None:
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    x[2, 32:64] = 0
    rounded = in_eight_bits(x)
    steps = x.view(7, 3, 32).abs().amax(dim=-1, keepdim=True) / 127
    assert ((rounded - x).view(7, 3, 32).abs() <= steps / 2 * (1 + 1e-5)).all()
    assert torch.equal(in_eight_bits(rounded), rounded) or (in_eight_bits(rounded) - rounded).abs().max() < 1e-6
    assert in_eight_bits(torch.tensor([[float("nan")] + 31 * [1.0]])).isnan().all()


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_logits_are_those_of_the_reference(type_name: str) -> None:
    """Where a channel lies between two steps of 8 bits, sums in another order may round it the other way."""
    case = block_case(type_name)
    logits = case.decode(1, num_threads=2)[2][0]
    wanted = case.reference(1)[2][0]
    apart = np.linalg.norm(logits - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert np.median(apart) < 1e-5
    assert apart.max() < 2e-2


def products(weight: BlockWeight, vectors: torch.Tensor, isa: str) -> tuple[Any, Any]:
    """Whole `vectors` [T, 512] as a final norm makes them of rows that run no layer, and what the head makes of these.

    Sums of their squares are exact, so the bits of the norm are known.
    """
    rows, columns = vectors.shape
    case = Case(replace(SHAPE, rows=rows, hidden=columns, vocab=weight.shape[0]))
    embedding = torch.cat([vectors, torch.zeros(weight.shape[0] - rows, columns)])
    head = blocks_in_lanes(weight)
    case.model = replace(case.model, embedding=embedding, final_norm=torch.ones(columns), lm_head=head)
    given = replace(case.rows, tokens=np.arange(rows), cutoffs=np.zeros_like(case.rows.cutoffs))
    squares = (vectors.numpy() ** 2).sum(axis=1, dtype=np.float32) / np.float32(columns)
    normed = vectors.numpy() * (np.float32(1) / np.sqrt(squares + np.float32(1e-5)))[:, None]
    return normed, case.decode(1, given, isa=isa)[2][0]


@pytest.mark.parametrize("isa", READERS)
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_the_largest_products_are_added_exactly(type_name: str, isa: str) -> None:
    """Channels of -127 and 127 meet rows of one byte each: sums of pairs that saturate would be off by half."""
    weight = constant_blocks(type_name, (0x00, 0x7F, 0x80, 0x81, 0xFF, 0x77, 0x88, 0x0F) * 4)
    signs = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).sign()
    vectors = torch.cat([torch.ones(1, 512), -torch.ones(1, 512), signs])
    normed, found = products(weight, vectors, isa)
    rows = weight.dequantize(torch.float64).numpy()
    terms = np.full_like(rows, 255) if type_name in INTEGER_TYPES else np.abs(rows)  # zero points apart from codes
    wanted, size = normed @ rows.T, np.abs(normed) @ terms.T
    assert (np.abs(found - wanted) <= 1e-5 * size).all()


@pytest.mark.parametrize("isa", READERS)
@pytest.mark.parametrize(("type_name", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_floats_are_added_in_one_order_by_every_instruction_set(type_name: str, bits: int, isa: str) -> None:
    """Block after block: the sum of products times the scale of the vector, times that of the row, rounded twice."""
    weight = random_blocks(type_name, rows=64)
    vectors = torch.randint(-100, 101, (7, 512), generator=torch.Generator().manual_seed(1)).float()
    normed, found = products(weight, vectors, isa)
    groups = normed.reshape(7, 1, 16, 32)
    largest = np.abs(groups).max(axis=-1)
    whole = np.rint(groups * (np.float32(127) / largest)[..., None]).astype(np.int64)
    blocks = weight.blocks.view(64, 16, -1).numpy()
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    codes = blocks[..., 2:].view(np.int8).astype(np.int64)
    if bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4 & 15], axis=-1) - 8
    sums = (whole * codes).sum(axis=-1).astype(np.float32) * (largest / np.float32(127))
    total = np.zeros((7, 64), np.float32)
    for block in range(16):  # a product of floats is exact in long doubles, so that both are rounded once
        product = sums[..., block].astype(np.longdouble) * scales[:, block]
        total = (product + total).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.int32), total.view(np.int32))


@pytest.mark.parametrize("isa", READERS)
@pytest.mark.parametrize("rows", [64, 48])
@pytest.mark.parametrize("type_name", sorted(INTEGER_TYPES))
def test_ordered_columns_meet_gathered_vectors(type_name: str, rows: int, isa: str) -> None:
    """Bits are those of the same blocks times vectors gathered by the order, interleaved (64 rows) or not."""
    weight = random_blocks(type_name, rows)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    ordered = replace(weight, order=order.int())
    rows_of_channels = torch.empty(rows, 512).index_copy_(1, order, weight.dequantize(torch.float32))
    for made in (ordered, blocks_in_lanes(ordered), stacked([ordered.rows(0, 16), ordered.rows(16, rows)])):
        assert torch.equal(made.dequantize(torch.float32), rows_of_channels)
    assert torch.equal(ordered.unpacked(), rows_of_channels)
    vectors = torch.randint(-100, 101, (40, 512), generator=torch.Generator().manual_seed(1)).float()
    for count in (1, 7, 40):
        _, wanted = products(weight, vectors[:count, order], isa)
        _, found = products(ordered, vectors[:count], isa)
        np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))


def test_matrices_of_other_orders_stay_apart() -> None:
    weight = random_blocks("U4_32", rows=32)
    orders = [torch.randperm(512, generator=torch.Generator().manual_seed(seed)).int() for seed in (0, 1)]
    first, second = (replace(weight, order=order) for order in orders)
    for parts in ([first, second], [weight, first]):
        both = stacked(parts)
        assert isinstance(both, StackedWeight)
        assert isinstance(blocks_in_lanes(both), StackedWeight)
        wanted = torch.cat([part.dequantize(torch.float32) for part in parts])
        assert torch.equal(blocks_in_lanes(both).dequantize(torch.float32), wanted)
    assert isinstance(stacked([first, replace(weight, order=orders[0].clone())]), BlockWeight)


@pytest.mark.parametrize("types", [BLOCK_TYPES[:4], BLOCK_TYPES[4:8], BLOCK_TYPES[8:12], BLOCK_TYPES[12:]])
def test_a_row_finds_the_same_bits_in_every_batch(types: tuple[str, ...]) -> None:
    case = block_case(*types)
    batches = [[0], [1], [16], [59], *([*range(count - 1), 59] for count in (*range(2, 10), 16, 17, 30))]
    assert_same_bits_in_batches(case, 2, batches)


def test_a_prompt_finds_the_same_bits_in_any_chunks() -> None:
    assert_same_bits_in_any_chunks(block_case("Q4_K", "Q6_K", rows=1, max_positions=160))


def test_a_number_that_is_none_stays_in_its_row() -> None:
    case = block_case("Q4_K", "Q8_0")
    wanted = case.decode(1)[2][0]
    key = case.rows.tables[case.rows.slots[3], 0, 0]
    case.pool[key, 1, 0] = float("nan")  # a value that row 3 alone attends to
    found = case.decode(1)[2][0]
    assert np.isnan(found[3]).all()
    others = np.arange(len(found)) != 3
    np.testing.assert_array_equal(found[others], wanted[others])


# -- the engine ------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, detokenize=False)


@pytest.mark.parametrize(
    ("hidden_size", "found"), [(ROUNDED_HIDDEN_SIZE - 64, "float32"), (ROUNDED_HIDDEN_SIZE, "int8")]
)
def test_auto_activations_narrow_model_float32(hidden_size: int, found: str) -> None:
    """By default activations are rounded from a hidden size of 896 on; "int8" and "float32" hold at any."""
    config = ModelConfig.from_dict(CONFIG | {"hidden_size": hidden_size, "num_attention_heads": 8, "head_dim": 64})
    in_blocks, in_floats = (
        partial(resolve_activations, has_blocks=has_blocks, is_bfloat16=False, config=config)
        for has_blocks in (True, False)
    )
    assert in_blocks("auto") == found
    assert in_floats("auto") == "float32"
    assert [in_blocks(asked) for asked in ("int8", "float32")] == ["int8", "float32"]


def test_a_file_with_blocks_meets_vectors_of_8_bits_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "ROUNDED_HIDDEN_SIZE", 0)
    gguf_files = pytest.importorskip("gguf_files", reason="the extra gguf is not installed")
    types = ("Q4_K", "Q6_K", "Q5_0")
    tokenizer = gguf_files.bpe_keys()
    file = gguf_files.write_gguf(
        tmp_path / "model.gguf", tokenizer=tokenizer, types=types, layers=2, vocab_size=448, tied=True
    )
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 64, "num_threads": 2}
    prompts = [{"prompt_token_ids": [1 + (7 * n + i) % 50 for i in range(1 + n % 40)]} for n in range(60)]
    params = [replace(PARAMS, depth=D3(0.8, 0.5) if n % 2 else FullDepth()) for n in range(60)]
    with Engine(file, **options) as engine:
        weights = engine.executor.model.weights
        assert engine.settings.activations == "int8"
        assert isinstance(weights.layers[0].down, BlockLanesWeight)
        assert weights.embedding is weights.lm_head
        together = engine.generate(prompts, params, use_tqdm=False)
        engine.reset_prefix_cache()
        alone = [engine.generate([prompts[n]], params[n], use_tqdm=False)[0] for n in (0, 1, 38, 39)]
    for n, single in zip((0, 1, 38, 39), alone, strict=True):
        assert single.outputs[0].logprobs == together[n].outputs[0].logprobs
    with Engine(file, activations="float32", **options) as engine:
        exact = engine.generate(prompts, params, use_tqdm=False)
    pairs = [(a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]) for a, b in zip(together, exact, strict=True)]
    apart = [abs(a[token].logprob - b[token].logprob) for a, b in pairs for token in a.keys() & b.keys()]
    assert 0 < max(apart) < 0.1


def test_eight_bits_are_refused_where_matrices_are_others() -> None:
    with pytest.raises(InvalidValueError, match=r"^activations must be auto or float32 but for a GGUF file.* 'int8'"):
        Engine("demo", activations="int8")


def test_without_bytes_to_multiply_activations_stay_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_files = pytest.importorskip("gguf_files", reason="the extra gguf is not installed")
    file = gguf_files.write_gguf(tmp_path / "model.gguf", tokenizer=gguf_files.bpe_keys(), types=("Q4_K",), layers=1)
    monkeypatch.setattr(resolve, "ROUNDED_HIDDEN_SIZE", 0)
    monkeypatch.setenv("D3ENGINE_NATIVE_ISA", "portable")
    assert not reads_interleaved_blocks("portable")
    with Engine(file, device="cpu", max_model_len=96) as engine:
        assert engine.settings.activations == "float32"
    with pytest.raises(InvalidValueError, match="activations"):
        Engine(file, device="cpu", activations="int8")
