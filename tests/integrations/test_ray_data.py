"""A batch on a local Ray: two engines answer what one engine without Ray answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("ray.data", reason="Ray is not installed: `make test-integrations` brings it")

COUNT = 150


def run(*words: str | Path) -> Any:
    from d3engine.cli import app

    options = ["--threads", "1", "--device", "cpu", "--kv-cache-memory-bytes", str(2**25)]
    return CliRunner().invoke(app, ["batch", *map(str, words), *options])


def results_of(file: Path) -> dict[str, Any]:
    """By custom_id, without what differs from run to run."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for result in found:
        if result["response"] is not None:
            del result["response"]["request_id"]
            for name in ("id", "created"):
                result["response"]["body"].pop(name, None)
    assert len({result["custom_id"] for result in found}) == len(found)
    return {result["custom_id"]: result for result in found}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """A file of requests at different depths, one of which its route refuses, and one that is none."""
    lines = []
    for nth in range(COUNT):
        depth = ["auto", {"policy": "full"}, {"policy": "d3", "alpha": 0.8, "start": 0.5}][nth % 3]
        body = {"prompt": f"Question: Tom has {nth} pens. Tom finds 3.", "max_tokens": 4 + nth % 9, "depth": depth}
        lines.append({"custom_id": f"c{nth}", "method": "POST", "url": "/v1/completions", "body": body})
    lines[7]["body"]["temperature"] = -1  # type: ignore[index]  # it is a body
    lines[9]["url"] = "/v1/nothing"
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_ray_answers_a_batch_as_one_and_resumes_it(
    requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines on Ray answer a batch as one engine does, and go on where it was ended."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by itself Ray lets its workers wait for all else on the machine
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert run(requests, here).exit_code == 1
    wanted = here.read_text().splitlines(keepends=True)
    there.write_text("".join(wanted[:20]) + wanted[20][:50])  # as a batch that was ended leaves it
    ended = run(requests, there, "--ray", "local", "--ray-engines", "2")
    assert "20 of 150 lines have their results" in ended.output
    assert "150 lines, and a result for each; " in ended.output
    assert results_of(there) == results_of(here)
    assert len(results_of(here)) == COUNT


def test_ray_that_does_not_start_ends_the_command_in_a_sentence(
    requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray that does not start ends the command in a sentence."""
    import ray

    def fail(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # Ray's own, and its own class

    monkeypatch.setattr(ray, "init", fail)
    ended = run(requests, tmp_path / "out.jsonl", "--ray", "local")
    assert ended.exit_code == 1
    assert "cannot reach Ray at 'local': The current node timed out during startup." in " ".join(ended.output.split())


def test_absent_cluster_ends_the_command_in_a_sentence(requests: Path, tmp_path: Path) -> None:
    """A cluster that is not there ends the command in a sentence."""
    ended = run(requests, tmp_path / "out.jsonl", "--ray", "127.0.0.1:1")
    assert ended.exit_code == 1
    assert "cannot reach Ray at '127.0.0.1:1'" in ended.output
