"""Linear shortcuts (bridges): affine maps over windows of skipped layers, and their file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import quantize_int8
from d3engine.model.fields import of_a_model
from d3engine.utils.files import as_json, open_regular, path_of, write_whole

Made = TypeVar("Made")

BRIDGES_FILE = "bridges.safetensors"
"""In a model's directory, or next to its GGUF file: the bridges that a policy calls "auto"."""

FORMAT = "d3engine-bridges-1"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of maps in a file."""

Window: TypeAlias = tuple[int, int]
"""(first, stop): the layers first .. stop - 1."""


@dataclass(frozen=True, eq=False)
class Bridge:
    """The map that replaces the layers [first, stop): `h + weight @ (down @ h) + offset`.

    It costs about a tenth of one layer and writes no KV entries, so a bridged window frees its cache as a skipped one.
    Sources: Din et al. 2023, "Jump to Conclusions: Short-Cutting Transformers With Linear Transformations"; Shopkhoev
    et al. 2025, "ReplaceMe".

    Attributes:
        weight: [H, H], or [H, r] with `down`.
        offset: [H].
        down: [r, H] of a bridge of rank r; None of a full one.
    """

    first: int
    stop: int
    weight: Tensor
    offset: Tensor
    down: Tensor | None = None

    @property
    def window(self) -> Window:
        return self.first, self.stop

    @property
    def rank(self) -> int | None:
        """r of a bridge of low rank; None of a full one."""
        return None if self.down is None else self.down.shape[0]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors().values())

    def crossed(self, hidden: Tensor) -> Tensor:
        """The states [T, H] after the window, given those before it; in the dtype of `hidden`."""
        inner = hidden if self.down is None else F.linear(hidden, self.down)
        return hidden + F.linear(inner, self.weight, self.offset)

    def of_nothing(self) -> Bridge:
        """A bridge of the same shapes that changes no state; gradient descent can still move it, as `down` stays."""
        return replace(self, weight=torch.zeros_like(self.weight), offset=torch.zeros_like(self.offset))

    def shrunk(self, share: float) -> Bridge:
        """A bridge that changes a state by this share of what it did: 0 leaves it as it is."""
        return replace(self, weight=self.weight * share, offset=self.offset * share)

    def cut(self, rank: int) -> Bridge:
        """Its `rank` largest singular values, float32: the nearest map of that rank if all states weigh the same."""
        whole = self.weight.double() if self.down is None else self.weight.double() @ self.down.double()
        left, values, right = torch.linalg.svd(whole, full_matrices=False)
        weight, down = (left[:, :rank] * values[:rank]).float(), right[:rank].float()
        return replace(self, weight=weight, down=down, offset=self.offset.float())

    def to(self, dtype: torch.dtype, device: torch.device) -> Bridge:
        """The same in another dtype, on another device."""
        moved: dict[str, Any] = {
            name: tensor.to(device, dtype).contiguous() for name, tensor in self._tensors().items()
        }
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        named = {"weight": self.weight, "offset": self.offset, "down": self.down}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class MadeFor:
    """What is good only for the weights that it was made for: `fingerprint` names them (`expected_tensors`)."""

    fingerprint: str
    num_layers: int
    hidden_size: int


@dataclass(frozen=True, eq=False)
class Bridges(MadeFor):
    """The bridges of one model, by their windows.

    `about` describes for people what the maps were fitted on, and their errors.
    """

    by_window: Mapping[Window, Bridge]
    about: Mapping[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype, device: torch.device) -> Bridges:
        """The same in another dtype, on another device."""
        return replace(self, by_window={window: bridge.to(dtype, device) for window, bridge in self.by_window.items()})

    @property
    def num_bytes(self) -> int:
        return sum(bridge.num_parameters * bridge.weight.element_size() for bridge in self.by_window.values())


def write_made(path: str | Path, made: MadeFor, format: str, tensors: dict[str, Tensor], **words: str) -> None:
    """Write a file whole or not at all, `words` ("about" at least) beside what it was made for; raises `OSError`."""
    sizes = {"num_layers": str(made.num_layers), "hidden_size": str(made.hidden_size)}
    write_whole(path, save(tensors, {"format": format, "fingerprint": made.fingerprint, **sizes, **words}))


def read_made(
    path: str | Path, kind: str, format: str, sizes: tuple[int, int] | None, read: Callable[[Any, dict[str, Any]], Made]
) -> Made:
    """What `read` makes of an open file, and of the fields of `MadeFor` with "about".

    `sizes` are the model's layers and hidden size, compared before a tensor is read. Raises `ModelFormatError`, naming
    the file, for what is no such `kind` of file, and for whatever `read` finds wrong.
    """
    with of_a_model(), open_regular(path) as opened:
        try:
            with safe_open(path_of(opened), framework="pt") as file:
                return read(file, _fields(file.metadata() or {}, format, sizes))
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelFormatError(f"{path} is no {kind}: {error}") from None


def _fields(words: Mapping[str, str], format: str, sizes: tuple[int, int] | None) -> dict[str, Any]:
    if words.get("format") != format:
        raise ValueError(f"its format is {words.get('format')!r}, not {format!r}")
    layers, size = int(words["num_layers"]), int(words["hidden_size"])
    if sizes is not None and sizes != (layers, size):
        raise ValueError(f"it is for {layers} layers of {size} numbers, not for {sizes[0]} of {sizes[1]}")
    about = as_json(words["about"], "about")
    if not isinstance(about, dict):
        raise ValueError("its about is no JSON object")
    return {"fingerprint": words["fingerprint"], "num_layers": layers, "hidden_size": size, "about": about}


def check_floats(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for another dtype than those of `DTYPES`, and for numbers that are not finite."""
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"{name} is {tensor.dtype}, not one of {', '.join(DTYPES)}")
    low, high = torch.aminmax(tensor)  # of any size: these need no second tensor, as isfinite does
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ValueError(f"{name} has numbers that are not finite")


def write_bridges(bridges: Bridges, path: str | Path) -> None:
    """Write a file whole or not at all; raises `OSError`."""
    tensors: dict[str, Tensor] = {}
    for (first, stop), bridge in sorted(bridges.by_window.items()):
        tensors |= {f"{first}:{stop}.{name}": tensor.contiguous() for name, tensor in bridge._tensors().items()}
    write_made(path, bridges, FORMAT, tensors, about=json.dumps(dict(bridges.about)))


def most_bytes(num_layers: int, hidden_size: int) -> int:
    """Bytes of a file with every window of a model of these sizes, float32, at most."""
    per_window = 4 * (2 * hidden_size**2 + hidden_size)
    return 128 * 2**20 + num_layers * (num_layers + 1) // 2 * per_window


def read_bridges(path: str | Path, sizes: tuple[int, int] | None = None) -> Bridges:
    """The bridges of a file, as stored; the caller compares the fingerprint.

    `sizes` are the model's layers and hidden size, compared before a tensor is read. Raises `ModelFormatError`, naming
    the file, for anything that `write_bridges` has not written, and for other sizes.
    """
    return read_made(path, "file of bridges", FORMAT, sizes, _read)


def _read(file: Any, fields: dict[str, Any]) -> Bridges:
    num_layers, hidden_size = fields["num_layers"], fields["hidden_size"]
    windows: dict[Window, set[str]] = {}
    for name in file.keys():  # noqa: SIM118 (no mapping: it cannot be iterated over)
        place, _, part = name.rpartition(".")
        first, stop = (int(number) for number in place.split(":"))
        if not 0 <= first < stop <= num_layers:
            raise ValueError(f"{name} is of no window of {num_layers} layers")
        windows.setdefault((first, stop), set()).add(part)
    found = {window: _bridge(file, window, parts, hidden_size) for window, parts in sorted(windows.items())}
    return Bridges(**fields, by_window=found)


def _bridge(file: Any, window: Window, parts: set[str], hidden_size: int) -> Bridge:
    name = f"{window[0]}:{window[1]}"
    if parts not in ({"weight", "offset"}, {"weight", "offset", "down"}):
        raise ValueError(f"window {name} has {', '.join(sorted(parts))}, not weight, offset and perhaps down")
    shapes = {part: tuple(file.get_slice(f"{name}.{part}").get_shape()) for part in parts}
    rank = shapes["down"][0] if "down" in parts else hidden_size
    if not 0 < rank <= hidden_size:
        raise ValueError(f"{name}.down has rank {rank}, not one of 1 to {hidden_size}")
    expected = {"weight": (hidden_size, rank), "offset": (hidden_size,), "down": (rank, hidden_size)}
    for part, shape in shapes.items():
        if shape != expected[part]:
            raise ValueError(f"{name}.{part} has shape {list(shape)}, not {list(expected[part])}")
    tensors = {part: file.get_tensor(f"{name}.{part}") for part in parts}
    for part, tensor in tensors.items():
        check_floats(f"{name}.{part}", tensor)
    return Bridge(*window, **tensors)


@dataclass(frozen=True, eq=False)
class BridgeWeights:
    """A bridge as an engine holds it, crossed by an operation of its layers: `h + weight (down h) + offset`.

    `weight` [H, H], or [H, r] with `down` [r, H]; `offset` [H] in the dtype of activations.
    """

    first: int
    stop: int
    weight: Weight
    offset: Tensor
    down: Weight | None = None

    @property
    def window(self) -> Window:
        return self.first, self.stop

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.offset.nbytes + (0 if self.down is None else self.down.nbytes)

    def cross(self, kernels: Any, hidden: Tensor, num_rows: Tensor | None = None) -> None:
        """Apply the map to the states `hidden` [T, H] in place, by the operations of `kernels`.

        `num_rows` int32 [1] on the device: later rows are left unchanged.
        """
        inner = hidden.clone()
        if self.down is not None:
            inner = hidden.new_zeros(hidden.shape[0], self.down.shape[0])
            kernels.linear_residual(hidden, self.down, None, inner, num_rows=num_rows)
        kernels.linear_residual(inner, self.weight, self.offset, hidden, num_rows=num_rows)


def held(
    bridge: Bridge, *, dtype: torch.dtype, weight_dtype: torch.dtype, quantization: str | None, device: torch.device
) -> BridgeWeights:
    """A bridge of a file for activations of `dtype`, in the format of an engine's matrices."""
    # With int4 layers maps are int8: one replaces several layers, so its errors weigh more and its bytes less than a
    # layer's (`docs/how-to/bridges.md` has figures).

    def matrix(values: Tensor) -> Weight:
        there = values.to(device)
        return quantize_int8(there) if quantization is not None else there.to(weight_dtype).contiguous()

    down = None if bridge.down is None else matrix(bridge.down)
    offset = bridge.offset.to(device, dtype).contiguous()
    return BridgeWeights(bridge.first, bridge.stop, matrix(bridge.weight), offset, down)
