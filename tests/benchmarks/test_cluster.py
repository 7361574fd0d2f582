"""The cluster benchmark: its clock is that of its step times, and its routers send requests where they say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_reports import report_of

from benchmarks import cluster
from d3engine.integrations.proxy import LeastLoaded, RoundRobin

SMALL = cluster.Settings(
    replicas=2, slots=4, num_layers=8, tokens=12, most_tokens=24, prefixes=3, seconds=1.0, warm_up=0.2, seeds=2
)
TIME = cluster.StepTime(fixed=0.01, layer=0.001, row=0.0, entry=0.0)


def test_a_lone_request_waits_and_goes_on_as_its_own_layers_say() -> None:
    simulation = cluster.Simulation(SMALL, RoundRobin(), TIME)
    simulation.run([cluster.Arrival(0.5, 0, 10)])
    (request,) = simulation.requests
    prompt, *later = (0.01 + 0.001 * int(depth) for depth in SMALL.schedule.depths(10))
    assert request.tokens == 10
    assert request.first_token == pytest.approx(0.5 + prompt)
    assert request.last_token == pytest.approx(0.5 + prompt + sum(later))
    assert simulation.counted.layers == SMALL.schedule.depths(10).sum()


def test_young_row_makes_the_others_steps_as_deep_as_its_own() -> None:
    """A young row makes the step of all others as deep as itself."""
    together = cluster.Simulation(replace(SMALL, replicas=1), RoundRobin(), TIME)
    together.run([cluster.Arrival(0.5, 0, 20), cluster.Arrival(0.6, 0, 20)])
    apart = cluster.Simulation(SMALL, RoundRobin(), TIME)
    apart.run([cluster.Arrival(0.5, 0, 20), cluster.Arrival(0.6, 0, 20)])
    for beside, alone, same in zip(together.requests, apart.requests, (False, True), strict=True):
        spent = beside.last_token - beside.first_token, alone.last_token - alone.first_token
        assert spent[0] > spent[1] - 1e-9
        assert (spent[0] == pytest.approx(spent[1])) == same  # the young one is the deepest anyway


@pytest.mark.parametrize("kind", cluster.ARRIVALS)
def test_each_request_is_answered_whole_at_the_wanted_rates(kind: str) -> None:
    """Every request is answered whole, and rates are those asked for."""
    arrivals = cluster.draw_arrivals(replace(SMALL, seconds=100.0), kind, 10.0, seed=0)
    assert len(arrivals) == pytest.approx(1000, rel=0.15 if kind == "poisson" else 0.3)
    assert [one.time for one in arrivals] == sorted(one.time for one in arrivals)
    some = arrivals[:20]
    simulation = cluster.Simulation(SMALL, LeastLoaded(), TIME)
    simulation.run(some)
    assert [request.tokens for request in simulation.requests] == [one.tokens for one in some]


def test_bursts_come_in_less_even_numbers_than_poissons() -> None:
    def dispersion(kind: str) -> float:
        times = [one.time for one in cluster.draw_arrivals(replace(SMALL, seconds=200.0), kind, 20.0, seed=0)]
        counts = [sum(1 for time in times if start <= time < start + 2) for start in range(0, 200, 2)]
        mean = sum(counts) / len(counts)
        return sum((count - mean) ** 2 for count in counts) / len(counts) / mean

    assert dispersion("poisson") == pytest.approx(1, abs=0.4)
    assert dispersion("bursts") > 3


def test_what_ray_does_by_itself_never_takes_the_busiest() -> None:
    busy = {"0": 3, "1": 1, "2": 2}
    router = cluster.OfTwo()
    assert {router.choose(0.0, b"", busy) for _ in range(50)} == {"1", "2"}


def test_command_prints_a_row_for_each_cell_and_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a row for each cell, and the same again."""
    sizes = ["--replicas=2", "--slots=4", "--tokens=8", "--seconds=0.25", "--warm-up=0.1", "--seeds=2", "--loads=0.8"]
    found = [report_of(cluster.main, tmp_path, *sizes, "--arrivals=bursts") for _ in range(2)]
    assert found[0]["cells"] == found[1]["cells"]
    assert [cell["routing"] for cell in found[0]["cells"]] == list(cluster.ROUTERS)
    shown = capsys.readouterr().out
    for cell in found[0]["cells"]:
        assert cell["routing"].split()[-1] in shown
        assert 1 <= cell["layers_saved"]["min"] <= cell["layers_saved"]["max"] < 32 / 19
        assert cell["wait"]["min"] > 0
    assert str(tmp_path) not in json.dumps(found[0]["environment"])


@pytest.mark.parametrize("wrong", [["--warm-up=20"], ["--loads", "0"], ["--routings", "by luck"]])
def test_sizes_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cluster.main(wrong)
    assert wrong[0].split("=")[0] in capsys.readouterr().err
