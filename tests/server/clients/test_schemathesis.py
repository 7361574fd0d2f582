"""schemathesis tries thousands of requests that it makes of /openapi.json: no fault, no hang, answers as described.
It takes minutes: `make test-server` installs it, and asks for this."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_server import demo_server

pytest.importorskip("schemathesis", reason="schemathesis is not installed: make test-server does it")

CASES = 2000
HOOKS = Path(__file__).with_name("hooks.py")
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 413, 415, 429]
"""
"""A text that is too long for its field may be too long for a body."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server(max_model_len=128) as address:
        yield address


def test_schemathesis_cases_meet_no_fault(url: str, tmp_path: Path) -> None:
    """Two thousand cases meet no fault, and get the answers that are described."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url, "--seed", "1"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "40", "--continue-on-failure", "--no-shrink"]
    command += ["--generation-database", "none", "--request-timeout", "120", "--report", "json"]
    command += ["--report-json-path", str(tmp_path / "report.json"), "--exclude-path-regex", "^/(page/.*)?$"]
    # Fields depend on each other, and on the model's template: what fits the schema may still be refused.
    command += ["--exclude-checks", "positive_data_acceptance,ignored_auth"]
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"], told.stdout
    assert (report["failures"], report["errors"]) == ([], []), told.stdout[-20_000:]
    assert report["test_cases"]["generated"] >= CASES
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        rates = report["valid_rates"][f"POST {path}"]
        assert sum(phase["accepted"] for phase in rates.values()) > 0, f"nothing was answered at {path}"
