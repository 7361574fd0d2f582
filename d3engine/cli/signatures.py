"""The parameters of a command as typer reads them, and what help calls their values."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from typer.models import OptionInfo

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
