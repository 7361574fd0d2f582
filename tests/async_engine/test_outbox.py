"""Outputs in the middle of answers leave an engine's loop together, now and then; what begins or ends one, at once."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from d3engine.async_engine.engine_loop import (
    FRAME_SECONDS,
    SECONDS_PER_ANSWER,
    Add,
    Ask,
    EngineLoop,
    OutputBatcher,
    Reply,
)
from d3engine.errors import EngineDeadError
from d3engine.request.outputs import CompletionOutput, RequestMetrics, RequestOutput


class Clock:
    """Stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """An outbox, and all that it has handed over, hand-over by hand-over."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sent: list[list[Reply]] = []
        self.batcher = OutputBatcher(self.sent.append, self.clock)

    def after(self, seconds: float, replies: list[Reply], *, more_is_soon: bool = True) -> list[Reply]:
        """What is handed over of these and of all before, so many seconds later."""
        self.clock.now += seconds
        for key, reply in replies:
            self.batcher.put(key, reply)
        num_before = len(self.sent)
        self.batcher.send(more_is_soon=more_is_soon)
        return [reply for replies in self.sent[num_before:] for reply in replies]


def output(token: int, *, is_first: bool = False, reason: str | None = None) -> RequestOutput:
    """A delta of one token."""
    answer = CompletionOutput(0, f"<{token}>", [token], None, None, reason, None, [16])
    times = RequestMetrics(1.0, 2.0, None, 0, last_token_time=2.0 if is_first else 3.0)
    return RequestOutput("a", None, [1], None, [answer], reason is not None, times)


def middle(count: int, token: int = 5) -> list[Reply]:
    """One output for each of so many answers, which have begun and do not end with it."""
    return [(key, output(token)) for key in range(count)]


@pytest.mark.parametrize("count", [1, 8, 32, 64, 512])
def test_outputs_within_answers_wait_for_their_number_or_frame(count: int) -> None:
    """Outputs within answers wait as long as their number says, and a frame at most."""
    distance = min(FRAME_SECONDS, count * SECONDS_PER_ANSWER)
    watched, tokens = Watched(), [middle(count, token) for token in range(4)]
    assert watched.after(1.0, tokens[0]) == tokens[0]  # after a pause nobody waits
    assert watched.after(0.6 * distance, tokens[1]) == []
    assert sorted(watched.after(0.6 * distance, tokens[2]), key=lambda reply: reply[0]) == sorted(
        tokens[1] + tokens[2], key=lambda reply: reply[0]
    )
    assert watched.after(0.6 * distance, tokens[3]) == []
    assert len(watched.sent) == 2


def test_first_and_last_output_go_at_once_with_those_waiting() -> None:
    """A first or last output goes at once, with what waited of the same answer alone."""
    ended_in_part = output(8, reason="stop")
    ended_in_part.finished = False  # another of its answers goes on
    error = ValueError("no")
    for urgent in (output(8, is_first=True), output(8, reason="length"), ended_in_part, error, {"num_running": 2}):
        watched = Watched()
        watched.after(1.0, middle(64))
        assert watched.after(0.001, middle(64, 7)) == []
        assert watched.after(0.001, [(3, urgent)]) == [(3, output(7)), (3, urgent)]
        assert watched.after(0.001, middle(1, 9)) == []
        others = watched.after(1.0, [])
        assert sorted(others, key=lambda reply: reply[0])[:2] == [(0, output(7)), (0, output(9))]
        assert {key for key, _ in others} == set(range(64)) - {3}


def test_all_goes_before_a_step_that_may_take_long() -> None:
    watched = Watched()
    watched.after(1.0, middle(64))
    assert watched.after(0.001, middle(64, 7), more_is_soon=False) == middle(64, 7)
    assert watched.after(0.001, [], more_is_soon=False) == []
    assert len(watched.sent) == 2


class Scripted:
    """An engine of one request, each of whose steps brings a token of it, at once; the fourth fails."""

    executor = None

    def __init__(self) -> None:
        self.num_steps = 0

    def add(self, prepared: Any) -> str:
        return "a"

    def step(self, *, at_once: bool) -> list[RequestOutput]:
        self.num_steps += 1
        if self.num_steps == 4:
            raise EngineDeadError("a fault")
        return [output(self.num_steps, is_first=self.num_steps == 1)]

    def has_unfinished_requests(self) -> bool:
        return True

    def is_ahead(self) -> bool:
        return True

    def stats(self) -> Any:
        return SimpleNamespace()


def test_outputs_that_wait_when_an_engine_ends_are_handed_over() -> None:
    found: list[Reply] = []
    loop = EngineLoop(cast(Any, Scripted()), found.extend)
    loop.inbox.put(Ask(7, "stats"))
    loop.inbox.put(Add(1, cast(Any, None)))
    with pytest.raises(EngineDeadError):
        loop.run()
    assert [key for key, _ in found] == [7, 1, 1, 1]
    assert [reply.outputs[0].token_ids for _, reply in found[1:]] == [[1], [2], [3]]
