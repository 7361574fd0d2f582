"""The programs in `examples/` run as their first lines say, and print what a reader is promised."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

PROMISED = {
    "compare_depths": [r"full depth: 16\.00 layers per token\n.* #### 46", r"lossless D3: [\d.]+ .*\n.* #### 46"],
    "measure_a_policy": [r"full depth: 100\.0% \(7\d\.\d% to 100\.0%\)", r"difference: [+-]\d+\.\d points"],
    "one_file_engine": [r"^Adding 3 makes 5 \+ 3 = 8\..* #### 10\n  layers: \[16, 16"],
    "policy_of_your_own": [r"^\[16, 16, 16, 16, 16, 16, 16, 16, 12"],
    "step_loop": [
        r"request 1 ended \(abort\)",
        r"request 0 ended \(stop\): ?Adding.*#### 6",
        r"request 3 ended \(stop\)",
    ],
    "stream_tokens": [r"' ?Adding'  layers \[16\]", r"' 41'  layers \[\d+\]", r"finished: stop"],
}


def test_every_example_has_a_promise() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(PROMISED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_promises(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["demo", "12"] if path.stem == "measure_a_policy" else []
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert [promise for promise in PROMISED[path.stem] if not re.search(promise, printed, re.MULTILINE)] == []
