"""Parts of the site from elsewhere: a MkDocs hook fills marks `<!-- table of NAME -->`, brings icon and changelog."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MARK = re.compile(r"<!-- table of (\w+) -->")
ROOT = Path(__file__).parents[1]
BROUGHT = {"images/icon.svg": ROOT / "d3engine" / "server" / "page" / "icon.svg", "changelog.md": ROOT / "CHANGELOG.md"}


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this with the files of the site, of which some stand outside of docs."""
    from mkdocs.structure.files import File

    for name, path in BROUGHT.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
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
    client: Any = SimpleNamespace(heartbeat=lambda: SimpleNamespace(error=None, is_sleeping=False))
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


def http() -> Iterator[str]:
    """Each route of /openapi.json, and the fields of all bodies, with the bounds that the bundled model has."""
    from d3engine.engine.model_directory import model_directory
    from d3engine.model.config import ModelConfig
    from d3engine.server.app import ROUTES
    from d3engine.server.routes.openapi import description
    from d3engine.server.settings import ServerSettings

    config = ModelConfig.from_directory(model_directory("demo"))
    client = SimpleNamespace(config=config, max_model_len=config.max_length)
    served: Any = SimpleNamespace(client=client, settings=ServerSettings(model_names=("demo",)))
    found = description(ROUTES, served)
    yield from ("## Routes", "")
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            yield from (
                "",
                f"### {method.upper()} {path}",
                "",
                _line(route["summary"]),
                "",
                "| part | content |",
                "|---|---|",
            )
            yield from _about(route)
    yield from ("", "## Bodies")
    for name, schema in sorted(found["components"]["schemas"].items()):
        yield from ("", f"### {name}", "", _line(schema.get("description")), "")
        yield from ("| field | value | default |", "|---|---|---|")
        for field, kind in schema["properties"].items():
            default = "required" if field in schema.get("required", ()) else _default(kind)
            yield f"| `{field}` | {_kind(kind)} | {default} |"


def _about(route: dict[str, Any]) -> Iterator[str]:
    """What a route takes and gives, in rows of a table."""
    for one in route["parameters"]:
        says = f": {_line(one['description'])}" if "description" in one else ""
        yield f"| {one['in']} | `{one['name']}`{says} |"
    if "requestBody" in route:
        yield f"| body | {_kind(route['requestBody']['content']['application/json']['schema'])} |"
    for media, content in route["responses"]["200"]["content"].items():
        schema, kind = content["schema"], "answer"
        if media == "text/event-stream":
            kind, data = "events", schema["properties"]["data"]
            schema = next(one for one in (data, *data.get("anyOf", ())) if "contentSchema" in one)["contentSchema"]
        elif media == "application/x-ndjson":
            kind = "lines"
        elif media != "application/json":
            kind = media
        yield f"| {kind} | {_kind(schema)} |"
    yield f"| errors | {', '.join(f'`{status}`' for status in route['responses'] if status != '200')} |"


def _kind(schema: dict[str, Any]) -> str:
    """The values that a schema allows, in words; what may be null may be left out."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        found = " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one != {"type": "null"}))
        return f"{found}: {_line(schema['description'])}" if "description" in schema else found
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        of = f" of {_kind(schema['items'])}" if schema.get("items") else ""
        return f"list{_bounds(schema, 'minItems', 'maxItems', ' values')}{of}"
    if schema.get("type") in ("integer", "number"):
        return f"{schema['type']}{_bounds(schema, 'minimum', 'maximum')}"
    if schema.get("type") == "string":
        pattern = f" like `{_line(schema['pattern'])}`" if "pattern" in schema else ""
        return f"string{pattern}{_bounds(schema, 'minLength', 'maxLength', ' characters')}"
    return _line(schema.get("description")) or schema.get("type", "anything")


def _bounds(schema: dict[str, Any], low: str, high: str, unit: str = "") -> str:
    least = schema.get(low, schema.get("exclusiveMinimum"))
    above = "above" if "exclusiveMinimum" in schema else "at least"
    if low in schema and high in schema and above == "at least":
        return f" ({least:,} to {schema[high]:,}{unit})"
    words = [f"{above} {least:,}"] if least is not None else []
    words += [f"at most {schema[high]:,}"] if high in schema else []
    return f" ({', '.join(words)}{unit})" if words else ""


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def errors() -> Iterator[str]:
    """The exceptions of `d3engine.errors`, with the exit code that a command ends with."""
    from d3engine import errors
    from d3engine.cli.commands import code_of

    yield from ("| exception | also a | meaning | exit code |", "|---|---|---|---|")
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.D3EngineError):
            also = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base.__module__ == "builtins")
            example = kind.__new__(kind)  # its code goes by its class
            yield f"| `{kind.__name__}` | {also} | {_line(kind.__doc__)} | {int(code_of(example))} |"


def statuses() -> Iterator[str]:
    """Statuses of failed requests, with the `type` that an error has in each protocol."""
    from http import HTTPStatus

    from d3engine.server.errors import ANTHROPICS_TYPES, TYPES

    phrases = {one.value: one.phrase for one in HTTPStatus} | {499: "Client Closed Request"}
    yield from ("| status | | `type` for OpenAI's clients | for Anthropic's |", "|---|---|---|---|")
    for status, kind in TYPES.items():
        yield f"| {status} | {phrases[status]} | `{kind}` | `{ANTHROPICS_TYPES.get(status, 'invalid_request_error')}` |"


def published_models() -> Iterator[str]:
    """What is known of published models by their config.json."""
    if str(ROOT) not in sys.path:  # mkdocs loads this file alone
        sys.path.append(str(ROOT))
    from tools.published_models import table

    return table()


def _line(text: str | None) -> str:
    """A text in one cell of a table."""
    words = re.sub(r"\[/?[a-z ]+\]", "", " ".join((text or "").split("\f")[0].split()))
    return words.replace("|", "\\|").replace("<", "&lt;")


TABLES = {
    "options": options,
    "environment": environment,
    "metrics": metrics,
    "refused": refused,
    "http": http,
    "errors": errors,
    "statuses": statuses,
    "published_models": published_models,
}
