"""Hidden states of a request, captured and changed, numbered as in transformers: l is the
residual stream in front of layer l, the number of layers the final norm's output."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.errors import InvalidValueError, require
from d3engine.utils.files import write_whole

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Change: TypeAlias = npt.NDArray[np.float32] | tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""A vector [H], or a map of low rank: `down` [r, H] and `up` [H, r]."""

MAX_LAYER = 4095
MAX_RANK = 512
MAX_BYTES = 2**32
"""Hidden states of one sequence at most."""
DTYPES = ("float32", "float16")
NAMED_POSITIONS = ("all", "prompt", "generated", "last")
_END = 2**62
"""Behind every position."""


class Positions(NamedTuple):
    """The positions start, start + step, ... below `stop`, counted over a prompt and its answer."""

    start: int
    stop: int
    step: int

    @classmethod
    def of(cls, which: str | slice, prompt_length: int) -> Positions:
        """Those of a `positions` field; negative ends of a slice count from the end of the prompt."""
        named = {
            "all": slice(None),
            "prompt": slice(prompt_length),
            "generated": slice(prompt_length, None),
            "last": slice(-1, prompt_length),
        }
        found = named[which] if isinstance(which, str) else which
        start, stop = (
            end if end is None or end >= 0 else max(0, prompt_length + end) for end in (found.start, found.stop)
        )
        return cls(start or 0, _END if stop is None else stop, found.step or 1)

    def among(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of `positions` are among these."""
        inside = (positions >= self.start) & (positions < self.stop)
        among: npt.NDArray[np.bool_] = inside & ((positions - self.start) % self.step == 0)
        return among

    def count_in(self, start: int, stop: int) -> int:
        """Positions among these in [start, stop)."""
        first = self.start + max(0, -(-(start - self.start) // self.step)) * self.step
        return len(range(first, min(self.stop, stop), self.step))


@dataclass(frozen=True)
class Capture:
    """Hidden states that a request returns, in `CompletionOutput.hidden_states`.

    A layer that a token skips passes the state on unchanged. The last token of an answer has no states: it runs
    through no layer.

    Args:
        layers: numbers of hidden states as transformers counts them, or one of them.
        positions: "all", "prompt", "generated", "last" (of the prompt), or a slice over prompt and answer, whose
            negative ends count from the end of the prompt.
        dtype: "float32" or "float16", in which values above 65504 become infinite.
        path: a safetensors file to write when the request ends, in place of memory; None: memory.

    Raises:
        InvalidValueError: for any value that is not allowed.
    """

    layers: int | Sequence[int]
    positions: str | slice = "all"
    dtype: str = "float32"
    path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _layers("layers", self.layers))
        _check_positions(self.positions)
        require(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))
        is_path = isinstance(self.path, str | os.PathLike) and os.fspath(self.path) != ""
        require(self.path is None or is_path, "path", self.path, "a file to write, or None")

    def __hash__(self) -> int:
        return hash((self.layers, repr(self.positions), self.dtype, self.path))  # a slice has no hash

    @classmethod
    def of(cls, given: object) -> Capture:
        """A Capture, or one of a layer or a list of layers."""
        return given if isinstance(given, cls) else cls(_layers("capture", given))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layers in ascending order."""
        return self.layers  # type: ignore[return-value]

    def at(self, prompt_length: int) -> Positions:
        """The positions, for a prompt of this length."""
        return Positions.of(self.positions, prompt_length)

    def check(self, num_layers: int, hidden_size: int, prompt_length: int, max_length: int) -> None:
        """Refuse what such a model, or a sequence of at most `max_length` tokens, cannot give."""
        _check_range("capture", self.numbers[-1], num_layers)
        size, width = np.dtype(self.dtype).itemsize, len(self.numbers) * hidden_size
        tokens = self.at(prompt_length).count_in(0, max_length - 1)
        allowed = (
            f"at most {MAX_BYTES:,} bytes of a sequence: fewer layers or positions, max_tokens, or float16"
            f" ({len(self.numbers)} layers x {tokens} tokens x {hidden_size} x {size} bytes)"
        )
        require(width * tokens * size <= MAX_BYTES, "capture", f"{width * tokens * size:,} bytes", allowed)


@dataclass(frozen=True, eq=False)
class Steer:
    """What is added to the residual stream of a request in front of some layers, as by a forward pre-hook there.

    A vector [H] is added as it is; of a pair (down [r, H], up [H, r]) the state h gains up (down h). Captured states
    have it in them. It is added where a token skips the layer, too.

    Args:
        layers: layer -> vector or pair, as lists, or arrays of numpy or torch; the final norm has no number here.
        positions: the tokens that it is added to; as of `Capture`.

    Raises:
        InvalidValueError: for any value that is not allowed.
    """

    layers: Mapping[int, Any]
    positions: str | slice = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _changes("layers", self.layers))
        _check_positions(self.positions)

    @classmethod
    def of(cls, given: object) -> Steer:
        """A Steer, or one of a mapping of layers."""
        return given if isinstance(given, cls) else cls(_changes("steer", given))

    @property
    def changes(self) -> Mapping[int, Change]:
        """The layers in ascending order."""
        return self.layers

    def at(self, prompt_length: int) -> Positions:
        """The positions, for a prompt of this length."""
        return Positions.of(self.positions, prompt_length)

    def check(self, num_layers: int, hidden_size: int) -> None:
        """Refuse what such a model cannot add."""
        _check_range("steer", max(self.changes), num_layers - 1)
        for layer, change in self.changes.items():
            sizes = (change.shape[0],) if not isinstance(change, tuple) else (change[0].shape[1], change[1].shape[0])
            shown = f"{', '.join(map(str, sizes))} channels at layer {layer}"
            require(set(sizes) == {hidden_size}, "steer", shown, f"of the model's {hidden_size} channels")

    @cached_property
    def _digest(self) -> bytes:
        digest = hashlib.sha256()
        for layer, change in self.changes.items():
            for array in change if isinstance(change, tuple) else (change,):
                digest.update(f"{layer} {array.shape} ".encode() + array.tobytes())
        return digest.digest()

    def salt(self, prompt_length: int) -> bytes | None:
        """What prompts share KV blocks by that are steered alike; None where it leaves the prompt as it is."""
        positions = self.at(prompt_length)
        if not positions.count_in(0, prompt_length):
            return None
        return self._digest + repr(tuple(positions)).encode()


@dataclass(eq=False, slots=True)
class HiddenStates:
    """The captured hidden states of one sequence: `states[layer]` is an array [T, H].

    Attributes:
        layers: those that there are.
        positions: int64 [T], of each row: its token's place in prompt and answer.
        path: the file that has them; its tensors are "hidden_states.LAYER", "positions" and "token_ids".
    """

    layers: tuple[int, ...]
    positions: IntArray
    path: str | None = None
    _arrays: dict[int, FloatArray] = field(default_factory=dict, repr=False)

    def __getitem__(self, layer: int) -> FloatArray:
        if layer not in self.layers:
            raise KeyError(f"layer {layer} was not captured; those that were: {', '.join(map(str, self.layers))}")
        if self.path is None:
            return self._arrays[layer]
        from safetensors import safe_open

        with safe_open(self.path, framework="numpy") as file:
            array: FloatArray = file.get_tensor(f"hidden_states.{layer}")
        return array

    def write(self, path: Path, token_ids: Sequence[int]) -> None:
        """Move the states into a file; `token_ids` are those of prompt and answer. Raises `OSError`."""
        from safetensors.numpy import save

        tensors: dict[str, npt.NDArray[Any]] = {f"hidden_states.{layer}": self._arrays[layer] for layer in self.layers}
        tensors |= {"positions": self.positions, "token_ids": np.array(token_ids, np.int64)[self.positions]}
        write_whole(path, save(tensors))
        self.path, self._arrays = os.path.abspath(path), {}


class StateCollector:
    """Collects the hidden states of one sequence, whose chunks come in order.

    A preempted sequence is computed again from its beginning; states that are known stay.
    """

    def __init__(self, capture: Capture, prompt_length: int) -> None:
        self._capture = capture
        self._wanted = capture.at(prompt_length)
        self._dtype = np.dtype(capture.dtype)
        self._next = dict.fromkeys(capture.numbers, 0)
        self._chunks: dict[int, list[FloatArray]] = {layer: [] for layer in capture.numbers}
        self._positions: list[IntArray] = []

    def take(self, layer: int, positions: IntArray, states: FloatArray) -> None:
        """Add the states [T, H] in front of a layer at ascending `positions` [T]."""
        fresh = self._wanted.among(positions) & (positions >= self._next[layer])
        if not fresh.any():
            return
        with np.errstate(over="ignore"):
            self._chunks[layer].append(states[fresh].astype(self._dtype))
        self._next[layer] = int(positions[fresh][-1]) + 1
        if layer == self._capture.numbers[0]:
            self._positions.append(positions[fresh])

    def collected(self, length: int) -> HiddenStates:
        """The states of the first `length` positions, after which nothing more is taken."""
        positions = np.concatenate([np.empty(0, np.int64), *self._positions])
        count = int(np.count_nonzero(positions < length))
        arrays = {}
        for layer in self._capture.numbers:
            own = self._chunks.pop(layer)
            arrays[layer] = np.concatenate(own)[:count] if own else np.empty((0, 0), self._dtype)
        return HiddenStates(self._capture.numbers, positions[:count], None, arrays)


def _layers(name: str, given: object) -> tuple[int, ...]:
    allowed = f"a layer, or a list of 1 or more different layers, from 0 to {MAX_LAYER}"
    found: Any = [given] if _is_layer(given) else given
    is_list = isinstance(found, Sequence) and not isinstance(found, bytes) and 0 < len(found) <= MAX_LAYER + 1
    require(is_list and all(map(_is_layer, found)) and len(set(found)) == len(found), name, given, allowed)
    return tuple(sorted(map(int, found)))


def _is_layer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) <= MAX_LAYER


def _check_range(name: str, layer: int, last: int) -> None:
    require(layer <= last, name, f"layer {layer}", f"of layers from 0 to {last}")


def _check_positions(given: object) -> None:
    allowed = f"one of {', '.join(NAMED_POSITIONS)}, or a slice of integers with a step of at least 1"
    if not isinstance(given, slice):
        require(isinstance(given, str) and given in NAMED_POSITIONS, "positions", given, allowed)
        return
    ends = (given.start, given.stop, given.step)
    are_integers = all(end is None or (type(end) is int and abs(end) < _END) for end in ends)
    require(are_integers and (given.step is None or given.step >= 1), "positions", given, allowed)


def _changes(name: str, given: Any) -> Mapping[int, Change]:
    allowed = f"a mapping of layers from 0 to {MAX_LAYER} to vectors, or to pairs of matrices (down [r, H], up [H, r])"
    is_mapping = isinstance(given, Mapping) and bool(given) and all(map(_is_layer, given))
    require(is_mapping, name, given, allowed)
    return MappingProxyType({int(layer): _change(name, layer, given[layer]) for layer in sorted(given)})


def _change(name: str, layer: int, given: Any) -> Change:
    if not (isinstance(given, tuple | list) and len(given) == 2 and not any(np.isscalar(one) for one in given)):
        return _floats(name, layer, given, 1)
    down, up = (_floats(name, layer, one, 2) for one in given)
    allowed = f"of pairs down [r, H], up [H, r] with one rank r from 1 to {MAX_RANK}"
    shown = f"{list(down.shape)} and {list(up.shape)} at layer {layer}"
    require(down.shape[0] == up.shape[1] <= MAX_RANK and down.shape[1] == up.shape[0], name, shown, allowed)
    return down, up


def _floats(name: str, layer: int, given: Any, dimensions: int) -> npt.NDArray[np.float32]:
    """A copy as float32, which cannot be changed, of numbers in a list, an array or a tensor of PyTorch."""
    allowed = "of finite numbers: a vector, or a pair of matrices, at each layer"
    try:
        with np.errstate(over="ignore"):
            numbers = given.detach().cpu().float().numpy() if hasattr(given, "detach") else given
            found = np.array(numbers, np.float32, order="C")
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidValueError(name, f"{given!r:.80} at layer {layer}", allowed) from error
    fits = found.ndim == dimensions and found.size > 0 and bool(np.isfinite(found).all())
    require(fits, name, f"{given!r:.80} at layer {layer}", allowed)
    found.setflags(write=False)
    return found


def path_of(capture: Capture | None) -> Path | None:
    """The file that a capture writes, absolute; None: none."""
    return None if capture is None or capture.path is None else Path(os.path.abspath(capture.path))
