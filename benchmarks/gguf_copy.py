"""Copies of a GGUF file: its floats with channels in another order, and its matrices in another of ggml's types.

Shuffled channels compute the same, and no group of neighbours has the grid of the groups that the file was made in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

_INPUTS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "token_embd", "output")
"""Matrices that meet hidden states, or, of the embedding, are some."""
_NORMS = ("attn_norm", "ffn_norm", "output_norm")


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

    _write(reader, path, ((one.name, moved(one.name, _floats(one)), None) for one in reader.tensors))


def in_q4_0(source: Path, path: Path) -> None:
    """Write `source` with the layers' matrices in Q4_0, and the embedding and the LM head in Q8_0."""
    reader = gguf.GGUFReader(source)

    def typed() -> Iterator[tuple[str, NDArray[np.uint8] | Floats, gguf.GGMLQuantizationType | None]]:
        for one in reader.tensors:
            floats = _floats(one)
            if len(one.shape) < 2:
                yield one.name, floats, None
                continue
            name = "Q4_0" if one.name.startswith("blk.") else "Q8_0"
            kind = gguf.GGMLQuantizationType[name]
            yield one.name, gguf.quants.quantize(floats, kind), kind

    _write(reader, path, typed())


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


def _floats(tensor: gguf.ReaderTensor) -> Floats:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)


def _write(
    reader: gguf.GGUFReader,
    path: Path,
    tensors: Iterator[tuple[str, NDArray[np.uint8] | Floats, gguf.GGMLQuantizationType | None]],
) -> None:
    """A file with the metadata of `reader` and other tensors; those without a type are float32."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
