"""Who may call: keys on every route but those that are named open, hosts, and pages of other origins."""

from typing import Any

import pytest
from guarded_apps import JSON, GuardedApp

from d3engine.server.middleware import access as keys
from d3engine.server.middleware.settings import GuardSettings

KEY, OTHER, METRICS = "a-key-of-1234", "another-key-99", "only-for-metrics"
LOCKED = GuardSettings(api_keys=(KEY, OTHER), metrics_keys=(METRICS,))


@pytest.fixture(scope="module")
def locked() -> GuardedApp:
    return GuardedApp(LOCKED)


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_any_of_the_keys_opens_a_route_in_both_headers(locked: GuardedApp, key: str) -> None:
    for headers in ({"Authorization": f"Bearer {key}"}, {"Authorization": f"bearer  {key} "}, {"x-api-key": key}):
        assert locked.call("GET", "/hello", headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"x-api-key": METRICS},
        {"x-api-key": ""},
    ],
)
def test_without_one_of_them_nothing_is_answered(locked: GuardedApp, headers: dict[str, str]) -> None:
    answer = locked.call("GET", "/hello", headers)
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY.encode() not in answer.body


CLOSED = ["/hello", "/v1/models", "/echo", "/no/such/route", "/metrics"]
LIKE_OPEN = ["/health/", "//health", "/HEALTH", "/health/../hello"]


@pytest.mark.parametrize("path", CLOSED + LIKE_OPEN)
def test_every_path_is_closed_unless_it_is_named_open(locked: GuardedApp, path: str) -> None:
    """Rows 1 and 2 of the security list: the path that is routed decides, and what is not open is closed."""
    assert locked.call("GET", path).status == 401
    assert locked.call("POST", path, JSON).status == 401
    for host in ("127.0.0.1/health?", "localhost/health#"):  # what a path made from the Host header would begin with
        assert locked.call("GET", path, {"Host": host}).status in (401, 421)


@pytest.mark.parametrize("path", sorted(keys.OPEN_PATHS))
def test_health_and_readiness_need_no_key(locked: GuardedApp, path: str) -> None:
    assert locked.call("GET", path).status == 200


def test_metrics_key_opens_the_metrics_alone(locked: GuardedApp) -> None:
    """The metrics have a separate key, which opens no other route."""
    assert locked.call("GET", "/metrics", {"x-api-key": METRICS}).status == 200
    assert locked.call("GET", "/metrics", {"x-api-key": KEY}).status == 200
    assert locked.call("GET", "/hello", {"x-api-key": METRICS}).status == 401
    alone = GuardedApp(GuardSettings(metrics_keys=(METRICS,)))
    assert alone.call("GET", "/hello").status == 200
    assert alone.call("GET", "/metrics").status == 401


def test_keys_are_compared_as_hashes_all_of_them_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are compared as hashes of one length, all of them each time."""
    # Row 3 of the security list: the time of a comparison says nothing of the key.
    compared: list[tuple[bytes, bytes]] = []

    def note(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return given == known

    monkeypatch.setattr(keys, "compare_digest", note)
    known = keys.digests([KEY.encode(), OTHER.encode()])
    for given in (KEY, OTHER, KEY[:3], "x" * 10_000):
        compared.clear()
        keys.known_key(known, [given.encode()])
        assert [len(one) for pair in compared for one in pair] == [32] * 4


def test_a_refused_request_is_not_read_any_further(locked: GuardedApp) -> None:
    async def body():  # type: ignore[no-untyped-def]
        raise AssertionError("the body of a request without a key was read")
        yield b""

    assert locked.call("POST", "/echo", JSON, body()).status == 401


OPEN = {"host": "0.0.0.0", "allow_no_key": True}
MINE = {"allowed_hosts": ("models.example",)}


@pytest.mark.parametrize(
    ("settings", "answered", "refused"),
    [
        (
            {},
            ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000", "127.0.0.1:1"],
            ["evil.example", "127.0.0.1.evil.example:8000", "[::2]:8000", "", "localhost.", None],
        ),
        (MINE, ["models.example:80", "localhost"], ["evil.example"]),
        (OPEN, ["anything.example"], []),
        (OPEN | MINE, ["models.example"], ["anything.example"]),
        ({"allowed_hosts": ("*",)}, ["evil.example"], []),
    ],
    ids=["local", "local with a name", "open", "open with a name", "any"],
)
def test_a_server_answers_to_the_hosts_of_its_settings(
    settings: dict[str, Any], answered: list[str], refused: list[str | None]
) -> None:
    """A local server answers to this machine's names, and each server to those that it allows."""
    app = GuardedApp(GuardSettings(**settings))
    for host in answered:
        assert app.call("GET", "/hello", {"Host": host}).status == 200
    for other in refused:
        answer = app.call("GET", "/hello", {"Host": other})
        assert (answer.status, answer.code) == (421, "host_not_allowed")


def test_pages_of_other_origins_need_an_allowed_origin() -> None:
    """Pages of other origins read nothing unless their origin is allowed."""
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    closed = GuardedApp().call("GET", "/hello", asked)
    assert not [name for name in closed.headers if name.startswith("access-control")]
    assert GuardedApp().call("OPTIONS", "/echo", asked).status == 405
    settings = GuardSettings(api_keys=(KEY,), allowed_origins=("https://page.example",))
    opened = GuardedApp(settings)
    preflight = opened.call("OPTIONS", "/echo", asked)
    assert preflight.status == 200  # a browser sends no key with it
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    refused = opened.call("POST", "/echo", asked | JSON)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example", "the page could not read why"
    assert "access-control-allow-credentials" not in refused.headers
    other = opened.call("GET", "/hello", {"Origin": "https://evil.example", "x-api-key": KEY})
    assert "access-control-allow-origin" not in other.headers
