"""Converters of llama2.c, pickled, GGUF and Meta checkpoints to model directories."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from d3engine.errors import NOTHING, InvalidValueError, ModelFormatError, TokenizerError, require, require_integer
from d3engine.model.checkpoint import Checkpoint
from d3engine.model.checkpoint_formats import to_half_split
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import EMBEDDING, FINAL_NORM, LM_HEAD
from d3engine.model.fields import of_a_model, read_json_object
from d3engine.model.gguf_file import open_gguf
from d3engine.model.gguf_metadata import LLAMA3_ROPE
from d3engine.model.source import CONFIG_FILE, GGUFFiles
from d3engine.text.tokenizer import load_tokenizer
from d3engine.utils.files import is_there, open_regular, path_of
from d3engine.weights_tools.writing import (
    DEFAULT_SHARD_BYTES,
    PendingTensor,
    add_tokenizer,
    copy_companions,
    first_line,
    hf_config,
    output_directory,
    write_configs,
    write_json,
    write_weights,
)


def convert_llama2c(
    source: Path,
    destination: Path,
    *,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Convert a llama2.c file (version 0: seven int32, then float32 tensors) to a model directory.

    `tokenizer` is a tokenizer.json or a .model file to put next to the weights. Raises `ModelFormatError` for a
    file that is no such checkpoint or has another size than its header requires, and `InvalidValueError` for a
    destination in use or a tokenizer that does not fit.
    """
    header = _read_llama2c_header(source)
    with output_directory(destination, overwrite=overwrite) as folder:
        config = write_configs(folder, header.config())
        if tokenizer is not None:
            add_tokenizer(tokenizer, folder, config.vocab_size)
        write_weights(folder, config, _llama2c_tensors(source, header), show_progress=show_progress)


def convert_bin(
    source: Path,
    destination: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Convert a transformers directory with pytorch_model*.bin files to one with safetensors.

    Unpickles with weights_only, which builds only tensors, and copies config.json, tokenizer and template files. Raises
    `ModelFormatError` for what the loader would refuse, `InvalidValueError` for a destination in use.
    """
    config = ModelConfig.from_directory(source)
    tensors: dict[str, PendingTensor] = {}
    for file in _bin_files(source):
        for name, tensor in load_pickled(file).items():
            if name in tensors:
                raise ModelFormatError(f"tensor {name!r} is in both {tensors[name].file} and {file}")
            tensors[name] = PendingTensor(file, tuple(tensor.shape), tensor.dtype, tensor.detach)
    with output_directory(destination, overwrite=overwrite) as folder:
        copy_companions(source, folder)
        write_weights(folder, config, tensors, shard_bytes=shard_bytes, show_progress=show_progress)


_LLAMA2C_HEADER = struct.Struct("<7i")
_LLAMA2C_LATER_MAGIC = 0x616B3432  # "ak42" opens the versions 1 and 2


@dataclass(frozen=True)
class _Llama2cHeader:
    """The seven integers in the file's order; `shared` (the sign of the sixth): the classifier is the embedding."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared: bool

    @property
    def kv_dim(self) -> int:
        return self.dim // self.n_heads * self.n_kv_heads

    def sections(self) -> dict[str, tuple[int, ...]]:
        """Every array of float32 in the file's order; those of layers are stacked."""
        layers, dim, hidden = self.n_layers, self.dim, self.hidden_dim
        rope_table = (self.seq_len, self.dim // self.n_heads // 2)
        sections: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, dim),
            "input_layernorm": (layers, dim),
            "self_attn.q_proj": (layers, dim, dim),
            "self_attn.k_proj": (layers, self.kv_dim, dim),
            "self_attn.v_proj": (layers, self.kv_dim, dim),
            "self_attn.o_proj": (layers, dim, dim),
            "post_attention_layernorm": (layers, dim),
            "mlp.gate_proj": (layers, hidden, dim),
            "mlp.down_proj": (layers, dim, hidden),
            "mlp.up_proj": (layers, hidden, dim),
            "final_norm": (dim,),
            "rope_cos": rope_table,
            "rope_sin": rope_table,
        }
        if not self.shared:
            sections["classifier"] = (self.vocab_size, dim)
        return sections

    @property
    def file_bytes(self) -> int:
        values = sum(torch.Size(shape).numel() for shape in self.sections().values())
        return _LLAMA2C_HEADER.size + 4 * values

    def config(self) -> dict[str, Any]:
        return hf_config(
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            intermediate_size=self.hidden_dim,
            num_layers=self.n_layers,
            num_heads=self.n_heads,
            num_kv_heads=self.n_kv_heads,
            rms_norm_eps=1e-5,
            max_position_embeddings=self.seq_len,
            tied=self.shared,
            dtype="float32",
            # run.c ends a text at the token 1 that starts the next one, so 1 ends a sequence as well as 2.
            eos_token_id=[1, 2],
        )


def _read_llama2c_header(source: Path) -> _Llama2cHeader:
    with of_a_model(), open_regular(source) as file:
        raw = file.read(_LLAMA2C_HEADER.size)
    if len(raw) < _LLAMA2C_HEADER.size:
        raise ModelFormatError(f"{source} has {len(raw)} bytes: too short for a llama2.c header")
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = _LLAMA2C_HEADER.unpack(raw)
    if dim == _LLAMA2C_LATER_MAGIC:
        raise ModelFormatError(f"{source} is a llama2.c file of version 1 or 2 ('ak42'): only version 0 is read")
    # run.c: a negative vocabulary size means that a separate classifier ends the file.
    header = _Llama2cHeader(
        dim, hidden_dim, n_layers, n_heads, n_kv_heads, abs(vocab_size), seq_len, shared=vocab_size > 0
    )
    _check_llama2c_header(source, header)
    return header


def _check_llama2c_header(source: Path, header: _Llama2cHeader) -> None:
    for name in ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len"):
        value = getattr(header, name)
        if value < 1:
            raise ModelFormatError(f"{source}: {name} must be at least 1, as in llama2.c's version 0; got {value}")
    if header.dim % header.n_heads or header.n_heads % header.n_kv_heads:
        raise ModelFormatError(
            f"{source}: dim={header.dim}, n_heads={header.n_heads}, n_kv_heads={header.n_kv_heads}: "
            "each must be a multiple of the next"
        )
    size = source.stat().st_size
    if size != header.file_bytes:
        raise ModelFormatError(f"{source} has {size} bytes; its header asks for {header.file_bytes}")


def _llama2c_tensors(source: Path, header: _Llama2cHeader) -> dict[str, PendingTensor]:
    values = np.memmap(source, dtype="<f4", mode="r", offset=_LLAMA2C_HEADER.size)
    sections = {}
    start = 0
    for name, shape in header.sections().items():
        end = start + torch.Size(shape).numel()
        sections[name] = values[start:end].reshape(shape)
        start = end
    heads = {"self_attn.q_proj": header.n_heads, "self_attn.k_proj": header.n_kv_heads}

    def pending(array: Any, num_heads: int | None = None) -> PendingTensor:
        return PendingTensor(source, array.shape, torch.float32, partial(_from_array, array, num_heads))

    tensors = {EMBEDDING: pending(sections["embedding"]), FINAL_NORM: pending(sections["final_norm"])}
    if not header.shared:
        tensors[LM_HEAD] = pending(sections["classifier"])
    for name, stacked in sections.items():
        if name.endswith(("_proj", "layernorm")):
            for layer, array in enumerate(stacked):
                tensors[f"model.layers.{layer}.{name}.weight"] = pending(array, heads.get(name))
    return tensors


def _from_array(array: Any, num_heads: int | None) -> Tensor:
    tensor = torch.from_numpy(np.array(array, dtype=np.float32))
    return tensor if num_heads is None else to_half_split(tensor, num_heads)


def _bin_files(source: Path) -> list[Path]:
    """The pytorch_model*.bin files of a directory; with an index, those that it names."""
    index = source / "pytorch_model.bin.index.json"
    if not is_there(index):
        files = sorted(source.glob("pytorch_model*.bin"))
        if not files:
            said = " and needs no conversion: its weights are safetensors" if any(source.glob("*.safetensors")) else ""
            raise ModelFormatError(f"{source} has no pytorch_model*.bin{said}")
        return files
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{index}: weight_map must be an object of tensor names and file names")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not shard.endswith(".bin") or Path(shard).name != shard:
            raise ModelFormatError(f"{index}: a shard must be a plain .bin file name; got {shard!r}")
    return [source / shard for shard in sorted(set(weight_map.values()))]


def _said_of_pickle(error: Exception) -> str:
    """What torch says of a file, without its advice to run what the file holds."""
    if not isinstance(error, pickle.UnpicklingError):
        return first_line(error)
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it holds {named[1]}, and not tensors alone" if named else "it is damaged, or no checkpoint"


def load_pickled(file: Path) -> dict[str, Tensor]:
    """Memory-map the tensors of a .bin or .pth file.

    A pickle may describe far more than its file holds: one value expanded to a matrix, one storage under a thousand
    names, compressed data. Raises `ModelFormatError` for that, for anything but dense tensors, and for a file that
    cannot be read.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        with of_a_model(), open_regular(file) as opened:
            _refuse_packed(file, opened)
            try:
                state = torch.load(path_of(opened), mmap=True, **options)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                state = torch.load(path_of(opened), **options)  # written before torch 1.6: cannot be mapped
    except ModelFormatError:
        raise
    except Exception as error:  # for a damaged file the unpickler can raise anything
        raise ModelFormatError(f"{file} cannot be read as a torch checkpoint: {_said_of_pickle(error)}") from None
    if not isinstance(state, dict):
        raise ModelFormatError(f"{file} must hold a dict of tensors, not a {type(state).__name__}")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelFormatError(f"{file}: {name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ModelFormatError(f"{file}: tensor {name!r} is no dense tensor with values of its own")
    # Twice its size is the most that a file can hold, where two names share each storage.
    described, size = sum(tensor.nbytes for tensor in state.values()), file.stat().st_size
    if described > 2 * size:
        raise ModelFormatError(f"{file} has {size:,} bytes and describes tensors of {described:,}: they repeat values")
    return state


def _refuse_packed(file: Path, opened: BinaryIO) -> None:
    """Raise for a zip file with compressed entries, which may expand to any size; torch writes none."""
    if opened.read(4) != b"PK\x03\x04":
        return
    with zipfile.ZipFile(opened) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ModelFormatError(f"{file}: {entry.filename!r} is packed, which torch.save never does")


GGUF_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def convert_gguf(
    source: Path,
    destination: Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> None:
    """Convert a GGUF file to a model directory, its tensors dequantized to `dtype`.

    Tokenizer, special tokens and chat template are converted too. Raises `ModelFormatError` for a file that is damaged
    or not supported, `InvalidValueError` for a destination in use or another dtype, and `MissingExtraError` without the
    package `gguf`.
    """
    require(dtype in GGUF_DTYPES, "dtype", dtype, f"one of {', '.join(GGUF_DTYPES)}")
    files = GGUFFiles(open_gguf(source))
    with files.open_checkpoint() as checkpoint, output_directory(destination, overwrite=overwrite) as folder:
        copy_companions(files, folder)
        write_json(folder / CONFIG_FILE, files.read_json_object(CONFIG_FILE) | {"torch_dtype": dtype})
        try:
            load_tokenizer(files)
        except TokenizerError as error:
            raise ModelFormatError(f"{source}: its tokenizer cannot be loaded: {error}") from None
        kind = GGUF_DTYPES[dtype]
        tensors = {
            name: PendingTensor(entry.file, entry.shape, kind, partial(_read, checkpoint, name, kind))
            for name, entry in checkpoint.entries.items()
        }
        config = ModelConfig.from_directory(folder)
        write_weights(folder, config, tensors, shard_bytes=shard_bytes, show_progress=show_progress)


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    return checkpoint.read(name).to(dtype)


_META_PARAMS = frozenset(
    {
        *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
        *("rope_theta", "use_scaled_rope", "max_batch_size", "max_seq_len"),
    }
)

# Meta's name of a layer's tensor -> transformers' name, and the dimension of Meta's model parallelism.
_META_LAYER: dict[str, tuple[str, int | None]] = {
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
}


def convert_meta(
    source: Path,
    destination: Path,
    *,
    max_position_embeddings: int | None = None,
    rope_factor: float | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    show_progress: bool = True,
) -> list[str]:
    """Convert a directory of Meta's (consolidated.*.pth, params.json, tokenizer.model) to a model directory.

    params.json has neither the trained context length nor the factor of a "scaled" rope; where they do not follow from
    other fields, the two arguments are required. Returns notes for the user, such as a tokenizer that was left out.
    Raises `ModelFormatError` and `InvalidValueError`.
    """
    model = _read_meta(source)
    tensors = _meta_tensors(model)
    raw = _meta_config(model, tensors, max_position_embeddings, rope_factor)
    notes: list[str] = []
    with output_directory(destination, overwrite=overwrite) as folder:
        config = write_configs(folder, raw)
        if is_there(source / "tokenizer.model"):
            try:
                add_tokenizer(source / "tokenizer.model", folder, config.vocab_size)
            except InvalidValueError as error:
                notes.append(f"left out: {error}; put the model's tokenizer.json into {destination}")
        else:
            notes.append(f"{source} has no tokenizer.model; put a tokenizer into {destination}")
        write_weights(folder, config, tensors, shard_bytes=shard_bytes, show_progress=show_progress)
    return notes


@dataclass(frozen=True)
class _MetaModel:
    """params.json and the model-parallel shards, memory-mapped, in order."""

    params_file: Path
    params: dict[str, Any]
    files: list[Path]
    shards: list[dict[str, Tensor]]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.params.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelFormatError(f"{self.params_file}: {name} must be a number above 0; got {value!r}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not isinstance(value, int):
            raise ModelFormatError(f"{self.params_file}: {name} must be an integer above 0; got {value!r}")
        return value

    def parts(self, name: str) -> list[Tensor]:
        for file, shard in zip(self.files, self.shards, strict=True):
            if name not in shard:
                raise ModelFormatError(f"{file}: tensor {name!r} is missing")
        return [shard[name] for shard in self.shards]


def _read_meta(source: Path) -> _MetaModel:
    params_file = source / "params.json"
    params = read_json_object(params_file)
    for name in params:
        if name not in _META_PARAMS:
            allowed = ", ".join(sorted(_META_PARAMS))
            raise ModelFormatError(f"{params_file}: {name!r} is not supported; the known fields are {allowed}")
    files = sorted(source.glob("consolidated.*.pth"))
    if not files:
        raise ModelFormatError(f"{source} has no consolidated.*.pth")
    return _MetaModel(params_file, params, files, [load_pickled(file) for file in files])


def _meta_tensors(model: _MetaModel) -> dict[str, PendingTensor]:
    """Every tensor by transformers' name, joined from its shards when read."""
    num_heads = model.integer("n_heads")
    num_kv_heads = model.integer("n_kv_heads", num_heads)
    heads = {"attention.wq": num_heads, "attention.wk": num_kv_heads}
    if num_kv_heads % len(model.files):
        raise ModelFormatError(
            f"{model.params_file}: n_kv_heads must be a multiple of the {len(model.files)} shards; got {num_kv_heads}"
        )
    tensors: dict[str, PendingTensor] = {}
    for name in sorted({name for shard in model.shards for name in shard} - {"rope.freqs"}):
        target, dimension, key = _meta_name(model, name)
        tensors[target] = _join(model, name, dimension, heads.get(key))
    return tensors


def _meta_name(model: _MetaModel, name: str) -> tuple[str, int | None, str]:
    """Return transformers' name, the dimension the shards were cut along (None: not cut), and the key."""
    if name == "norm.weight":
        return FINAL_NORM, None, name
    if name == "output.weight":
        return LM_HEAD, 0, name
    if name == "tok_embeddings.weight":
        # Llama 1 and 2 cut the columns, Llama 3 the rows, as the shape shows.
        return EMBEDDING, 0 if model.parts(name)[0].shape[-1] == model.integer("dim") else 1, name
    prefix, _, rest = name.partition(".")
    layer, _, key = rest.removesuffix(".weight").partition(".")
    if prefix != "layers" or not layer.isdecimal() or key not in _META_LAYER or not name.endswith(".weight"):
        raise ModelFormatError(f"{model.files[0]}: tensor {name!r} is unexpected in a Llama checkpoint")
    target, dimension = _META_LAYER[key]
    return f"model.layers.{layer}.{target}.weight", dimension, key


def _join(model: _MetaModel, name: str, dimension: int | None, num_heads: int | None) -> PendingTensor:
    parts = model.parts(name)
    shape = list(parts[0].shape)
    if any(list(part.shape) != shape or part.dtype != parts[0].dtype for part in parts):
        raise ModelFormatError(f"{model.files[0].parent}: tensor {name!r} differs in shape or dtype between shards")
    if dimension is not None:
        if dimension >= len(shape):
            raise ModelFormatError(f"{model.files[0]}: tensor {name!r} has shape {shape}: a matrix is expected")
        shape[dimension] *= len(parts)
    if num_heads is not None and shape[0] % (2 * num_heads):
        raise ModelFormatError(f"{model.files[0]}: tensor {name!r} has {shape[0]} rows for {num_heads} heads")

    def read() -> Tensor:
        whole = parts[0] if dimension is None else torch.cat(parts, dimension)
        return whole if num_heads is None else to_half_split(whole, num_heads)

    return PendingTensor(model.files[0], tuple(shape), parts[0].dtype, read)


def _meta_config(
    model: _MetaModel,
    tensors: Mapping[str, PendingTensor],
    max_position_embeddings: int | None,
    rope_factor: float | None,
) -> dict[str, Any]:
    gate = "model.layers.0.mlp.gate_proj.weight"
    for name in (EMBEDDING, gate):
        if name not in tensors:
            raise ModelFormatError(f"{model.files[0]}: no tensor for {name!r}")
    vocab_size = tensors[EMBEDDING].shape[0]
    num_heads = model.integer("n_heads")
    is_llama3 = vocab_size == 128256
    return hf_config(
        vocab_size=vocab_size,
        hidden_size=model.integer("dim"),
        intermediate_size=tensors[gate].shape[0],
        num_layers=model.integer("n_layers"),
        num_heads=num_heads,
        num_kv_heads=model.integer("n_kv_heads", num_heads),
        rms_norm_eps=model.number("norm_eps"),
        max_position_embeddings=_meta_max_positions(model, max_position_embeddings),
        tied=LM_HEAD not in tensors or torch.equal(tensors[LM_HEAD].read(), tensors[EMBEDDING].read()),
        dtype=str(tensors[EMBEDDING].dtype).removeprefix("torch."),
        rope_theta=float(model.number("rope_theta", 10_000.0)),
        rope_scaling=_meta_rope_scaling(model, rope_factor),
        bos_token_id=128000 if is_llama3 else 1,
        # End of text, of message and of turn; a base model never emits the last two.
        eos_token_id=[128001, 128008, 128009] if is_llama3 else 2,
    )


def _meta_max_positions(model: _MetaModel, given: int | None) -> int:
    if given is not None:
        return require_integer("max_position_embeddings", given, 1)
    if model.params.get("use_scaled_rope"):
        return 131_072
    if model.params.get("rope_theta") == 500_000.0:
        return 8192
    raise InvalidValueError(
        "max_position_embeddings", NOTHING, "given, since params.json does not say (2048 for Llama 1, 4096 for Llama 2)"
    )


def _meta_rope_scaling(model: _MetaModel, factor: float | None) -> dict[str, Any] | None:
    """Llama 3.1's constants, which Meta keeps in code and not in params.json; only the factor varies."""
    if not model.params.get("use_scaled_rope"):
        if factor is not None:
            raise InvalidValueError("rope_factor", factor, "absent, since params.json does not set use_scaled_rope")
        return None
    if factor is None:
        raise InvalidValueError(
            "rope_factor", NOTHING, "given, since params.json does not say (8 for Llama 3.1, 32 for Llama 3.2)"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
