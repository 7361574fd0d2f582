"""Writes a model directory in shards: checked first, and whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from d3engine.errors import FailedError, InvalidValueError, ModelFormatError
from d3engine.model.checkpoint import FP8, INDEX_FILE, SINGLE_FILE, Checkpoint, TensorEntry, TensorFile
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import check_tensors, expected_tensors
from d3engine.model.source import COMPANIONS, CONFIG_FILE, GENERATION_CONFIG_FILE, ModelSource, files_of
from d3engine.model.weights import byte_progress
from d3engine.text.tokenizer import guarded
from d3engine.text.tokenizer_files import is_tiktoken, read_tiktoken
from d3engine.utils.files import DATA_BYTES, is_there, naming, read_bytes

DEFAULT_SHARD_BYTES = 5 * 10**9

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: FP8,
}

_SENTENCEPIECE_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


@dataclass(frozen=True)
class PendingTensor:
    """A tensor still to be read: the file for errors, its shape and dtype, and the function that reads it.

    So names and shapes are checked before any is read, and only one shard is in memory at a time.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@contextmanager
def output_directory(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder; when the block ends without an error, its files become those of `destination`.

    A new destination appears with all its files at once. One with files is refused unless `overwrite`; then its weight
    files, files of the same names as new ones, and with a new tokenizer all of the old one, are replaced. An error or
    an interrupt restores them. If the process is killed while it replaces files, the destination has no config.json, so
    that no mixed model can be loaded, and the old files are in "old" in a hidden folder there. Raises
    `InvalidValueError`.
    """
    if is_there(destination) and not destination.is_dir():  # a link to nothing too
        raise InvalidValueError("DST", str(destination), "a directory, or a path where none exists yet")
    if destination.is_dir() and any(destination.iterdir()) and not overwrite:
        raise InvalidValueError("DST", str(destination), "a new or empty directory (or give --overwrite)")
    is_new = not destination.exists()
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Renames need one file system, and an existing directory may be a mount point.
    work = Path(tempfile.mkdtemp(dir=destination.parent if is_new else destination, prefix=f".{destination.name}."))
    folder, old = work / "new", work / "old"
    try:
        folder.mkdir()
        old.mkdir()
        yield folder
        if is_new:
            os.rename(folder, destination)
        else:
            _replace_files(folder, destination, old)
        shutil.rmtree(old)  # until here it could be restored
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for empty in (old, work):
            with suppress(OSError):
                empty.rmdir()


_TOKENIZERS, _OF_USERS = {"tokenizer.json", "tokenizer.model"}, {"d3.json", "prompt_form.json"}


def _replace_files(folder: Path, destination: Path, old: Path) -> None:
    """Move the files of `folder` into `destination`, and the replaced ones into `old`; undo it on any error.

    config.json, without which nothing can be loaded, leaves first and arrives last.
    """
    arriving = sorted((file.name for file in folder.iterdir()), key=lambda name: name == CONFIG_FILE)
    stale = {file.name for file in destination.glob("model*.safetensors")} | {INDEX_FILE, *arriving}
    if not _TOKENIZERS.isdisjoint(arriving):  # a tokenizer or chat template of other weights must not stay beside them
        stale |= {name.partition("/")[0] for name in COMPANIONS} - _OF_USERS
    leaving = sorted((name for name in stale if is_there(destination / name)), key=lambda name: name != CONFIG_FILE)
    moves = [(destination / name, old / name) for name in leaving]
    moves += [(folder / name, destination / name) for name in arriving]
    done: list[tuple[Path, Path]] = []
    try:
        for move in moves:
            done.append(move)
            os.rename(*move)
    except BaseException:
        for before, after in reversed(done):
            if is_there(after) and not is_there(before):
                os.rename(after, before)
        raise


def copy_companions(source: ModelSource, folder: Path, *, leave: Container[str] = ()) -> None:
    """Copy a model's files besides its weights, such as configs and tokenizer, but not `leave`."""
    files = files_of(source)
    for name in COMPANIONS:
        if name not in leave and files.has(name):
            content = files.read_bytes(name)
            with naming(folder / name):
                (folder / name).parent.mkdir(exist_ok=True)  # of how embeddings are pooled
                (folder / name).write_bytes(content)


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Write an object as transformers does: two spaces, a newline at the end."""
    with naming(path):
        path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def write_configs(folder: Path, config: Mapping[str, Any]) -> ModelConfig:
    """Write config.json and generation_config.json; return the config as the engine reads it."""
    write_json(folder / CONFIG_FILE, config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    write_json(folder / GENERATION_CONFIG_FILE, tokens)
    return ModelConfig.from_directory(folder)


def hf_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    rms_norm_eps: float,
    max_position_embeddings: int,
    tied: bool,
    dtype: str,
    rope_theta: float = 10_000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    bos_token_id: int = 1,
    eos_token_id: int | list[int] = 2,
) -> dict[str, Any]:
    """Return the config.json of a plain Llama in transformers 4's spelling, which 5 reads as well."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": rms_norm_eps,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }


def add_tokenizer(tokenizer: Path, folder: Path, vocab_size: int) -> None:
    """Put a tokenizer.json, a sentencepiece model or Meta's file of Llama 3 into `folder`, if its ids fit the model.

    Meta's file becomes a tokenizer.json, which others read too.
    """
    if not tokenizer.is_file() or tokenizer.suffix not in (".model", ".json"):
        raise InvalidValueError("tokenizer", str(tokenizer), "a tokenizer.json or a .model file")
    content = read_bytes(tokenizer, DATA_BYTES)
    name, config = f"tokenizer{tokenizer.suffix}", _SENTENCEPIECE_CONFIG
    if is_tiktoken(content):
        try:
            backend, names = read_tiktoken(tokenizer, content, {})
        except ModelFormatError as error:
            raise InvalidValueError("tokenizer", str(tokenizer), f"a readable .model file ({error})") from None
        content = backend.to_str().encode()
        name, config = "tokenizer.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    size = _tokenizer_size(tokenizer, name, content)
    if size > vocab_size:
        allowed = f"one with at most the model's {vocab_size} tokens (it has {size})"
        raise InvalidValueError("tokenizer", str(tokenizer), allowed)
    with naming(folder / name):
        (folder / name).write_bytes(content)
    if tokenizer.suffix == ".model":
        write_json(folder / "tokenizer_config.json", config)


def _tokenizer_size(tokenizer: Path, name: str, content: bytes) -> int:
    """The number of tokens in a tokenizer file; `InvalidValueError` if the engine cannot read it."""
    try:
        if name.endswith(".model"):
            from sentencepiece import SentencePieceProcessor

            return int(SentencePieceProcessor(model_proto=content).get_piece_size())
        from tokenizers import Tokenizer

        return int(guarded(Tokenizer.from_buffer, content).get_vocab_size())
    except Exception as error:  # both libraries raise bare Exception and RuntimeError for a bad file
        allowed = f"a readable tokenizer.json or .model file ({first_line(error)})"
        raise InvalidValueError("tokenizer", str(tokenizer), allowed) from None


def first_line(error: Exception) -> str:
    """The first line of a library's error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def write_weights(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, PendingTensor],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    show_progress: bool = True,
    description: str = "converting",
) -> None:
    """Write the tensors of `config` as safetensors: one file, or shards of at most `shard_bytes` and an index.

    A tensor larger than `shard_bytes` gets a separate shard. Old rope buffers and the second copy of a tied embedding
    are dropped; other surplus tensors raise `ModelFormatError` before writing.
    """
    _check(tensors, config)
    wanted = {name: tensors[name] for name in expected_tensors(config)}
    write_shards(folder, wanted, shard_bytes=shard_bytes, show_progress=show_progress, description=description)


def write_shards(
    folder: Path,
    wanted: Mapping[str, PendingTensor],
    *,
    shard_bytes: int,
    show_progress: bool,
    description: str,
) -> None:
    """Write tensors in their order, as `write_weights` does, without a check of them."""
    shards = _plan_shards(wanted, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [SINGLE_FILE]
    total = sum(_nbytes(tensor) for tensor in wanted.values())
    with byte_progress(total, description, show_progress) as progress:
        for name, shard in zip(names, shards, strict=True):
            contents = {}
            for key in shard:
                # Copied, as a view into a mapped or merged file would be written with its whole storage.
                contents[key] = wanted[key].read().clone(memory_format=torch.contiguous_format)
                progress.update(contents[key].nbytes)
            try:
                save_file(contents, folder / name, metadata={"format": "pt"})
            except SafetensorError as error:
                raise FailedError(f"{folder / name} cannot be written: {error}") from error
            shutil.copymode(folder / CONFIG_FILE, folder / name)  # safetensors writes with mode 600
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _check(tensors: Mapping[str, PendingTensor], config: ModelConfig) -> None:
    """Run the loader's checks of names and shapes over tensors that are still in their source files."""
    entries = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            allowed = ", ".join(str(dtype) for dtype in _DTYPE_NAMES)
            raise ModelFormatError(f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}: allowed are {allowed}")
        entries[name] = TensorEntry(name, tensor.file, tensor.shape, _DTYPE_NAMES[tensor.dtype])
    reader = _Reader(tensors)
    check_tensors(Checkpoint(entries, {entry.file: reader for entry in entries.values()}), config)


@dataclass(frozen=True)
class _Reader(TensorFile):
    """Reads pending tensors, for the loader's checks."""

    tensors: Mapping[str, PendingTensor]

    def tensor(self, entry: TensorEntry) -> Tensor:
        return self.tensors[entry.name].read()


def _nbytes(tensor: PendingTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _plan_shards(tensors: Mapping[str, PendingTensor], shard_bytes: int) -> list[list[str]]:
    """Split the tensor names, in their order, into shards of at most `shard_bytes`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _nbytes(tensor) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _nbytes(tensor)
    return shards
