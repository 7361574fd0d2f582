"""The table of deliberate breaks fits the code, so that `tools/breaks.py` can be run at any time."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tools.breaks import ROOT, Break, table

BREAKS, FEWEST = table(), 40
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def names_in(file: str) -> frozenset[str]:
    """The tests of a file, those of a class behind its name."""
    found = set()
    for node in ast.parse(text_of(file)).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}::{one.name}" for one in node.body if isinstance(one, FUNCTION))}
        elif isinstance(node, FUNCTION):
            found.add(node.name)
    return frozenset(found)


def test_breaks_are_many_and_different() -> None:
    assert len(BREAKS) >= FEWEST
    assert max(Counter((one.file, one.old, one.new) for one in BREAKS).values()) == 1


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_break_fits_the_code(one: Break) -> None:
    """Its old text stands once in its file, what replaces it is another, and its tests exist."""
    assert text_of(one.file).count(one.old) == 1
    assert one.old != one.new
    if one.file.endswith(".py"):
        ast.parse(text_of(one.file).replace(one.old, one.new))
    assert one.tests
    for test in one.tests:
        file, _, name = test.partition("::")
        assert Path(file).name.startswith("test_")
        assert names_in(file)
        assert not name or name in names_in(file)
