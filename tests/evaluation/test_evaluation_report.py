"""Baselines at equal depth, and the page of an evaluation."""

import re
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from typing import Any

import pytest

from d3engine.depth import (
    D3,
    DepthPolicy,
    EarlyExit,
    FixedSkip,
    FullDepth,
    Lossless,
    SkipDecode,
    Speculative,
    TailSkip,
    UnifiedSkip,
)
from d3engine.depth.statistics import LLAMA2_7B, mean_depth
from d3engine.research.evaluation.accuracy import Interval, Score, paired, wilson_interval
from d3engine.research.evaluation.baselines import (
    BISECTIONS,
    at_equal_depth,
    early_exit_at_depth,
    published_order,
    unified_for_mean,
)
from d3engine.research.evaluation.benchmark import Asked, Benchmark, Verdict
from d3engine.research.evaluation.generated import GeneratedProblem
from d3engine.research.evaluation.report import (
    Chart,
    Result,
    as_dict,
    chart,
    cost_table,
    page,
    right_by_constant,
    tables,
)
from d3engine.research.evaluation.work import Cost, Work


@pytest.mark.parametrize(("num_layers", "start"), [(32, 0.6), (40, 0.5), (80, 0.6), (16, 0.7), (32, 0.2)])
def test_baselines_have_the_mean_depth_of_the_policy(num_layers: int, start: float) -> None:
    policy = D3(0.9, start)
    wanted = mean_depth(policy.schedule(num_layers), 200)
    skip_decode, unified, tail_skip = at_equal_depth(policy, num_layers=num_layers, max_tokens=200)
    assert isinstance(skip_decode, SkipDecode)
    assert isinstance(unified, UnifiedSkip)
    assert abs(mean_depth(skip_decode.schedule(num_layers), 200) - wanted) <= 0.26
    assert abs(mean_depth(unified.schedule(num_layers), 200) - wanted) <= 0.5
    assert isinstance(tail_skip, TailSkip)
    assert mean_depth(tail_skip.schedule(num_layers), 200) == pytest.approx(wanted, abs=0.5 / 200)


def test_tail_skipping_below_one_layer_takes_its_lowest_mean() -> None:
    """Tail skipping takes its lowest mean where D3 runs less than one layer."""
    policy = D3(0.5, 0.2)
    assert mean_depth(policy.schedule(4), 50) < 1
    tail_skip = at_equal_depth(policy, num_layers=4, max_tokens=50)[-1]
    assert mean_depth(tail_skip.schedule(4), 50) == pytest.approx((4 + 49) / 50)


def test_published_layers_go_from_their_llama_alone() -> None:
    """Published layers go from the Llama that they were published for and no other."""
    assert published_order(replace(LLAMA2_7B, vocab_size=128_256)) == ()
    order = published_order(LLAMA2_7B)
    wanted = mean_depth(D3(0.9999, 0.8).schedule(32), 1024)  # 29.9: two layers, to the nearest
    (*_, fixed) = at_equal_depth(D3(0.9999, 0.8), num_layers=32, max_tokens=1024, removal_order=order)
    assert fixed == FixedSkip([26, 27])
    assert abs(mean_depth(fixed.schedule(32), 1024) - wanted) < 0.5
    assert FixedSkip.preset("shortgpt", 32) in at_equal_depth(
        D3(0.9, 0.6), num_layers=32, max_tokens=200, removal_order=order
    ), "19.2 layers are fewer than the nine that were published leave"


def test_unified_skipping_takes_the_nearest_of_all_means() -> None:
    for wanted in (2.0, 7.3, 11.5, 15.99, 16.0):
        chosen = unified_for_mean(wanted, num_layers=16, max_tokens=50)
        means = {kept: mean_depth(UnifiedSkip(Fraction(16, kept)).schedule(16), 50) for kept in range(2, 17)}
        best = min(abs(mean - wanted) for mean in means.values())
        assert abs(mean_depth(chosen.schedule(16), 50) - wanted) == pytest.approx(best)


@pytest.mark.parametrize(("wanted", "nearest"), [(4.0, 0.5), (6.4, 0.8), (1.0, 0.125), (12.0, 1.0)])
def test_the_threshold_of_early_exit_is_found_within_0_and_1(wanted: float, nearest: float) -> None:
    asked: list[float] = []

    def depth_of(policy: DepthPolicy) -> float:
        assert isinstance(policy, EarlyExit)
        asked.append(policy.threshold)
        return 8 * policy.threshold

    found = early_exit_at_depth(depth_of, wanted)
    assert found.threshold == pytest.approx(nearest, abs=1 / 128)
    assert len(asked) == (1 if wanted == 12.0 else BISECTIONS), "no lower threshold is nearer than one that is too low"
    assert max(asked) <= 1


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
    full = Score(FullDepth(), LLAMA2_7B, Work(20, 640, 20), 1, 32.0, 2.0, (True, True, False, True))
    less = Score(D3(0.9, 0.6), LLAMA2_7B, Work(20, 480, 20), 0, 19.165, 1.0, (True, False, False, True))
    return Result(benchmark, ("Full depth", "D3 <b>&"), (full, less))


def test_the_tables_hold_the_figures_of_the_scores() -> None:
    quality, cost, by_task, *_ = tables([result("first")])
    assert quality.rows[1][1:3] == ("50.0% (2)", "15.0% to 85.0%")
    assert quality.rows[1][4:6] == ("1", "0")
    assert cost.rows[0][-1] == "10.0"
    assert cost.rows[1][1:5] == ("24.00", "19.16", "1.325x", "1.648x")
    assert [row[0] for row in by_task.rows] == ["one", "two", "all, by questions"]
    assert by_task.rows[0][2] == "66.67 (20.8 to 93.9)"
    change = paired((True, True, False), (True, False, False)).interval
    assert by_task.rows[0][3] == f"33.33 (-33.33: {100 * change.low:+.1f} to {100 * change.high:+.1f})"
    assert by_task.rows[2][1:3] == ("4", f"75.00 ({100 * wilson_interval(3, 4).low:.1f} to 95.4)")
    assert by_task.rows[2][3].startswith("50.00 (-25.00: ")


def test_a_score_stands_beside_that_of_whoever_reads_no_question() -> None:
    told = [Asked("?", GeneratedProblem("?", f"#### {answer}", answer)) for answer in ("1", "1", "1", "1", "2", "1")]
    benchmark = Benchmark("known", "test split", {"ones": told, "apart": told[3:5]}, 8)
    assert right_by_constant(told) == (True, True, True, True, False, True)
    assert right_by_constant(told[3:5]) == (False, False), "an answer is not found on the question that it answers"
    right = tuple(place < 3 for place in range(8))
    known = Result(benchmark, ("Full depth",), (Score(FullDepth(), LLAMA2_7B, Work(8, 256, 8), 0, 32.0, 1.0, right),))
    quality, *_ = tables([known])
    assert "would be right on 62.5% (5): +25.0 (" in quality.notes[0]
    assert as_dict(known)["right_by_constant_answers"] == 5


def test_verdicts_of_code_are_counted_below_the_scores() -> None:
    """A note and JSON say why code is not right; no note says so where answers are right or wrong alone."""

    def judged(*verdicts: Verdict) -> Result:
        found = result("code")
        return replace(found, scores=tuple(replace(score, verdicts=verdicts) for score in found.scores))

    plain = judged(Verdict.RIGHT, Verdict.WRONG, Verdict.WRONG, Verdict.WRONG)
    code = judged(Verdict.RIGHT, Verdict.TIME, Verdict.NO_CODE, Verdict.RIGHT)
    note = "Full depth: 2 right, 1 no code, 1 time; D3 <b>&: 2 right, 1 no code, 1 time."
    assert set(tables([code])[0].notes) - set(tables([plain])[0].notes) == {note}
    assert as_dict(code)["scores"][1]["verdicts"] == {"right": 2, "no code": 1, "time": 1}
    assert as_dict(plain)["scores"][0]["verdicts"] == {"right": 1, "wrong": 3}


def test_several_benchmarks_end_in_the_figures_of_table_6() -> None:
    *_, last = tables([result("first"), result("second")])
    assert last.rows == [
        (name, *row)
        for name in ("first", "second")
        for row in (
            ("Full depth", "75.00%", "30.1% to 95.4%", "32.00", "1.000x", "32.00", "1.000x", "2.0 s", "10.0"),
            ("D3 <b>&", "50.00%", "15.0% to 85.0%", "19.16", "1.648x", "24.00", "1.325x", "1.0 s", "20.0"),
        )
    ]


def test_page_is_self_contained_well_formed_and_escaped() -> None:
    """The page stands alone, is well-formed, and escapes what it is given."""
    found = [result("first"), result("<script>alert(1)</script>")]
    text = page("An evaluation", {"model": "<img src=x onerror=1>"}, [chart(one) for one in found], tables(found))
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


def test_points_and_intervals_of_the_page_are_at_the_scores() -> None:
    """Points and intervals of the page are where the scores are."""
    text = page("An evaluation", {}, [chart(result("first"))], [])
    xs = dict(re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">(\d+) %', text))
    scale = {int(percent): float(x) for x, percent in xs.items()}
    at = [float(x) for x in re.findall(r'<circle class="mark" cx="([\d.]+)"', text)]
    for x, share in zip(at, (0.75, 0.5), strict=True):
        assert x == pytest.approx(scale[0] + share * (scale[100] - scale[0]), abs=0.2)
    lines = re.findall(r'<line class="mark" x1="([\d.]+)" x2="([\d.]+)"', text)
    assert all(float(low) < x < float(high) for (low, high), x in zip(lines, at, strict=True))


def test_labels_of_any_length_stand_inside_the_chart() -> None:
    """A letter of a 13 px font is about half an em wide on average; 0.6 leaves room."""
    title = "SelfSpeculative, draft (SkipDecode, max tokens 256, min layers 12, warmup 3), draft length 8, " * 4
    text = page("An evaluation", {}, [Chart("A chart", [(title, 0.5, Interval(0.4, 0.6))])], [])
    labels = re.findall(r'<text x="(\d+)" y="(\d+)">(.*?)</text>', text)
    assert " ".join(label for _, _, label in labels) == title.strip()
    assert len({y for _, y, _ in labels}) == len(labels) > 2
    assert all(int(x) + 13 * 0.6 * len(label) < 960 for x, _, label in labels)
    (bar,) = re.findall(r'<circle class="mark" cx="[\d.]+" cy="(\d+)"', text)
    assert int(bar) > max(int(y) for _, y, _ in labels)


@pytest.mark.parametrize(
    ("policy", "work", "cells", "words"),
    [
        (D3(0.9, 0.6), Work(10, 240, 10), ("24.00", "20.00", "1.325x", "1.581x"), ()),
        (Lossless(D3(0.9, 0.6)), Work(10, 400, 20), ("40.00", "-", "0.791x", "-"), ("Drafts", "No nominal")),
        (EarlyExit(0.5), Work(10, 240, 25, 80), ("24.00", "-", "1.183x", "-"), ("Early exit", "No nominal")),
        (Speculative("demo"), Work(10, 400, 20), ("40.00", "-", "-", "-"), ("Drafts", "second model")),
        (FullDepth(), Work(), ("-", "20.00", "-", "1.581x"), ()),
    ],
)
def test_cost_of_each_policy_is_shown_with_its_meaning(
    policy: DepthPolicy, work: Work, cells: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """The cost of every kind of policy is shown with what it means."""
    nominal = None if "-" in cells[1] else 20.0
    table = cost_table("Cost", ["it"], [Cost(policy, LLAMA2_7B, work, 0, nominal, 1.0)])
    assert tuple(table.rows[0][1:5]) == cells
    assert all(any(word in note for note in table.notes) for word in words)
    assert len(table.notes) == 1 if not words else len(table.notes) > 1
