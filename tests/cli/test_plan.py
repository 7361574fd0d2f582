"""`d3engine plan`: its weights are those that ranks load, its room is what is left, and depth makes room for more."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama
from invoking import refused, report_of, succeed

from d3engine.depth import D3, EarlyExit
from d3engine.engine.memory import weight_bytes
from d3engine.model.config import ModelConfig
from d3engine.model.shard import shard_of
from d3engine.model.weights import load_weights
from d3engine.weights_tools.quantize import quantize_model

GIB = 2**30


def planned(*words: str) -> list[dict[str, Any]]:
    return report_of(["plan", *words])


def test_plan_counts_weights_and_kv_cache_of_llama_2_70b() -> None:
    """The plan counts the parameters and the KV cache of Llama 2 70B on one device."""
    floats, int8, int4 = planned("llama-2-70b", "--gpus", "200GiB", "--gpu-memory-utilization", "1")
    assert floats["weight_bytes"] == 2 * 68_976_648_192
    matrices = 80 * (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672)
    others = 68_976_648_192 - matrices - 32_000 * 8192
    rows = 80 * (2 * 8192 + 2 * 1024 + 2 * 28672 + 8192)
    rest = 32_000 * (8192 + 4) + 2 * others  # the LM head is int8 under both schemes
    assert int8["weight_bytes"] == matrices + 4 * rows + rest
    assert int4["weight_bytes"] == matrices // 2 + 4 * matrices // 128 + rest
    assert floats["sequence_bytes"] == 4096 * 80 * 2 * 8 * 128 * 2
    assert floats["room"] == 200 * GIB - floats["weight_bytes"] - floats["step_bytes"]
    assert floats["sequences"] == floats["room"] // floats["sequence_bytes"]


def test_plan_two_devices_shard_and_depth_fits_more_sequences() -> None:
    """Two devices shard matrices and the KV cache, and depth makes room for more sequences."""
    (alone, *_), (shared, *_) = (planned("llama-2-70b", "--gpus", gpus) for gpus in ("80GB", "80GB,80GB"))
    assert not alone["fits"]
    assert shared["fits"]
    assert shared["sequence_bytes"] * 2 == alone["sequence_bytes"]
    norms = 2 * 8192 * (2 * 80 + 1)  # which both have
    assert (shared["weight_bytes"] - norms) * 2 == alone["weight_bytes"] - norms
    deep, *_ = planned("llama-2-70b", "--gpus", "80GB,80GB", "--depth", "d3 alpha=0.9 start=0.6")
    assert deep["sequences"] == shared["sequences"]
    assert deep["sequences_by_depth"] > shared["sequences_by_depth"] == shared["sequences"]


def test_the_page_shows_what_the_command_finds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "devices.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("d3engine plan llama-2-70b"))
    for row in planned(*shlex.split(command)[2:]):
        sizes = [f"{row[name] / GIB:.1f} GiB" for name in ("weight_bytes", "room")]
        cells = [row["weights"], *sizes, str(row["sequences"]), str(row["sequences_by_depth"])]
        assert f"\n| {' | '.join(cells)} |\n" in page


def test_plan_8_bit_kv_cache_holds_nearly_twice_the_sequences() -> None:
    """An 8-bit KV cache is counted with its scales, and holds nearly twice as many sequences."""
    wide, narrow = (planned("llama-3-8b", "--gpus", "80GB", "--kv-cache-dtype", name)[0] for name in ("auto", "fp8"))
    assert wide == planned("llama-3-8b", "--gpus", "80GB")[0]
    assert wide["sequence_bytes"] == 4096 * 32 * 2 * 8 * 128 * 2
    assert narrow["sequence_bytes"] == 4096 * 32 * 2 * 8 * (128 + 4)
    assert narrow["room"] == wide["room"]
    assert narrow["sequences"] == narrow["room"] // narrow["sequence_bytes"] > 1.9 * wide["sequences"]
    assert "8-bit cache" in succeed(["plan", "llama-3-8b", "--gpus", "80GB", "--kv-cache-dtype", "fp8"]).output


def test_bridges_are_counted_with_the_weights() -> None:
    d3 = ("llama-2-7b", "--gpus", "24GB", "--depth", "d3 alpha=0.9 start=0.5")
    bare, bridged = planned(*d3), planned(*d3[:-1], f"{d3[-1]} bridges=bridges.safetensors")
    more = [one["weight_bytes"] - other["weight_bytes"] for one, other in zip(bridged, bare, strict=True)]
    maps = 7 * 4096 * 4097  # that many depths has the window of 16 layers at alpha 0.9
    assert more == [2 * maps, maps, maps]
    assert [one["room"] - other["room"] for one, other in zip(bare, bridged, strict=True)] == more


def test_the_models_own_depth_is_what_is_planned_for_and_told(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    directory, words = tmp_path / "model", ("--gpus", "1GiB", "--context", "64", "--answer", "32")
    shutil.copytree(tiny_llama().directory, directory)
    full = planned(str(directory), *words)
    assert full[0]["depth"] == {"policy": "full"}
    d3 = D3(alpha=0.5, start=0.5)
    (directory / "d3.json").write_text(json.dumps({"depth": d3.describe(), "task": "word-problems"}))
    for model in (directory, directory / "config.json"):
        own = planned(str(model), *words)
        assert own[0]["depth"] == d3.describe()
        assert own[0]["sequences_by_depth"] > full[0]["sequences_by_depth"]
        assert own == planned(str(model), *words, "--depth", "d3 alpha=0.5 start=0.5")
        assert planned(str(model), *words, "--depth", "full") == full
        result = succeed(["plan", str(model), *words])
        assert "D3, alpha 0.5, start 0.5" in result.stdout.splitlines()[0]
        assert result.stderr.startswith("depth from d3.json: D3, alpha 0.5, start 0.5 (found safe for word-problems")
    (directory / "config.json").rename(directory / "sizes.json")  # beside which a d3.json may be anybody's
    assert planned(str(directory / "sizes.json"), *words) == full


def test_an_own_depth_that_is_not_fixed_is_refused_by_its_file(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    shutil.copy(tiny_llama().directory / "config.json", tmp_path)
    (tmp_path / "d3.json").write_text(json.dumps({"depth": EarlyExit(0.9).describe()}))
    said = refused(["plan", str(tmp_path), "--gpus", "1GiB", "--context", "64", "--answer", "32"])
    assert "error: --depth must be a policy of fixed depths (under the one in the model's d3.json each" in said


def test_the_smallest_device_decides() -> None:
    uneven, even = (planned("llama-3-8b", "--gpus", gpus)[0] for gpus in ("80GB,24GB", "24GB,24GB"))
    assert uneven == even


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_the_weights_are_those_that_a_rank_loads(scheme: str | None, tiny_llama: MakeLlama, tmp_path: Path) -> None:
    directory, _ = tiny_llama(attention_bias=True, num_key_value_heads=4)
    if scheme is not None:
        quantize_model(directory, tmp_path / scheme, scheme)
        directory = tmp_path / scheme
    config = ModelConfig.from_directory(directory)
    part = shard_of(config, 0, 3)
    loaded = load_weights(directory, config, dtype=torch.bfloat16, device="cpu", show_progress=False, part=part)
    assert weight_bytes(config, part) == loaded.nbytes
    found = planned(str(directory), "--gpus", "1GiB,1GiB,1GiB", "--context", "64", "--answer", "8")
    assert [fit["weights"] for fit in found] == (["bfloat16", "int8", "int4"] if scheme is None else [scheme])


def test_plan_has_a_row_for_a_packed_file(tmp_path: Path) -> None:
    """A GGUF file is planned for as a GPU holds it, on one device: with more, its matrices become floats."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    from gguf_files import write_gguf

    packed, wide = (write_gguf(tmp_path / f"{name}.gguf", types=(name,), layers=1) for name in ("Q8_0", "Q2_K"))
    words = ("--context", "64", "--answer", "8")
    own, *others = planned(str(packed), "--gpus", "1GiB", *words)
    assert own["weights"] == "as in the file"
    assert 0.9 * packed.stat().st_size < own["weight_bytes"] < packed.stat().st_size
    assert own["room"] - others[0]["room"] == others[0]["weight_bytes"] - own["weight_bytes"]
    assert planned(str(packed), "--gpus", "1GiB,1GiB", *words)[0]["weights"] == "bfloat16"
    as_floats, floats = planned(str(wide), "--gpus", "1GiB", *words)[:2]
    assert as_floats["weight_bytes"] == floats["weight_bytes"]


def test_plan_of_a_config_alone_says_what_cannot_be_sharded(tiny_llama: MakeLlama) -> None:
    """A config alone is enough, and the plan says why a scheme cannot be sharded."""
    config = str(tiny_llama().directory / "config.json")
    *floats, int4 = planned(config, "--gpus", "1GiB,1GiB", "--context", "64", "--answer", "8")
    assert all(fit["fits"] for fit in floats)
    assert "int4 parts them at multiples of 128 channels" in int4["reason"]
    result = succeed(["plan", config, "--gpus", "1MiB", "--context", "64", "--answer", "8"])
    assert "GiB short of one sequence" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "80"],
        ["--gpus", "0GB"],
        ["--gpus", "80GB,"],
        ["--gpus", "80GB", "--context", "0"],
        ["--gpus", "80GB", "--context", "4097"],
        ["--gpus", "80GB", "--context", "100", "--answer", "100"],
        ["--gpus", "80GB", "--kv-cache-dtype", "int8"],
        ["--gpus", "80GB", "--gpu-memory-utilization", "1.5"],
        ["--gpus", "80GB", "--depth", "early-exit threshold=0.9"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused_by_its_option(words: list[str]) -> None:
    option = "--depth" if "--depth" in words else next(word for word in reversed(words) if word.startswith("--"))
    assert option in refused(["plan", "llama-2-7b", *words])
