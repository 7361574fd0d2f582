"""The benchmarks of bridges run, and their figures follow from each other; no time is judged here."""

from pathlib import Path

import pytest
from benchmark_reports import report_of

from benchmarks import bridge_cost, draft_frontier, lossless
from d3engine.depth import D3
from d3engine.engine.model_directory import model_directory
from d3engine.model.bridges import write_bridges
from d3engine.model.config import ModelConfig
from d3engine.research.evaluation.accuracy import shape_of


@pytest.mark.parametrize("rank", [None, 16])
def test_the_cost_of_bridges_is_counted_in_flops(rank: int | None, tmp_path: Path) -> None:
    asked = ["--model=demo", "--alpha=0.8", "--start=0.5", "--tokens=9", "--repeats=1"]
    report = report_of(bridge_cost.main, tmp_path, *asked, *([] if rank is None else [f"--rank={rank}"]))
    full, bare, bridged = (report["systems"][name] for name in ("full depth", "skipped", "bridged"))
    config = ModelConfig.from_directory(model_directory("demo"))
    shape, later = shape_of(config), D3(0.8, 0.5).schedule(config.num_layers).depths(9)[1:]
    assert full["flops_ratio"] == full["speedup"] == 1
    assert bare["mean_layers"] == bridged["mean_layers"] == later.mean()
    assert bridged["crossings_per_token"] == 1
    assert bare["crossings_per_token"] == full["crossings_per_token"] == 0
    whole = shape.num_layers * shape.layer_parameters + shape.head_parameters
    map_size = shape.hidden_size * (shape.hidden_size if rank is None else 2 * rank)
    cost = later.mean() * shape.layer_parameters + shape.head_parameters
    assert bare["flops_ratio"] == pytest.approx(whole / cost)
    assert bridged["flops_ratio"] == pytest.approx(whole / (cost + map_size))
    assert bridged["realisation_ratio"] == pytest.approx(bridged["speedup"] / bridged["flops_ratio"])
    assert report["bridge_bytes"] > 0


def test_the_needed_acceptance_reaches_its_goal() -> None:
    for share, goal in ((0.2, 1.0), (0.5, 1.25), (0.5, 1.0)):
        wanted = draft_frontier.needed(share, goal)
        length = draft_frontier.best_length(wanted, share)
        assert lossless.modelled_speedup(wanted, share, length) == pytest.approx(goal)
    assert draft_frontier.needed(0.95, 1.25) > 1


def test_drafts_with_and_without_bridges_are_in_one_plot(tmp_path: Path) -> None:
    """Drafts with and without bridges are points of one plot."""
    directory, bare = model_directory("demo"), D3(0.5, 0.5)
    picture, bridges = (tmp_path / name for name in ("f.png", "b.safetensors"))
    config = ModelConfig.from_directory(directory)
    write_bridges(bridge_cost.random_bridges(directory, config, bare, None), bridges)
    some = ["--model=demo", "--draft", "0.5", "0.5", "--lengths", "2", "--prompts=2", f"--bridges={bridges}"]
    report = report_of(draft_frontier.main, tmp_path, *some, "--tokens=16", f"--plot={picture}")
    skipped, bridged = report["points"]
    assert [skipped["bridged"], bridged["bridged"]] == [False, True]
    assert 0 < skipped["share"] < bridged["share"] < 1
    for point in (skipped, bridged):
        assert point["drafted"] >= point["accepted"]
        assert 0 <= point["acceptance"] <= 1
        speedup = lossless.modelled_speedup(point["acceptance"], point["share"], point["best_length"])
        assert point["at_best_length"] == pytest.approx(speedup)
    assert picture.stat().st_size > 1000
    asked = tmp_path / "chat.txt"
    asked.write_text("What is 2 plus 3?\n\nWho are you?\n")
    report = report_of(draft_frontier.main, tmp_path, *some[:4], "--lengths", "1", "--tokens=8", f"--chat={asked}")
    assert report["settings"]["chat"] == str(asked)
    times = [*some[:2], "0.5", "0.5", "--lengths", "2", "--prompts=1", "--tokens=12", "--repeats=1"]
    report = report_of(lossless.main, tmp_path, *times, f"--bridges={bridges}")
    assert report["settings"]["bridges"] == str(bridges)
