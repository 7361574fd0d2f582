"""Published checkpoints in 8-bit floats: rows with scales stay as they are, and all stand for the same floats."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama
from fp8_checkpoints import PUBLISHED, Published, publish
from quantized_weights import dense
from safetensors.torch import load_file, save_file
from saved_llama import change_json
from tiny_models import random_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from d3engine import Engine, InvalidValueError, ModelFormatError, SamplingParams
from d3engine.cli import app
from d3engine.engine.resolve import held_config
from d3engine.kernels.quantized import Fp8Weight
from d3engine.model.checkpoint_formats import floats_of_rows
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.shard import shard_of
from d3engine.model.source import open_checkpoint
from d3engine.model.weights import load_weights
from d3engine.weights_tools.quantize import quantize_model

MakeCheckpoint = Callable[[str], tuple[Path, LlamaForCausalLM]]
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
QUERY = "model.layers.1.self_attn.q_proj."


@pytest.fixture
def checkpoint_of(tiny_llama: MakeLlama, tmp_path: Path) -> MakeCheckpoint:
    """A directory as one publisher writes it, and transformers' model of the floats that it stands for."""

    def make(name: str) -> tuple[Path, LlamaForCausalLM]:
        source = tiny_llama(**(SIZES if "128" in name else {})).directory
        directory = tmp_path / "published"
        meant = publish(source, directory, PUBLISHED[name])
        model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.load_state_dict(meant)
        return directory, model

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_are_transformers_over_the_floats(checkpoint_of: MakeCheckpoint, name: str) -> None:
    """Answers are those of transformers over the floats that it stands for."""
    directory, model = checkpoint_of(name)
    prompts = random_prompts([3, 17])
    with Engine(directory, **OPTIONS) as engine:
        found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, found, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert output.outputs[0].token_ids == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["Qwen"])
def test_floats_are_those_transformers_reads(checkpoint_of: MakeCheckpoint, name: str) -> None:
    """The floats are those that transformers reads from the same files."""
    pytest.importorskip("accelerate", reason="transformers reads 8-bit floats with accelerate alone")
    directory, _ = checkpoint_of(name)
    wanted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    with open_checkpoint(directory) as checkpoint:
        for tensor in checkpoint.entries:
            torch.testing.assert_close(checkpoint.read(tensor).float(), wanted[tensor].float(), rtol=0, atol=0)


SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}
"""Of a model whose matrices have whole groups of 128 columns; others have one that is not full."""


def scheme_of(name: str) -> str | None:
    if PUBLISHED[name].shares != "block":
        return "fp8"
    return "fp8_groups" if PUBLISHED[name].block[1] == 128 else None


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_and_blocks_of_128_columns_stay_8_bits(checkpoint_of: MakeCheckpoint, name: str) -> None:
    """Rows with scales and blocks of 128 columns stay 8 bits, and others become floats."""
    directory, model = checkpoint_of(name)
    meant = model.state_dict()
    stored = load_file(directory / "model.safetensors")
    config = ModelConfig.from_directory(directory)
    assert config.quantization == scheme_of(name)
    weights = load_weights(directory, config, dtype=torch.float32, device="cpu")
    assert torch.equal(dense(weights.lm_head), meant["lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        module = f"model.layers.{index}.mlp.down_proj.weight"
        assert torch.equal(dense(layer.down), meant[module])
        assert isinstance(layer.down, Fp8Weight if scheme_of(name) else Tensor)
        if isinstance(layer.down, Fp8Weight):
            assert torch.equal(layer.down.values.view(torch.uint8), stored[module].view(torch.uint8))
        stacked = [meant[f"model.layers.{index}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(dense(layer.gate_up), torch.cat(stacked))


def test_gpu_that_converts_no_8_bit_gets_floats(checkpoint_of: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, model = checkpoint_of("a scale a row")
    config = ModelConfig.from_directory(directory)
    held = {}
    for capability in ((8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        held[capability] = held_config(config, torch.device("cuda")).quantization
    assert held == {(8, 0): None, (8, 9): "fp8", (9, 0): "fp8"}
    floats = load_weights(directory, replace(config, quantization=None), dtype=torch.float32, device="cpu")
    assert torch.equal(dense(floats.layers[1].down), model.state_dict()["model.layers.1.mlp.down_proj.weight"])
    assert isinstance(floats.layers[0].qkv, Tensor)


def test_of_a_config_without_weights_it_is_not_said_how_they_lie(checkpoint_of: MakeCheckpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint_of("a scale a row")
    (directory / "model.safetensors").unlink()
    assert ModelConfig.from_directory(directory).quantization is None


def test_where_a_layer_was_left_in_floats_all_are_floats(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    rows = PUBLISHED["a scale a row"]
    publish(tiny_llama().directory, tmp_path, replace(rows, ignored=(*rows.ignored, "layers.1.mlp.down_proj")))
    assert ModelConfig.from_directory(tmp_path).quantization is None
    with Engine(tmp_path, **OPTIONS) as engine:
        assert engine.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@pytest.mark.parametrize("name", ["a scale a row", "a scale a matrix", "Qwen", "blocks of 128 columns"])
def test_a_row_and_a_ranks_part_are_of_the_same_floats(checkpoint_of: MakeCheckpoint, name: str) -> None:
    directory, model = checkpoint_of(name)
    config = ModelConfig.from_directory(directory)
    wanted = model.state_dict()[QUERY + "weight"]
    with open_checkpoint(directory) as checkpoint:
        assert floats_of_rows(checkpoint).read_row(QUERY + "weight", 5) == wanted[5].numpy().tobytes()
    part = shard_of(config, 1, 2)
    whole, ranks = (
        load_weights(directory, config, dtype=torch.float32, device="cpu", part=own).layers[1].down
        for own in (None, part)
    )
    assert type(whole) is type(ranks)
    assert torch.equal(dense(ranks), dense(whole)[:, part.channels.start : part.channels.stop])


def test_it_can_be_inspected_verified_and_quantized_as_ours(checkpoint_of: MakeCheckpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint_of("a scale a row")
    inspected = CliRunner().invoke(app, ["weights", "inspect", str(directory)])
    assert inspected.exit_code == 0
    assert "F8_E4M3" in inspected.stdout
    assert CliRunner().invoke(app, ["weights", "verify", str(directory)]).exit_code == 0
    made = CliRunner().invoke(app, ["weights", "quantize", str(directory), str(tmp_path / "int8"), "--scheme", "int8"])
    assert made.exit_code == 0, made.output
    assert ModelConfig.from_directory(tmp_path / "int8").quantization == "int8"
    with pytest.raises(InvalidValueError, match="a model with float weights"):
        quantize_model(tmp_path / "int8", tmp_path / "other", "fp8")
    with Engine(tmp_path / "int8", **OPTIONS) as engine:
        assert engine.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


WEIGHT, SCALE = QUERY + "weight", QUERY + "weight_scale"
FP8, OTHER_FP8 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALE, None, "weight' has dtype F8_E4M3, but there are no floats"),
        (SCALE, torch.ones(3, 1), r"shape \[3, 1\]: allowed .* for each row"),
        (SCALE, torch.ones(7, 5), r"shape \[7, 5\]: allowed .* equal blocks"),
        (SCALE, torch.full((64, 1), torch.nan), "q_proj.weight_scale' must have finite"),
        (SCALE, torch.zeros(64, 1), "weight_scale' must have finite values above 0"),
        (SCALE, -torch.ones(64), "weight_scale' must have finite values above 0"),
        (SCALE, torch.full((1,), torch.inf), "weight_scale' must have finite"),
        (SCALE, torch.ones(64, 1, 1), r"shape \[64, 1, 1\]: allowed for a matrix"),
        (SCALE, torch.ones(1, 1, 1), r"shape \[1, 1, 1\]: allowed for a matrix"),
        (SCALE, torch.ones(63), r"shape \[63\]: allowed for a matrix"),
        (SCALE, torch.ones(0), r"shape \[0\]: allowed for a matrix"),
        (SCALE, torch.ones(64, 1).char(), "but there are no floats"),
        (QUERY + "weight_scale_inv", torch.ones(64, 1), "weight_scale_inv' is unexpected"),
        (WEIGHT, lambda weight: weight[None], "q_proj.weight' has .* for matrices alone"),
        (WEIGHT, lambda weight: weight[0, 0], "q_proj.weight' has .* for matrices alone"),
        (WEIGHT, lambda weight: weight[:, :5].clone(), "q_proj.*config.json asks for"),
        (WEIGHT, lambda weight: weight.float().to(OTHER_FP8), r"q_proj\.weight' has dtype F8_E5M2: allowed are F64"),
        (QUERY + "qweight", torch.ones(64, 48), "qweight' is unexpected beside published"),
        (QUERY + "input_scale", torch.ones(1, 1, 1), r"input_scale' has .*\[1, 1, 1\]: allowed is one"),
        (QUERY + "input_scale", torch.ones(1).char(), "input_scale' has dtype I8 .* allowed is one float"),
        (QUERY + "k_scale", torch.ones(2, 2), "k_scale' has .* allowed is one float, or one for each"),
        ("other.input_scale", torch.ones(1), "other.input_scale' is unexpected"),
        ("lm_head.weight_scale", torch.ones(300, 1), r"lm_head\.weight_scale' is unexpected"),
        (QUERY + "weight_zero", torch.ones(64, 1), "weight_zero' is unexpected"),
        ("model.norm.weight", lambda norm: norm.to(FP8), r"norm\.weight' has dtype F8_E4M3, but there are no floats"),
    ],
)
def test_files_that_are_not_what_their_config_says_are_refused(
    checkpoint_of: MakeCheckpoint, name: str, change: Any, message: str
) -> None:
    """A tensor is left out where `change` is None, is another, or what a function makes of it."""
    directory, _ = checkpoint_of("a scale a row")
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    (directory / "model.safetensors").unlink()
    old = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(old) if callable(change) else change
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelFormatError, match=message):
        Engine(directory, **OPTIONS)


@pytest.mark.parametrize(
    "published", ["a scale a row", "AutoFP8", "Qwen", "blocks of 128 columns", "equal blocks of 128 columns"]
)
def test_tensor_of_another_shape_or_dtype_is_our_error(checkpoint_of: MakeCheckpoint, published: str) -> None:
    """A tensor of another shape or dtype is an error of ours whatever it is."""
    directory, _ = checkpoint_of(published)
    file, draw = directory / "model.safetensors", random.Random(published)
    usual = {name: tensor.clone() for name, tensor in load_file(file).items()}
    refused = 0
    for _ in range(60):
        file.unlink()
        save_file(usual | mutated(usual, draw), file)
        try:
            config = ModelConfig.from_directory(directory)
            load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False)
            fingerprint(directory)
        except ModelFormatError as error:
            refused += str(file) in str(error)
    assert refused > 50


def mutated(tensors: dict[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
    """One tensor in another shape, of another dtype or under another name."""
    name = draw.choice(sorted(tensors))
    kind = draw.choice(("shape", "shape", "dtype", "name"))
    if kind == "name":
        scales = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale")
        ends = ("weight", *scales, "qweight", "scales", "bias", "x")
        return {f"{name.rpartition('.')[0]}.{draw.choice(ends)}": draw_tensor(draw, tensors[name].dtype)}
    if kind == "shape":
        return {name: draw_tensor(draw, tensors[name].dtype)}
    return {name: tensors[name].float().to(draw.choice((torch.int8, torch.uint8, torch.float8_e4m3fn)))}


def draw_tensor(draw: random.Random, dtype: torch.dtype) -> torch.Tensor:
    shape = [draw.choice((0, 1, 2, 3, 64, 80)) for _ in range(draw.randrange(5))]
    return torch.ones(shape).to(dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "marlin-24"}, "format must be 'float-quantized' beside quant_method .*; got 'marlin-24'"),
        ({"format": "pack-quantized"}, "config_groups: group_0: weights: type must be 'int' .*; got 'float'"),
        ({"format": None}, "format must be 'float-quantized' .*; got None"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config must be absent or empty"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config must be absent or empty"),
        ({"weight_block_size": [16]}, "weight_block_size must be two whole numbers"),
        ({"weight_block_size": ["9" * 5000, 16]}, "weight_block_size must be two whole numbers"),
        ({"weight_block_size": [16.0, True]}, "weight_block_size must be two whole numbers"),
        ({"weight_block_size": [0, 16]}, "weight_block_size must be two whole numbers above 0"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo must be 'FP8' beside .*; got 'NVFP4'"),
        ({"quant_method": "hqq"}, "quant_method must be .* fbgemm_fp8, fp8, modelopt, or .*; got 'hqq'"),
    ],
)
def test_what_is_not_values_times_scales_is_refused_by_name(
    checkpoint_of: MakeCheckpoint, changes: dict[str, Any], message: str
) -> None:
    directory, _ = checkpoint_of("a scale a row")
    change_json(directory / "config.json", lambda config: config["quantization_config"].update(changes))
    with pytest.raises(ModelFormatError, match=message):
        Engine(directory, **OPTIONS)


def test_8_bit_floats_without_their_config_are_no_weights(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """Without a config that says so 8 bit floats are no weights."""
    publish(tiny_llama().directory, tmp_path, Published({"quant_method": "fp8"}))
    change_json(tmp_path / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(ModelFormatError, match=r"has dtype F8_E4M3: allowed are F64, F32, F16, BF16"):
        Engine(tmp_path, **OPTIONS)
