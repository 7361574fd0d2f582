"""Operations that every layer repeats: described once a shape, and after that bound to the tensors of each call.

Describing an operation (tiles, grids, all arguments by name) takes Python some 30 us, and Triton's way from there to
the driver as long again, since it looks at every argument anew. Nothing of that depends on where tensors lie, but for
whether addresses are multiples of 16 bytes. So what one call has found out is kept as a recipe: compiled kernels with
their arguments in order, and where among these the addresses of tensors belong. A step that no graph can hold, of a
prompt's chunk beside answers, is bound by this time on the host.

An operation is written as a function that describes it: its result, and the steps that compute it, of which none runs.
`performed` makes of that the function which does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from d3engine.kernels.kv_pool import Fp8Pool
from d3engine.kernels.low_rank import RowMaps
from d3engine.kernels.triton import launches
from d3engine.kernels.triton.launches import Launch, every_row
from d3engine.kernels.weight_format import WeightFormat

MOST_RECIPES = 4096
"""Beyond it the oldest goes: a recipe is some 3 KB, and a step of other row counts makes five new ones a layer."""


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A step that torch computes: `function` writes one of its `operands`, and returns nothing."""

    function: Callable[..., None]
    operands: tuple[Tensor | None, ...]

    def run(self) -> None:
        self.function(*self.operands)


Step: TypeAlias = Launch | TorchCall

P = ParamSpec("P")
T = TypeVar("T", bound=Tensor | None)
"""The result of an operation; None where it only writes what it was given."""


def performed(describe: Callable[P, tuple[T, Sequence[Step]]]) -> Callable[P, T]:
    """The operation that a function describes: called alike, it launches the steps, and returns the result alone.

    Arguments are tensors of one device, weights, pools, and values that can be hashed; of tensors a description may
    depend on shapes, strides and dtypes alone. Memory that it makes is not initialized, and each tensor of it has its
    own.
    """

    @wraps(describe)
    def operation(*arguments: P.args, **options: P.kwargs) -> T:
        return _perform(describe, arguments, options)

    return operation


def _perform(describe: Callable[..., tuple[T, Sequence[Step]]], arguments: tuple[Any, ...], options: Any) -> T:
    key, tensors = _parts(describe, (*arguments, *options, *options.values()))
    addresses = [tensor.data_ptr() for tensor in tensors]
    key += (tensors[0].device, *[address & 15 for address in addresses])
    found = tuple(key)
    recipe = _recipes.get(found)
    if recipe is not None:
        return cast(T, recipe.perform(tensors, addresses))
    result, steps = describe(*arguments, **options)
    compiled = [step.run() for step in steps]
    recipe = _recipe(tensors, result, steps, compiled)
    if recipe is not None:
        with _recipes_lock:  # a thread that loads an adapter has other operations than that which runs steps
            _recipes[found] = recipe
            if len(_recipes) > MOST_RECIPES:
                _recipes.pop(next(iter(_recipes)), None)
    return result


def forget() -> None:
    """Describe every operation anew: to be called where something changes that a description depends on."""
    _recipes.clear()


def _parts(describe: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
    """What a description depends on, but for device and addresses; and the tensors of all arguments, in one order."""
    key: list[Any] = [describe, launches.PROGRAMMATIC]
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            key += (argument.dtype, argument.shape, argument.stride())
            tensors.append(argument)
        elif isinstance(argument, _COMPOSED):
            key += (type(argument), argument.shape, getattr(argument, "type_name", None))
            for part in argument.tensors:
                key += (part.dtype, part.shape, part.stride())
                tensors.append(part)
        else:
            key.append(argument)
    return key, tensors


_COMPOSED = (WeightFormat, Fp8Pool, RowMaps)
"""Arguments that consist of tensors; what these do not say follows from type, shape and, of blocks, the type's name."""


@dataclass(frozen=True, slots=True)
class _BoundLaunch:
    """A compiled kernel with its grid, its arguments in order, and where addresses belong among them."""

    launch: Callable[..., None]
    values: list[Any]
    places: list[tuple[int, int, int]]  # (argument, tensor, bytes behind its beginning)

    def run(self, tensors: list[Tensor], addresses: list[int]) -> None:
        values = self.values.copy()
        for place, nth, offset in self.places:
            values[place] = addresses[nth] + offset
        self.launch(*values)


@dataclass(frozen=True, slots=True)
class _BoundCall:
    """A function, and which tensors are its operands."""

    function: Callable[..., None]
    operands: list[int | None]

    def run(self, tensors: list[Tensor], addresses: list[int]) -> None:
        self.function(*[None if nth is None else tensors[nth] for nth in self.operands])


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Steps over the tensors of a call, which are numbered: first those given, then those made."""

    device: torch.device
    made: list[tuple[torch.Size, torch.dtype]]
    steps: list[_BoundLaunch | _BoundCall]
    result: int | None

    def perform(self, tensors: list[Tensor], addresses: list[int]) -> Tensor | None:
        # Kernels are launched on the current device, wherever the tensors are.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for shape, dtype in self.made:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                tensors.append(tensor)
                addresses.append(tensor.data_ptr())
            for step in self.steps:
                step.run(tensors, addresses)
        return None if self.result is None else tensors[self.result]


_recipes: dict[tuple[Any, ...], _Recipe] = {}
_recipes_lock = threading.Lock()


def _recipe(
    given: list[Tensor], result: Tensor | None, steps: Sequence[Step], compiled: Sequence[Any]
) -> _Recipe | None:
    """The recipe of steps that have run, with the kernels that they were compiled to.

    None where it would not be sure to do the same again: in the interpreter, which compiles nothing, and where it
    cannot be told which tensor an address belongs to.
    """
    numbers = _Numbers(given)
    try:
        # Those that torch is to see again first: what kernels read may be a view of one of them.
        calls = [operand for step in steps if isinstance(step, TorchCall) for operand in step.operands]
        for tensor in (result, *calls):
            if tensor is not None:
                numbers.of(tensor)
        bound = [_bound(step, kernel, numbers) for step, kernel in zip(steps, compiled, strict=True)]
        return _Recipe(given[0].device, numbers.made, bound, None if result is None else numbers.of(result))
    except _UnboundError:
        return None


class _UnboundError(Exception):
    """A step that cannot be bound to other tensors."""


def _bound(step: Step, kernel: Any, numbers: _Numbers) -> _BoundLaunch | _BoundCall:
    if isinstance(step, TorchCall):
        operands = [None if operand is None else numbers.of(operand) for operand in step.operands]
        return _BoundCall(step.function, operands)
    if kernel is None:
        raise _UnboundError
    values: list[Any] = []
    places: list[tuple[int, int, int]] = []
    for nth, value in enumerate(step.in_order()):
        if isinstance(value, Tensor) and value is every_row(value.device):
            value = value.data_ptr()  # it lasts as long as the process
        elif isinstance(value, Tensor):
            if value.numel():
                places.append((nth, *numbers.place(value)))
            value = 0  # nothing is read of an empty one
        values.append(value)
    return _BoundLaunch(kernel[(*step.grid, 1, 1)[:3]], values, places)


class _Numbers:
    """Which tensor of a call is which: those `given`, in order, then those that its description made."""

    def __init__(self, given: list[Tensor]) -> None:
        self.made: list[tuple[torch.Size, torch.dtype]] = []
        self._known = list(given)

    def of(self, tensor: Tensor) -> int:
        """The number of that very tensor; one that is not known is one that was made."""
        for nth, known in enumerate(self._known):
            if known is tensor:
                return nth
        if any(_shares_memory(known, tensor) for known in self._known) or not _is_whole(tensor):
            raise _UnboundError
        self.made.append((tensor.shape, tensor.dtype))
        self._known.append(tensor)
        return len(self._known) - 1

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """The number of the one tensor that holds the memory of `tensor`, and where in it, in bytes."""
        for nth, known in enumerate(self._known):
            if known is tensor:
                return nth, 0
        start, stop = _memory(tensor)
        holders = []
        for nth, known in enumerate(self._known):
            first, last = _memory(known)
            if _shares_memory(known, tensor) and first <= start and stop <= last:
                holders.append((nth, start - first))
        if len(holders) > 1:
            raise _UnboundError
        return holders[0] if holders else (self.of(tensor), 0)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The addresses [start, stop) of its values; none for a tensor without any."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (extent + 1) * tensor.element_size()


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is contiguous, and all of its memory: then one like it can be made."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
