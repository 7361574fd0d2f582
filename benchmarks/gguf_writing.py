"""GGUF files: of weights in memory, and copies with channels in another order or matrices in another of ggml's types.

Shuffled channels compute the same, and no group of neighbours has the grid of the groups that the file was made in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.systems import need_llama
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights

Floats: TypeAlias = NDArray[np.float32]

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "16-bit": gguf.GGMLQuantizationType.BF16,
    "12-bit": gguf.GGMLQuantizationType.BF16,
    "8-bit": gguf.GGMLQuantizationType.Q8_0,
    "4-bit": gguf.GGMLQuantizationType.Q4_0,
}
"""What comes nearest to each of our kinds of weights; Q8_0 and Q4_0 have a scale for every 32 weights."""

_INPUTS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "token_embd", "output")
"""Matrices that meet hidden states, or, of the embedding, are some."""
_NORMS = ("attn_norm", "ffn_norm", "output_norm")
_UNUSED = 5
"""ggml's kind of such tokens; kinds are sentencepiece's own numbers."""


# -- weights in memory -----------------------------------------------------------------------------------------


def write_gguf(
    path: Path, config: ModelConfig, weights: LlamaWeights, kind: str, tokenizer: Path | None = None
) -> None:
    """Write float32 `weights` as a GGUF file, matrices in the type of `kind`.

    It has the tokenizer of the model directory `tokenizer`, or none.
    """
    need_llama(config)
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_tokenizer(writer, tokenizer, config.vocab_size)

    def add(name: str, tensor: Tensor, is_matrix: bool = True) -> None:
        values = tensor.float().contiguous().numpy()
        given = TYPES[kind] if is_matrix else TYPES["f32"]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, given), raw_dtype=given)

    add("token_embd", weights.embedding)
    add("output_norm", weights.final_norm, is_matrix=False)
    if weights.lm_head is not weights.embedding:
        add("output", _plain(weights.lm_head))
    for index, layer in enumerate(weights.layers):
        block = f"blk.{index}"
        # Heads lie in adjacent pairs there as here.
        query, key, value = _plain(layer.qkv).split([config.q_size, config.kv_size, config.kv_size])
        gate, up = _plain(layer.gate_up).chunk(2)
        add(f"{block}.attn_norm", layer.attention_norm, is_matrix=False)
        add(f"{block}.ffn_norm", layer.mlp_norm, is_matrix=False)
        named = {"attn_q": query, "attn_k": key, "attn_v": value, "attn_output": _plain(layer.output)}
        for name, matrix in (named | {"ffn_gate": gate, "ffn_up": up, "ffn_down": _plain(layer.down)}).items():
            add(f"{block}.{name}", matrix)
    finish(writer)


def _plain(weight: Any) -> Tensor:
    assert isinstance(weight, Tensor), "float weights are written; llama.cpp has its own quantized forms"
    return weight


def add_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """The keys of a Llama's sizes."""
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """A model directory's tokenizer: copied from its own GGUF file, or made of its tokenizer.model.

    Raises `FileNotFoundError` where it has neither of both.
    """
    sources = sorted(directory.glob("*.gguf"))
    if sources:
        _copy_keys(gguf.GGUFReader(sources[0]), writer, lambda name: name.startswith("tokenizer."))
        return
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto.FromString((directory / "tokenizer.model").read_bytes())
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    pieces += [(f"[unused {number}]", -1000.0, _UNUSED) for number in range(len(pieces), vocab_size)]
    tokens, scores, kinds = zip(*pieces, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.trainer_spec.bos_id)
    writer.add_eos_token_id(model.trainer_spec.eos_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- copies of files -------------------------------------------------------------------------------------------


def shuffled(source: Path, path: Path, seed: int = 0) -> None:
    """Write the floats of `source` to `path`: channels of hidden states, of MLPs and of each head's values shuffled.

    Raises `ValueError` for a tensor that a Llama or a Qwen2 does not have.
    """
    reader = gguf.GGUFReader(source)
    sizes = {name: _number(reader, name) for name in ("embedding_length", "attention.head_count", "block_count")}
    num_heads, num_kv_heads = sizes["attention.head_count"], _number(reader, "attention.head_count_kv")
    generator = np.random.default_rng(seed)
    hidden = generator.permutation(sizes["embedding_length"])
    middles = [generator.permutation(_number(reader, "feed_forward_length")) for _ in range(sizes["block_count"])]
    rows_of_values = next(int(one.shape[1]) for one in reader.tensors if one.name.endswith("attn_v.weight"))
    head_dim = rows_of_values // num_kv_heads
    within = np.stack([generator.permutation(head_dim) for _ in range(num_kv_heads)])
    values = (within + np.arange(num_kv_heads)[:, None] * head_dim).ravel()
    of_queries = np.repeat(within, num_heads // num_kv_heads, axis=0)
    heads = (of_queries + np.arange(num_heads)[:, None] * head_dim).ravel()

    def moved(name: str, floats: Floats) -> Floats:
        parts = name.split(".")
        module, kind = parts[-2:]
        middle = middles[int(parts[1])] if parts[0] == "blk" else np.arange(0)
        if kind == "bias" and module in ("attn_q", "attn_k", "attn_v"):
            return floats[values] if module == "attn_v" else floats
        if module in _NORMS:
            return floats[hidden]
        if module in _INPUTS:
            floats = floats[:, hidden]
            by_row = {"attn_v": values, "ffn_gate": middle, "ffn_up": middle}.get(module)
            return floats if by_row is None else floats[by_row]
        if module in ("attn_output", "ffn_down"):
            return floats[hidden][:, heads if module == "attn_output" else middle]
        raise ValueError(f"{source}: tensor {name!r} has no place in a Llama or a Qwen2")

    _write_copy(reader, path, ((one.name, moved(one.name, floats_of(one)), None) for one in reader.tensors))


def in_q4_0(source: Path, path: Path) -> None:
    """Write `source` with the layers' matrices in Q4_0, and the embedding and the LM head in Q8_0."""
    reader = gguf.GGUFReader(source)

    def typed() -> Iterator[tuple[str, NDArray[np.uint8] | Floats, gguf.GGMLQuantizationType | None]]:
        for one in reader.tensors:
            floats = floats_of(one)
            if len(one.shape) < 2:
                yield one.name, floats, None
                continue
            kind = TYPES["4-bit" if one.name.startswith("blk.") else "8-bit"]
            yield one.name, gguf.quants.quantize(floats, kind), kind

    _write_copy(reader, path, typed())


def quantized_by_llama_cpp(source: Path, path: Path, name: str) -> None:
    """Write `source` as llama.cpp quantizes it to `name`, such as "Q4_K_M", without a text.

    Raises `ImportError` without llama-cpp-python, `RuntimeError` where it fails.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.nthread = 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise RuntimeError(f"llama.cpp could not quantize {source} to {name}")


def _number(reader: gguf.GGUFReader, name: str) -> int:
    architecture = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{architecture}.{name}"].contents())


def floats_of(tensor: gguf.ReaderTensor) -> Floats:
    """What a tensor of a file stands for."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)


def _write_copy(
    reader: gguf.GGUFReader,
    path: Path,
    tensors: Iterator[tuple[str, NDArray[np.uint8] | Floats, gguf.GGMLQuantizationType | None]],
) -> None:
    """A file with the metadata of `reader` and other tensors; those without a type are float32."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    own = ("general.architecture", "general.file_type")
    _copy_keys(reader, writer, lambda name: not name.startswith("GGUF.") and name not in own)
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    finish(writer)


def _copy_keys(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, is_wanted: Callable[[str], bool]) -> None:
    for name, field in reader.fields.items():
        if is_wanted(name):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
