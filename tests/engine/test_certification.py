"""Depths that were never certified for a model are logged once; certified and exact ones are not."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d3engine import (
    D3,
    Distilled,
    EarlyExit,
    Engine,
    FullDepth,
    Lossless,
    Nested,
    SamplingParams,
    SelfSpeculative,
    Width,
)
from d3engine.depth import DepthPolicy
from d3engine.engine.depth import MOST_KNOWN, Certification
from d3engine.engine.model_directory import model_directory

OWN = D3(alpha=0.8, start=0.6)
OTHER = D3(alpha=0.9, start=0.6)
SMALL: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_memory_bytes": 2**23, "device": "cpu"}


def a_copy(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundled model under a `d3.json` that `change` has altered."""
    copied = folder / "model"
    shutil.copytree(model_directory("demo"), copied)
    content = json.loads((copied / "d3.json").read_text())
    change(content)
    (copied / "d3.json").write_text(json.dumps(content))
    return copied


@pytest.mark.parametrize(
    ("policy", "is_covered"),
    [
        (FullDepth(), True),
        (OWN, True),
        (OTHER, False),
        (D3(alpha=1, start=0.5), True),  # skips nothing
        (D3(alpha=0.5, start=0.6, tail=7), True),  # 9 + 7 layers always run
        (Nested(alpha=0.9, windows=((3, 6),)), False),
        (Distilled(), False),  # every layer runs, but of other weights
        (Width(["a"], alpha=1, widths=[0.5]), True),  # no step runs the student
        (Width(["a"], steps=[400]), False),
        (EarlyExit(threshold=0.9), False),
        (Lossless(OTHER), True),
        (SelfSpeculative(OTHER), True),
    ],
)
def test_certified_depths_are_full_own_and_verified_drafts(policy: DepthPolicy, is_covered: bool) -> None:
    """Full depth, the model's own setting and verified drafts are certified."""
    assert Certification(model_directory("demo"), 16).covers(policy) == is_covered


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("fingerprint"),
        lambda content: content.update(fingerprint="sha256:of-other-weights"),
        lambda content: content.update(bridges={"sha256": 3}),
        lambda content: content.update(depth="no policy"),
    ],
    ids=["by hand", "other weights", "unreadable bridges", "no policy"],
)
def test_file_of_other_weights_certifies_nothing(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    """A file that does not certify these weights certifies nothing."""
    certification = Certification(a_copy(tmp_path, change), 16)
    assert not certification.covers(OWN)
    assert certification.covers(FullDepth())


def test_without_a_file_only_full_depth_is_certified(tmp_path: Path) -> None:
    model = a_copy(tmp_path, lambda content: None)
    (model / "d3.json").unlink()
    assert not Certification(model, 16).covers(OWN)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_engine_warns_once_of_its_depth_and_each_requests(caplog: pytest.LogCaptureFixture) -> None:
    """An engine warns once of its default depth and once of the depth of each request."""
    with Engine("demo", depth=OTHER, **SMALL) as engine:
        (own,) = warnings(caplog)
        assert own.startswith("D3, alpha 0.9, start 0.6 was never certified for this model")
        for depth in (None, OTHER, OWN, FullDepth(), D3(alpha=0.9, start=0.5), D3(alpha=0.9, start=0.5)):
            engine.generate([[5, 6]], SamplingParams(max_tokens=2, depth=depth), use_tqdm=False)
    said = warnings(caplog)
    assert [words.split(" was ")[0] for words in said] == ["D3, alpha 0.9, start 0.6", "D3, alpha 0.9, start 0.5"]


def test_a_certified_engine_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Engine("demo", **SMALL) as engine:
        engine.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert warnings(caplog) == []


def test_clients_with_ever_new_depths_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    certification = Certification(model_directory("demo"), 16)
    for number in range(3 * MOST_KNOWN):
        certification.log(D3(alpha=0.5 + number / 1000, start=0.6))
    assert len(warnings(caplog)) == MOST_KNOWN
