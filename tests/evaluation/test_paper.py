"""`d3engine paper`: our schedules and averages against the figures that the paper prints."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from d3engine.cli import app
from d3engine.cli.commands import COMMANDS
from d3engine.evaluation import paper
from d3engine.evaluation.paper_tables import ITEMS, SIZES, TABLE_6, TABLE_8

GOLDEN_MEANS = {
    ("7B", "gsm8k"): 29.904297,
    ("13B", "gsm8k"): 37.511719,
    ("70B", "gsm8k"): 75.534180,
    ("7B", "bbh"): 19.165,
    ("13B", "bbh"): 20.335,
    ("70B", "bbh"): 48.43,
}
"""Worked out once from the paper's formula, apart from this code."""


@pytest.fixture(scope="module")
def shown() -> str:
    result = CliRunner().invoke(app, ["paper"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def as_json() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["paper", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_mean_layers_are_the_golden_numbers_and_round_to_the_papers() -> None:
    found = {(c.size, c.benchmark): c for c in paper.mean_layers()}
    assert found.keys() == GOLDEN_MEANS.keys()
    for key, compared in found.items():
        assert compared.ours == pytest.approx(GOLDEN_MEANS[key], abs=5e-7), key
        assert abs(compared.difference) < 0.0051, key
        assert compared.agrees


def test_flops_ratios_are_the_papers_to_a_hundredth_for_every_method() -> None:
    found = paper.flops_ratios()
    assert len(found) == 18
    assert all(abs(c.difference) <= 0.01 for c in found), [c for c in found if not c.agrees]
    ours = {(c.size, c.benchmark): round(c.ours, 3) for c in found if c.setting == "Ours: D3"}
    assert ours == {
        ("7B", "bbh"): 1.648,
        ("13B", "bbh"): 1.943,
        ("70B", "bbh"): 1.648,
        ("7B", "gsm8k"): 1.069,
        ("13B", "gsm8k"): 1.065,
        ("70B", "gsm8k"): 1.059,
    }


def test_the_printed_wall_clock_exceeds_the_layer_bound_at_every_size() -> None:
    for column in paper.wall_clock():
        assert column.speedup == pytest.approx(column.printed_speedup, abs=0.01)
        assert 1.05 < column.layer_bound < 1.07 < column.printed_speedup


def test_averages_weighted_by_items_are_the_papers_but_for_one() -> None:
    found = paper.averages()
    assert [(a.size, a.method) for a in found if not a.agrees] == [("7B", "full")]
    assert all(abs(a.unweighted - a.papers) > 0.1 for a in found), "the unweighted mean must not fit as well"


def test_every_score_of_table_8_is_a_whole_number_of_items() -> None:
    """So neither a score nor a number of items is mistyped."""
    assert sum(row.items for row in TABLE_8) == ITEMS["bbh"]
    assert len({row.task for row in TABLE_8}) == 27
    for row in TABLE_8:
        for pair in row.scores:
            for score in (pair.full, pair.d3):
                right = score * row.items / 100
                assert right == pytest.approx(round(right), abs=0.011), row


def test_the_averages_of_table_8_are_the_scores_of_table_6() -> None:
    for average in paper.averages():
        method = "Full Depth" if average.method == "full" else "Ours: D3"
        (row,) = (row for row in TABLE_6[average.size, "bbh"] if row.method == method)
        assert row.exact_match == average.papers


def test_the_only_misprint_is_named() -> None:
    assert [(m.size, m.task) for m in paper.misprints()] == [("7B", "word_sorting")]


def test_gains_are_within_two_standard_errors() -> None:
    found = {(g.size, g.benchmark): g for g in paper.gains()}
    assert all(0 < g.in_standard_errors < 2 for g in found.values())
    # sqrt(0.1061 * 0.8939 / 1319 + 0.1205 * 0.8795 / 1319)
    assert found["7B", "gsm8k"].standard_error == pytest.approx(1.234, abs=1e-3)


def test_table_6_reports_cells_of_table_9_with_settings_of_their_own() -> None:
    found = {g.size: g for g in paper.grid_cells()}
    assert (found["7B"].start, found["13B"].start) == (0.8, 0.7)
    assert (found["7B"].best_start, found["13B"].best_start) == (0.2, 0.7)


def test_the_tables_show_the_figures_of_the_json(shown: str, as_json: dict[str, Any]) -> None:
    for compared in as_json["mean_layers"]:
        row = next(line for line in shown.splitlines() if line.split()[:2] == [compared["benchmark"], compared["size"]])
        assert f"{compared['ours']:.6f}" in row
        assert f"{compared['papers']:.2f}" in row
    for name in ("mean_layers", "flops_ratios"):
        assert all(entry["agrees"] for entry in as_json[name])
    assert all(f"{w['layer_bound']:.3f}x" in shown for w in as_json["wall_clock"])
    assert [w["size"] for w in as_json["wall_clock"]] == list(SIZES)
    assert "Misprint: word_sorting, 7B" in shown


@pytest.mark.parametrize("command", [r.command for r in paper.REPRODUCE if r.command.startswith("d3engine ")])
def test_the_commands_that_need_weights_parse(command: str, shown: str) -> None:
    assert command in shown
    words = shlex.split(command)[1:]
    assert words[0] in COMMANDS
    found: Any = typer.main.get_command(app)
    context = found.make_context("d3engine", list(words))
    while hasattr(found, "get_command"):
        found = found.get_command(context, words.pop(0))
        context = found.make_context(found.name, list(words), parent=context)


def test_it_needs_no_torch() -> None:
    run = "from d3engine.cli import app; app(['paper', '--json'], standalone_mode=False)"
    code = f"{run}; import sys; print('torch imported:', 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "torch imported: False"
