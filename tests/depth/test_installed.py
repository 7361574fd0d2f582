"""A policy of an installed package is found by its name everywhere, and whatever is wrong with it names the package."""

import sys
from pathlib import Path

import pytest

from d3engine.cli.depth_options import parse_depth
from d3engine.depth import D3, policy_from_dict, policy_from_name
from d3engine.depth.policy import PolicyLoadError, policy_from_directory, policy_names
from d3engine.errors import InvalidValueError

MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from d3engine.depth import DepthPolicy, Schedule

@dataclass(frozen=True)
class Bottom(DepthPolicy):
    layers: int
    after: int = 1
    name: ClassVar[str] = "bottom"

    def schedule(self, num_layers):
        return Schedule.nested([2**31 - 1] * self.layers + [self.after] * (num_layers - self.layers))

class Renamed(Bottom):
    name: ClassVar[str] = "other"

NOT_A_POLICY = 5
"""
OFFERS = {
    "bottom": "offered_policies:Bottom",
    "d3": "offered_policies:Bottom",
    "renamed": "offered_policies:Renamed",
    "five": "offered_policies:NOT_A_POLICY",
    "missing": "offered_policies:Nothing",
    "broken": "no_such_module_at_all:Policy",
    "twice": "offered_policies:Bottom",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two installed packages, as an installer leaves them: a module, and metadata with entry points."""
    (tmp_path / "offered_policies.py").write_text(MODULE)
    _write_metadata(tmp_path, "good-depths", OFFERS)
    _write_metadata(tmp_path, "rival-depths", {"twice": "offered_policies:Renamed"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "offered_policies", raising=False)
    return tmp_path


def _write_metadata(site: Path, package: str, offers: dict[str, str]) -> None:
    folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in offers.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[d3engine.policies]", *lines]) + "\n")


@pytest.mark.usefixtures("installed")
def test_a_policy_of_a_package_is_found_by_name_with_its_options() -> None:
    assert "bottom" in policy_names()
    assert "offered_policies" not in sys.modules, "a package was imported before anybody asked for its policy"
    policy = policy_from_name("bottom", layers=3)
    assert type(policy).__name__ == "Bottom"
    assert policy.schedule(5).depths(3).tolist() == [5, 3, 3]
    assert policy_from_dict({"policy": "bottom", "layers": 3, "after": 1}) == policy
    with pytest.raises(InvalidValueError, match=r"alpha must be .*takes layers, after.*; got 1"):
        policy_from_name("bottom", alpha=1)
    with pytest.raises(InvalidValueError, match="policy must be given with layers"):
        policy_from_name("bottom")


def test_a_policy_of_a_package_may_stand_in_d3_json(installed: Path) -> None:
    (installed / "d3.json").write_text('{"depth": {"policy": "bottom", "layers": 2, "after": 7}}')
    assert policy_from_directory(installed) == policy_from_name("bottom", layers=2, after=7)


@pytest.mark.usefixtures("installed")
def test_policy_of_a_package_has_command_line_options() -> None:
    """A policy of a package has its options on the command line."""
    expected = policy_from_name("bottom", layers=2, after=7)
    assert parse_depth("bottom layers=2 after=7") == expected
    assert parse_depth("bottom layers=2 --after=7") == expected
    for options, message in (
        ("", "must be given with layers"),
        ("layers", r"option must be option=value, with layers, after; got 'layers'"),
        ("layers=2 layers=3", r"layers must be given once; got '3'"),
        ("layers=2 alpha=3", r"option must be .*; got 'alpha=3'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            parse_depth(f"bottom {options}")


@pytest.mark.usefixtures("installed")
def test_no_package_takes_the_name_of_a_policy_of_d3engine() -> None:
    assert policy_from_name("d3", alpha=0.9, start=0.6) == D3(0.9, 0.6)
    assert policy_names().count("d3") == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "'missing' of the package good-depths cannot be imported from offered_policies:Nothing"),
        ("broken", "'broken' of the package good-depths .* no_such_module_at_all"),
        ("five", "'five' of good-depths is no dataclass of DepthPolicy: 5"),
        ("renamed", "'renamed' of good-depths calls itself 'other'"),
        ("twice", "'twice' is offered by more than one installed package: good-depths and rival-depths"),
    ],
)
def test_unusable_offer_is_refused_with_its_package(name: str, message: str) -> None:
    """An offer that cannot be used is refused with the name of its package."""
    with pytest.raises(PolicyLoadError, match=message):
        policy_from_name(name)
