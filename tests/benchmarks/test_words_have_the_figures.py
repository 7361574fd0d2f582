"""Figures that the pages quote in words are those of committed runs."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()))


def words_of(page: str, part: str = "how-to") -> str:
    """The words of a page, on one line."""
    return " ".join((DOCS / part / page).read_text().split())


def test_the_cost_of_an_adapter_is_that_of_the_run() -> None:
    one, eight = (row["ratio"] for row in result("lora-coder-0.5b")["rows"])
    page = words_of("lora.md")
    for ratio, lead in ((one, "at every matrix adds"), (eight, "token, and")):
        median, least, most = (100 * ratio[name] - 100 for name in ("median", "min", "max"))
        assert f"{lead} {median:.0f} % ({least:.0f} to {most:.0f})" in page


def test_json_schemas_are_those_of_the_run() -> None:
    report = result("json-schemas")
    counts = report["counts"]
    schemas, valid = counts["schemas"], counts["valid instances"]
    page = words_of("structured.md")
    assert f"takes {counts['accepted']:,} of {schemas:,} schemas" in page
    assert f"({100 * counts['accepted'] / schemas:.1f} %)" in page
    assert report["wrongly allowed"] == []
    assert f"none of their {counts['invalid instances']:,} invalid instances" in page
    assert f"{100 * counts['valid instances allowed'] / valid:.1f} % of {valid:,} valid ones" in page


def test_what_an_interval_of_admission_saves_is_that_of_the_run() -> None:
    cells = {(cell["admit_every"], cell["batch"]): cell for cell in result("admission")["cells"]}
    at_once, every = cells[1, 128], cells[16, 128]
    saved = (
        f"saves {every['layer_steps_saved']:.2f} times the layer-steps instead of {at_once['layer_steps_saved']:.2f}"
    )
    assert f"{saved}, and a request waits {every['extra_wait']:.1f} steps longer" in words_of("gpu.md")


def test_the_gain_by_own_layers_is_that_of_the_run() -> None:
    best = max(cell["speedup"]["median"] for cell in result("lossless-demo-cpu")["cells"])
    assert f"the bundled model gains {best:.2f} times at best" in words_of("speculative.md")


def test_what_a_student_gains_is_that_of_the_run() -> None:
    cell = result("lossless-student-qwen2.5-coder-0.5b")["cells"][0]
    assert cell["draft_length"] == 2
    page = words_of("results.md", "explanation")
    assert f"decodes {1 / cell['draft_cost']:.2f} times as fast as full depth on one thread" in page
    accepted, speedup = cell["accepted_over_drafted"], cell["speedup"]
    speed = f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})"
    assert f"{100 * accepted:.0f} % of drafts of two tokens are accepted, at {speed} of full depth's" in page


def test_what_the_native_library_saves_is_that_of_the_runs() -> None:
    def over_eager(name: str, kinds: tuple[str, ...]) -> list[float]:
        rows = [row for row in result(name)["decode"] if row["batch"] == 1 and row["kind"] in kinds]
        return [row["over"]["eager"]["median"] for row in rows]

    (floats,), (bits,) = (over_eager("cpu-eager-smollm2-zen4", (kind,)) for kind in ("f32", "4-bit"))
    demo = over_eager("cpu-demo-zen4", ("f32", "16-bit", "12-bit", "8-bit", "4-bit"))
    page = words_of("cpu.md")
    assert f"takes {floats:.0f} (float32) to {bits:.0f} times (4 bits) as long" in page
    assert f"the bundled model's {min(demo):.0f} to {max(demo):.0f} times" in page


def test_what_the_server_costs_is_that_of_the_runs() -> None:
    def rows_of(name: str) -> list[dict[str, Any]]:
        return [row for model in result(name)["models"] for row in model["streams"]]

    def spread(name: str, ratio: str, digits: int) -> str:
        ours = [row[ratio] for row in rows_of(name) if row["system"] == "d3engine" and ratio in row]
        values = [one["median"] if isinstance(one, dict) else one for one in ours]
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    page = " ".join((DOCS / "reference" / "server.md").read_text().split())
    demo, smollm2 = "serving-demo", "serving-smollm2"
    assert f"makes {spread(demo, 'of_engine', 2)} of the engine's own tokens" in page
    assert f"{spread(demo, 'over_peer', 1)} times those of llama.cpp's server" in page
    assert f"D3 is {spread(demo, 'over_full', 2)} times as fast" in page
    assert f"makes {spread(smollm2, 'of_engine', 2)} of the engine's tokens" in page
    assert f"{spread(smollm2, 'over_peer', 2)} times those of llama.cpp's server (two rounds" in page
    cpu = {
        row["system"]: row["cpu_per_token"] for row in rows_of(demo) if (row["streams"], row["depth"]) == (64, "full")
    }
    ours, lockstep = (1e6 * cpu[name]["median"] for name in ("d3engine", "lockstep generate"))
    assert f"takes {ours:.0f} microseconds of processor time for a token at full depth" in page
    assert f"where `generate` takes {lockstep:.0f}." in page
