"""What a soak calls a fault is one."""

import pytest

from benchmarks.soak import GROWTH, RISE_SECONDS, Soak, _text, requests


def test_an_answer_that_is_another_than_alone_is_a_fault() -> None:
    soak = Soak("http://127.0.0.1:1", alone=["five", "six"])
    soak._compare(1, "six")
    assert not soak.faults
    soak._compare(1, "sixteen")
    assert soak.faults == ["request 1 answered 'sixteen'; alone 'six'"]


def growth(sizes: list[float]) -> float | None:
    return Soak("", memory=[(float(second), size) for second, size in enumerate(sizes)]).growth()


def test_memory_still_rising_differs_from_memory_that_has_risen() -> None:
    """Memory that rises to the end is distinguished from memory that has risen."""
    count = int(2 * RISE_SECONDS) + 2
    assert growth([100.0 + min(second, 150) for second in range(count)]) == pytest.approx(0)
    rises = growth([100.0 + 0.1 * second for second in range(count)])
    assert rises is not None
    assert rises > GROWTH


def test_memory_that_may_rise_for_the_first_time_is_not_judged() -> None:
    """Memory that may still rise for the first time is not judged."""
    assert growth([100.0 + 0.2 * second for second in range(int(2 * RISE_SECONDS) - 2)]) is None
    assert growth([]) is None


def test_pieces_of_a_stream_and_whole_answers_are_read_alike() -> None:
    assert _text({"choices": [{"text": "a", "delta": {}}]}, "message") == "a"
    assert _text({"choices": [{"delta": {"role": "assistant", "content": None}}]}, "delta") == ""
    assert _text({"choices": [{"message": {"content": "b"}}]}, "message") == "b"
    with pytest.raises(AssertionError):
        _text({"error": {"message": "it failed"}}, "delta")
    assert len({path for path, _ in requests()}) == 2
