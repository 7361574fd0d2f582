"""Damaged files of K-quants, IQ4, AWQ, GPTQ and compressed-tensors are refused by name, whatever their bytes say."""

import json
import resource
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integer_checkpoints import PUBLISHED, publish
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_llama
from torch import Tensor

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import SMALL, write_gguf

from d3engine.errors import ModelFormatError
from d3engine.kernels.blocks import BLOCK_FORMATS, StackedWeight
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf
from d3engine.model.source import files_of
from d3engine.model.weights import load_weights

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 40}
QUERY = "model.layers.0.self_attn.q_proj."
MOST_BYTES = 512 * 2**20
"""By which the memory of the process may grow in these tests: more than the files take, less than lies ask for."""


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MOST_BYTES


def load(path: Path) -> list[Tensor]:
    """All floats of a model, loaded packed and as floats, and its tokenizer; raises as the engine does."""
    files = files_of(path)
    for name in ("tokenizer.json", "tokenizer.model"):
        if files.has(name):
            files.read_bytes(name)
    config = ModelConfig.from_directory(files)
    found: list[Tensor] = []
    for keeps in (True, False):
        weights = load_weights(path, config, dtype=torch.float32, device="cpu", keeps_blocks=keeps, show_progress=False)
        for layer in weights.layers:
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                parts = matrix.parts if isinstance(matrix, StackedWeight) else (matrix,)
                found += [part if isinstance(part, Tensor) else part.unpacked() for part in parts]
    return found


def read_or_refused(path: Path, name: str) -> bool:
    """Whether a damaged model is refused, by an error that names its file or a field; what is read is finite."""
    try:
        found = load(path)
    except ModelFormatError as error:
        said = str(error)
        assert name in said or said.startswith("config.json: "), said
        assert len(said) < 4000
        return True
    assert all(bool(torch.isfinite(floats).all()) for floats in found)
    return False


# -- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    folder = tmp_path_factory.mktemp("gguf")

    @cache
    def of(type_name: str) -> bytes:
        sizes = SMALL | {"types": (type_name,), "hidden": 256, "intermediate": 256, "heads": 4, "head_dim": 64}
        return write_gguf(folder / f"{type_name}.gguf", **sizes).read_bytes()

    return of


@pytest.mark.parametrize("type_name", TYPES)
def test_gguf_cut_in_its_tensors_is_refused(tmp_path: Path, gguf_bytes: Callable[[str], bytes], type_name: str) -> None:
    """A file that ends in a block, at its end or before the last tensor; one byte more is no damage."""
    whole, cut = gguf_bytes(type_name), tmp_path / "cut.gguf"
    cut.write_bytes(whole)
    tensors = sorted(open_gguf(cut).tensors.values(), key=lambda tensor: tensor.offset)
    for tensor in (tensors[0], tensors[len(tensors) // 2], tensors[-1]):
        block = BLOCK_FORMATS[type_name].nbytes
        for length in {tensor.offset, tensor.offset + block + 1, tensor.offset + tensor.nbytes - 1}:
            cut.write_bytes(whole[:length])
            with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
                load(cut)
    cut.write_bytes(whole + b"\0")
    load(cut)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("type_name", TYPES)
def test_gguf_scale_that_is_no_number_is_named(
    tmp_path: Path, gguf_bytes: Callable[[str], bytes], type_name: str, number: float
) -> None:
    """Of any block of a matrix, the last one too, and of the embedding."""
    whole, path = gguf_bytes(type_name), tmp_path / "model.gguf"
    path.write_bytes(whole)
    tensors = open_gguf(path).tensors
    layout = BLOCK_FORMATS[type_name]
    for name, own in {"blk.0.ffn_down.weight": "mlp.down_proj", "token_embd.weight": "embed_tokens"}.items():
        tensor = tensors[name]
        for place in layout.halves:
            for block in (0, tensor.nbytes // layout.nbytes - 1):
                damaged = bytearray(whole)
                struct.pack_into("<e", damaged, tensor.offset + block * layout.nbytes + place, number)
                path.write_bytes(damaged)
                with pytest.raises(ModelFormatError, match=rf"{own}\.weight' holds NaN or infinity"):
                    load(path)


@pytest.mark.parametrize("type_name", TYPES)
@given(data=st.data())
def test_gguf_of_any_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, gguf_bytes: Callable[[str], bytes], type_name: str, data: st.DataObject
) -> None:
    """Bytes of the header and of the tensors change: counts, lengths, offsets, types, scales; or the file is cut."""
    damaged = bytearray(gguf_bytes(type_name))
    header = damaged.index(b"blk.0.attn_norm.weight")
    places = st.one_of(st.integers(0, 400), st.integers(header - 64, header + 800), st.integers(0, len(damaged) - 1))
    edits = st.lists(st.tuples(places, st.sampled_from([0, 1, 2, 7, 8, 15, 127, 128, 255])), max_size=6)
    for place, byte in data.draw(edits):
        damaged[place] = byte
    end = data.draw(st.one_of(st.none(), st.integers(0, len(damaged))))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged[:end])
    is_refused = read_or_refused(path, "damaged.gguf")
    if bytes(damaged[:end]) == gguf_bytes(type_name):
        assert not is_refused


WORDS = (0, 1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("field", ["rows", "columns", "type", "offset", "dimensions"])
def test_gguf_that_lies_of_a_tensor_is_refused(
    tmp_path: Path, gguf_bytes: Callable[[str], bytes], type_name: str, field: str
) -> None:
    """Each number that describes a matrix, in place of the true one."""
    whole, path, name = gguf_bytes(type_name), tmp_path / "lie.gguf", b"blk.0.ffn_gate.weight"
    first = whole.index(name) + len(name)
    place, code = {
        "dimensions": (first, "<I"),
        "columns": (first + 4, "<Q"),
        "rows": (first + 12, "<Q"),
        "type": (first + 20, "<I"),
        "offset": (first + 24, "<Q"),
    }[field]
    (true,) = struct.unpack_from(code, whole, place)
    for word in {*WORDS, true + 1, true - 1, true + 32, max(0, true - 32), 2 * true} - {true}:
        if not 0 <= word < 2 ** (8 * struct.calcsize(code)):
            continue
        damaged = bytearray(whole)
        struct.pack_into(code, damaged, place, word)
        path.write_bytes(damaged)
        is_refused = read_or_refused(path, "lie.gguf")
        assert is_refused or (field == "type" and word < true)  # blocks of another type may fit into the same bytes


# -- matrices of whole numbers -----------------------------------------------------------------------------------------

KINDS = (
    *("AWQ, 128", "AWQ, 32", "GPTQ, a row", "GPTQ in 8 bits", "GPTQ in the order of activations"),
    *("W4A16", "W8A16, a row", "W4A16 with ends in 8 bits"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("source"), **SIZES, num_attention_heads=4, head_dim=64).directory


@pytest.fixture(scope="module")
def published(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def of(name: str) -> Path:
        directory = tmp_path_factory.mktemp("published")
        publish(source, directory, PUBLISHED[name])
        return directory

    return of


def rewritten(source: Path, directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a model with edited tensors."""
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    directory.mkdir(exist_ok=True)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text((source / "config.json").read_text())
    return directory


def parts_of(tensors: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in tensors if name.startswith(QUERY))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", KINDS)
def test_whole_numbers_have_scale_one(
    published: Callable[[str], Path], tmp_path: Path, name: str, number: float
) -> None:
    """The last scale of a matrix is no number: the error names its tensor, packed or not."""

    def edit(tensors: dict[str, Tensor]) -> None:
        (scales,) = (part for part in parts_of(tensors) if part.endswith(("scales", "weight_scale")))
        tensors[scales].view(-1)[-1] = number

    directory = rewritten(published(name), tmp_path / "damaged", edit)
    config = ModelConfig.from_directory(directory)
    for keeps in (True, False):
        with pytest.raises(ModelFormatError, match=rf"{QUERY}(scales|weight_scale|weight)'"):
            load_weights(directory, config, dtype=torch.float32, device="cpu", keeps_blocks=keeps, show_progress=False)


def damages() -> st.SearchStrategy[Callable[[Tensor], Tensor | None]]:
    """What may become of a tensor; None: it is left out."""
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8])
    numbers = st.sampled_from([0, -1, 1, 7, 2**31 - 1, -(2**31), 3e38, -1.0, float("nan"), float("inf")])
    return st.one_of(
        st.just(lambda tensor: None),
        st.just(lambda tensor: tensor.flatten()),
        st.just(lambda tensor: tensor.t() if tensor.dim() == 2 else tensor[None]),
        st.just(lambda tensor: tensor[:-1] if tensor.dim() else tensor),
        st.just(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor),
        st.just(lambda tensor: tensor[:0] if tensor.dim() else tensor),
        st.just(lambda tensor: tensor[..., :0] if tensor.dim() else tensor),
        st.just(lambda tensor: tensor.view(-1)[0]),
        dtypes.map(lambda dtype: lambda tensor: tensor.to(dtype)),
        numbers.map(lambda number: lambda tensor: filled(tensor, number)),
    )


def filled(tensor: Tensor, number: float) -> Tensor:
    if tensor.is_floating_point():
        return torch.full(tensor.shape, number).to(tensor.dtype)  # some become infinite
    info = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, 0 if number != number else int(min(max(number, info.min), info.max)))


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_damaged_parts_of_a_matrix_are_read_or_refused(
    published: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """Parts of one matrix are missing, cut, turned, of another dtype or other values."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for part in data.draw(st.lists(st.sampled_from(parts_of(tensors)), min_size=1, max_size=2, unique=True)):
            made = data.draw(damages())(tensors[part])
            if made is None:
                del tensors[part]
            else:
                tensors[part] = made.clone()

    assert not read_or_refused(published(name), "published")
    directory = rewritten(published(name), tmp_path_factory.getbasetemp() / "damaged", edit)
    read_or_refused(directory, "damaged")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 4, 8, 16, 32, 33, 64, 128, 256, 2**31, 2**70, 0.5, 1e300, "", "x", "4", "gemm"]),
    st.sampled_from([[], {}, [4], {"a": 1}, "int", "float", "group", "channel", "tensor", "gptq", "gptq_v2", "awq"]),
)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_any_quantization_config_is_read_or_refused(
    published: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """One or two values of the config, nested ones too, are others."""
    directory = rewritten(published(name), tmp_path_factory.getbasetemp() / "configured", lambda tensors: None)
    config = json.loads((directory / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        holder = config["quantization_config"]
        while True:
            key = data.draw(st.sampled_from(sorted(holder)))
            if not isinstance(holder[key], dict) or not holder[key] or data.draw(st.booleans()):
                break
            holder = holder[key]
        holder[key] = deepcopy(data.draw(VALUES))  # a mapping within itself is no JSON
    is_same = json.loads((directory / "config.json").read_text()) == config
    (directory / "config.json").write_text(json.dumps(config))
    is_refused = read_or_refused(directory, "configured")
    if is_same:
        assert not is_refused


@pytest.mark.parametrize("name", ["W4A16", "W4A16 with ends in 8 bits"])
@pytest.mark.parametrize("shape", [[256], [256, 2**62], [-1, -1], [256, 0], [256, 256, 1], [2**40, 256]])
def test_lying_weight_shape_asks_for_nothing(
    published: Callable[[str], Path], tmp_path: Path, name: str, shape: list[int]
) -> None:
    """What a checkpoint says of a matrix's shape is held against its numbers, or not read at all."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{QUERY}weight_shape"] = torch.tensor(shape)

    directory = rewritten(published(name), tmp_path / "damaged", edit)
    if PUBLISHED[name] == replace(PUBLISHED[name], ends=None):
        load(directory)  # the one layout decides
    else:
        with pytest.raises(ModelFormatError, match=f"{QUERY}weight_packed' with its shape and scales must be one of"):
            load(directory)
