"""The tables of figures on the pages are those that `python -m benchmarks.pages` makes of the committed runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages

DOCS = pages.ROOT / "docs"


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.stem)
def test_a_page_has_the_tables_of_the_committed_runs(page: Path) -> None:
    """If this fails: `python -m benchmarks.pages`."""
    assert pages.written(page.read_text()) == page.read_text()


def test_every_table_of_figures_stands_on_one_page_and_once() -> None:
    """Every mark of a table is closed, and none stands twice."""
    texts = [page.read_text() for page in DOCS.rglob("*.md")]
    marks = [mark for text in texts for mark in re.findall(r"<!-- figures: ([^>]*) -->", text)]
    assert len(marks) == len(set(marks)) == sum(len(pages.MARK.findall(text)) for text in texts)
    assert {mark.split()[0] for mark in marks} == set(pages.TABLES)


def test_every_run_that_a_page_names_is_committed() -> None:
    """A path `benchmarks/results/NAME.json` on a page is a file."""
    named = {
        name for page in DOCS.rglob("*.md") for name in re.findall(r"`benchmarks/results/([^`]+)`", page.read_text())
    }
    assert len(named) >= 8
    assert [name for name in named if not (pages.RESULTS / name).exists()] == []


def test_a_new_run_changes_its_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes the pages of a run that has changed, and `--check` names them."""
    name = "tool-calls-coder-0.5b"
    found = pages.run(name)
    (tmp_path / "docs").mkdir()
    (tmp_path / f"{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    mark, end = f"<!-- figures: tool_calls {name} -->", "<!-- end of figures -->"
    with_table, without = tmp_path / "docs" / "one.md", tmp_path / "docs" / "two.md"
    with_table.write_text(f"# Calls\n\n{mark}\n{end}\n\nBehind it.\n")
    without.write_text("# Nothing\n")
    assert pages.main(["--check"]) == 1
    assert mark + "\n" + end in with_table.read_text()
    assert pages.main([]) == 0
    assert with_table.read_text().endswith(f"\n{end}\n\nBehind it.\n")
    assert f"| {found['counts']['calls']} |" in with_table.read_text()
    assert pages.main(["--check"]) == 0
    found["counts"]["calls"] = 4711
    (tmp_path / f"{name}.json").write_text(json.dumps(found))
    capsys.readouterr()
    assert pages.main(["--check"]) == 1
    assert (
        capsys.readouterr().out == "docs/one.md differs from the committed runs: python -m benchmarks.pages writes it\n"
    )
    assert without.read_text() == "# Nothing\n"


def cell(system: str, temperature: float, batch: int, kind: str, rate: float, equal: int = 2) -> dict[str, Any]:
    """A cell of a report of `benchmarks.speculation`; its gain is a hundredth of its rate."""
    ratio = {"median": rate / 100, "low": rate / 200, "high": rate / 50}
    figures = {"ratio": ratio, "worst": {"ratio": rate / 400}, "tokens_per_second": rate, "equal": equal, "answers": 2}
    return {"system": system, "temperature": temperature, "batch": batch, "kind": kind, **figures}


def test_drafts_of_any_target_make_a_table() -> None:
    """Two temperatures and batches, the peer's best length, and kinds that the run did not have."""
    settings = {"model": "target-q4_k_m.gguf", "draft": "small-7b.gguf", "systems": ["none", "lookup, auto", "draft"]}
    settings |= {"temperatures": [0.0, 0.5], "batches": [1, 4], "threads": 3, "tokens": 99}
    cells = [
        cell(system, temperature, batch, kind, rate, equal)
        for temperature in (0.0, 0.5)
        for batch in (1, 4)
        for kind in ("code", "all")
        for system, rate, equal in (("none", 100.0, 2), ("draft", 150.0, 2), ("lookup, auto", 110.0, 1))
    ]
    for system, rate in (("llama.cpp", 80.0), ("llama.cpp, 2", 60.0), ("llama.cpp, 5", 90.0)):
        cells += [cell(system, 0.0, 1, kind, rate) for kind in ("code", "all")]
    arguments = {"draft": "{'num_speculative_tokens': 6}", "lookup, auto": "{'method': 'ngram'}"}
    greedy = {"settings": settings, "arguments": arguments, "cells": cells}
    batch = greedy | {"settings": settings | {"model": "target-int8", "batches": [8]}, "cells": []}
    lines = list(pages.gains([batch, greedy]))
    gain, lookup = "1.50 (0.75-3.00) | - | - | -", "1.10 (0.55-2.20) | - | - | -"
    assert lines[3] == f"| Q4_K_M | greedy | the 7B, 6 tokens | 100 | {gain} | 0.38 | 2, 99 |"
    assert lines[4] == f"| Q4_K_M | greedy | lookups | 100 | {lookup} | 0.28 | 2, 99 |"
    assert lines[5].startswith("| Q4_K_M | greedy | llama.cpp itself, 5 tokens | 80.0 | 0.90 (0.45-1.80) |")
    assert f"| Q4_K_M | temperature 0.5, 4 at once | the 7B, 6 tokens | 100 | {gain} | 0.38 | 2, 99 |" in lines
    assert len(lines) == 3 + 4 * 2 + 1 + 3
    assert lines[-2] == "Token for token as without drafts: 12 of 16 answers, of llama.cpp's 2 of 2."


def test_speculation_has_weights_in_the_order_of_their_bits() -> None:
    """One answer at once stands before several, whatever the weights."""
    cells = [cell(system, 0.0, batch, "all", 100.0) for system in ("none", "auto") for batch in (1, 4)]
    settings = {"draft": "small", "systems": ["none", "auto"], "temperatures": [0.0], "tokens": 9}
    runs = [
        {"settings": settings | {"model": f"target{end}", "batches": [batch]}, "arguments": {}, "cells": cells}
        for end, batch in (("-bf16", 1), ("-coder-1.5b", 4), ("-int8", 1), ("-coder-1.5b", 1))
    ]
    lines = [line.split(" | ") for line in pages.gains(runs)][3:7]
    assert [line[0] for line in lines] == ["| Q4_K_M", "| int8", "| bfloat16", "| Q4_K_M"]
    assert [line[1:3] for line in lines[2:]] == [["greedy", "a draft model"], ["greedy, 4 at once", "a draft model"]]


def test_a_number_keeps_three_digits() -> None:
    """Zeros that were measured stay, and no exponent stands on a page."""
    figure = {"value": 28.0, "low": 0.0412, "high": 1705.2}
    assert pages.spread(figure) == "28.0 (0.0412-1,705)"
    assert pages.spread({"median": 149.6, "min": 1.5, "max": 2.0}) == "150 (1.50-2.00)"
