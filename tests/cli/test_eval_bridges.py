"""`d3engine eval` with policies that name files of bridges: who runs it owns the files, so its engine opens them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_files import some_maps, write_maps
from invoking import refused, report_of, succeed

from d3engine.cli.engine_options import model_directory
from d3engine.cli.eval import resolve_policies
from d3engine.depth import D3, Nested
from d3engine.depth.statistics import mean_depth
from d3engine.engine.engine import Engine
from d3engine.executor.bridging import BridgeStore
from d3engine.model.bridges import read_bridges
from d3engine.model.bridges import write_bridges as write_maps_file
from d3engine.model.config import ModelConfig

SMALL = ("--limit", "2", "--max-tokens", "12", "--device", "cpu", "--kv-cache-memory-bytes", str(2**25))
CONFIG = ModelConfig.from_directory(model_directory("demo"))
SKIPPED = "nested alpha=0.8 windows=6:9,3:6"


def write_bridges(path: Path, scale: float, first: int = 0) -> str:
    """Bridges of the bundled model, of the windows from a layer; of scale 0 they do nothing."""
    maps = some_maps(CONFIG.num_layers, CONFIG.hidden_size, scale=scale)
    write_maps({window: one for window, one in maps.items() if window[0] >= first}, model_directory("demo"), path)
    return str(path)


def evaluated(*policies: str) -> list[str]:
    return ["eval", "demo", *SMALL, *(word for one in policies for word in ("--depth", one))]


def test_eval_bridged_policies_show_their_file_and_cost(tmp_path: Path) -> None:
    """Policies name files of bridges, and their rows show the file and the cost of its maps."""
    nothing, something = (write_bridges(tmp_path / f"{scale}.safetensors", scale) for scale in (0, 4))
    lossless = "lossless alpha=0.8 start=0.5"
    asked = (SKIPPED, f"{SKIPPED} bridges={nothing}", f"{SKIPPED} bridges={something}", lossless)
    words = evaluated(*asked, f"{lossless} bridges={something}")
    report = report_of([*words, "--answers", str(tmp_path / "a")])
    skipped, same, other, drafted, drafted_bridged = report["benchmarks"][0]["scores"]
    assert (same["tokens"], same["layers_run"]) == (skipped["tokens"], skipped["layers_run"])
    texts: dict[str, list[str]] = {}
    for line in (tmp_path / "a").read_text().splitlines():
        texts.setdefault(json.loads(line)["policy"].split("bridges")[0], []).append(json.loads(line)["text"])
    bare, bridged = (texts[f"Nested windows, alpha 0.8, windows 6:9,3:6{rest}"] for rest in ("", ", "))
    assert bridged[:2] == bare
    assert bridged[2:] != bare
    full, other_drafts = sorted(texts.items())[0][1], texts["Lossless D3, draft (D3, alpha 0.8, start 0.5, "]
    assert full == other_drafts
    assert drafted["layers_run"] < drafted_bridged["layers_run"], "drafts by maps of nothing known are rejected"
    assert skipped["crossings"] == drafted_bridged["crossings"] == 0 < other["crossings"]
    map_in_layers = CONFIG.hidden_size**2 / CONFIG.layer_parameters
    bridges = other["crossings"] / other["tokens"] * map_in_layers
    assert other["realised_mean_layers_with_bridges"] == pytest.approx(other["realised_mean_layers"] + bridges)


def test_eval_bridge_column_stands_where_a_row_has_bridges(tmp_path: Path) -> None:
    """The table has a column of layers with bridges where any row has bridges."""
    bridges = write_bridges(tmp_path / "b.safetensors", 0)
    shown = succeed(evaluated(SKIPPED, f"{SKIPPED} bridges={bridges}"))
    assert "realised  with bridges  nominal" in shown.stdout
    assert "with bridges" not in succeed(evaluated(SKIPPED)).stdout


def test_eval_kept_answers_are_keyed_by_the_bridges_content(tmp_path: Path) -> None:
    """Kept answers are those of the bridges that were in the file."""
    kept, file = tmp_path / "answers.jsonl", tmp_path / "b.safetensors"
    counts = []
    for scale in (0, 4, None):  # None: the file stays as it is
        if scale is not None:
            write_bridges(file, scale)
        succeed([*evaluated(f"{SKIPPED} bridges={file}"), "--answers", str(kept)])
        counts.append(len(kept.read_text().splitlines()))
    assert counts == [2, 4, 4]


def test_eval_unfit_bridge_file_is_refused_before_any_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of bridges that does not fit is refused before any question is asked."""
    lacking = write_bridges(tmp_path / "b.safetensors", 0, first=6)
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: pytest.fail("a question was asked"))
    for name, said in ((lacking, "3:9 is not in it"), (str(tmp_path / "none"), "is missing")):
        assert said in refused(evaluated("full", f"{SKIPPED} bridges={name}")).splitlines()[-1]


def test_what_one_may_not_have_at_all_is_not_had_by_naming_it(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    kind: dict[str, Any] = {"dtype": torch.float32, "weight_dtype": torch.float32, "device": cpu}
    store = BridgeStore(model_directory("demo"), CONFIG, allowed=frozenset(), **kind)
    policy = D3(0.8, 0.5, bridges=write_bridges(tmp_path / "b.safetensors", 0))
    store.allow(frozenset([str(policy.bridges)]))
    with pytest.raises(ValueError, match="bridges must be absent beside a tensor_parallel_size above 1"):
        store.check(policy.schedule(CONFIG.num_layers))


def test_eval_bridged_d3_gets_unbridged_and_nested_baselines(tmp_path: Path) -> None:
    """The baselines of a bridged D3 are itself without bridges and the nested windows of its file."""
    file = tmp_path / "b.safetensors"
    write_bridges(file, 0)
    nested = {"nested": {"windows": [[6, 10], [2, 6], [10, 14]]}}
    write_maps_file(replace(read_bridges(file), about=nested), file)
    policy = D3(0.5, 0.5, bridges=str(file))
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**25) as engine:
        found = resolve_policies(engine, [policy, D3(0.5, 0.75)], False, True, 64)
        without = resolve_policies(engine, [D3(0.5, 0.75)], False, True, 64)
    rivals = [D3(0.5, 0.5), Nested(0.5, [[6, 10], [2, 6]], bridges=str(file))]
    assert found[0] == policy
    assert [one for one in found[1:] if one in rivals] == rivals
    assert found[found.index(D3(0.5, 0.75)) :] == without, "a D3 without bridges has the published baselines alone"
    means = [mean_depth(one.schedule(CONFIG.num_layers), 64) for one in (policy, rivals[1])]
    assert means[0] == pytest.approx(means[1], abs=0.1)
