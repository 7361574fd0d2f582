"""Students: other weights that a model's layers have for generated tokens, and their file.

Prompts run the model's own layers. Behind them a student leaves some layers out, and runs others with matrices of its
own: narrower MLPs, or a layer that stands for a whole window. A layer keeps its KV cache, so nothing else changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError, require
from d3engine.kernels.bfloat16_pairs import PairsWeight, in_pairs
from d3engine.kernels.blocks import (
    ROUNDED_COLUMNS,
    BlockLanesWeight,
    BlockWeight,
    StackedWeight,
    blocks_in_lanes,
    quantize_blocks,
    stacked,
)
from d3engine.kernels.interleaved import LanesWeight, in_lanes
from d3engine.kernels.matrices import Weight, tensors_of
from d3engine.kernels.quantized import Int8Weight, quantize_int8
from d3engine.kernels.split_blocks import SplitBlockWeight
from d3engine.model.bridges import MadeFor, check_floats, read_made, write_made
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LayerWeights, LlamaWeights
from d3engine.utils.files import as_json, beside

STUDENT_FILE = "student.safetensors"
"""In a model's directory, or next to its GGUF file: the student that a policy calls "auto"."""


def student_file(name: str) -> str | None:
    """The file beside the weights that a policy calls "auto", or of several "auto-1" and so on; None where the name is
    a path."""
    number = re.fullmatch("auto((-[1-9][0-9]?)?)", name)
    return None if number is None else f"student{number[1]}.safetensors"


def student_path(directory: Path, name: str) -> Path:
    """The file of a student that a policy of the model in `directory` calls so, whether it is there or not."""
    file = student_file(name)
    return Path(name) if file is None else beside(directory, file)


FORMAT = "d3engine-student-1"

WIDTH_ERROR = 0.01
"""What a policy may call a student wider or narrower than it is: its neurons are a multiple of some number."""

NEURONS = "neurons"
"""int64 [k], ascending: the neurons of the MLP that stay, whose rows of gate and up are the model's own."""

MATRICES = ("qkv", "output", "gate_up", "down")
VECTORS = ("qkv_bias", "attention_norm", "mlp_norm")


@dataclass(frozen=True, eq=False)
class Student(MadeFor):
    """What a model runs for generated tokens: `layers` by number, the tensors of each that are not the model's own.

    Tensors have the names and the order of channels of `LayerWeights`, or are `NEURONS`; `skip_layers` are left out.
    `about` says for people how it was made, and what it agreed in.
    """

    skip_layers: tuple[int, ...]
    layers: Mapping[int, Mapping[str, Tensor]]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.layers.values() for tensor in tensors.values())

    def narrower(self, config: ModelConfig) -> float:
        """Layers' worth of matrices that its narrower layers save a token; layers left out are not counted."""
        return 3 * config.hidden_size * self._fewer_neurons(config) / config.layer_parameters

    def width(self, config: ModelConfig) -> float:
        """The part of the MLPs' neurons that it runs, on average over the layers that run."""
        running = config.num_layers - len(self.skip_layers)
        return 1 - self._fewer_neurons(config) / (config.intermediate_size * max(running, 1))

    def check_made_for(self, config: ModelConfig, name: str, skipped: list[int], width: float | None) -> None:
        """Refuse, by name, layers left out or a width that are not those of this student, called `name`."""
        wanted, own = list(self.skip_layers), self.width(config)
        require(skipped == wanted, "skip_layers", skipped, f"those that the student was trained without, {wanted}")
        require(width is None or abs(width - own) <= WIDTH_ERROR, "widths", width, f"the width of {name}, {own:.3f}")

    def _fewer_neurons(self, config: ModelConfig) -> int:
        own = [tensors["down"].shape[1] for tensors in self.layers.values() if "down" in tensors]
        return sum(config.intermediate_size - width for width in own)


def write_student(student: Student, path: str | Path) -> None:
    """Write a file whole or not at all; raises `OSError`."""
    tensors = {
        f"{layer}.{name}": tensor.contiguous()
        for layer, named in sorted(student.layers.items())
        for name, tensor in named.items()
    }
    words = {"skip_layers": json.dumps(list(student.skip_layers)), "about": json.dumps(dict(student.about))}
    write_made(path, student, FORMAT, tensors, **words)


def read_student(path: str | Path, config: ModelConfig) -> Student:
    """The student of a file for a model of this config; the caller compares the fingerprint.

    Raises `ModelFormatError`, naming the file, for anything that `write_student` has not written for such a model.
    """
    sizes = (config.num_layers, config.hidden_size)
    return read_made(path, "student of this model", FORMAT, sizes, partial(_read, config))


def _read(config: ModelConfig, file: Any, fields: dict[str, Any]) -> Student:
    skip = as_json(file.metadata()["skip_layers"], "skip_layers")
    inside = isinstance(skip, list) and all(type(one) is int and 0 <= one < config.num_layers for one in skip)
    if not inside or sorted(set(skip)) != skip:
        raise ValueError(f"its skip_layers {skip} are no layers of the model, in order")
    layers: dict[int, dict[str, Tensor]] = {}
    for name in file.keys():  # noqa: SIM118 (no mapping: it cannot be iterated over)
        number, _, part = name.partition(".")
        layer = int(number)
        if not 0 <= layer < config.num_layers or layer in skip:
            raise ValueError(f"{name} is of no layer that runs")
        layers.setdefault(layer, {})[part] = _checked(name, part, file.get_tensor(name))
    for layer, tensors in layers.items():
        _check_shapes(layer, tensors, config)
    return Student(**fields, skip_layers=tuple(skip), layers=layers)


def _checked(name: str, part: str, tensor: Tensor) -> Tensor:
    if part == NEURONS:
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.numel():
            raise ValueError(f"{name} is no list of neurons")
        return tensor
    if part not in (*MATRICES, *VECTORS):
        raise ValueError(f"{name} is none of {', '.join((NEURONS, *MATRICES, *VECTORS))}")
    check_floats(name, tensor)
    return tensor


def _check_shapes(layer: int, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise `ValueError` for a tensor that does not fit the model, or the others of its layer."""
    size, heads = config.hidden_size, config.q_size + 2 * config.kv_size
    width = config.intermediate_size
    if NEURONS in tensors:
        neurons = tensors[NEURONS]
        ascends = bool((neurons[1:] > neurons[:-1]).all()) and int(neurons[0]) >= 0 and int(neurons[-1]) < width
        if not ascends or "gate_up" in tensors or "down" not in tensors:
            raise ValueError(f"{layer}.{NEURONS} are not ascending neurons of {width}, with their own down matrix")
        width = neurons.numel()
    elif "gate_up" in tensors:
        width = tensors["gate_up"].shape[0] // 2
    expected = {
        "qkv": (heads, size),
        "output": (size, config.q_size),
        "gate_up": (2 * width, size),
        "down": (size, width),
        "qkv_bias": (heads,),
        "attention_norm": (size,),
        "mlp_norm": (size,),
    }
    for part, tensor in tensors.items():
        if part != NEURONS and tuple(tensor.shape) != expected[part]:
            raise ValueError(f"{layer}.{part} has shape {list(tensor.shape)}, not {list(expected[part])}")
    if 0 < width <= config.intermediate_size:
        return
    raise ValueError(f"{layer} has {width} neurons, not 1 to {config.intermediate_size}")


def with_student(weights: LlamaWeights, student: Student, plain: LlamaWeights | None = None) -> LlamaWeights:
    """The weights that generated tokens run: those of the student in the place of the model's own.

    Matrices become of the kind of those that they replace: floats of that dtype, 5 bits beside matrices in blocks, 8
    bits beside others. Rows of gate and up that stay are taken from `plain`, the same weights in the file's own
    formats, where `weights` have another layout. Skipped layers stay, and are never run.
    """
    layers = list(weights.layers)
    for number, tensors in student.layers.items():
        own = layers[number]
        changes: dict[str, Any] = {
            name: _like(getattr(own, name), tensors[name]) for name in MATRICES if name in tensors
        }
        changes |= {name: tensors[name].to(weights.device, weights.dtype) for name in VECTORS if name in tensors}
        if NEURONS in tensors:
            changes["gate_up"] = narrowed((plain or weights).layers[number], tensors[NEURONS], own.gate_up)
        if "gate_up" in changes and own.gate_up_bias is not None:
            raise ModelFormatError(f"layer {number} has a bias in its MLP, which students know nothing of")
        layers[number] = replace(own, **changes)
    return replace(weights, layers=tuple(layers))


def bytes_beyond(weights: LlamaWeights, own: LlamaWeights) -> int:
    """Bytes of the matrices of a student's weights that are not the model's own."""
    layers = zip(weights.layers, own.layers, strict=True)
    pairs = [(getattr(one, name), getattr(other, name)) for one, other in layers for name in MATRICES]
    return sum(tensor.nbytes for one, other in pairs if one is not other for tensor in tensors_of(one))


def narrowed(layer: LayerWeights, neurons: Tensor, like: Weight | None = None) -> Weight:
    """The rows of gate and up of these neurons: exactly as the layer has them, where its format has single rows."""
    whole = layer.gate_up
    rows = torch.cat((neurons, neurons + whole.shape[0] // 2))
    if isinstance(whole, Tensor):
        return whole[rows.to(whole.device)].contiguous()
    if isinstance(whole, PairsWeight):
        return PairsWeight(whole.values[rows].contiguous())
    if isinstance(whole, BlockWeight | Int8Weight | SplitBlockWeight):
        return _laid_out(whole.at(rows), like)
    if isinstance(whole, StackedWeight) and all(isinstance(part, BlockWeight) for part in whole.parts):
        return _laid_out(stacked(_rows_of_parts(whole, rows)), like)
    values = whole.dequantize(torch.float32)[rows]
    return values if like is None else _like(like, values)


def _like(own: Weight, values: Tensor) -> Weight:
    """Floats as a matrix of the kind of `own`."""
    if isinstance(own, Tensor):
        return values.to(own.device, own.dtype).contiguous()
    if own.float_dtype is not None:  # held without loss
        held = values.to(own.tensors[0].device, own.float_dtype).contiguous()
        return in_pairs(held) if isinstance(own, PairsWeight) else held
    there = values.float().to(own.tensors[0].device)
    parts = own.parts if isinstance(own, StackedWeight) else (own,)
    in_blocks = any(isinstance(part, BlockWeight | BlockLanesWeight) for part in parts)
    if in_blocks and not values.shape[1] % ROUNDED_COLUMNS:
        return _laid_out(quantize_blocks(there, "Q5_0"), own)
    return _laid_out(quantize_int8(there), own)


def _rows_of_parts(whole: StackedWeight, rows: Tensor) -> list[BlockWeight]:
    """The ascending `rows` of matrices in blocks on top of each other, part by part."""
    found, before = [], 0
    for part in whole.parts:
        inside = rows[(rows >= before) & (rows < before + part.shape[0])] - before
        assert isinstance(part, BlockWeight)
        found.append(part.at(inside))
        before += part.shape[0]
    return found


def _laid_out(matrix: Weight, own: Weight | None) -> Weight:
    """A matrix with interleaved rows where that which it replaces has them."""
    if isinstance(matrix, BlockWeight | StackedWeight):
        parts = own.parts if isinstance(own, StackedWeight) else (own,)
        return blocks_in_lanes(matrix) if any(isinstance(part, BlockLanesWeight) for part in parts) else matrix
    return in_lanes(matrix) if isinstance(own, LanesWeight) else matrix
