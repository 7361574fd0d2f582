"""Quantized weights are the same in a directory as in memory; a directory that is damaged is refused by name."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama
from quantized_weights import LAYOUTS, QUERY, SCHEMES, QuantizedDirectory, all_tensors, load, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from watching import watch

from d3engine import Engine
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.kernels.quantized import Fp8Weight, Int4Weight, Int8Weight, quantize_int8
from d3engine.model.weights import quantize_weights
from d3engine.weights_tools import quantize
from d3engine.weights_tools.quantize import quantize_model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_directory_loads_as_quantized_in_memory(
    quantized_directory: QuantizedDirectory, scheme: str, layout: str
) -> None:
    """A quantized directory loads as the quantized float weights."""
    source, target = quantized_directory(scheme, layout)
    original, loaded = load(source), load(target)
    expected = quantize_weights(original, scheme)
    kind = {"int8": Int8Weight, "fp8": Fp8Weight, "int4": Int4Weight}[scheme]
    for layer, float_layer in zip(loaded.layers, original.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            assert isinstance(getattr(layer, name), kind)
            assert getattr(layer, name).shape == getattr(float_layer, name).shape
    for one, other in zip(all_tensors(loaded), all_tensors(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.float(), other.float())
    tied = layout == "tied"
    assert (loaded.lm_head is loaded.embedding) == (expected.lm_head is expected.embedding) == tied
    assert isinstance(loaded.lm_head, Int8Weight)
    files = load_file(target / "model.safetensors")
    assert loaded.nbytes == expected.nbytes == sum(tensor.nbytes for tensor in files.values())
    assert loaded.nbytes < original.nbytes
    assert run("verify", target).stdout == "OK\n"


def test_quantize_writes_shards_in_turn_and_each_matrix_once(
    tiny_llama: MakeLlama, quantized_directory: QuantizedDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are written one by one, and every matrix is quantized once."""
    quantized = watch(monkeypatch, quantize, "quantize_matrix", lambda matrix, scheme: scheme)
    source = tiny_llama(max_shard_size="40KB").directory
    quantize_model(source, tmp_path / "out", "int8", shard_bytes=10_000, show_progress=False)
    assert len(quantized) == 3 * 7 + 1
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 5
    assert all(len(load_file(s)) == 1 or sum(t.nbytes for t in load_file(s).values()) <= 10_000 for s in shards)
    whole = load(quantized_directory("int8", "grouped heads")[1])
    for one, other in zip(all_tensors(load(tmp_path / "out")), all_tensors(whole), strict=True):
        assert torch.equal(one, other)


def test_what_is_not_quantized_is_copied_as_it_is(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    deepcopy(tiny_llama(attention_bias=True).model).to(torch.bfloat16).save_pretrained(source)
    beside = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
    (source / "d3.json").write_text("{}")
    for name in beside:
        (source / name).write_text(f"contents of {name}")
    done = run("quantize", "--scheme", "int4", "--rtn", source, target)
    assert done.stdout == f"wrote {target}\n", done.output
    for name in (*beside, "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "d3.json").exists(), "it was calibrated on other weights"
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "d3engine", "scheme": "int4", "lm_head": "int8"}
    assert config == json.loads((source / "config.json").read_text())
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    kept = {name for name in before if "proj.weight" not in name and name != "lm_head.weight"}
    assert {"model.embed_tokens.weight", "model.norm.weight", f"{QUERY}.bias"} <= kept
    for name in kept:
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], before[name])
    assert {name.rpartition(".")[2] for name in set(after) - kept} == {"qweight", "scales"}
    assert torch.equal(after["lm_head.scales"], quantize_int8(before["lm_head.weight"]).scales)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_inspect_shows_a_quantized_directory(quantized_directory: QuantizedDirectory, tiny_llama: MakeLlama) -> None:
    shown = run("inspect", quantized_directory("int4", "grouped heads")[1]).stdout
    parameters = sum(parameter.numel() for parameter in tiny_llama().model.parameters())
    assert "int4" in shown
    assert f"{parameters:,}" in shown
    assert "model.layers.*.mlp.up_proj.qweight" in shown
    assert "none" in run("inspect", tiny_llama().directory).stdout


def test_the_tool_refuses_what_it_cannot_do(
    tiny_llama: MakeLlama, quantized_directory: QuantizedDirectory, tmp_path: Path
) -> None:
    source, target = quantized_directory("int8", "grouped heads")
    new = tmp_path / "new"
    for arguments, message in (
        ((source, target), r"DST must be a new or empty directory.*; got .*"),
        ((target, new), r"MODEL must be a model with float weights \(this one is int8\).*; got .*"),
        ((source, source), "DST must be another directory than MODEL.*; got .*"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            quantize_model(*arguments, "int4", overwrite=arguments[0] == arguments[1], show_progress=False)
    with pytest.raises(InvalidValueError, match=r"scheme must be one of int8, int4, fp8.*; got 'int3'"):
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
    ("fp8", lambda t: t[f"{QUERY}.qweight"].view(torch.uint8)[5, 6].fill_(255), rf"'{QUERY}\.qweight' holds NaN"),
    ("fp8", lambda t: t.update({f"{QUERY}.qweight": torch.ones(64, 48).char()}), r"has dtype I8: allowed are F8_E4M3"),
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
        ({"quant_method": "aqlm", "bits": 4}, "quant_method must be 'd3engine', as `d3engine weights.*; got 'aqlm'"),
        ({"quant_method": "awq"}, "bits is missing"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method must be .*; got 'bitsandbytes'"),
        ({"quant_method": "d3engine"}, "scheme must be one of int8, int4, fp8.*; got None"),
        ({"quant_method": "d3engine", "scheme": "int2"}, "scheme must be one of int8, int4, fp8.*; got 'int2'"),
        ({"quant_method": "d3engine", "scheme": ["int8"]}, r"scheme must be .*; got \['int8'\]"),
        ({"quant_method": "d3engine", "scheme": "int8", "lm_head": "int6"}, "lm_head must be one of int8, int4, float"),
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


def test_quantizing_twice_and_unknown_schemes_are_refused(tiny_llama: MakeLlama) -> None:
    weights = load(tiny_llama().directory)
    with pytest.raises(InvalidValueError, match=r"scheme must be one of int8, int4, fp8.*; got 'fp4'"):
        quantize_weights(weights, "fp4")
    with pytest.raises(InvalidValueError, match=r"weights must be float matrices.*; got 'Int8Weight'"):
        quantize_weights(quantize_weights(weights, "int8"), "int4")


def test_a_model_may_be_named_as_everywhere(tmp_path: Path) -> None:
    assert run("quantize", "--scheme", "fp8", "demo", tmp_path / "out").exit_code == 0
    assert isinstance(load(tmp_path / "out").layers[0].qkv, Fp8Weight)
    failed = run("quantize", "--scheme", "int8", tmp_path / "out", tmp_path / "other")
    assert failed.exit_code == 2
    assert "MODEL must be a model with float weights (this one is fp8)" in failed.stderr
