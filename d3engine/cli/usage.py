"""What is wrong with a command line that cannot be read, in one sentence like any other error's.

The one idea: typer words such faults in its own way, which changes with its version and leaves out the value; here they
name the option, what it must be and what it got, and say where the help is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

from d3engine.cli.invocation import as_typed
from d3engine.errors import NOTHING, must_be

UsageError: Any = typer.BadParameter.__bases__[0]
"""What typer raises for a command line that it cannot read; which package has it depends on typer's version."""

KINDS = {"INTEGER": "an integer", "NUMBER": "a number"}
"""What a value of such a name in the help must be."""


def shows_help(error: Any) -> bool:
    """Whether this is no fault: a group named alone, which shows its help."""
    return type(error).show is not UsageError.show


def in_words(error: Any, context: Any, given: Callable[[], Mapping[str, Any]]) -> str:
    """The sentence for an error of typer's; `given` has the values of the command line as they stand there."""
    return f"{_fault(error, given)}; see {as_typed(*context.command_path.split()[1:], '--help')}"


def _fault(error: Any, given: Callable[[], Mapping[str, Any]]) -> str:
    parameter = getattr(error, "param", None)
    if parameter is None:
        return _unknown(error) if hasattr(error, "possibilities") else error.format_message().rstrip(".")
    is_option = parameter.param_type_name == "option"
    name = max(parameter.opts, key=len) if is_option else parameter.metavar or parameter.name.upper()
    if hasattr(error, "param_type"):  # it is missing
        text = (parameter.help or "a value").rstrip(".")
        return must_be(name, NOTHING, f"given: {text[0].lower()}{text[1:]}")
    if parameter.metavar in KINDS:
        return must_be(name, given().get(parameter.name), KINDS[parameter.metavar])
    return f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}"


def _unknown(error: Any) -> str:
    from d3engine.cli.depth_options import respelled  # which loads the policies

    new = respelled(error.option_name)
    if new is not None:
        return f"there is no option {error.option_name} any more: write {new}"
    like = f" (is it {' or '.join(sorted(error.possibilities))}?)" if error.possibilities else ""
    return f"there is no option {error.option_name}{like}"
