"""Programmatic launch is on where a device has passed its trial, and nowhere else; failing it stops no engine."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from d3engine.engine import device as programmatic_launch
from d3engine.engine.device import settle_programmatic_launch
from d3engine.executor.graph_shapes import Repeats, Step
from d3engine.kernels.target import TARGETS
from d3engine.kernels.triton import launches, programmatic

DEVICE = torch.device("cpu")  # Triton's interpreter runs the chain
Wrong = Callable[[Step], Step]


class Failing(Repeats):
    """A recorder on a device that does something else than it was told to."""

    def __init__(self, wrong: Wrong) -> None:
        self._wrong = wrong

    def record(self, step: Step) -> Step:
        step()
        return self._wrong(step)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing asked yet, a Hopper, and a chain that an interpreter has time for."""
    monkeypatch.setattr(programmatic_launch, "_faults", {})
    monkeypatch.setattr(programmatic_launch, "target_of", lambda device: TARGETS[90])
    monkeypatch.setattr(programmatic, "PROGRAMS", 2)
    monkeypatch.setattr(programmatic, "LINKS", 4)
    before = launches.PROGRAMMATIC
    yield
    launches.PROGRAMMATIC = before


def refused(step: Step) -> Step:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with a flag")


def left_out(step: Step) -> Step:
    return lambda: None


def repeated_too_often(step: Step) -> Step:
    return lambda: (step(), step())[0]


def test_device_that_keeps_order_is_tried_once_and_used() -> None:
    """A device that keeps the order is tried once, and its kernels begin early."""
    asked = []

    class Counted(Repeats):
        def record(self, step: Step) -> Step:
            asked.append(launches.PROGRAMMATIC)
            return super().record(step)

    for _ in range(2):
        launches.PROGRAMMATIC = False
        assert settle_programmatic_launch(DEVICE, Counted)
        assert launches.PROGRAMMATIC
    assert asked == [True]  # the trial itself launches so


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (refused, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (left_out, "a kernel did not wait for the one before it"),
        (repeated_too_often, "a kernel did not wait for the one before it"),
    ],
)
def test_a_device_that_fails_is_noted_and_runs_without(
    wrong: Wrong, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not settle_programmatic_launch(DEVICE, partial(Failing, wrong))
            assert not launches.PROGRAMMATIC
    (message,) = caplog.messages
    assert message.endswith(f"as its trial failed: {says}")


def test_kernel_that_reads_too_early_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads what is not there yet fails the trial."""
    # As if one link had begun before the one in front of it.
    run, numbers = programmatic.Launch.run, iter(range(100))

    def in_wrong_order(launch: programmatic.Launch) -> None:
        if next(numbers) != 5:
            run(launch)

    monkeypatch.setattr(programmatic.Launch, "run", in_wrong_order)
    assert programmatic.fault(DEVICE, Repeats().record) == "a kernel did not wait for the one before it"


def test_one_device_that_fails_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle_programmatic_launch(DEVICE, Repeats)
    programmatic_launch._faults[torch.device("cuda:1")] = "RuntimeError: made up"
    assert not settle_programmatic_launch(DEVICE, Repeats)
    assert not launches.PROGRAMMATIC


@pytest.mark.parametrize("way", [89, "gfx942", "off"])
def test_nobody_is_asked_who_does_not_have_it_or_want_it(way: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "off":
        monkeypatch.setattr(programmatic_launch, "target_of", lambda device: TARGETS[way])
    else:
        monkeypatch.setenv("D3ENGINE_PROGRAMMATIC_LAUNCH", "off")
    launches.PROGRAMMATIC = False
    assert not settle_programmatic_launch(DEVICE, partial(Failing, refused))
    assert not launches.PROGRAMMATIC
    assert not programmatic_launch._faults


@pytest.mark.parametrize("shape", ["tiny", "small-heads"])
def test_every_kernel_can_wait_for_the_one_in_front_of_it(shape: str) -> None:
    """That it waits in time is seen in its machine code, by `make inspect`."""
    seen = set()
    for form in ("", *launches.QUANTIZED, *launches.BLOCKS):
        for operation, _, launch in launches.registered(launches.SHAPES[shape], torch.bfloat16, form):
            assert "PDL" in launch.kernel.arg_names
            seen.add(operation)
    assert seen == set(launches.MODULES)
