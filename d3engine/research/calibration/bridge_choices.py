"""Bridges that a calibration tries: of given files, and cut to lower ranks in a directory
that goes away; the search knows their names alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import BRIDGES
from d3engine.depth.schedule import AUTO_BRIDGES
from d3engine.engine.depth import STUDENT_BYTES
from d3engine.errors import InvalidValueError, ModelFormatError, require, require_integer
from d3engine.model.bridges import BRIDGES_FILE, Bridges, Window, most_bytes, read_bridges, write_bridges
from d3engine.utils.files import UnreadableFileError, beside, read_bytes, sha256_of, write_whole


@dataclass(frozen=True)
class BridgeChoice:
    """Bridges that settings may cross by. `share` is what crossing one window costs, of a full map; the largest.

    `made_of` says of a file that was cut which one it is from, and to which rank.
    """

    name: str
    path: Path
    windows: frozenset[Window]
    share: float
    made_of: str = ""

    def policy(self, setting: DepthPolicy) -> DepthPolicy:
        """The setting with this very file, as an engine runs it."""
        told: Any = setting
        return cast(DepthPolicy, replace(told, bridges=str(self.path)))


def bridge_choices(
    files: Sequence[str], ranks: Sequence[int], directory: Path, weights: str, cut_to: Path
) -> Mapping[str, BridgeChoice]:
    """The choices by their names: each file as it is, and cut to each rank, which is written into `cut_to`.

    "auto" is the file beside the weights in `directory`; `weights` is the fingerprint that all must name. Raises
    `InvalidValueError` that names `--bridges` or `--bridge-rank`.
    """
    found: dict[str, BridgeChoice] = {}
    for number, file in enumerate(files):
        lies_at = beside(directory, BRIDGES_FILE) if file == AUTO_BRIDGES else Path(file)
        bridges = read_fitted(lies_at, weights)
        found[file] = _choice(file, lies_at, bridges)
        for rank in sorted(set(ranks)):
            _check_rank(rank, bridges, file)
            path = cut_to / f"{number}-{rank}.safetensors"
            choice = _choice(f"{file} at rank {rank}", path, _cut(bridges, rank, path))
            digest = sha256_of(lies_at, most_bytes(bridges.num_layers, bridges.hidden_size))
            found[choice.name] = replace(choice, made_of=f"{digest} at rank {rank}")
    return found


def as_run(policy: DepthPolicy, choices: Mapping[str, BridgeChoice]) -> DepthPolicy:
    """A setting with the file of the bridges that it names."""
    bridges = getattr(policy, BRIDGES, None)
    return policy if bridges is None else choices[bridges].policy(policy)


def write_copy(source: Path, target: Path, name: str) -> dict[str, Any]:
    """Copy bridges or a student called `name` to `target`, unless they lie there; what `d3.json` says of them.

    Raises `InvalidValueError` where that cannot be done.
    """
    try:
        content = read_bytes(source, source.stat().st_size)
        if not (target.exists() and target.samefile(source)):
            write_whole(target, content)
    except (OSError, UnreadableFileError) as error:
        raise InvalidValueError("--out", str(target), f"beside a file that can be written ({error})") from error
    return {"file": target.name, "sha256": sha256(content).hexdigest(), "from": name}


def check_target(choices: Mapping[str, BridgeChoice], target: Path) -> None:
    """Refuse to write over bridges that are not the only ones that could be chosen."""
    lies_there = target.exists() and any(not target.samefile(choice.path) for choice in choices.values())
    allowed = f"such that no {target.name} lies beside it, since the bridges that are chosen are written there"
    require(not lies_there, "--out", str(target.parent), allowed)


def check_student_target(source: Path, target: Path) -> None:
    """Refuse to write over another student than the one of the setting."""
    both = source.is_file() and target.exists()  # what is missing is reported where it is loaded
    lies_there = both and sha256_of(source, STUDENT_BYTES) != sha256_of(target, STUDENT_BYTES)
    allowed = f"such that no other {target.name} lies beside it, since that of the setting is written there"
    require(not lies_there, "--out", str(target.parent), allowed)


def read_fitted(path: Path, weights: str) -> Bridges:
    """The bridges of a file, fitted to the weights of this fingerprint; raises `InvalidValueError` for others."""
    try:
        bridges = read_bridges(path)
    except ModelFormatError as error:
        raise InvalidValueError("--bridges", str(path), f"what d3engine bridge fit has written ({error})") from None
    require(bridges.fingerprint == weights, "--bridges", str(path), "fitted to these weights, not to others")
    return bridges


def _check_rank(rank: int, bridges: Bridges, file: str) -> None:
    held = [bridge.rank for bridge in bridges.by_window.values() if bridge.rank is not None]
    most = min([bridges.hidden_size // 2, *held]) - 1
    reason = f"an integer from 1 to {most}: from there on a cut map of {file} costs no less than the map itself"
    require(1 <= require_integer("--bridge-rank", rank, 1) <= most, "--bridge-rank", rank, reason)


def _cut(bridges: Bridges, rank: int, path: Path) -> Bridges:
    cut = replace(bridges, by_window={window: one.cut(rank) for window, one in bridges.by_window.items()})
    cut = replace(cut, about={**bridges.about, "cut_to_rank": rank})
    write_bridges(cut, path)
    return cut


def _choice(name: str, path: Path, bridges: Bridges) -> BridgeChoice:
    largest = max(one.num_parameters - one.offset.numel() for one in bridges.by_window.values())
    return BridgeChoice(name, path, frozenset(bridges.by_window), largest / bridges.hidden_size**2)
