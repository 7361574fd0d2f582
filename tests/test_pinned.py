"""What others publish is taken at versions that we have chosen."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_DEVELOPERS = {"test", "docs", "dev"}

RUNTIME = [
    *PROJECT["dependencies"],
    *(one for extra, some in PROJECT["optional-dependencies"].items() if extra not in FOR_DEVELOPERS for one in some),
]


@pytest.mark.parametrize("text", sorted(set(RUNTIME)))
def test_every_package_at_run_time_has_an_upper_bound(text: str) -> None:
    requirement = Requirement(text)
    if requirement.name == "d3engine":
        return
    operators = {one.operator for one in requirement.specifier}
    assert operators & {"<", "<=", "==", "~="}, text


def test_every_action_is_pinned_by_its_commit() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
    uses = [line for file in workflows for line in file.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert uses
    for line in uses:
        if "uses: ./.github/" in line:
            continue  # this very commit's
        assert re.fullmatch(r"\s*(- )?uses: [\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
