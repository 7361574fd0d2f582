"""Messages between callers and an engine's process: bytes that can be read without running
anything, and only what the other side does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import UnionType
from typing import Any, Final, TypeAlias, get_args, get_type_hints

import msgspec

from d3engine import errors
from d3engine.depth import DepthPolicy, policy_from_dict
from d3engine.engine.stats import EngineStats
from d3engine.errors import D3EngineError, FailedError, InvalidValueError, require
from d3engine.request.hidden_states import Capture, Steer
from d3engine.request.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from d3engine.request.params import RequestOutputKind, SamplingParams


class Struct(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A message; its first element is its name."""


# -- to the engine ---------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True):
    """The first: what to make the engine of, where to talk and to beat, and PyTorch's threads."""

    model: str
    arguments: dict[str, Any]
    requests: str
    replies: str
    pulse: str
    threads: int


class Add(Struct, frozen=True):
    key: int
    request_id: str | None
    prompt: str | None
    token_ids: list[int]
    params: dict[str, Any]
    priority: int
    flow: tuple[str, str] | None = None
    adapter: tuple[str, str] | None = None  # name and path


class Leave(Struct, frozen=True):
    key: int


class Abort(Struct, frozen=True):
    request_id: str


class Ask(Struct, frozen=True):
    key: int
    method: str
    arguments: tuple[str, ...] = ()


class Stop(Struct, frozen=True):
    pass


Message: TypeAlias = Start | Add | Leave | Abort | Ask | Stop

# -- from the engine -------------------------------------------------------------------------------------------------


class Failure(Struct, frozen=True):
    """An error by the name of its class in `d3engine.errors`, and what brought it about."""

    name: str
    message: str
    field: str | None = None
    allowed: str | None = None
    cause: str | None = None


class Ready(Struct, frozen=True):
    """The engine is there; `settings` are its own, resolved."""

    settings: dict[str, Any]
    num_blocks: int


class Output(Struct, frozen=True):
    """A RequestOutput, without the prompt."""

    key: int
    request_id: str
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    embedding: list[float] | None = None


class Value(Struct, frozen=True):
    """What a method returned."""

    key: int
    value: EngineStats | None


class Refused(Struct, frozen=True):
    """What a caller gets in place of an answer."""

    key: int
    failure: Failure


class End(Struct, frozen=True):
    """The last: why there will be nothing more."""

    failure: Failure


Replies: TypeAlias = list[Output | Value | Refused | Ready | End]

encode: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
decode_message: Final[Callable[[bytes], Any]] = msgspec.msgpack.Decoder(Message).decode
decode_replies: Final[Callable[[bytes], Any]] = msgspec.msgpack.Decoder(Replies).decode


_same = attrgetter(*Output.__struct_fields__[1:])  # what both kinds have, in the order of both


def output_without_prompt(key: int, output: RequestOutput) -> Output:
    return Output(key, *_same(output))


def output_with_prompt(output: Output, prompt: str | None, token_ids: list[int]) -> RequestOutput:
    request_id, *others = _same(output)
    return RequestOutput(request_id, prompt, token_ids, *others)


# -- errors ----------------------------------------------------------------------------------------------------------


def failure_of(error: BaseException) -> Failure:
    """An error in words. One that is none of d3engine's own becomes a `FailedError`."""
    cause = None if error.__cause__ is None else repr(error.__cause__)
    if isinstance(error, InvalidValueError):
        return Failure("InvalidValueError", str(error), error.field, error.allowed, cause)
    if isinstance(error, D3EngineError) and isinstance(getattr(errors, type(error).__name__, None), type):
        return Failure(type(error).__name__, str(error), cause=cause)
    return Failure("FailedError", f"{type(error).__name__}: {error}", cause=repr(error))


def error_of(failure: Failure) -> Exception:
    """The error again; its cause is a `FailedError` in the words of the other process."""
    kind = getattr(errors, failure.name)
    error: Exception = kind.__new__(kind, failure.message)
    if isinstance(error, InvalidValueError):
        error.field, error.value, error.allowed = failure.field or "", None, failure.allowed or ""
    if failure.cause is not None:
        error.__cause__ = FailedError(failure.cause)
    return error


# -- sampling parameters ---------------------------------------------------------------------------------------------

_DEFAULTS = SamplingParams()
_TYPES = get_type_hints(SamplingParams)


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not as by default, ready for `encode`.

    Raises `InvalidValueError` for a value that another process would not understand.
    """
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    return {name: plain(name, value) for name, value in given.items() if value != getattr(_DEFAULTS, name)}


def params_of(plain_fields: Mapping[str, Any]) -> SamplingParams:
    """The parameters again, checked again."""
    return SamplingParams(**{name: _value(name, value) for name, value in plain_fields.items()})


def plain(name: str, value: Any) -> Any:
    """A value as `encode` takes it. Raises `InvalidValueError` naming the field for one that cannot be sent."""
    if isinstance(value, DepthPolicy):
        return _plain_policy(name, value)
    if isinstance(value, Enum):
        return value.value
    allowed = "None, since the engine runs in another process"
    require(not isinstance(value, Capture | Steer), name, value, allowed)
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes,))
    except TypeError as error:
        allowed = f"something that can be sent to the engine's own process ({error})"
        raise InvalidValueError(name, value, allowed) from None


def _plain_policy(name: str, policy: DepthPolicy) -> dict[str, Any]:
    described = policy.describe()
    try:
        is_known = policy_from_dict(described) == policy
    except D3EngineError:
        is_known = False
    if not is_known:
        allowed = "a policy of d3engine's or of an installed package, since the engine has a process of its own"
        raise InvalidValueError(name, policy, allowed)
    return described


def _value(name: str, value: Any) -> Any:
    if name == "depth":
        return policy_from_dict(value)
    if name == "output_kind":
        return RequestOutputKind(value)
    arms = get_args(_TYPES[name]) if isinstance(_TYPES[name], UnionType) else (_TYPES[name],)
    kind: Any = next((arm for arm in arms if is_dataclass(arm)), None)
    return kind(**value) if kind is not None and isinstance(value, Mapping) else value
