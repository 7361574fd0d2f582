"""The LM head beside quantized matrices: what it can be, what files say of it, and how it is read back."""

import json
from pathlib import Path

import pytest
import torch
from fixture_types import MakeLlama
from quantized_weights import LAYOUTS, all_tensors, load, run
from safetensors.torch import load_file, save_file
from saved_llama import change_json
from torch import Tensor

from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.kernels.matrices import looked_up
from d3engine.kernels.quantized import Int4Weight, Int8Weight, quantize_int8
from d3engine.model.config import ModelConfig
from d3engine.model.weights import quantize_weights
from d3engine.weights_tools.quantize import quantize_model

KINDS = {"int8": Int8Weight, "int4": Int4Weight, "float": Tensor}
PAIRS = [("grouped heads", "int8"), ("grouped heads", "int4"), ("grouped heads", "float")]
PAIRS += [("tied", "int8"), ("tied", "float")]


def source_of(tiny_llama: MakeLlama, layout: str) -> Path:
    return tiny_llama(**LAYOUTS[layout]).directory


@pytest.mark.parametrize(("layout", "form"), PAIRS)
def test_lm_head_has_the_scheme_asked_for_in_file_and_memory(
    tiny_llama: MakeLlama, tmp_path: Path, layout: str, form: str
) -> None:
    """An LM head has the scheme that is asked for, in files as in memory."""
    source, target = source_of(tiny_llama, layout), tmp_path / "out"
    assert run("quantize", "--scheme", "int4", "--rtn", "--lm-head", form, source, target).exit_code == 0
    found = load(target)
    assert isinstance(found.lm_head, KINDS[form])
    assert (found.lm_head is found.embedding) == (layout == "tied")
    expected = quantize_weights(load(source), "int4", lm_head=form)
    assert all(map(torch.equal, all_tensors(found), all_tensors(expected)))
    assert found.nbytes == sum(tensor.nbytes for tensor in load_file(target / "model.safetensors").values())
    assert run("verify", target).stdout == "OK\n"
    assert f"int4, LM head {form}" in run("inspect", target).stdout


def test_a_head_that_is_the_embedding_too_is_not_of_four_bits(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    source = source_of(tiny_llama, "tied")
    message = "lm_head must be one of int8, float for a model whose head is its embedding.*; got 'int4'"
    with pytest.raises(InvalidValueError, match=message):
        quantize_model(source, tmp_path / "out", "int4", lm_head="int4")
    with pytest.raises(InvalidValueError, match=message):
        quantize_weights(load(source), "int4", lm_head="int4")
    quantization = {"quant_method": "d3engine", "scheme": "int4", "lm_head": "int4"}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    with pytest.raises(ModelFormatError, match=r"lm_head must be one of int8, float, or absent .* is its embedding"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(("layout", "form"), [("grouped heads", "int4"), ("tied", "float")])
def test_directory_without_an_lm_head_scheme_loads_as_before(
    tiny_llama: MakeLlama, tmp_path: Path, layout: str, form: str
) -> None:
    """A directory that does not name the scheme of its LM head loads as before there was a choice."""
    quantize_model(source_of(tiny_llama, layout), tmp_path / "out", "int4", lm_head=form, show_progress=False)
    before = all_tensors(load(tmp_path / "out"))
    change_json(tmp_path / "out" / "config.json", lambda config: config["quantization_config"].pop("lm_head"))
    assert all(map(torch.equal, all_tensors(load(tmp_path / "out")), before))


def test_float_head_of_a_tied_int8_embedding_is_unexpected(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """A float LM head in a file whose embedding is tied and int8 is unexpected."""
    quantize_model(source_of(tiny_llama, "tied"), tmp_path / "out", "int8", show_progress=False)
    file = tmp_path / "out" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors | {"lm_head.weight": torch.ones(300, 48)}, file)
    with pytest.raises(ModelFormatError, match=r"'lm_head\.weight' is unexpected"):
        load(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_int8_table_are_those_of_its_matrix(dtype: torch.dtype) -> None:
    """Rows of an int8 table are those of the matrix that it stands for."""
    table, places = quantize_int8(torch.randn(11, 7)), torch.tensor([3, 0, 3, 10])
    assert torch.equal(looked_up(table, places, dtype), table.dequantize(dtype)[places])
