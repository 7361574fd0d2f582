"""Which replica a request goes to, by each of the rules."""

import json
from collections import Counter

import pytest

from d3engine.integrations.proxy import PREFIX_BYTES, ByCohort, ByPrefix, LeastLoaded, RoundRobin, beginning

NAMES = ("ada", "bob", "cyd", "dee")
IDLE = dict.fromkeys(NAMES, 0)
PREFIXES = [b"prefix %d" % nth for nth in range(400)]


def homes(busy: dict[str, int]) -> list[str]:
    return [ByPrefix().choose(0.0, prefix, busy) for prefix in PREFIXES]


def test_round_robin_takes_turns_however_replicas_are_listed() -> None:
    """Round robin takes one after the other, however they are listed."""
    router = RoundRobin()
    assert [router.choose(0.0, b"", busy) for busy in ({"b": 0, "a": 9}, {"a": 9, "b": 0}, {"b": 0, "a": 9})] == [
        "a",
        "b",
        "a",
    ]


def test_the_least_loaded_one_is_the_first_of_those_with_fewest() -> None:
    assert LeastLoaded().choose(0.0, b"", {"ada": 3, "bob": 1, "cyd": 1}) == "bob"


def test_prefixes_are_spread_evenly_and_keep_their_home() -> None:
    """Prefixes are spread evenly and always have the same home."""
    found = homes(IDLE)
    assert found == homes(dict(reversed(IDLE.items())))
    assert min(Counter(found)[name] for name in NAMES) > 60


def test_only_prefixes_of_a_gone_replica_find_another_home() -> None:
    """Only the prefixes of a replica that has gone find another home."""
    before = homes(IDLE)
    after = homes({name: 0 for name in NAMES if name != "cyd"})
    assert {old for old, new in zip(before, after, strict=True) if old != new} == {"cyd"}


def test_overloaded_home_sends_its_prefixes_to_the_least_loaded() -> None:
    """A home with far more load than the others sends its prefixes to the least loaded."""
    home = ByPrefix().choose(0.0, b"hello", {"ada": 0, "bob": 0})
    other = "bob" if home == "ada" else "ada"
    assert ByPrefix().choose(0.0, b"hello", {home: 5, other: 3}) == home
    assert ByPrefix().choose(0.0, b"hello", {home: 9, other: 1}) == other


def test_cohort_stays_until_its_window_or_replica_ends() -> None:
    """A cohort keeps one replica until its window ends, or it is overloaded or gone."""
    router = ByCohort(window=0.5)
    assert router.choose(0.0, b"", {"ada": 2, "bob": 1}) == "bob"
    assert router.choose(0.4, b"", {"ada": 2, "bob": 3}) == "bob"
    assert router.choose(0.5, b"", {"ada": 2, "bob": 3}) == "ada"
    assert router.choose(0.6, b"", {"ada": 9, "bob": 1}) == "bob"
    assert router.choose(0.7, b"", {"ada": 9}) == "ada"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"model": "demo", "prompt": "Once upon a time", "max_tokens": 9}, {"prompt": "Once upon a time"}),
        ({"messages": [1], "system": "Be brief."}, {"system": "Be brief.", "max_tokens": 1, "messages": [1]}),
        ({"instructions": "Be brief.", "input": "a"}, {"input": "b", "instructions": "Be brief."}),
        ({"model": "demo", "prompt": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
    ],
)
def test_like_prompts_are_known_by_their_beginning(first: dict[str, object], second: dict[str, object]) -> None:
    """Prompts that begin alike are known by their beginning, wherever it stands."""
    one, two = (beginning(json.dumps(body).encode()) for body in (first, second))
    common = json.dumps(first.get("system") or first.get("instructions") or first["prompt"]).encode()
    assert one.startswith(common)
    assert two.startswith(common)


def test_no_text_passes_for_a_field_that_a_prompt_begins_with() -> None:
    body = json.dumps({"user": '", "system": "x', "prompt": 'a "messages": b'}).encode()
    assert beginning(body).startswith(b'"a ')


def test_of_a_long_prompt_only_the_first_bytes_count() -> None:
    one, two = (beginning(json.dumps({"prompt": "a" * PREFIX_BYTES + end}).encode()) for end in "xy")
    assert one == two
    assert beginning(b"no JSON") == b"no JSON"
