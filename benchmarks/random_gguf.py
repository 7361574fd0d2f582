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

from benchmarks.gguf_writing import add_sizes
from d3engine import InvalidValueError
from d3engine.cli.plan import sizes
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_metadata import FREQ_FACTORS, llama3_divisors
from d3engine.utils.files import free_bytes

Q4_K, Q6_K, F32 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F32

DEVIATION = 0.02
"""Of weights, as at the start of a training; `random_weights` says why two matrices of a layer have less."""
_OF_RANDOM_BITS = {Q4_K: 258.0, Q6_K: 1367.0}
"""The deviation of weights of random bits whose blocks have the scale 1, and for Q4_K the minimum 7.5."""


def llama3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> ModelConfig:
    """A Llama 3 of these sizes; `factor` is of its rope, `others` of config.json."""
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    given = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    rope = {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", "factor": others.pop("factor")} | factors}
    return ModelConfig.from_dict(given | rope | sizes(hidden, inner, layers, heads, kv_heads) | others)


SHAPES = {
    "llama-3.1-8b": llama3(4096, 14_336, 32, 32, 8, factor=8.0, tie_word_embeddings=False),
    "llama-3.2-1b": llama3(2048, 8192, 16, 32, 8, factor=32.0, tie_word_embeddings=True),
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


def write_random(shape: ModelConfig, path: Path) -> None:
    """Write such a file, one tensor after the other. Raises `InvalidValueError` where the disk has no room for it."""
    tensors = list(_tensors(shape))
    total = sum(tensor.nbytes for tensor in tensors)
    if free_bytes(path) < 1.02 * total:
        raise InvalidValueError("--model", str(path), f"a file on a disk with {1.02 * total / 1e9:.1f} GB free")
    writer = GGUFWriter(path, "llama")
    add_sizes(writer, shape)
    _add_tokenizer(writer, shape.vocab_size)
    factors = llama3_divisors(shape.head_dim, shape.rope.theta, shape.rope.factor).astype(np.float32)
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


def _tensors(shape: ModelConfig) -> Iterator[_Tensor]:
    hidden, inner, residual = shape.hidden_size, shape.intermediate_size, DEVIATION / math.sqrt(2 * shape.num_layers)
    embedding = Q6_K if shape.tie_word_embeddings else Q4_K
    yield _Tensor("token_embd.weight", (shape.vocab_size, hidden), embedding)
    for layer in range(shape.num_layers):
        more = Q6_K if _has_more_bits(layer, shape.num_layers) else Q4_K
        block = f"blk.{layer}."
        yield _Tensor(f"{block}attn_norm.weight", (hidden,))
        yield _Tensor(f"{block}attn_q.weight", (shape.q_size, hidden), Q4_K)
        yield _Tensor(f"{block}attn_k.weight", (shape.kv_size, hidden), Q4_K)
        yield _Tensor(f"{block}attn_v.weight", (shape.kv_size, hidden), more)
        yield _Tensor(f"{block}attn_output.weight", (hidden, shape.q_size), Q4_K, residual)
        yield _Tensor(f"{block}ffn_norm.weight", (hidden,))
        yield _Tensor(f"{block}ffn_gate.weight", (inner, hidden), Q4_K)
        yield _Tensor(f"{block}ffn_up.weight", (inner, hidden), Q4_K)
        yield _Tensor(f"{block}ffn_down.weight", (hidden, inner), more, residual)
    yield _Tensor("output_norm.weight", (hidden,))
    if not shape.tie_word_embeddings:
        yield _Tensor("output.weight", (shape.vocab_size, hidden), Q6_K)


def _has_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice: the first and the last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """Engines ask for one: bytes, pairs of bytes, and what is left as pairs and one byte."""
    alphabet = sorted(ByteLevel.alphabet())
    pairs = product(alphabet, alphabet)
    longer = ((first + second, third) for first, second, third in product(alphabet, repeat=3))
    merges = list(islice(chain(pairs, longer), vocab_size - len(alphabet)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*alphabet, *map("".join, merges)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(list(map(" ".join, merges)))
    writer.add_bos_token_id(vocab_size - 2)
    writer.add_eos_token_id(vocab_size - 1)
