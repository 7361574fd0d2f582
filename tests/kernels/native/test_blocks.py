"""Matrices in blocks: the numbers that they stand for, and the sums of float32 weights, to the last bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from block_matrices import random_blocks
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import bpe_keys, write_gguf

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.kernels.blocks import BLOCK_FORMATS, BLOCK_TYPES, BlockWeight, StackedWeight, stacked
from d3engine.kernels.native.library import isas_here, read_block_rows
from d3engine.model.weights import LlamaWeights, with_matrices

pytestmark = pytest.mark.usefixtures("native_library")
OF_GGML = tuple(name for name, layout in BLOCK_FORMATS.items() if layout.bits is None)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, detokenize=False)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_every_instruction_set_reads_the_numbers_of_a_type(type_name: str) -> None:
    weight = random_blocks(type_name, rows=40)
    wanted = weight.unpacked()
    for isa in isas_here():
        assert torch.equal(read_block_rows(weight, isa=isa), wanted), isa
    assert torch.equal(weight.rows(3, 17).dequantize(torch.float32), wanted[3:17])
    assert torch.equal(weight.at(torch.tensor([5, 0])).dequantize(torch.float32), wanted[[5, 0]])


def test_the_sizes_of_blocks_are_those_of_gguf() -> None:
    for name, layout in BLOCK_FORMATS.items():
        if layout.bits is None:
            assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (layout.columns, layout.nbytes)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_a_scale_that_is_no_number_is_found(type_name: str, number: float) -> None:
    weight = random_blocks(type_name, rows=4)
    assert weight.is_finite
    layout = BLOCK_FORMATS[type_name]
    for place in layout.halves:
        blocks = weight.blocks.clone()
        blocks.view(-1, layout.nbytes)[-1, place : place + 2] = torch.tensor([number]).half().view(torch.uint8)
        assert not replace(weight, blocks=blocks).is_finite
    if layout.bits is not None:
        blocks = weight.blocks.clone()
        blocks.view(-1, layout.nbytes)[-1, 1:4] = torch.tensor([number]).view(torch.uint8)[1:]
        assert not replace(weight, blocks=blocks).is_finite


def test_stacked_matrices_of_one_type_become_one() -> None:
    first, second, third = random_blocks("Q4_K", 8), random_blocks("Q4_K", 4, seed=1), random_blocks("Q6_K", 6)
    both = stacked([first, second])
    assert isinstance(both, BlockWeight)
    several = stacked([first, second, third])
    assert isinstance(several, StackedWeight)
    assert (len(several.parts), several.shape) == (2, (18, 512))
    wanted = torch.cat([one.unpacked() for one in (first, second, third)])
    assert torch.equal(several.dequantize(torch.float32), wanted)
    assert torch.equal(several.rows(5, 15).dequantize(torch.float32), wanted[5:15])


def as_floats(weights: LlamaWeights) -> LlamaWeights:
    """The same weights in float32."""

    def floats(matrix: Any) -> Any:
        return matrix.float() if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)

    table, is_tied = floats(weights.embedding), weights.lm_head is weights.embedding
    made = with_matrices(weights, floats, lambda head: table if is_tied else floats(head))
    return replace(made, embedding=table)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q5_0", "Q8_0"), OF_GGML[:7], OF_GGML[4:]])
def test_logits_of_blocks_are_those_of_float32_in_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...], isa: str
) -> None:
    """Logits are those of float32 weights alone and in any batch."""
    if isa not in isas_here():
        pytest.skip(f"{isa} does not run here")
    monkeypatch.setenv("D3ENGINE_NATIVE_ISA", isa)
    file = write_gguf(tmp_path / "model.gguf", tokenizer=bpe_keys(), types=types, layers=2)
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 64, "num_threads": 2}
    options["activations"] = "float32"
    prompts = [{"prompt_token_ids": [1 + (7 * n + i) % 50 for i in range(1 + n % 40)]} for n in range(60)]
    params = [replace(PARAMS, depth=D3(0.8, 0.5) if n % 2 else FullDepth()) for n in range(60)]
    with Engine(file, **options) as engine:
        weights = engine.executor.model.weights
        assert isinstance(weights.layers[0].down, BlockWeight)
        assert engine.stats().executor.startswith(f"native ({isa}")
        together = engine.generate(prompts, params, use_tqdm=False)
        engine.reset_prefix_cache()
        alone = [engine.generate([prompts[n]], params[n], use_tqdm=False)[0] for n in (0, 1, 38, 39)]
        floats = as_floats(weights)
    with Engine(file, weights=floats, weight_dtype="float32", **options) as engine:
        wanted = engine.generate(prompts, params, use_tqdm=False)
    for found, expected in zip(together, wanted, strict=True):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs
    for n, single in zip((0, 1, 38, 39), alone, strict=True):
        assert single.outputs[0].logprobs == together[n].outputs[0].logprobs
