"""Quantized weights: exact where they can be, bounded where not, and the same in a directory as in memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import TinyLlama
from torch import Tensor
from typer.testing import CliRunner, Result

from benchmarks import quantization as benchmark
from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.cli.weights import app
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.evaluation.accuracy import take_problems
from d3engine.evaluation.word_problems import format_prompt
from d3engine.kernels import quantized, reference
from d3engine.kernels.quantized import INT4_DIVISORS, Int4Weight, Int8Weight, quantize_int4, quantize_int8
from d3engine.loading.model_directory import model_directory
from d3engine.model.config import ModelConfig
from d3engine.model.quantization import quantize_matrix, quantize_weights, with_matrices
from d3engine.model.weights import LlamaWeights, load_weights
from d3engine.weights_tools import quantize
from d3engine.weights_tools.quantize import quantize_model

SCHEMES = ("int8", "int4")
SHAPES = [(5, 123), (3, 128), (7, 352), (2, 1), (1, 129)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "more than one group": {"hidden_size": 144, "intermediate_size": 200},
}
QUERY = "model.layers.1.self_attn.q_proj"
MakeTiny = Callable[..., TinyLlama]


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)).to(dtype)


# -- the two forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_off_by_half_a_step_at_most(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape, dtype)
    weight = quantize_int8(matrix)
    assert weight.shape == matrix.shape
    assert (weight.values.dtype, weight.scales.dtype) == (torch.int8, torch.float32)
    largest = matrix.double().abs().amax(dim=1)
    torch.testing.assert_close(weight.scales.double(), largest / 127, rtol=1e-6, atol=0)
    error = (weight.dequantize(torch.float64) - matrix.double()).abs()
    assert bool((error <= largest[:, None] / 127 * 0.50001).all())
    assert weight.values.abs().amax(dim=1).eq(127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_takes_for_each_group_the_best_of_its_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random_matrix(*shape, dtype)
    weight = quantize_int4(matrix)
    assert weight.shape == matrix.shape

    def errors(weight: Int4Weight) -> Tensor:
        """The squared error of each group."""
        off = (weight.dequantize(torch.float64) - matrix.double()).square()
        return torch.stack([group.sum(dim=1) for group in off.split(128, dim=1)], dim=1)

    alone = torch.stack([errors(quantize_int4(matrix, (divisor,))) for divisor in INT4_DIVISORS])
    torch.testing.assert_close(errors(weight), alone.amin(dim=0), rtol=1e-4, atol=1e-12)
    plain = quantize_int4(matrix, (7.0,))
    for column in range(shape[1]):
        off = (plain.dequantize(torch.float64) - matrix.double())[:, column].abs()
        assert bool((off <= plain.scales[:, column // 128].abs() * 0.50001).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_representable_comes_back_exactly(shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(columns)
    groups = -(-columns // 128)
    # Scales of few bits, as those of a bfloat16 file are: the products below are exact in float32.
    steps = torch.rand(rows, groups, generator=generator).add(0.1).bfloat16().float()
    wide = torch.randint(-127, 128, shape, generator=generator)
    wide[:, 0] = torch.tensor([127, -127]).repeat(rows)[:rows]
    matrix = wide * steps[:, :1]
    weight = quantize_int8(matrix)
    assert torch.equal(weight.values, wide.to(torch.int8))
    assert torch.equal(weight.dequantize(torch.float32), matrix)
    for extreme in (-8, 7, -7):
        narrow = torch.randint(-7, 7, shape, generator=generator)
        narrow[:, ::128] = extreme
        matrix = narrow * steps.repeat_interleave(128, dim=1)[:, :columns]
        assert torch.equal(quantize_int4(matrix).dequantize(torch.float32), matrix)


def test_a_byte_holds_channels_j_and_j_plus_64_and_the_padding_stands_for_zero() -> None:
    rows, columns = 3, 352
    whole = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(0))
    whole[:, ::128] = -8
    weight = quantize_int4(whole.float())
    assert weight.packed.shape == (rows, 3 * 64)
    assert (weight.packed.dtype, weight.scales.dtype) == (torch.uint8, torch.float32)
    assert torch.equal(weight.scales, torch.ones(rows, 3))
    padded = torch.nn.functional.pad(whole, (0, 3 * 128 - columns))
    for row in range(rows):
        for group in range(3):
            for j in range(64):
                byte = int(weight.packed[row, 64 * group + j])
                assert byte & 15 == padded[row, 128 * group + j] + 8
                assert byte >> 4 == padded[row, 128 * group + 64 + j] + 8
    assert weight.nbytes == rows * 3 * 64 + rows * 3 * 4


@pytest.mark.parametrize("quantize_matrix", [quantize_int8, quantize_int4])
def test_rows_of_zeros_and_of_almost_nothing_stay_what_they_are(
    quantize_matrix: Callable[[Tensor], Int8Weight | Int4Weight],
) -> None:
    matrix = torch.zeros(3, 200)
    matrix[1] = 1e-45  # the least float32 there is: its scale is 0
    matrix[2, 7] = 3.0
    weight = quantize_matrix(matrix)
    assert bool(weight.scales.isfinite().all())
    torch.testing.assert_close(weight.dequantize(torch.float32), matrix, rtol=1e-6, atol=1e-44)
    zero = 0 if isinstance(weight, Int8Weight) else 8 << 4 | 8
    assert bool(weight.tensors[0][:2].eq(zero).all())


@pytest.mark.parametrize("quantize_matrix", [quantize_int8, quantize_int4])
def test_what_cannot_be_quantized_is_refused(
    quantize_matrix: Callable[[Tensor], Int8Weight | Int4Weight],
) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        matrix = torch.ones(3, 130)
        matrix[1, 129] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize_matrix(matrix)
    for matrix in (torch.ones(4), torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 0)):
        with pytest.raises(ValueError, match=r"weights must be a float matrix \[N, K\]"):
            quantize_matrix(matrix)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_large_matrix_is_quantized_by_runs_of_rows(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(11, 300)
    whole = quantize_matrix(matrix, scheme)
    monkeypatch.setattr(quantized, "_VALUES_AT_ONCE", 4 * 300)
    for one, other in zip(whole.tensors, quantize_matrix(matrix, scheme).tensors, strict=True):
        assert torch.equal(one, other)


# -- the operations ----------------------------------------------------------------------------------------------


def outputs_of(weight: Any, dtype: torch.dtype, num_rows: Tensor | None = None) -> list[Tensor]:
    """What every linear operation makes of a weight [96, 160]."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, norm, bias, residual = random(3, 160), random(160), random(96), random(3, 96)
    pool = torch.zeros(2, 2, 4, 2, 16, dtype=dtype)
    rotations = torch.polar(torch.ones(3, 8), torch.rand(3, 8, generator=generator))
    entries = torch.arange(6).view(3, 2)
    queries = reference.qkv(hidden, norm, 1e-5, weight, bias, rotations, pool, entries, 2, num_rows=num_rows)
    reference.linear_residual(hidden, weight, bias, residual, num_rows=num_rows)
    return [
        queries,
        pool,
        residual,
        reference.gate_up(hidden, norm, 1e-5, weight, bias, num_rows=num_rows),
        reference.lm_head(hidden, norm, 1e-5, weight, num_rows=num_rows),
        reference.lm_head_argmax(hidden, norm, 1e-5, weight, num_rows=num_rows)[0],
    ]


@pytest.mark.parametrize("values_at_once", [2**20, 7 * 160])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_operation_is_that_of_the_dequantized_matrix(
    scheme: str, dtype: torch.dtype, tolerance: float, values_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_VALUES_AT_ONCE", values_at_once)
    weight = quantize_matrix(random_matrix(96, 160), scheme)
    for num_rows in (None, torch.tensor([2], dtype=torch.int32)):
        ours = outputs_of(weight, dtype, num_rows)
        theirs = outputs_of(weight.dequantize(dtype), dtype, num_rows)
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 10, equal_nan=True)
        if dtype == torch.float32:
            assert torch.equal(ours[-1], theirs[-1])


def test_float16_products_do_not_overflow_before_they_are_scaled() -> None:
    weight = quantize_int8(torch.full((2, 128), 0.01))
    out = torch.zeros(1, 2, dtype=torch.float16)
    reference.linear_residual(torch.full((1, 128), 100.0, dtype=torch.float16), weight, None, out)
    torch.testing.assert_close(out, torch.full((1, 2), 128.0, dtype=torch.float16), rtol=1e-2, atol=0)


# -- directories -------------------------------------------------------------------------------------------------


def load(directory: Path) -> LlamaWeights:
    config = ModelConfig.from_directory(directory)
    return load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False)


def all_tensors(weights: LlamaWeights) -> list[Tensor]:
    head = weights.lm_head
    tensors = [weights.embedding, weights.final_norm, *((head,) if isinstance(head, Tensor) else head.tensors)]
    return tensors + [tensor for layer in weights.layers for tensor in layer.tensors()]


def dequantized(weights: LlamaWeights) -> LlamaWeights:
    return with_matrices(weights, lambda matrix: matrix.dequantize(torch.float32))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def quantized_directory(
    tiny_llama: MakeTiny, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """`quantized_directory(scheme, layout)` -> (float directory, quantized directory), made once; read-only."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(scheme: str, layout: str) -> tuple[Path, Path]:
        if (scheme, layout) not in made:
            source = tiny_llama(**LAYOUTS[layout]).directory
            target = tmp_path_factory.mktemp("quantized")
            quantize_model(source, target, scheme, show_progress=False)
            made[scheme, layout] = source, target
        return made[scheme, layout]

    return make


QuantizedDirectory = Callable[[str, str], tuple[Path, Path]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_directory_loads_as_the_quantized_float_weights(
    quantized_directory: QuantizedDirectory, scheme: str, layout: str
) -> None:
    source, target = quantized_directory(scheme, layout)
    original, loaded = load(source), load(target)
    expected = quantize_weights(original, scheme)
    kind = Int8Weight if scheme == "int8" else Int4Weight
    for layer, float_layer in zip(loaded.layers, original.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            assert isinstance(getattr(layer, name), kind)
            assert getattr(layer, name).shape == getattr(float_layer, name).shape
    for one, other in zip(all_tensors(loaded), all_tensors(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    tied = layout == "tied"
    assert (loaded.lm_head is loaded.embedding) == (expected.lm_head is expected.embedding) == tied
    assert isinstance(loaded.lm_head, Tensor if tied else kind)
    files = load_file(target / "model.safetensors")
    assert loaded.nbytes == expected.nbytes == sum(tensor.nbytes for tensor in files.values())
    assert loaded.nbytes < original.nbytes
    assert run("verify", target).stdout == "OK\n"


def test_shards_are_written_one_by_one_and_every_matrix_quantized_once(
    tiny_llama: MakeTiny,
    quantized_directory: QuantizedDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized_names: list[tuple[int, ...]] = []

    def counted(matrix: Tensor, scheme: str) -> Int8Weight | Int4Weight:
        quantized_names.append(tuple(matrix.shape))
        return quantize_matrix(matrix, scheme)

    monkeypatch.setattr(quantize, "quantize_matrix", counted)
    source = tiny_llama(max_shard_size="40KB").directory
    quantize_model(source, tmp_path / "out", "int8", shard_bytes=10_000, show_progress=False)
    assert len(quantized_names) == 3 * 7 + 1
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 5
    assert all(len(load_file(s)) == 1 or sum(t.nbytes for t in load_file(s).values()) <= 10_000 for s in shards)
    whole = load(quantized_directory("int8", "grouped heads")[1])
    for one, other in zip(all_tensors(load(tmp_path / "out")), all_tensors(whole), strict=True):
        assert torch.equal(one, other)


def test_what_is_not_quantized_is_copied_as_it_is(tiny_llama: MakeTiny, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    deepcopy(tiny_llama(attention_bias=True).model).to(torch.bfloat16).save_pretrained(source)
    beside = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
    (source / "d3.json").write_text("{}")
    for name in beside:
        (source / name).write_text(f"contents of {name}")
    done = run("quantize", "--scheme", "int4", source, target)
    assert done.stdout == f"wrote {target}\n", done.output
    for name in (*beside, "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "d3.json").exists(), "it was calibrated on other weights"
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "d3engine", "scheme": "int4"}
    assert config == json.loads((source / "config.json").read_text())
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    kept = {name for name in before if "proj.weight" not in name and name != "lm_head.weight"}
    assert {"model.embed_tokens.weight", "model.norm.weight", f"{QUERY}.bias"} <= kept
    for name in kept:
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], before[name])
    assert {name.rpartition(".")[2] for name in set(after) - kept} == {"qweight", "scales"}
    assert torch.equal(after["lm_head.scales"], quantize_int4(before["lm_head.weight"]).scales)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_inspect_shows_a_quantized_directory(quantized_directory: QuantizedDirectory, tiny_llama: MakeTiny) -> None:
    shown = run("inspect", quantized_directory("int4", "grouped heads")[1]).stdout
    parameters = sum(parameter.numel() for parameter in tiny_llama().model.parameters())
    assert "int4" in shown
    assert f"{parameters:,}" in shown
    assert "model.layers.*.mlp.up_proj.qweight" in shown
    assert "none" in run("inspect", tiny_llama().directory).stdout


def test_the_tool_refuses_what_it_cannot_do(
    tiny_llama: MakeTiny, quantized_directory: QuantizedDirectory, tmp_path: Path
) -> None:
    source, target = quantized_directory("int8", "grouped heads")
    new = tmp_path / "new"
    for arguments, message in (
        ((source, target), r"DST must be a new or empty directory.*; got .*"),
        ((target, new), r"SRC must be a model with float weights \(this one is int8\).*; got .*"),
        ((source, source), "DST must be another directory than SRC.*; got .*"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            quantize_model(*arguments, "int4", overwrite=arguments[0] == arguments[1], show_progress=False)
    with pytest.raises(InvalidValueError, match=r"scheme must be one of int8, int4.*; got 'int3'"):
        quantize_model(source, new, "int3", show_progress=False)
    assert run("quantize", "--scheme", "int3", source, new).exit_code == 2
    assert run("quantize", source, new).exit_code == 2
    failed = run("quantize", "--scheme", "int8", target, new)
    assert (failed.exit_code, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)
    assert not new.exists()

    bad = tmp_path / "bad"
    tiny_llama().model.save_pretrained(bad)
    tensors = load_file(bad / "model.safetensors")
    for value, message in (
        (math.nan, f"model.safetensors: tensor '{QUERY}.weight' holds NaN or infinity"),
        (1e300, f"tensor '{QUERY}.weight' has values too large for torch.float32"),
    ):
        matrix = tensors[f"{QUERY}.weight"].double()
        matrix[3, 4] = value
        save_file(tensors | {f"{QUERY}.weight": matrix}, bad / "model.safetensors")
        with pytest.raises(ModelFormatError, match=message):
            quantize_model(bad, new, "int4", show_progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


Edit = Callable[[dict[str, Tensor]], Any]
WRONG_TENSORS: list[tuple[str, Edit, str]] = [
    ("int8", lambda t: t.pop(f"{QUERY}.scales"), rf"'{QUERY}\.scales' is missing in .*model\.safetensors"),
    ("int4", lambda t: t.pop(f"{QUERY}.qweight"), rf"'{QUERY}\.qweight' is missing"),
    ("int8", lambda t: t.update({"model.norm.scales": torch.ones(48)}), "'model.norm.scales' is unexpected"),
    ("int8", lambda t: t.update({f"{QUERY}.weight": torch.ones(64, 48)}), rf"'{QUERY}\.weight' is unexpected"),
    ("int4", lambda t: t.update({"lm_head.weight": torch.ones(300, 48)}), r"'lm_head\.weight' is unexpected"),
    ("int8", lambda t: t.update({f"{QUERY}.scales": torch.ones(64, 1)}), r"has shape \[64, 1\]; .* asks for \[64\]"),
    ("int4", lambda t: t.update({f"{QUERY}.scales": torch.ones(64)}), r"has shape \[64\]; .* asks for \[64, 1\]"),
    (
        "int8",
        lambda t: t.update({f"{QUERY}.qweight": torch.ones(64, 48, dtype=torch.uint8)}),
        rf"model\.safetensors: tensor '{QUERY}\.qweight' has dtype U8: allowed are I8",
    ),
    ("int4", lambda t: t.update({f"{QUERY}.qweight": torch.ones(64, 64)}), r"has dtype F32: allowed are U8"),
    ("int8", lambda t: t.update({f"{QUERY}.scales": torch.ones(64).half()}), r"has dtype F16: allowed are F32"),
    ("int8", lambda t: t[f"{QUERY}.scales"][5].fill_(torch.inf), rf"'{QUERY}\.scales' holds NaN or infinity"),
    ("int4", lambda t: t[f"{QUERY}.scales"][5].fill_(torch.nan), rf"'{QUERY}\.scales' holds NaN or infinity"),
    ("int8", lambda t: t[f"{QUERY}.qweight"][5, 6].fill_(-128), rf"'{QUERY}\.qweight' holds -128: allowed are -127"),
]


@pytest.mark.parametrize(("scheme", "edit", "message"), WRONG_TENSORS)
def test_a_wrong_tensor_is_named_with_its_file(
    quantized_directory: QuantizedDirectory, tmp_path: Path, scheme: str, edit: Edit, message: str
) -> None:
    directory = quantized_directory(scheme, "grouped heads")[1]
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path)
    assert run("verify", tmp_path).exit_code == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method must be 'd3engine', as `d3engine weights.*; got 'gptq'"),
        ({"quant_method": "awq"}, "quant_method must be .*; got 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method must be .*; got 'bitsandbytes'"),
        ({"quant_method": "d3engine"}, "scheme must be one of int8, int4.*; got None"),
        ({"quant_method": "d3engine", "scheme": "int2"}, "scheme must be one of int8, int4.*; got 'int2'"),
        ({"quant_method": "d3engine", "scheme": ["int8"]}, r"scheme must be .*; got \['int8'\]"),
        ({"quant_method": "d3engine", "scheme": "int8", "bits": 8}, "bits must be absent, since only .*; got 8"),
        (["int8"], "quantization_config must be an object, or absent.*; got .*"),
        ({"quant_method": "d3engine", "scheme": "int4"}, "qweight' has dtype I8: allowed are U8"),
        (None, r"q_proj\.weight' is missing"),
    ],
)
def test_a_wrong_quantization_config_is_refused(
    quantized_directory: QuantizedDirectory, tmp_path: Path, given: Any, message: str
) -> None:
    directory = quantized_directory("int8", "grouped heads")[1]
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    with pytest.raises(ModelFormatError, match=message):
        Engine(tmp_path, skip_tokenizer_init=True)


def test_quantizing_twice_and_unknown_schemes_are_refused(tiny_llama: MakeTiny) -> None:
    weights = load(tiny_llama().directory)
    with pytest.raises(InvalidValueError, match=r"scheme must be one of int8, int4.*; got 'fp8'"):
        quantize_weights(weights, "fp8")
    with pytest.raises(InvalidValueError, match=r"weights must be float matrices.*; got 'Int8Weight'"):
        quantize_weights(quantize_weights(weights, "int8"), "int4")


# -- the engine --------------------------------------------------------------------------------------------------


def tokens_of(engine: Engine, prompts: list[list[int]], *, together: bool = True) -> list[tuple[int, ...]]:
    """Greedy tokens, each prompt once at full depth and once under D3."""
    pairs = [
        ({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12, depth=depth))
        for prompt in prompts
        for depth in (FullDepth(), D3(0.8, 0.4))
    ]
    batches = [pairs] if together else [[pair] for pair in pairs]
    outputs = [
        output
        for batch in batches
        for output in engine.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False)
    ]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_answers_as_with_the_dequantized_weights_alone_and_in_a_batch(
    quantized_directory: QuantizedDirectory, make_prompts: Callable[..., list[list[int]]], scheme: str, layout: str
) -> None:
    source, target = quantized_directory(scheme, layout)
    prompts = make_prompts([3, 17, 9])
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with Engine(target, **options) as engine:
        batch = tokens_of(engine, prompts)
        alone = tokens_of(engine, prompts, together=False)
    with Engine(source, weights=dequantized(load(target)), **options) as engine:
        expected = tokens_of(engine, prompts)
    assert batch == alone == expected
    assert len(set(expected)) == 6, "answers that agree by chance would prove nothing"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_dtype_of_an_engine_is_that_of_activations_and_floats(
    quantized_directory: QuantizedDirectory, make_prompts: Callable[..., list[list[int]]], scheme: str
) -> None:
    directory = quantized_directory(scheme, "biases")[1]
    config = ModelConfig.from_directory(directory)
    weights = load_weights(directory, config, dtype=torch.bfloat16, device="cpu", show_progress=False)
    layer = weights.layers[0]
    assert layer.qkv_bias is not None
    assert {weights.embedding.dtype, layer.attention_norm.dtype, layer.qkv_bias.dtype} == {torch.bfloat16}
    assert layer.down.scales.dtype == weights.lm_head.scales.dtype == torch.float32
    with Engine(directory, weights=weights, dtype="bfloat16", skip_tokenizer_init=True) as engine:
        assert engine.executor.pool.dtype == torch.bfloat16
        assert all(len(tokens) == 12 for tokens in tokens_of(engine, make_prompts([5])))


# -- the benchmark -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tiny_llama: MakeTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads the word problems with the bundled model's tokenizer."""
    directory = tmp_path_factory.mktemp("reader")
    source = tiny_llama(vocab_size=768, hidden_size=128, num_hidden_layers=2, eos_token_id=2).directory
    for file in source.iterdir():
        shutil.copyfile(file, directory / file.name)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(model_directory("demo") / name, directory / name)
    (directory / "d3.json").write_text('{"depth": {"policy": "d3", "alpha": 0.9, "start": 0.5}}')
    return directory


def test_the_benchmark_finds_the_loss_that_the_engine_gives_for_a_prompt(reader: Path) -> None:
    """At full depth a solution costs the same whether it is generated step by step or read as part of a prompt."""
    given = take_problems("validation", 0, 2)
    with Engine(reader, device="cpu", dtype="float32") as engine:
        found = benchmark.answer(engine, given, FullDepth(), 4)
        shallow = benchmark.answer(engine, given, D3(0.5, 0.5), 4)
        assert engine.tokenizer is not None
        solutions = [benchmark.solution_tokens(engine, problem) for problem in given]
        questions = [engine.tokenizer.encode(format_prompt(problem.question)) for problem in given]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, depth=FullDepth())
        prompts = [{"prompt_token_ids": [*a, *b]} for a, b in zip(questions, solutions, strict=True)]
        outputs = engine.generate(prompts, params, use_tqdm=False)
    for place, (output, solution) in enumerate(zip(outputs, solutions, strict=True)):
        assert output.prompt_logprobs is not None
        read = zip(output.prompt_logprobs[-len(solution) :], solution, strict=True)
        assert found.losses[place] == pytest.approx(-sum(at[token].logprob for at, token in read), rel=1e-4)
        assert found.lengths[place] == len(solution)
        assert solution[-1] == 2
        assert abs(shallow.losses[place] - found.losses[place]) > 0.1
    assert [len(tokens) for tokens in found.token_ids] == [4, 4]


def test_the_benchmark_reports_each_scheme_at_each_depth(reader: Path, tmp_path: Path) -> None:
    options = [f"--model={reader}", "--problems=3", "--max-tokens=4", f"--json={tmp_path / 'report.json'}"]
    assert benchmark.main(options) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert str(reader.parent) not in (tmp_path / "report.json").read_text()
    rows = {row["weights"]: row for row in report["rows"]}
    assert list(rows) == ["float32", *SCHEMES]
    assert rows["int4"]["weight_bytes"] < rows["int8"]["weight_bytes"] < rows["float32"]["weight_bytes"]
    assert 0 == rows["float32"]["relative_error"] < rows["int8"]["relative_error"] < rows["int4"]["relative_error"]
    for row in rows.values():
        assert list(row["depths"]) == ["full depth", "d3"]
        for figures in row["depths"].values():
            assert all(f["low"] <= f["value"] <= f["high"] for f in figures.values())
    for figures in rows["float32"]["depths"].values():
        assert figures["perplexity_over_float"] == {"value": 1, "low": 1, "high": 1}
        assert figures["identical_answers"]["value"] == 1
    for depth in ("full depth", "d3"):
        perplexities = [row["depths"][depth]["perplexity"]["value"] for row in rows.values()]
        ratios = [row["depths"][depth]["perplexity_over_float"]["value"] for row in rows.values()]
        assert ratios == pytest.approx([perplexity / perplexities[0] for perplexity in perplexities])
        assert 0 < abs(ratios[1] - 1) < 0.1


def test_the_page_has_the_figures_of_the_result() -> None:
    root = Path(__file__).parents[2]
    report = json.loads((root / "benchmarks" / "results" / "quantization-demo.json").read_text())
    page = (root / "docs" / "quantization.md").read_text()

    def shown(figure: dict[str, float], form: str) -> str:
        value, low, high = (form.format(figure[name]) for name in ("value", "low", "high"))
        return f"{value} ({low} to {high})"

    for row in report["rows"]:
        for name, depth in (("full", "full depth"), ("D3", "d3")):
            cells = [row["weights"], f"{row['weight_bytes']:,}", name]
            figures = row["depths"][depth]
            cells += [shown(figures[key], "{:.5f}") for key in ("perplexity", "perplexity_over_float")]
            cells += [shown(figures[key], "{:.1%}") for key in ("exact_match", "identical_answers")]
            assert f"| {' | '.join(cells)} |" in page


def test_the_ratio_of_perplexities_pairs_the_problems() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(50, generator=generator, dtype=torch.float64).numpy()
    found = benchmark.Answers([], [], losses, losses * 0 + 10)
    worse = replace(found, losses=losses + 0.5)
    ratio = benchmark.perplexity_ratio(worse, found)
    assert list(ratio.values()) == pytest.approx([math.exp(0.05)] * 3)  # every problem by the same: no spread at all
    alone = benchmark.perplexity(worse)
    assert alone["value"] == pytest.approx(math.exp((losses.mean() + 0.5) / 10))
    assert alone["high"] - alone["low"] > 0.001
