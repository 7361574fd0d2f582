"""Baselines at equal depth, and the page of an evaluation."""

from __future__ import annotations

import re
from fractions import Fraction
from html.parser import HTMLParser
from typing import Any

import pytest

from d3engine.depth import D3, FullDepth, SkipDecode, UnifiedSkip
from d3engine.depth.statistics import LLAMA2_7B, mean_depth
from d3engine.evaluation.accuracy import Score
from d3engine.evaluation.baselines import at_equal_depth, unified_for_mean
from d3engine.evaluation.benchmark import Asked, Benchmark
from d3engine.evaluation.generated import GeneratedProblem
from d3engine.evaluation.html_page import page
from d3engine.evaluation.report import Result, tables


@pytest.mark.parametrize(("num_layers", "start"), [(32, 0.6), (40, 0.5), (80, 0.6), (16, 0.7), (32, 0.2)])
def test_baselines_have_the_mean_depth_of_the_policy(num_layers: int, start: float) -> None:
    policy = D3(0.9, start)
    wanted = mean_depth(policy.schedule(num_layers), 200)
    skip_decode, unified = at_equal_depth(policy, num_layers=num_layers, max_tokens=200)
    assert isinstance(skip_decode, SkipDecode)
    assert isinstance(unified, UnifiedSkip)
    assert abs(mean_depth(skip_decode.schedule(num_layers), 200) - wanted) <= 0.26
    assert abs(mean_depth(unified.schedule(num_layers), 200) - wanted) <= 0.5


def test_unified_skipping_takes_the_nearest_of_all_means() -> None:
    for wanted in (2.0, 7.3, 11.5, 15.99, 16.0):
        chosen = unified_for_mean(wanted, num_layers=16, max_tokens=50)
        means = {kept: mean_depth(UnifiedSkip(Fraction(16, kept)).schedule(16), 50) for kept in range(2, 17)}
        best = min(abs(mean - wanted) for mean in means.values())
        assert abs(mean_depth(chosen.schedule(16), 50) - wanted) == pytest.approx(best)


class Tags(HTMLParser):
    """Every tag with its attributes, and whether each is closed in order."""

    VOID = ("meta", "line", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def result(name: str) -> Result:
    question = Asked("?", GeneratedProblem("?", "#### 1", "1"))
    benchmark = Benchmark(name, "test split", {"one": [question] * 3, "two": [question]}, 8)
    full = Score(FullDepth(), 32, (True, True, False, True), 20, 1, 32.0, 32.0, 2.0, LLAMA2_7B)
    less = Score(D3(0.9, 0.6), 32, (True, False, False, True), 20, 0, 19.165, 24.0, 1.0, LLAMA2_7B)
    return Result(benchmark, ("Full depth", "D3 <b>&"), (full, less))


def test_the_tables_hold_the_figures_of_the_scores() -> None:
    quality, cost, by_task, *_ = tables([result("first")])
    assert quality.rows[1][1:3] == ("50.0% (2)", "15.0% to 85.0%")
    assert quality.rows[1][4:6] == ("1", "0")
    assert cost.rows[0][-1] == "10.0"
    assert cost.rows[1][1:5] == ("24.00", "19.16", "1.325x", "1.648x")
    assert [row[0] for row in by_task.rows] == ["one", "two", "all, by questions"]
    assert by_task.rows[0][2:] == ("66.67", "33.33 (-33.33)")
    assert by_task.rows[2][1:] == ("4", "75.00", "50.00 (-25.00)")


def test_several_benchmarks_end_in_the_figures_of_table_6() -> None:
    *_, last = tables([result("first"), result("second")])
    assert last.rows == [
        (name, *row)
        for name in ("first", "second")
        for row in (("Full depth", "75.00%", "32.00", "1.000x"), ("D3 <b>&", "50.00%", "19.16", "1.648x"))
    ]


def test_the_page_stands_alone_is_well_formed_and_escapes_what_it_is_given() -> None:
    found = [result("first"), result("<script>alert(1)</script>")]
    text = page("An evaluation", {"model": "<img src=x onerror=1>"}, found, tables(found))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "img", "link", "iframe", "b"}
    assert not re.search(r"(?:src|href|url|@import|https?:)", re.sub(r"&lt;.*?&gt;", "", text))
    assert "D3 &lt;b&gt;&amp;" in text
    assert len([tag for tag, _ in tags.seen if tag == "circle"]) == 4
    cells = re.findall(r"<td>(.*?)</td>", text)
    for table in tables(found):
        for row in table.rows:
            assert all(cell.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in cells for cell in row)


def test_points_and_intervals_of_the_page_are_where_the_scores_are() -> None:
    text = page("An evaluation", {}, [result("first")], [])
    xs = dict(re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">(\d+) %', text))
    scale = {int(percent): float(x) for x, percent in xs.items()}
    at = [float(x) for x in re.findall(r'<circle class="mark" cx="([\d.]+)"', text)]
    for x, share in zip(at, (0.75, 0.5), strict=True):
        assert x == pytest.approx(scale[0] + share * (scale[100] - scale[0]), abs=0.2)
    lines = re.findall(r'<line class="mark" x1="([\d.]+)" x2="([\d.]+)"', text)
    assert all(float(low) < x < float(high) for (low, high), x in zip(lines, at, strict=True))
