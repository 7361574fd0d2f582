"""Published checkpoints of whole numbers: packed or not, they stand for the floats that their tools compute."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama
from integer_checkpoints import PUBLISHED, publish
from safetensors.torch import load_file, save_file
from saved_llama import change, change_json, put
from tiny_models import random_prompts
from torch import Tensor
from transformers import LlamaForCausalLM

from d3engine import Engine, ModelFormatError, SamplingParams
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight, StackedWeight
from d3engine.kernels.native.library import byte_isa
from d3engine.model.source import open_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
IN_FLOATS = ("float32 scales", "GPTQ in groups of unequal sizes")
"""What no block holds."""
QUERY = "model.layers.1.self_attn.q_proj."


@pytest.fixture
def source(tiny_llama: MakeLlama) -> Path:
    return tiny_llama(**SIZES).directory


def answers(model: Path, **options: Any) -> list[Any]:
    with Engine(model, **OPTIONS, **options) as engine:
        outputs = engine.generate(random_prompts([3, 17, 40]), PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_are_the_floats_that_a_tool_computes(source: Path, tmp_path: Path, name: str) -> None:
    meant = publish(source, tmp_path / "published", PUBLISHED[name])
    with open_checkpoint(tmp_path / "published") as checkpoint:
        for tensor, floats in meant.items():
            assert torch.equal(checkpoint.read(tensor).float(), floats), tensor
            for row in (0, 13, len(floats) - 1):
                bytes_of_row = checkpoint.read_row(tensor, row)
                assert torch.equal(torch.frombuffer(bytearray(bytes_of_row), dtype=torch.float32), floats[row].view(-1))


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_are_those_of_transformers_over_the_floats(source: Path, tmp_path: Path, name: str) -> None:
    meant = publish(source, tmp_path / "published", PUBLISHED[name])
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.load_state_dict(meant)
    for backend in ("auto", "torch"):
        found = answers(tmp_path / "published", activations="float32", backend=backend)
        for prompt, (tokens, _) in zip(random_prompts([3, 17, 40]), found, strict=True):
            ids = torch.tensor([prompt])
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            assert tokens == wanted[0, len(prompt) :].tolist()


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("name", PUBLISHED)
def test_packed_matrices_give_the_bits_of_the_floats(source: Path, tmp_path: Path, name: str) -> None:
    meant = publish(source, tmp_path / "published", PUBLISHED[name])
    floats = tmp_path / "floats"
    floats.mkdir()
    save_file(meant, floats / "model.safetensors", metadata={"format": "pt"})
    (floats / "config.json").write_text((source / "config.json").read_text())
    with Engine(tmp_path / "published", activations="float32", **OPTIONS) as engine:
        held = engine.executor.model.weights.layers[0].down
    assert isinstance(held, Tensor if name in IN_FLOATS else BlockWeight)
    found, wanted = answers(tmp_path / "published", activations="float32"), answers(floats)
    if isinstance(held, BlockWeight) and held.order is not None:  # sums of other neighbours round otherwise
        assert torch.equal(held.dequantize(torch.float32), meant["model.layers.0.mlp.down_proj.weight"])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    else:
        assert found == wanted


@pytest.mark.usefixtures("native_library")
def test_act_order_stays_packed_with_rounded_inputs(source: Path, tmp_path: Path) -> None:
    """For 8-bit inputs rows are interleaved; the floats that they stand for keep every bit."""
    if byte_isa() is None:
        pytest.skip("no instruction set of this machine multiplies bytes")
    meant = publish(source, tmp_path / "published", PUBLISHED["GPTQ in the order of activations"])
    with Engine(tmp_path / "published", activations="int8", **OPTIONS) as engine:
        layer = engine.executor.model.weights.layers[0]
        (output,) = engine.generate(random_prompts([17]), PARAMS, use_tqdm=False)
    for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
        assert isinstance(matrix, BlockLanesWeight)
        assert matrix.order is not None
    for name, matrix in {"mlp.down_proj": layer.down, "self_attn.o_proj": layer.output}.items():
        assert torch.equal(matrix.dequantize(torch.float32), meant[f"model.layers.0.{name}.weight"])
    assert len(output.outputs[0].token_ids) == PARAMS.max_tokens


@pytest.mark.usefixtures("native_library")
def test_projections_of_other_orders_are_read(source: Path, tmp_path: Path) -> None:
    """Keys of another order stay apart from queries; gates of another order than the other half become floats."""
    directory = tmp_path / "published"
    meant = publish(source, directory, PUBLISHED["GPTQ in the order of activations"])
    tensors = load_file(directory / "model.safetensors")
    for module in ("self_attn.k_proj", "mlp.gate_proj"):
        name = f"model.layers.0.{module}"
        given, turned = (tensors[f"{name}.{kind}"] for kind in ("g_idx", "qweight"))
        tensors[f"{name}.g_idx"] = given.flip(0).contiguous()
        codes = torch.stack([turned >> 4 * nth & 15 for nth in range(8)], dim=1).flatten(0, 1).flip(0)
        words = sum(codes.view(-1, 8, codes.shape[1])[:, nth].long() << 4 * nth for nth in range(8))
        tensors[f"{name}.qweight"] = torch.where(words >= 2**31, words - 2**32, words).int()
        meant[f"{name}.weight"] = meant[f"{name}.weight"].flip(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with Engine(directory, activations="float32", **OPTIONS) as engine:
        layer = engine.executor.model.weights.layers[0]
        (output,) = engine.generate(random_prompts([17]), PARAMS, use_tqdm=False)
    assert isinstance(layer.qkv, StackedWeight)
    assert isinstance(layer.gate_up, Tensor)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.load_state_dict(meant)
    ids = torch.tensor([output.prompt_token_ids])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert output.outputs[0].token_ids == wanted[0, ids.shape[1] :].tolist()


@pytest.mark.usefixtures("native_library")
def test_packed_matrices_take_the_bytes_of_the_file(source: Path, tmp_path: Path) -> None:
    publish(source, tmp_path / "published", PUBLISHED["AWQ, 128"])
    with Engine(tmp_path / "published", activations="float32", **OPTIONS) as engine:
        layer = engine.executor.model.weights.layers[0]
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
    assert all(matrix.nbytes / matrix.shape.numel() == 4.25 / 8 for matrix in matrices)


def refused(source: Path, directory: Path, **quantization: Any) -> str:
    publish(source, directory, PUBLISHED["GPTQ, 128"])
    change_json(directory / "config.json", lambda config: config["quantization_config"].update(quantization))
    with pytest.raises(ModelFormatError) as error:
        Engine(directory, **OPTIONS)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, "bits must be 4 or 8; got 3"),
        ({"bits": "4"}, "bits must be an integer"),
        ({"group_size": 100}, "group_size must be a multiple of 32, or -1"),
        ({"group_size": 0}, "group_size must be an integer from 1"),
        ({"group_size": 64}, "in groups of 64 is [6, 256]"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq', 'gptq_v2' or absent"),
        ({"dynamic": {"-:lm_head": {}}}, "dynamic must be absent or empty"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be 'gemm', or absent"),
        ({"quant_method": "awq", "bits": 8}, "bits must be 4; got 8"),
        ({"quant_method": "hqq"}, "quant_method must be"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format must be 'float-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups must be an object"),
    ],
)
def test_layout_that_is_not_read_is_refused(source: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(source, tmp_path / "published", **changes)


@pytest.mark.parametrize(
    ("tensor", "changed", "words"),
    [
        ("scales", None, "has no floats 'model.layers.1.self_attn.q_proj.scales'"),
        ("scales", torch.ones(2, 200), "has shape [2, 200]: allowed for a matrix of [256, 256] in groups of 128"),
        ("scales", torch.full((2, 256), float("nan")).half(), "q_proj.scales'"),
        ("scales", torch.ones(2, 256).int(), "has no floats"),
        ("qzeros", None, "'model.layers.1.self_attn.q_proj.qzeros' is missing"),
        ("qzeros", torch.zeros(2, 30, dtype=torch.int32), "has dtype I32 and shape [2, 30]: allowed is I32 of [2, 32]"),
        ("qweight", torch.zeros(32, 256), "has dtype F32 and shape [32, 256]: allowed is a matrix of I32"),
        ("qweight", torch.zeros(32, dtype=torch.int32), "has dtype I32 and shape [32]"),
        ("qweight", torch.zeros(40, 256, dtype=torch.int32), "q_proj.scales' has shape [2, 256]"),
        ("g_idx", torch.full((256,), 9, dtype=torch.int32), "q_proj.g_idx' must be the groups, 0 to 1, of 256 columns"),
        ("g_idx", torch.zeros(9, dtype=torch.int32), "q_proj.g_idx' must be the groups, 0 to 1, of 256 columns"),
        ("weight", torch.zeros(256, 256), "is unexpected beside"),
        ("bias", torch.ones(256), "'model.layers.1.self_attn.q_proj.bias' is unexpected"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    source: Path, tmp_path: Path, tensor: str, changed: Tensor | None, words: str
) -> None:
    directory = tmp_path / "published"
    publish(source, directory, PUBLISHED["GPTQ, 128"])
    change(directory, put(QUERY + tensor, changed))
    with pytest.raises(ModelFormatError, match=re.escape(words)):
        Engine(directory, **OPTIONS)


@pytest.mark.parametrize("columns", [None, 128])
def test_open_matrix_of_no_group_is_refused(source: Path, tmp_path: Path, columns: int | None) -> None:
    """Of several layouts one must give a matrix the columns that its `weight_shape` names."""
    directory = tmp_path / "published"
    publish(source, directory, PUBLISHED["W4A16 with ends in 8 bits"])
    change(directory, put(QUERY + "weight_shape", None if columns is None else torch.tensor([256, columns])))
    words = "q_proj.weight_packed' with its shape and scales must be one of config_groups: 4 bits with a scale for 32"
    with pytest.raises(ModelFormatError, match=re.escape(words)):
        Engine(directory, **OPTIONS)
