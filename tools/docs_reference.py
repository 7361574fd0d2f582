"""Parts of the site that the code has: a MkDocs hook fills the marks `<!-- table of NAME -->`, and brings the icon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MARK = re.compile(r"<!-- table of (\w+) -->")


ICON = Path(__file__).parents[1] / "d3engine" / "server" / "page" / "icon.svg"


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this with the files of the site: the icon of the server's page is the site's too."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "images/icon.svg", abs_src_path=str(ICON)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with the text of each page."""
    return MARK.sub(lambda mark: "\n".join(TABLES[mark[1]]()), markdown)


def options() -> Iterator[str]:
    """A section for each command, with its arguments and all options, those too that `--help` leaves out."""
    import typer

    from d3engine.cli import app

    def sections(command: Any, name: str) -> Iterator[str]:
        context = command.make_context(name, [], resilient_parsing=True)
        if hasattr(command, "list_commands"):
            if name != "d3engine":
                yield from ("", f"### {name}", "", _line(command.help))
            for each in command.list_commands(context):
                yield from sections(command.get_command(context, each), f"{name} {each}")
            return
        yield from ("", f"### {name}", "", _line(command.help), "", "| option | |", "|---|---|")
        for one in command.params:
            if "--help" not in one.opts:
                spelled = [*one.opts, *one.secondary_opts] if one.param_type_name == "option" else [one.name.upper()]
                yield f"| {', '.join(f'`{word}`' for word in spelled)} | {_line(getattr(one, 'help', None))} |"

    return sections(typer.main.get_command(app), "d3engine")


def environment() -> Iterator[str]:
    """The registry of environment variables."""
    from d3engine.utils.environment import VARIABLES

    yield from ("| variable | values | meaning |", "|---|---|---|")
    for one in VARIABLES:
        values = "any" if one.takes_any else ", ".join(f"`{value}`" for value in one.allowed)
        yield f"| `{one.name}` | {values} | {_line(one.meaning)} |"


def metrics() -> Iterator[str]:
    """All families of `/metrics`, as a server of the bundled model has them."""
    from d3engine import Engine, FullDepth
    from d3engine.server.metrics import Exposition, Meters

    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        exposition = Exposition("d3engine")
        exposition._stats = engine.stats()
        meters = Meters(FullDepth(), engine.config.num_layers)
    client: Any = SimpleNamespace(heartbeat=lambda: SimpleNamespace(error=None))
    yield from ("| metric | kind | meaning |", "|---|---|---|")
    for family in exposition._families(client, SimpleNamespace(taken=0), meters):  # type: ignore[arg-type]
        name = family.name + ("_total" if family.type == "counter" else "")
        yield f"| `{name}` | {family.type} | {_line(family.documentation)} |"


def refused() -> Iterator[str]:
    """Fields of requests that the server refuses by name, and those that change nothing."""
    from d3engine.server.requests.refused import ANTHROPICS_ASK_NOTHING, ASK_NOTHING, REFUSED, json_text

    yield from ("| refused | because | unless it is |", "|---|---|---|")
    for one in REFUSED:
        allowed = ", ".join(f"`{json_text(value)}`" for value in one.allowed)
        yield f"| {', '.join(f'`{name}`' for name in one.fields.split())} | {_line(one.why)} | {allowed} |"
    taken = ", ".join(f"`{name}`" for name in (*ASK_NOTHING, *ANTHROPICS_ASK_NOTHING))
    yield from ("", f"Accepted and ignored, since they cannot change an answer: {taken}.")


def _line(text: str | None) -> str:
    """A text in one cell of a table."""
    words = re.sub(r"\[/?[a-z ]+\]", "", " ".join((text or "").split("\f")[0].split()))
    return words.replace("|", "\\|").replace("<", "&lt;")


TABLES = {"options": options, "environment": environment, "metrics": metrics, "refused": refused}
