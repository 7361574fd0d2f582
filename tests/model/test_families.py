"""What a config.json of another family comes to, what of it is refused, and that every tool reads its tensors."""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import NO_PAD, TIED, granite, make_family
from quantized_weights import all_tensors, load
from safetensors.torch import load_file, save_file
from tiny_models import TINY
from transformers import AutoConfig

from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.families import FAMILIES
from d3engine.model.family import Biases, Multipliers
from d3engine.model.weights import load_weights, quantize_weights, random_weights
from d3engine.weights_tools.convert import convert_bin
from d3engine.weights_tools.inspection import inspect_model, verify_model
from d3engine.weights_tools.quantize import quantize_model

SIZES = {"vocab_size": 100, "hidden_size": 256, "intermediate_size": 80}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 32}
GRANITE = granite(attention=0.1, residual=0.25, logits=8.0)
MODEL_TYPES = [
    *("llama", "ministral", "mistral", "qwen2", "seed_oss", "granite", "phi3", "internlm3", "exaone", "qwen3"),
    *("ministral3", "smollm3", "olmo2", "olmo3"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "exaone4", "ernie4_5"),
]
GRANITE_4 = "GraniteMoeHybridForCausalLM"
DENSE: dict[str, Any] = {"num_local_experts": 0, "shared_intermediate_size": 60, "layer_types": ["attention"] * 2}
"""What a Granite 4 must say to be one that runs."""


def config(architecture: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({"architectures": [architecture]} | SIZES | changes)


def config_of_type(model_type: str) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": model_type} | SIZES)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_fields_have_the_familys_defaults(model_type: str) -> None:
    """Absent fields have the defaults of the family in transformers."""
    read, oracle = config_of_type(model_type), AutoConfig.for_model(model_type, **SIZES)
    assert read.num_kv_heads == oracle.num_key_value_heads
    assert read.head_dim == (getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads)
    assert read.max_position_embeddings == oracle.max_position_embeddings
    assert read.rms_norm_eps == oracle.rms_norm_eps
    ropes = oracle.rope_parameters
    assert read.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    local_theta = ropes["sliding_attention"]["rope_theta"] if "sliding_attention" in ropes else None
    assert local_theta == (None if read.local_rope is None else read.local_rope.theta)
    assert read.bos_token_id == oracle.bos_token_id
    ends = oracle.eos_token_id
    assert list(read.eos_token_ids) == ([] if ends is None else ends if isinstance(ends, list) else [ends])
    assert read.rotary_dim == int(read.head_dim * ropes.get("partial_rotary_factor", 1.0))
    kinds = getattr(oracle, "layer_types", None) or ["sliding_attention"] * SIZES["num_hidden_layers"]
    slides = oracle.model_type in ("olmo3", "gemma2", "gemma3_text", "exaone4")
    assert read.windows == tuple(
        getattr(oracle, "sliding_window", None) if not slides or kind == "sliding_attention" else None for kind in kinds
    )
    for own, name in ((read.soft_caps.attention, "attn"), (read.soft_caps.logits, "final")):
        assert own == getattr(oracle, f"{name}_logit_softcapping", None)
    scalar = getattr(oracle, "query_pre_attn_scalar", None)
    assert scalar is None or read.attention_scale == scalar**-0.5
    assert read.tie_word_embeddings == oracle.tie_word_embeddings


def test_the_table_has_one_entry_for_each_pair_of_names() -> None:
    pairs = [(name, family.model_type) for family in FAMILIES for name in family.architectures]
    assert len(pairs) == len(set(pairs))


def test_biases_are_those_of_the_family() -> None:
    assert config("Qwen2ForCausalLM").biases == Biases(qkv=True)
    assert config("SeedOssForCausalLM").biases == Biases(qkv=True)
    assert config("SeedOssForCausalLM", attention_bias=False, attention_out_bias=True).biases == Biases(output=True)
    assert config("LlamaForCausalLM", attention_bias=True).biases == Biases(qkv=True, output=True)
    assert config("InternLM3ForCausalLM", qkv_bias=True, bias=True).biases == Biases(True, True, True)
    assert config("Qwen3ForCausalLM", attention_bias=True, mlp_bias=True).biases == Biases(qkv=True, output=True)
    assert config("GlmForCausalLM").biases == config("Glm4ForCausalLM", mlp_bias=True).biases == Biases(qkv=True)
    assert config("Ernie4_5ForCausalLM", use_bias=True).biases == Biases(True, True, True)
    granite = config("GraniteMoeHybridForCausalLM", **DENSE, attention_bias=True)
    assert granite.biases == Biases(qkv=True, output=True)


def test_norms_of_queries_and_keys_are_those_of_the_family() -> None:
    configs = {model_type: config_of_type(model_type) for model_type in MODEL_TYPES}
    assert [name for name, read in configs.items() if read.has_head_norms] == ["qwen3", "gemma3_text", "exaone4"]
    assert [name for name, read in configs.items() if read.has_projection_norms] == ["olmo2", "olmo3"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 20_000.0, "rope_local_base_freq": 5_000.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 4e4}}, "rope_theta": 3e4},
    ],
)
def test_both_ropes_of_a_gemma_3_are_transformers(changes: dict[str, Any]) -> None:
    """Both ropes of a Gemma 3 are read as transformers reads them."""
    read = config("Gemma3ForCausalLM", **changes)
    assert read.max_length == 131_072  # with the factor in it
    oracle = AutoConfig.for_model("gemma3_text", **(SIZES | deepcopy(changes))).rope_parameters
    for rope, kind in ((read.rope, "full_attention"), (read.local_rope, "sliding_attention")):
        assert rope is not None
        assert (rope.rope_type, rope.theta, rope.factor) == (
            oracle[kind]["rope_type"],
            oracle[kind]["rope_theta"],
            oracle[kind].get("factor"),
        )


YARN = {"rope_type": "yarn", "factor": 2.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
WIDE = LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
OF_8_PAIRS = LONGROPE | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


SLIDING = ["sliding_attention"] * 2
USED = {"use_sliding_window": True}
DYNAMIC = {"type": "dynamic", "factor": 2.0}
TWO_PARTS = {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Qwen3MoeForCausalLM", {}, r"architectures must be a list with one of .*Qwen3ForCausalLM.*; got \['Qwen3Moe"),
        ("GraniteMoeForCausalLM", {}, "architectures must be .*; got"),
        ("MistralForCausalLM", {"model_type": "llama"}, "model_type must be 'mistral' beside .*; got 'llama'"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be an integer from 1 to .*; got 0"),
        ("MistralForCausalLM", {"layer_types": SLIDING}, "layer_types must be 'full_attention'"),
        ("Qwen2ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window must be true or false; got 1"),
        ("Qwen2ForCausalLM", {"layer_types": SLIDING}, "layer_types must be 'full_attention' for"),
        ("Qwen2ForCausalLM", USED | {"layer_types": ["chunked_attention"] * 2}, "layer_types must be .* or absent;"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "other"]}, "layer_types must be 'full_attention'"),
        ("MinistralForCausalLM", {"layer_types": SLIDING[:1]}, "layer_types must be .* num_hidden_layers=2 kinds"),
        ("Qwen3ForCausalLM", {"max_window_layers": -1}, "max_window_layers must be an integer from 0 to .*; got -1"),
        ("Qwen2ForCausalLM", {"hidden_act": "gelu"}, "hidden_act must be 'silu'; got 'gelu'"),
        ("GraniteForCausalLM", {"attention_multiplier": 0}, "attention_multiplier must be .*above 0; got 0"),
        ("GraniteForCausalLM", {"residual_multiplier": 1e-9}, "residual_multiplier must be .*from 1e-06.*; got 1e-09"),
        ("GraniteForCausalLM", {"logits_scaling": "8"}, "logits_scaling must be .*; got '8'"),
        ("GraniteForCausalLM", {"embedding_multiplier": -1}, "embedding_multiplier must be .*; got -1"),
        ("Qwen3ForCausalLM", {"partial_rotary_factor": 0.75}, r"partial_rotary_factor must be 1\.0.*; got 0\.75"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, r"factor must be a number up to 1.*; got 1\.5"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.4}, "factor must be .* an even number of channels"),
        ("GlmForCausalLM", {"partial_rotary_factor": 0.01}, r"that makes .* 2 or more, of head_dim=128; got 0\.01"),
        ("Phi3ForCausalLM", TWO_PARTS, r"factor must be the same as the partial_rotary_factor=0\.5 outside; got 0\.75"),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE}, "rope_scaling: short_factor must be .* for each of 4 pairs"),
        ("Phi3ForCausalLM", {"rope_scaling": YARN}, "rope_scaling must be of type default or longrope for Phi3Fo"),
        (GRANITE_4, DENSE | {"layer_types": None}, "layer_types must be 'attention' for each of 2"),
        (GRANITE_4, DENSE | {"layer_types": ["attention", "mamba"]}, "layer_types must be .*: mamba layers are not"),
        (GRANITE_4, DENSE | {"num_local_experts": None}, "num_local_experts must be 0: experts are not .*; got None"),
        (GRANITE_4, DENSE | {"shared_intermediate_size": None}, "shared_intermediate_size is missing"),
        (GRANITE_4, DENSE | {"position_embedding_type": "alibi"}, "position_embedding_type must be"),
        ("MiniCPMForCausalLM", {"num_experts": 8}, "num_experts must be 0 or absent: experts are not supp.*; got 8"),
        ("MiniCPMForCausalLM", {"sparse_config": {}}, "sparse_config must be null or absent: attention is dense"),
        ("MiniCPMForCausalLM", {"scale_depth": 0}, "scale_depth must be a finite number above 0; got 0"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be .*; got 'LLLG'"),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": SLIDING}, "must be 'full_attention' for"),
        ("InternLM3ForCausalLM", {"qkv_bias": True}, "qkv_bias must be the same as mlp_bias=False; got True"),
        ("Qwen3ForCausalLM", {"layer_types": SLIDING}, "layer_types must be 'full_attention' for"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"full_attention": WIDE}}, "must be of type default or linear or"),
        ("Qwen3ForCausalLM", {"attention_bias": "yes"}, "attention_bias must be true or false; got 'yes'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers must be null or a list of num_hidden_layers=2"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, r"no_rope_layers must be .* 0 or 1 .*; got \[1, 2\]"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": 1}, "no_rope_layers must be .*; got 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be .* from 1 to .*; got 0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent, since trans"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window is missing"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must be an object with"),
        ("Gemma3ForCausalLM", {"rope_scaling": DYNAMIC}, "rope_scaling must be of type default"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "activation must be 'gelu_pytorch_tanh'; got 'gelu'"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 0}, "final_logit_softcapping must be .* above 0; got 0"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "hidden_act must be 'gelu_pytorch_tanh' or 'gelu'; got 'silu'"),
        ("GemmaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping must be absent; got 30.0"),
        ("Olmo3ForCausalLM", {"rope_theta": 10_000.0}, "rope_theta must be 500000, or in rope_parameters for both"),
        ("LlamaModel", {}, "tie_word_embeddings must be true, since a LlamaModel has no LM head of its own; got None"),
    ],
)
def test_field_beyond_the_engine_is_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    """What a family may ask for and the engine cannot do is refused by field."""
    with pytest.raises(ModelFormatError, match=message):
        config(architecture, **changes)


def test_layers_without_rope_are_the_lists_or_the_intervals() -> None:
    """Layers without rope are those of the list or at the interval."""
    for given in ({}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0]}):
        sizes = {"num_hidden_layers": 10} | given
        flags = AutoConfig.for_model("smollm3", **(SIZES | sizes)).no_rope_layers[:10]
        read = config("SmolLM3ForCausalLM", **sizes).layers_without_rope
        assert read == tuple(layer for layer, has_rope in enumerate(flags) if not has_rope)
        assert 0 < len(read) < 10
    assert config("LlamaForCausalLM", no_rope_layers=[0, 0]).layers_without_rope == ()  # transformers reads it nowhere


def test_rope_of_an_exaone_4_is_in_layers_with_a_window() -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window_pattern": "GL"}
    assert config("Exaone4ForCausalLM", **kinds).layers_without_rope == (0,)
    assert config("Exaone4ForCausalLM", num_hidden_layers=9).layers_without_rope == (3, 7)
    for given in ({"sliding_window_pattern": None}, {"layer_types": ["full_attention"] * 2}):
        read = config("Exaone4ForCausalLM", sliding_window=None, **given)
        assert (read.layers_without_rope, read.windows) == ((), (None, None))


def test_granite_4_has_its_shared_mlp_and_rope_where_it_says_so() -> None:
    for kind, layers in ((None, (0, 1)), ("nope", (0, 1)), ("rope", ())):
        read = config("GraniteMoeHybridForCausalLM", **DENSE, position_embedding_type=kind)
        assert (read.layers_without_rope, read.intermediate_size) == (layers, 60)
    reversed_order = {"shared_intermediate_size": 60} | SIZES | DENSE
    assert ModelConfig.from_dict({"model_type": "granitemoehybrid"} | reversed_order).intermediate_size == 60


def test_windows_are_those_of_the_layers_that_have_one() -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"):
        assert config(architecture, sliding_window=64).windows == (None, None)
        used = {"sliding_window": 64, "use_sliding_window": True}
        assert config(architecture, **used, **kinds).windows == (None, 64)
        assert config(architecture, **used, max_window_layers=1).windows == (None, 64)
        assert config(architecture, **used).windows == (None, None)  # from layer 28 on
        assert config(architecture, **(used | {"sliding_window": None})).windows == (None, None)
    for architecture in ("MistralForCausalLM", "Phi3ForCausalLM", "MinistralForCausalLM"):
        assert config(architecture, sliding_window=64).windows == (64, 64)
        assert config(architecture, sliding_window=None).windows == (None, None)
    assert config("MinistralForCausalLM", sliding_window=64, **kinds).windows == (None, 64)
    assert config("LlamaForCausalLM", sliding_window=64).windows == (None, None)
    assert config("LlamaForCausalLM", sliding_window=64).longest_text == 64


def test_unknown_model_type_alone_is_refused() -> None:
    """An unknown model type alone is refused with those that run."""
    message = "model_type must be 'llama' or 'mistral' or .*; got 'falcon'"
    with pytest.raises(ModelFormatError, match=message):
        ModelConfig.from_dict({"model_type": "falcon"} | SIZES)


def test_architectures_that_hold_no_name_are_refused() -> None:
    for architectures in ("LlamaForCausalLM", [], [None], [["LlamaForCausalLM"]]):
        with pytest.raises(ModelFormatError, match="architectures must be a list with"):
            ModelConfig.from_dict(SIZES | {"architectures": architectures})


MakeModel = Callable[[str], Path]
SAVED = ["Granite", "Phi-3", "Qwen2", "Qwen3", "SmolLM3", "OLMo 2", "Gemma 2", "Gemma 3", "GLM-4 of 2025", "Granite 4"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A tiny random model of a family, as a directory; read-only."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Granite": ("granite", GRANITE | TIED),
        "Phi-3": ("phi3", NO_PAD),
        "Qwen2": ("qwen2", {}),
        "Qwen3": ("qwen3", {}),
        "SmolLM3": ("smollm3", NO_PAD | {"no_rope_layers": [1, 0, 1]}),
        "OLMo 2": ("olmo2", {}),
        "Gemma 2": ("gemma2", TIED),
        "Gemma 3": ("gemma3_text", {}),
        "GLM-4 of 2025": ("glm4", NO_PAD),
        "Granite 4": ("granitemoehybrid", DENSE | {"layer_types": ["attention"] * 3, "mamba_n_heads": 4}),
    }
    own_head_dim = {model_type for model_type, _ in kinds.values()} - {"olmo2"}
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_family(tmp_path_factory.mktemp("family"), kinds[name], own_head_dim).directory
        return made[name]

    return make


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("name", SAVED)
def test_quantized_family_loads_as_quantized_weights(name: str, scheme: str, saved: MakeModel, tmp_path: Path) -> None:
    quantize_model(saved(name), tmp_path / "out", scheme, show_progress=False)
    verify_model(tmp_path / "out", show_progress=False)
    found, expected = (all_tensors(w) for w in (load(tmp_path / "out"), quantize_weights(load(saved(name)), scheme)))
    if name == "Granite":  # whose embedding is multiplied: here after it was quantized, there before
        assert all(map(torch.allclose, found, expected))
    else:
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", SAVED)
def test_family_is_verified_inspected_and_converted(name: str, saved: MakeModel, tmp_path: Path) -> None:
    """A family is verified inspected and converted from pickles."""
    source = saved(name)
    verify_model(source, show_progress=False)
    assert inspect_model(source).facts["num_layers"] == TINY["num_hidden_layers"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text((source / "config.json").read_text())
    torch.save(load_file(source / "model.safetensors"), tmp_path / "old" / "pytorch_model.bin")
    convert_bin(tmp_path / "old", tmp_path / "new", show_progress=False)
    found, expected = all_tensors(load(tmp_path / "new")), all_tensors(load(source))
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


def test_tied_granite_stays_tied_with_matrices_as_they_are(saved: MakeModel) -> None:
    """A tied Granite stays tied and its matrices are left as they are."""
    weights, tensors = load(saved("Granite")), load_file(saved("Granite") / "model.safetensors")
    assert weights.lm_head is weights.embedding
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"] * 48.0)  # 12 / 0.25
    assert torch.equal(weights.layers[1].down, tensors["model.layers.1.mlp.down_proj.weight"])


def test_multiplier_too_large_for_the_embedding_is_refused(saved: MakeModel, tmp_path: Path) -> None:
    """A multiplier that makes the embedding too large for its dtype is refused."""
    directory = changed(saved("Granite"), tmp_path, embedding_multiplier=1e6)
    read = ModelConfig.from_directory(directory)
    with pytest.raises(ModelFormatError, match=r"embed_tokens\.weight' has values too large for torch\.float16"):
        load_weights(directory, read, dtype=torch.float16, device="cpu", show_progress=False)


def test_a_missing_fused_matrix_is_named(saved: MakeModel, tmp_path: Path) -> None:
    directory = changed(saved("Qwen2"), tmp_path, architectures=["Phi3ForCausalLM"], model_type="phi3")
    name = re.escape("'model.layers.0.self_attn.qkv_proj.weight' is missing")
    with pytest.raises(ModelFormatError, match=name):
        load(directory)


def test_norm_of_heads_missing_or_of_wrong_width_is_named(saved: MakeModel, tmp_path: Path) -> None:
    """A norm of heads that is missing or of another width is named."""
    name, width = "model.layers.1.self_attn.k_norm.weight", TINY["head_dim"]
    tensors = load_file(saved("Qwen3") / "model.safetensors")
    for place, norm, message in (
        ("missing", None, f"tensor '{name}' is missing"),
        ("wide", torch.ones(2 * width), f"tensor '{name}' has shape [{2 * width}]; config.json asks for [{width}]"),
        ("broken", torch.full((width,), torch.nan), f"tensor '{name}' holds NaN or infinity"),
    ):
        directory = tmp_path / place
        directory.mkdir()
        (directory / "config.json").write_text((saved("Qwen3") / "config.json").read_text())
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(others if norm is None else others | {name: norm}, directory / "model.safetensors")
        with pytest.raises(ModelFormatError, match=re.escape(message)):
            load(directory)
    named = re.escape("tensor 'model.layers.0.self_attn.k_norm.weight' is unexpected for this config.json")
    with pytest.raises(ModelFormatError, match=named):
        load(changed(saved("Qwen3"), tmp_path / "llama", architectures=["LlamaForCausalLM"], model_type="llama"))


def test_random_weights_have_what_the_files_of_a_family_have(saved: MakeModel) -> None:
    for name in ("Qwen3", "SmolLM3", "OLMo 2", "Gemma 2", "Gemma 3", "GLM-4 of 2025", "Granite 4"):
        read = ModelConfig.from_directory(saved(name))
        random = random_weights(read, dtype=torch.float32, device="cpu", seed=0)
        pairs = zip(all_tensors(random), all_tensors(load(saved(name))), strict=True)
        assert all(made.shape == loaded.shape for made, loaded in pairs)


LATER_LAYERS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
COMPUTED_OTHERWISE: dict[str, list[dict[str, Any]]] = {
    "Qwen2": [LATER_LAYERS | {"max_window_layers": first} for first in range(3)],
    "Phi-3": [
        {"rope_parameters": None, "partial_rotary_factor": 0.5},
        {"rope_parameters": None, "rope_scaling": OF_8_PAIRS},
    ],
    "Granite": [{name: 2 * value} for name, value in GRANITE.items()],
    "SmolLM3": [{"no_rope_layers": flags} for flags in ([1, 1, 1], [0, 1, 1])],
    "Gemma 2": [{f"{name}_logit_softcapping": 5.0} for name in ("attn", "final")],
    "Gemma 2, other than caps": [{"query_pre_attn_scalar": 9}, {"sliding_window": 9}],
    "Gemma 3": [{"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 4e4}}}],
}


@pytest.mark.parametrize("name", COMPUTED_OTHERWISE)
def test_what_a_family_computes_is_part_of_the_fingerprint(name: str, saved: MakeModel, tmp_path: Path) -> None:
    """Windows, multipliers, layers without RoPE, caps and a second RoPE are part of the fingerprint."""
    source = saved(name.partition(",")[0])
    found = {fingerprint(source)}
    for nth, changes in enumerate(COMPUTED_OTHERWISE[name]):
        found.add(fingerprint(changed(source, tmp_path / str(nth), **changes)))
    assert len(found) == 1 + len(COMPUTED_OTHERWISE[name])


def test_how_rope_pairs_channels_is_part_of_the_fingerprint(saved: MakeModel, tmp_path: Path) -> None:
    as_ernie = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "rope_parameters": None}
    as_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | {"rope_theta": 500_000.0}
    ernie = changed(saved("Qwen2"), tmp_path / "ernie", **as_ernie)
    llama = changed(saved("Qwen2"), tmp_path / "llama", **(as_llama | {"rope_parameters": None}))
    assert fingerprint(ernie) != fingerprint(llama)


def test_the_norms_of_a_gemma_have_one_added(saved: MakeModel) -> None:
    weights, tensors = load(saved("Gemma 2")), load_file(saved("Gemma 2") / "model.safetensors")
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"] + 1)
    for own, name in (
        (weights.layers[1].attention_norm, "input"),
        (weights.layers[1].attention_post_norm, "post_attention"),
        (weights.layers[1].mlp_norm, "pre_feedforward"),
        (weights.layers[1].mlp_post_norm, "post_feedforward"),
    ):
        assert own is not None
        assert torch.equal(own, tensors[f"model.layers.1.{name}_layernorm.weight"] + 1)


def test_a_llama_has_no_multipliers(saved: MakeModel) -> None:
    assert config("LlamaForCausalLM", **GRANITE).multipliers == Multipliers()  # transformers reads none of them


def changed(source: Path, directory: Path, **changes: Any) -> Path:
    """The weights of `source` beside its config.json with `changes`, in a directory that may be new."""
    directory.mkdir(exist_ok=True)
    contents = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(contents))
    (directory / "model.safetensors").symlink_to(source / "model.safetensors")
    return directory
