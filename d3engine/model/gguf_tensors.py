"""The tensors of a GGUF file as a checkpoint: by transformers' names, in its order of rows, dequantized when read.

The one idea: one tensor at a time. A header says what all of them will be; the values of one are made when it is asked
for, and nothing keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.model.checkpoint import Checkpoint, Packed, TensorEntry
from d3engine.model.families import GGUF_FAMILIES
from d3engine.model.gguf_config import FREQ_FACTORS
from d3engine.model.gguf_file import GGUFFile
from d3engine.model.head_order import adjacent_row, to_half_split

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Modules whose rows can stand in another order than transformers', and the field of how many heads they are."""


def gguf_checkpoint(file: GGUFFile, config: Mapping[str, Any]) -> Checkpoint:
    """The tensors of `file`, whose config.json is `config`; all are read in float32.

    Raises `ModelFormatError` for one that no model here has, or that has not the heads of the config.
    """
    _, form = GGUF_FAMILIES[config["model_type"]]
    modules = {**_LAYER_NAMES, **form.modules}
    names = {_name_of(file, name, modules): name for name in file.tensors if name != FREQ_FACTORS}
    heads = {module: config[field] for module, field in _HEADS.items()} if form.adjacent_pairs else {}
    tensors = GGUFTensors(file, names, heads)
    return Checkpoint({entry.name: entry for entry in tensors.entries()}, {file.path: tensors})


class GGUFTensors:
    """Reads the tensors of a GGUF file, by their names in transformers."""

    def __init__(self, file: GGUFFile, names: Mapping[str, str], heads: Mapping[str, int]) -> None:
        self._file = file
        self._names = names
        self._heads = heads

    def entries(self) -> Iterator[TensorEntry]:
        """What there is; raises `ModelFormatError` for rows that are not those of so many heads."""
        for name, own in self._names.items():
            tensor, num_heads = self._file.tensors[own], self._num_heads(name)
            if num_heads is not None and tensor.shape[0] % (2 * num_heads):
                raise ModelFormatError(
                    f"{self._file.path}: tensor {own!r} of shape {tensor.shape} is not {num_heads} heads"
                )
            packed = None if tensor.type_name == "F32" else Packed(tensor.type_name, tensor.nbytes)
            yield TensorEntry(name, self._file.path, tensor.shape, "F32", packed)

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in float32: memory of its own."""
        values = torch.from_numpy(self._file.read(self._names[name]))
        num_heads = self._num_heads(name)
        return values if num_heads is None else to_half_split(values, num_heads)

    def row(self, name: str, dtype: str, shape: tuple[int, ...], row: int) -> Tensor:
        """One row of it, of which alone the bytes are read."""
        if len(shape) == 1:
            return self.tensor(name, dtype, shape)[row]
        num_heads = self._num_heads(name)
        place = row if num_heads is None else adjacent_row(row, num_heads, shape[0])
        return torch.from_numpy(self._file.read_rows(self._names[name], place, 1))[0]

    def give_back(self, name: str) -> None:
        """Nothing: who has read a tensor has all there is of it."""

    def _num_heads(self, name: str) -> int | None:
        """Of how many heads the rows are in the file's order; None where rows have none."""
        return self._heads.get(name.split(".")[-2])


def _name_of(file: GGUFFile, name: str, modules: Mapping[str, str]) -> str:
    """transformers' name of a tensor; raises `ModelFormatError` for one that `modules` and no model here have."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES and kind == "weight":
        return f"{_NAMES[module]}.weight"
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in modules:
        raise ModelFormatError(f"{file.path}: tensor {name!r} is not supported: no model here has it")
    return f"model.layers.{found[1]}.{modules[found[2]]}.{found[3]}"
