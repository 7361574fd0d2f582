"""The sandbox that a chat template runs in: it can neither reach Python nor use up the machine.

A template is a program from a stranger. The sandbox of jinja2 keeps it from Python's internals but not from eating all
time and memory, so the one idea here: every loop turn, call, filter and container of a template passes a guard that
counts it and measures its value. Operations that could blow up *before* the guard sees the result (a product, a join,
a replacement) are measured from their operands; the few that cannot be (padding, `format`) are not offered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from d3engine.errors import ModelFormatError

# What chat templates use of jinja2's filters, less those whose result can be far larger than their operands.
# fmt: off
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "forceescape", "groupby", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort",
    "string", "sum", "title", "trim", "truncate", "unique", "upper", "wordcount",
)
# fmt: on
_REFUSED_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"))
_LARGEST_INTEGER_BITS = 4096


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may use."""

    characters: int = 4_000_000
    """Written in all (what a macro returns counts again where it is used), and of every value on the way."""
    steps: int = 1_000_000
    """Loop turns, calls, filters and containers."""
    seconds: float = 10.0
    """Wall clock; looked at in every step, so one step may overrun it by the time it takes."""


class LimitError(Exception):
    """One of `RenderLimits` is used up; the text says which."""


def compile_template(source: str, limits: RenderLimits) -> CodeType:
    """Return the guarded code of a template, for `render_template`. Raises `ModelFormatError`."""
    environment = _GuardedEnvironment(_Budget(limits))
    try:
        tree = _InsertGuards().visit(environment.parse(source))
        return environment.compile(tree, filename="<chat template>")
    except jinja2.TemplateSyntaxError as error:
        raise ModelFormatError(f"chat template: line {error.lineno}: {error.message}") from None
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelFormatError(f"chat template: cannot be compiled: {error}") from None


def render_template(code: CodeType, variables: Mapping[str, Any], limits: RenderLimits) -> str:
    """Return what the template writes. Raises `LimitError`, or whatever a template can raise: anything."""
    environment = _GuardedEnvironment(_Budget(limits))
    template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    return "".join(template.generate(variables))


# Compilation


class _InsertGuards(NodeTransformer):
    """Let every loop turn count a step and every value that can grow pass the guard.

    Macros and blocks run again only through a call, which is a value and so counts already.
    """

    def _guard_value(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node  # the target of an assignment
        assert isinstance(node, nodes.Expr)
        return _call_guard(node, node.lineno)

    visit_Call = visit_Filter = visit_Concat = visit_List = visit_Tuple = visit_Dict = _guard_value

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call_guard(nodes.Const(None), node.lineno)).set_lineno(node.lineno))
        if isinstance(node.test, nodes.Expr):
            node.test = _call_guard(node.test, node.lineno)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # As an expression, so that plain text is counted where it is written, like everything else.
        return _call_guard(nodes.Const(node.data), node.lineno)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.call = _unguarded(node.call)  # a field that must stay what it is; its parts are guarded
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(_unguarded(node.filter), "write", [], [], None, None)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = None if node.filter is None else _unguarded(node.filter)
        return node


def _call_guard(value: nodes.Expr, lineno: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute("guard"), [value], [], None, None)
    call.set_lineno(lineno)
    return call


def _unguarded(node: Any) -> Any:
    return node.args[0]


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; a prompt needs only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


# Rendering


class _Budget:
    """What one rendering has used."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._steps = 0
        self._written = 0
        self._deadline = time.monotonic() + limits.seconds

    def guard(self, value: Any) -> Any:
        """Count a step and return `value`, measured."""
        self._steps += 1
        if self._steps > self.limits.steps:
            raise LimitError(f"{self.limits.steps} steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"{self.limits.seconds:g} seconds")
        self.allow(self.size(value))
        return value

    def write(self, value: Any) -> str:
        """Return the text that `value` is written as, counted."""
        text = str(self.guard(value))
        self._written += len(text)
        self.allow(self._written)
        return text

    def size(self, value: Any) -> int:
        """Return the characters and items of a value written out; repeats count. Stops early beyond the limit."""
        enough = self.limits.characters
        total, pending = 0, [value]
        while pending and total <= enough:
            item = pending.pop()
            total += 1
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, int):
                total += 0 if item.bit_length() <= _LARGEST_INTEGER_BITS else enough
            elif isinstance(item, list | tuple | set | dict):
                total += len(item)
                if total <= enough:
                    pending.extend(item)
                    pending.extend(item.values() if isinstance(item, dict) else ())
        return total

    def allow(self, size: int) -> None:
        """Refuse a value that has, or would have, `size` characters or items."""
        if size > self.limits.characters:
            raise LimitError(f"{self.limits.characters} characters")


class _Namespace(Namespace):
    """jinja2's `namespace`; the only object that a template can change, hence never written out with its content."""

    def __repr__(self) -> str:
        return "<namespace>"


class _GuardedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, set up as transformers does, with one rendering's budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: _Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=budget.write,
            optimized=False,  # constant folding would compute values at compile time, outside any budget
        )
        self.budget = budget
        self.guard = budget.guard
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters |= {"tojson": _to_json, "indent": _indent, "sum": _sum, "write": budget.write}
        self.filters |= {"join": self._join(self.filters["join"])}
        self.filters |= {"replace": self._replace(self.filters["replace"])}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "joiner", "cycler")}
        self.globals |= {"namespace": _Namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def wrap_str_format(self, value: Any) -> None:
        """Leave `format` to `is_safe_attribute`, which refuses it: a format can ask for any width."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = isinstance(obj, int | float) or (isinstance(obj, str | bytes) and attr in _REFUSED_METHODS)
        return not refused and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are jinja2's: keyword arguments of the template's own must not collide with them.
        if __obj is __self.guard:
            return __obj(*args)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str | bytes) and args:
            if __obj.__name__ == "join":
                args = (__self._measured_items(args[0], text),)
            elif __obj.__name__ == "replace" and len(args) > 1:
                __self._measure_replacement(text, *args[:2])
        # A macro and a cycler keep their arguments as a tuple: nested in one another, these grow past every guard.
        __self.budget.allow(__self.budget.size([args, kwargs]))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            is_small = isinstance(left, int) and isinstance(right, int) and right >= 0
            if not is_small or left.bit_length() * right > _LARGEST_INTEGER_BITS:
                raise LimitError(f"powers of {_LARGEST_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, str | bytes):
            raise jinja2.exceptions.SecurityError("formatting with % is not supported in a chat template")
        elif operator == "*":
            self._measure_product(left, right)
        return self.budget.guard(super().call_binop(context, operator, left, right))

    def _measure_product(self, left: Any, right: Any) -> None:
        value, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and not isinstance(value, int):
            self.budget.allow(self.budget.size(value) * max(times, 0))

    def _measured_items(self, value: Any, separator: str | bytes) -> list[Any]:
        items = list(value)
        self.budget.allow(self.budget.size(items) + len(items) * len(separator))
        return items

    def _measure_replacement(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(old, str | bytes) and type(new) in (str, bytes, Markup):
            self.budget.allow(len(text) + text.count(old) * len(new))

    def _join(self, join: Callable[..., Any]) -> Callable[..., Any]:
        @jinja2.pass_eval_context
        def guarded(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
            return join(context, self._measured_items(value, str(d)), d, attribute)

        return guarded

    def _replace(self, replace: Callable[..., Any]) -> Callable[..., Any]:
        @jinja2.pass_eval_context
        def guarded(context: Any, s: Any, old: Any, new: Any, count: Any = None) -> Any:
            self._measure_replacement(str(s), str(old), str(new))
            return replace(context, s, old, new, count)

        return guarded


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`tojson` without jinja2's escapes for HTML, which no model was trained on; transformers' options."""
    _require_narrow("tojson", indent)
    for separator in separators or ():
        _require_narrow("tojson", separator)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """jinja2's `sum`, of numbers only: a sum of lists takes quadratic time."""
    if not isinstance(start, int | float):
        raise jinja2.exceptions.SecurityError("sum is supported for numbers only")
    return jinja2.filters.do_sum(environment, iterable, attribute, start)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's `indent`, for a width that cannot blow up the text."""
    _require_narrow("indent", width)
    return jinja2.filters.do_indent(s, width, first, blank)


def _require_narrow(name: str, width: Any) -> None:
    size = len(width) if isinstance(width, str) else width
    if size is not None and not (isinstance(size, int) and size <= 32):
        raise jinja2.exceptions.SecurityError(f"{name} is supported up to a width of 32")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise jinja2.exceptions.SecurityError("strftime_now takes a format of at most 200 characters")
    return datetime.now().strftime(format)
