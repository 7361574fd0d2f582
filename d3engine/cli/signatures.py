"""The parameters of a command as typer reads them, and what help calls their values."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from typer.models import OptionInfo

from d3engine.errors import InvalidValueError

VALUES: dict[Any, str] = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}
"""What help calls the value of an option of each kind, whatever the version of typer."""


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """An option of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def give_parameters(command: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> None:
    """Let typer see these parameters in place of the command's own."""
    parameters = list(parameters)
    for parameter in parameters:
        _name_value(parameter.annotation)
    # Typer reads one or the other, by version.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


@contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Call the fields of an `InvalidValueError` by the flags that a user types: `api_keys` is `--api-key`."""
    flags = {field: flag.split("/")[0] for field, flag in flags.items()}
    try:
        yield
    except InvalidValueError as error:
        if type(error) is not InvalidValueError:
            raise
        # Only names with an underscore cannot be words of the sentence; those in quotes are values.
        words = "|".join(field for field in flags if "_" in field)
        allowed = (
            re.sub(rf"\b(?<!['\"])({words})\b", lambda word: flags[word[0]], error.allowed) if words else error.allowed
        )
        raise InvalidValueError(flags.get(error.field, error.field), error.value, allowed) from error


def _name_value(annotation: Any) -> None:
    """Say what the value of an option is called, where nothing says so yet."""
    if get_origin(annotation) is not Annotated:
        return
    kind, *given = get_args(annotation)
    for info in given:
        if isinstance(info, OptionInfo) and info.metavar is None:
            info.metavar = VALUES.get(_one_of(kind))


def _one_of(kind: Any) -> Any:
    """The kind of one value: int of `int | None` and of `list[int] | None`."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [one for one in get_args(kind) if one is not type(None)]
    return get_args(kind)[0] if get_origin(kind) is list else kind
