"""What a server refuses to be told, by name."""

from dataclasses import fields
from typing import Any

import pytest

from d3engine.cli.server_options import LIMITS, TIMEOUTS, WHAT, WHO
from d3engine.errors import InvalidValueError
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 65536}, "port must be an integer from 0 to 65535; got 65536"),
        ({"port": True}, "port must be an integer"),
        ({"max_body_bytes": 10}, "max_body_bytes must be"),
        ({"max_queue": -1}, "max_queue must be"),
        ({"request_timeout": 0}, "request_timeout must be a finite number in"),
        ({"write_timeout": float("nan")}, "write_timeout must be"),
        ({"metrics_prefix": "a:b"}, "metrics_prefix must be"),
        ({"allowed_origins": ("example.org",)}, "allowed_origins must be"),
        ({"allowed_hosts": ("a b",)}, "allowed_hosts must be"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        GuardSettings(**given)


@pytest.mark.parametrize("key", ["short", "with a space in it", "üüüüüüüüüü", "line\nline-line"])
def test_an_unfit_key_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(InvalidValueError, match="api_keys must be keys of at least 8") as refused:
        GuardSettings(api_keys=(key,))
    assert key not in str(refused.value)


def test_keys_are_not_part_of_what_settings_look_like() -> None:
    assert "s3cret-s3cret" not in repr(GuardSettings(api_keys=("s3cret-s3cret",), metrics_keys=("s3cret-s3cret-2",)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_without_a_key_only_this_machine_is_served(host: str) -> None:
    """Row 19 of the security list: loopback by default, and no open address without a key."""
    assert GuardSettings().is_local
    with pytest.raises(InvalidValueError, match="host must be an address of this machine alone"):
        GuardSettings(host=host)
    assert not GuardSettings(host=host, api_keys=("a-long-key",)).is_local
    assert not GuardSettings(host=host, allow_no_key=True).is_local


def test_command_line_options_are_the_servers_settings() -> None:
    """The options of the command line are the settings of the server, one for one."""
    decided = {field.name for settings in (GuardSettings, ServerSettings) for field in fields(settings)} - {"guards"}
    assert {*WHO, *WHAT, *LIMITS, *TIMEOUTS.values()} - {"api_key_file", "timeouts"} == decided
