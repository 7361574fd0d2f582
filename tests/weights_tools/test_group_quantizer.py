"""Four bits in groups: errors are made up for, and each layer sees what the layers before it make."""

import json
import re
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from fp8_checkpoints import PUBLISHED, publish
from quantized_weights import OPTIONS, TEXT, run
from safetensors.torch import load_file, save_file
from tiny_models import TINY, random_prompts, save_random
from torch import Tensor

from d3engine import Engine, SamplingParams
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight
from d3engine.model.config import ModelConfig
from d3engine.model.source import files_of, open_checkpoint
from d3engine.weights_tools import group_quantizer
from d3engine.weights_tools.fitting_text import fitting_tokens
from d3engine.weights_tools.group_quantizer import Groups, quantize_groups
from d3engine.weights_tools.layerwise import LayerwiseModel
from d3engine.weights_tools.quantize import quantize_model, quantize_to_groups

DEMO = model_directory("demo")


def sample(rows: int = 48, columns: int = 256) -> tuple[Tensor, Tensor]:
    """A matrix, and activations [T, K] with a few directions that weigh far more than others."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    inputs += torch.randn(600, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_numbers_on_a_grid_come_back_as_they_were(group_size: int) -> None:
    codes = torch.randint(0, 16, (8, 256), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    codes[:, ::group_size], codes[:, 1::group_size] = 0, 15
    shape = 8, 256 // group_size
    meant = Groups(codes, torch.full(shape, 7, dtype=torch.uint8), torch.full(shape, 0.25).half()).dequantize()
    found = quantize_groups(meant, group_size, torch.eye(256))
    assert torch.equal(found.dequantize(), meant)
    assert torch.equal(found.codes, codes)


def test_quantize_groups_products_beat_rounding_alone() -> None:
    """Products of the text are nearer than with every number rounded alone."""
    matrix, inputs = sample()
    wanted = F.linear(inputs, matrix)

    def error(moments: Tensor) -> float:
        found = F.linear(inputs, quantize_groups(matrix, 64, moments).dequantize())
        return float((found - wanted).norm() / wanted.norm())

    assert error(inputs.t() @ inputs) < 0.6 * error(torch.eye(256))


def test_quantize_groups_sweeps_lower_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales that are chosen again leave less of the error that they are chosen by."""
    matrix, inputs = sample()
    moments, errors = inputs.t() @ inputs, []
    for sweeps in (0, 1, 2):
        monkeypatch.setattr(group_quantizer, "_SWEEPS", sweeps)
        left = quantize_groups(matrix, 32, moments).dequantize() - matrix
        errors.append(float((left @ moments * left).sum()))
    assert errors[0] > errors[1] > errors[2]


def test_channels_that_no_activation_has_are_rounded_alone() -> None:
    matrix, inputs = sample()
    inputs[:, 30:90] = 0
    found = quantize_groups(matrix, 64, inputs.t() @ inputs).dequantize()
    assert torch.isfinite(found).all()
    assert float((found - matrix)[:, 30:90].abs().max()) < 1.0


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22}
MODELS: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "a bias of query, key and value": (transformers.Qwen2Config, {}),
    "biases everywhere": (transformers.SeedOssConfig, {"attention_out_bias": True, "mlp_bias": True}),
    "multipliers": (transformers.GraniteConfig, GRANITE),
    "fused matrices": (transformers.Phi3Config, {"pad_token_id": None}),
    "norms of heads, and yarn": (transformers.Qwen3Config, {"rope_parameters": YARN}),
    "layers without rope": (transformers.SmolLM3Config, {"pad_token_id": None, "no_rope_layers": [0, 1, 0]}),
    "norms behind alone, and of whole projections": (transformers.Olmo2Config, {}),
    "soft caps": (transformers.Gemma2Config, {"sliding_window": 8, "attn_logit_softcapping": 1.0, "head_dim": 16}),
    "part of a head turned": (transformers.Phi3Config, {"pad_token_id": None, "partial_rotary_factor": 0.5}),
    "interleaved pairs of part of a head": (transformers.GlmConfig, {"pad_token_id": None, "head_dim": 16}),
    "a window everywhere": (transformers.MistralConfig, {"sliding_window": 8}),
    "a window in some layers": (
        transformers.MinistralConfig,
        {"sliding_window": 8, "head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "a window from the second layer on": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "norms behind alone, and windows": (transformers.Olmo3Config, {"sliding_window": 8}),
    "a scaled embedding": (transformers.GemmaConfig, {"head_dim": 16}),
    "other names": (transformers.ExaoneConfig, {"pad_token_id": None}),
    "biases by other names": (transformers.InternLM3Config, {"qkv_bias": True, "bias": True}),
    "two ropes": (
        transformers.Gemma3TextConfig,
        {"sliding_window": 8, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
    ),
}


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_layers_see_the_hidden_states_of_transformers(tmp_path: Path, name: str) -> None:
    kind, changes = MODELS[name]
    sizes = {field: value for field, value in TINY.items() if field != "head_dim"}
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(kind(**(sizes | changes)), dtype=torch.float32)
    save_random(tmp_path, made)
    config = ModelConfig.from_directory(tmp_path)
    prompts = torch.tensor(random_prompts([24, 24, 24]))
    wanted = made(prompts, output_hidden_states=True)
    with open_checkpoint(tmp_path) as checkpoint:
        model = LayerwiseModel(checkpoint, config, prompts.shape[1])
        states = model.embedded(prompts)
        for layer in range(config.num_layers):
            states = model.layer(layer, states)
            if layer < config.num_layers - 1:  # transformers has the last ones normed
                found = torch.cat(states) * config.multipliers.residual
                torch.testing.assert_close(found, wanted.hidden_states[layer + 1], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(torch.cat([*model.logits(states)]), wanted.logits, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in 4 bits, as the command makes it."""
    directory = tmp_path_factory.mktemp("groups") / "new"
    result = run("quantize", "demo", directory, "--scheme", "int4")
    assert result.exit_code == 0, result.output
    return directory


def test_the_directory_runs_packed_and_answers_as_before(quantized: Path) -> None:
    assert run("verify", quantized).stdout == "OK\n"
    prompt = "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?"
    params = SamplingParams(temperature=0, max_tokens=64)
    answers = []
    for model in ("demo", quantized):
        with Engine(model, **OPTIONS) as engine:
            answers.append(engine.generate([prompt], params, use_tqdm=False)[0].outputs[0].text)
            weights, native = engine.executor.model.weights, engine.stats().executor.startswith("native")
    assert answers[0] == answers[1]
    if native:
        matrices = [*(layer.down for layer in weights.layers), weights.embedding, weights.lm_head]
        assert all(isinstance(matrix, BlockWeight | BlockLanesWeight) for matrix in matrices)


def test_other_tools_find_their_layout(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"], config["ignore"]) == ("compressed-tensors", "pack-quantized", [])
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config["config_groups"]["group_1"]["targets"] == ["Embedding", "lm_head"]
    with files_of(quantized).open_checkpoint() as checkpoint:
        entry = checkpoint.entries["model.layers.3.mlp.down_proj.weight"]
        ends = [checkpoint.entries[name] for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert (entry.shape, entry.type_name) == ((128, 352), "U4_32")
    assert [one.type_name for one in ends] == ["U8_128", "U8_128"]
    (row,) = [line for line in run("inspect", quantized).stdout.splitlines() if "quantization" in line]
    assert row.split() == ["quantization", "U4_32,", "U8_128"]


def test_quantize_to_groups_tied_embedding_is_the_head(tmp_path: Path) -> None:
    """An embedding that is the LM head is written once, in 8 bits, within half a step of its floats."""
    source = copytree(DEMO, tmp_path / "tied")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    quantize_to_groups(source, tmp_path / "new", text=TEXT, show_progress=False)
    found = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert (found["config_groups"]["group_1"]["targets"], found["ignore"]) == (["Embedding"], ["lm_head"])
    wanted = tensors["model.embed_tokens.weight"].float()
    with open_checkpoint(tmp_path / "new") as checkpoint:
        assert "lm_head.weight" not in checkpoint.entries
        embedding = checkpoint.read("model.embed_tokens.weight")
    steps = wanted.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((embedding - wanted).abs() <= 0.51 * steps + 1e-6).all())
    with Engine(tmp_path / "new", **OPTIONS) as engine:
        assert engine.executor.model.weights.lm_head is engine.executor.model.weights.embedding


def test_quantize_to_groups_float_head_stays(tmp_path: Path) -> None:
    """With `--lm-head float` both the embedding and the head keep every bit."""
    quantize_to_groups(DEMO, tmp_path / "new", lm_head="float", text=TEXT, show_progress=False)
    before, after = (load_file(one / "model.safetensors") for one in (DEMO, tmp_path / "new"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(before[name], after[name])
    found = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert (list(found["config_groups"]), found["ignore"]) == (["group_0"], ["lm_head"])


def test_published_8_bit_floats_become_what_their_floats_do(tmp_path: Path) -> None:
    """Of a checkpoint in 8-bit floats, its head too, each tensor is that of the floats that it stands for."""
    floats, published = copytree(DEMO, tmp_path / "floats"), copytree(DEMO, tmp_path / "published")
    tensors = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
    tensors = {name: tensor for name, tensor in tensors.items() if re.search(r"layers\.([2-9]|1\d)\.", name) is None}
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": 2}
    (floats / "config.json").write_text(json.dumps(config))
    meant = publish(floats, published, PUBLISHED["NVIDIA, the head too"])
    save_file(meant, floats / "model.safetensors", metadata={"format": "pt"})
    made = []
    for source in (floats, published):
        directory = tmp_path / f"{source.name}-4"
        quantize_to_groups(source, directory, text=TEXT, bits=5.5, show_progress=False)
        made.append(load_file(directory / "model.safetensors"))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    quantize_model(floats, tmp_path / "int8", "int8", show_progress=False)
    with pytest.raises(InvalidValueError, match=r"a model with float weights \(this one is int8\)"):
        quantize_to_groups(tmp_path / "int8", tmp_path / "other", text=TEXT, show_progress=False)


def test_fitting_tokens_default_has_conversations() -> None:
    """Half of the default text is the model's own: it begins as its chat template does."""
    tokens = fitting_tokens(DEMO, None, show_progress=False)
    with Engine("demo", **OPTIONS) as engine:
        prompt = engine.chat_prompt([{"role": "user", "content": "Tom has 5 pens."}])["prompt_token_ids"]
    starts = [row[:2] == prompt[:2] for row in tokens.tolist()]
    assert starts == [False] * 16 + [True] * 16
    assert len({tuple(row) for row in tokens.tolist()}) == len(tokens)


def test_fitting_tokens_without_template_are_pages(tmp_path: Path) -> None:
    """A model that knows no chats is fitted to documentation alone."""
    source = copytree(DEMO, tmp_path / "model", ignore=ignore_patterns("chat_template.jinja"))
    assert len(fitting_tokens(source, None, show_progress=False)) == 16


BITS = "--bits must be a number from 4.63 to 8.12, which all matrices take in"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scheme", "int8", "--group-size", "32"), "--group-size must be absent but for --scheme int4 without --rtn"),
        (("--scheme", "int4", "--rtn", "--group-size", "32"), "--group-size must be absent but for --scheme int4"),
        (("--scheme", "int8", "--bits", "5.5"), "--bits must be absent but for --scheme int4 without --rtn; got 5.5"),
        (("--scheme", "int4", "--rtn", "--bits", "5.5"), "--bits must be absent but for --scheme int4 without --rtn"),
        (("--scheme", "int4", "--bits", "4.5"), BITS),
        (("--scheme", "int4", "--bits", "8.2"), BITS),
        (("--scheme", "int4", "--bits", "nan"), BITS),
        (("--scheme", "int4", "--like", "q4_0"), "--like must be --bits BITS; got 'q4_0'"),
        (("--scheme", "int8", "--rtn"), "--rtn must be absent with another --scheme than int4"),
        (("--scheme", "int4", "--group-size", "48"), "--group-size must be one of 32, 64, 128; got 48"),
        (("--scheme", "int4", "--group-size", "64"), "--group-size must be a divisor of 352"),
        (("--scheme", "int4", "--lm-head", "int4"), "--lm-head must be one of int8, float with groups; got 'int4'"),
        (("--scheme", "int4", "--rtn", "--text", "README.md"), "--text must be absent but for --scheme int4"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    result = run("quantize", "demo", tmp_path / "new", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="text must be at least 1024 tokens"):
        quantize_to_groups(DEMO, tmp_path / "new", 32, text="A few words.")


def test_a_model_is_not_replaced_by_what_is_made_of_it(tmp_path: Path) -> None:
    model = copytree(DEMO, tmp_path / "model")
    with pytest.raises(InvalidValueError, match="DST must be another directory than MODEL"):
        quantize_to_groups(model, model, 32, overwrite=True)
