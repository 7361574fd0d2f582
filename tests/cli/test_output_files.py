"""A page or a picture that cannot be written costs nothing else: what was measured is printed all the same."""

import json
from pathlib import Path

import pytest
from invoking import invoke, refused, succeed

from d3engine.errors import InvalidValueError
from d3engine.research.calibration import report as calibration_report

SMALL = ("--max-tokens", "16", "--device", "cpu", "--kv-cache-memory-bytes", str(2**25))


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """A link to a device that takes no byte; it can be opened for writing like any file."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "full.png").symlink_to("/dev/full")
    return tmp_path / "full.png"


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--html", ("eval", "demo", "--limit", "1")),
        ("--html", ("analyze", "sample", "demo", "--limit", "1", "--guess-layers", "2")),
        ("--png", ("analyze", "perplexity", "demo", "--limit", "2")),
        ("--png", ("analyze", "saturation", "demo", "--limit", "1")),
    ],
)
def test_unwritable_file_is_named_and_json_is_printed(option: str, arguments: tuple[str, ...], full_disk: Path) -> None:
    """A file that cannot be written is named, and the JSON is printed all the same."""
    result = invoke([*arguments, *SMALL, option, str(full_disk), "--json"])
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert "full.png" in result.stderr
    assert json.loads(result.stdout)
    assert full_disk.is_symlink()


def test_page_replaces_the_old_one_and_leaves_no_other_file(tmp_path: Path) -> None:
    """A page replaces the old one with its mode, and leaves no other file."""
    page = tmp_path / "page.html"
    page.write_text("old")
    page.chmod(0o640)
    succeed(["eval", "demo", *SMALL, "--limit", "1", "--html", str(page)])
    assert page.read_text().lower().startswith("<!doctype html>")
    assert page.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("path", ["nowhere/page.html", "."])
def test_unwritable_page_is_refused_before_the_work(tmp_path: Path, path: str) -> None:
    """A page that could not be written is refused before the work."""
    for arguments in (("eval", "no/such/model"), ("analyze", "sample", "no/such/model")):
        stderr = refused([*arguments, *SMALL, "--html", str(tmp_path / path)])
        assert "--html must be a file that can be written, in an existing folder" in stderr


def test_policy_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d3.json").write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(InvalidValueError, match="No space left"):
        calibration_report.write_policy_file({"depth": {"policy": "full"}}, tmp_path / "d3.json")
    assert (tmp_path / "d3.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "d3.json"]
