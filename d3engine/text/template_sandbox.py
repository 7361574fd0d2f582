"""A chat template in jinja2's sandbox, and an analysis of its syntax tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from d3engine.text.chat_messages import REASONING_FIELDS, MessageFormat

_WALKING_FILTERS = frozenset(("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"))
_PART_FIELDS = ("text", "type")
_KEPT_TEMPLATES = 8


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Reply with the messages' form that a template reads; with `variables`, with its text; or with its error."""
    try:
        template = _compiled(request["source"])
        if request["variables"] is None:
            return {"form": asdict(template.form)}
        text = template.render(request["variables"], request["characters"])
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything; its traceback has only generated code
        return {"failed": (str(error) or type(error).__name__)[:10_000]}
    return {"too_long": True} if text is None else {"text": text}


@lru_cache(_KEPT_TEMPLATES)
def _compiled(source: str) -> CompiledTemplate:
    """Return the compiled template. Raises `ValueError` with the line and the error."""
    environment = _Environment()
    try:
        tree = environment.parse(source)
        return CompiledTemplate(environment.from_string(tree), _message_format(tree))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None


class CompiledTemplate:
    """A template, and the form of the messages that it reads."""

    def __init__(self, template: jinja2.Template, form: MessageFormat) -> None:
        self._template = template
        self.form = form

    def render(self, variables: Mapping[str, Any], max_characters: int) -> str | None:
        """Return the template's text, None if it is too long. Raises anything, as a template can."""
        chunks, written = [], 0
        for chunk in self._template.generate(variables):
            chunks.append(chunk)
            written += len(chunk)
            if written > max_characters:
                return None
        return "".join(chunks)


# Functions that transformers gives a template


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; a prompt needs only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class _Namespace(Namespace):
    """jinja2's `namespace`, the one object that a template can change, without access to private attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no name for self, so that a template may use it
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals = {name: self.globals[name] for name in ("range", "joiner", "cycler")}
        self.globals |= {"namespace": _Namespace, "dict": _new_dict}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`tojson` without jinja2's escapes for HTML, which no model was trained on; transformers' options."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """`dict` as a function: a template gets no class."""
    return dict(*args, **kwargs)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


# Analysis of the syntax tree


def _message_format(tree: nodes.Template) -> MessageFormat:
    reads = {id(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)) if _reads_content(node)}
    names = _content_names(tree)
    walked = [root for expression in _walked(tree) for root in _roots(expression) if _is_content(root, names)]
    strings = {node.attr for node in tree.find_all(nodes.Getattr)}
    strings |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return MessageFormat(
        walks_parts=bool(walked),
        only_walks=bool(walked) and reads == {id(root) for root in walked},
        reasoning_fields=tuple(field for field in REASONING_FIELDS if field in strings),
    )


def _walked(tree: nodes.Template) -> Iterator[nodes.Expr]:
    """Every expression that is iterated over: in a loop, by a filter for lists, or as `x[0].text`."""
    looked_into = {id(part.node) for part in tree.find_all(nodes.Getattr) if part.attr in _PART_FIELDS}
    looked_into |= {id(part.node) for part in tree.find_all(nodes.Getitem) if _key(part) in _PART_FIELDS}
    for loop in tree.find_all(nodes.For):
        assert isinstance(loop.iter, nodes.Expr)
        yield loop.iter
    for each in tree.find_all(nodes.Filter):
        if each.name in _WALKING_FILTERS and each.node is not None:
            yield each.node
    for item in tree.find_all(nodes.Getitem):
        if _key(item) is None and id(item) in looked_into:
            yield item.node


def _roots(expression: nodes.Expr) -> Iterator[nodes.Expr]:
    """The expressions whose items an expression may have: `a` and `b` of `(a if x else b)[1:] | list`."""
    sources: list[nodes.Expr | None] = []
    match expression:
        case nodes.CondExpr():
            sources = [expression.expr1, expression.expr2]
        case nodes.Or() | nodes.And():
            sources = [expression.left, expression.right]
        case nodes.Filter():
            sources = [expression.node]
        case nodes.Getitem(arg=nodes.Slice()):
            sources = [expression.node]
        case _:
            yield expression
    for source in sources:
        if source is not None:
            yield from _roots(source)


def _content_names(tree: nodes.Template) -> set[str]:
    """The names that hold a content: set by `set`, or as the argument of a macro."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        found = set(names)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _may_be_content(assignment.node, names):
                found.add(assignment.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                given = zip((parameter.name for parameter in macro.args), call.args, strict=False)
                found |= {name for name, argument in given if _may_be_content(argument, names)}
        if found == names:
            return names
        names = found


def _may_be_content(expression: Any, names: set[str]) -> bool:
    return any(_is_content(root, names) for root in _roots(expression))


def _is_content(expression: nodes.Expr, names: set[str]) -> bool:
    return _reads_content(expression) or (isinstance(expression, nodes.Name) and expression.name in names)


def _reads_content(expression: nodes.Expr) -> bool:
    """Whether it is `x.content`, `x["content"]` or `x.get("content")`."""
    if isinstance(expression, nodes.Call):
        is_get = isinstance(expression.node, nodes.Getattr) and expression.node.attr == "get"
        first = expression.args[0] if expression.args else None
        return is_get and isinstance(first, nodes.Const) and first.value == "content"
    return _key(expression) == "content"


def _key(expression: nodes.Expr) -> str | None:
    """The constant name that an expression looks up, else None."""
    if isinstance(expression, nodes.Getattr):
        return expression.attr
    constant = expression.arg if isinstance(expression, nodes.Getitem) else None
    return constant.value if isinstance(constant, nodes.Const) and isinstance(constant.value, str) else None
