"""The benchmark of serving asks as clients do, and its figures follow from what it saw."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.serving import Answered, Settings, closed_loop, figures, open_loop, percentile


def test_streams_and_arrivals_bring_every_token_in_time(url: str) -> None:
    settings = Settings(tokens=5, requests=2)
    for depth in ("full", "d3"):
        answered = asyncio.run(closed_loop(url, settings, 3, depth))
        assert [one.tokens for one in answered] == [5] * 6
        assert all(one.sent < one.first <= one.last for one in answered)
    arrived = asyncio.run(open_loop(url, Settings(tokens=2, requests=1), 1000.0, "full"))
    assert [one.tokens for one in arrived] == [2] * 16


def test_what_the_server_refuses_ends_the_benchmark_with_its_words(url: str) -> None:
    with pytest.raises(SystemExit, match=r"the server answered 400.*max_tokens"):
        asyncio.run(closed_loop(url, Settings(tokens=10**6), 1, "full"))


def test_figures_follow_from_the_times() -> None:
    answered = [Answered(0.0, 0.5, 1.5, 11), Answered(1.0, 1.1, 2.0, 10)]
    found = figures(answered)
    assert found["tokens_per_second"] == pytest.approx(21 / 2)
    assert found["first_token_p50"] == pytest.approx(0.1)
    assert found["first_token_p99"] == pytest.approx(0.5)
    assert [found["per_token_p50"], found["per_token_p99"]] == pytest.approx([0.1, 0.1])
    assert [percentile([3, 1, 2, 4], percent) for percent in (1, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]
