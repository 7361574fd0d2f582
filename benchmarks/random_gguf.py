"""GGUF files of real models' sizes with random weights, in the types of llama.cpp's Q4_K_M, where no value matters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm

from d3engine import InvalidValueError
from d3engine.model.gguf_metadata import FREQ_FACTORS, llama3_divisors
from d3engine.utils.files import free_bytes

Q4_K, Q6_K, F32 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F32

DEVIATION = 0.02
"""Of weights, as at the start of a training; `random_weights` says why two matrices of a layer have less."""
_OF_RANDOM_BITS = {Q4_K: 258.0, Q6_K: 1367.0}
"""The deviation of weights of random bits whose blocks have the scale 1, and for Q4_K the minimum 7.5."""
_THETA = 500_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama 3."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    rope_factor: float


SHAPES = {
    "llama-3.1-8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256, is_tied=False, rope_factor=8.0),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128_256, is_tied=True, rope_factor=32.0),
}


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType = F32
    deviation: float = DEVIATION

    @property
    def nbytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // values * size

    def random(self, rng: np.random.Generator) -> NDArray[Any]:
        """Ones for a norm; for a matrix blocks of random bits but for their scales, uint8 [rows, bytes of a row]."""
        if self.kind == F32:
            return np.ones(self.shape, dtype=np.float32)
        size = GGML_QUANT_SIZES[self.kind][1]
        blocks = np.frombuffer(rng.bytes(self.nbytes), dtype=np.uint8).reshape(-1, size).copy()
        scale = self.deviation / _OF_RANDOM_BITS[self.kind]
        if self.kind == Q4_K:
            blocks[:, :4] = np.array([scale, 7.5 * scale], dtype=np.float16).view(np.uint8)
        else:
            blocks[:, -2:] = np.array([scale], dtype=np.float16).view(np.uint8)
        return blocks.reshape(self.shape[0], -1)


def write_random(shape: Shape, path: Path) -> None:
    """Write such a file, one tensor after the other. Raises `InvalidValueError` where the disk has no room for it."""
    tensors = list(_tensors(shape))
    total = sum(tensor.nbytes for tensor in tensors)
    if free_bytes(path) < 1.02 * total:
        raise InvalidValueError("--model", str(path), f"a file on a disk with {1.02 * total / 1e9:.1f} GB free")
    writer = GGUFWriter(path, "llama")
    _add_keys(writer, shape)
    factors = llama3_divisors(shape.head_dim, _THETA, shape.rope_factor).astype(np.float32)
    writer.add_tensor_info(FREQ_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_tensor_data(factors)
    rng = np.random.default_rng(0)
    with tqdm(total=total, unit="B", unit_scale=True, desc=path.name) as bar:
        for tensor in tensors:
            writer.write_tensor_data(tensor.random(rng))
            bar.update(tensor.nbytes)
    writer.close()


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    hidden, residual = shape.hidden, DEVIATION / math.sqrt(2 * shape.layers)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _Tensor("token_embd.weight", (shape.vocabulary, hidden), Q6_K if shape.is_tied else Q4_K)
    for layer in range(shape.layers):
        more = Q6_K if _has_more_bits(layer, shape.layers) else Q4_K
        block = f"blk.{layer}."
        yield _Tensor(f"{block}attn_norm.weight", (hidden,))
        yield _Tensor(f"{block}attn_q.weight", (queries, hidden), Q4_K)
        yield _Tensor(f"{block}attn_k.weight", (keys, hidden), Q4_K)
        yield _Tensor(f"{block}attn_v.weight", (keys, hidden), more)
        yield _Tensor(f"{block}attn_output.weight", (hidden, queries), Q4_K, residual)
        yield _Tensor(f"{block}ffn_norm.weight", (hidden,))
        yield _Tensor(f"{block}ffn_gate.weight", (shape.inner, hidden), Q4_K)
        yield _Tensor(f"{block}ffn_up.weight", (shape.inner, hidden), Q4_K)
        yield _Tensor(f"{block}ffn_down.weight", (hidden, shape.inner), more, residual)
    yield _Tensor("output_norm.weight", (hidden,))
    if not shape.is_tied:
        yield _Tensor("output.weight", (shape.vocabulary, hidden), Q6_K)


def _has_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice: the first and the last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _add_keys(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(131_072)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(_THETA)
    writer.add_vocab_size(shape.vocabulary)
    # Engines ask for a tokenizer: bytes, pairs of bytes, and what is left as pairs and one byte.
    alphabet = sorted(ByteLevel.alphabet())
    pairs = product(alphabet, alphabet)
    longer = ((first + second, third) for first, second, third in product(alphabet, repeat=3))
    merges = list(islice(chain(pairs, longer), shape.vocabulary - len(alphabet)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*alphabet, *map("".join, merges)])
    writer.add_token_types([1] * shape.vocabulary)
    writer.add_token_merges(list(map(" ".join, merges)))
    writer.add_bos_token_id(shape.vocabulary - 2)
    writer.add_eos_token_id(shape.vocabulary - 1)
