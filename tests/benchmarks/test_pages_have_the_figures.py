"""Tables of the pages have the figures of committed runs: decoding on a CPU, GGUF files, activations, the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import policies

ROOT = Path(__file__).parents[2]
CPU, GGUF = (ROOT / "docs" / name for name in ("explanation/cpu.md", "how-to/gguf.md"))
SHOWN = {"smollm2": "SmolLM2-135M", "large": "24 x 1024"}
LATER = ("cpu-large-lanes-zen4", "8-bit", "4-bit")
"""A run of its kinds alone, of a later version than the others of its model."""


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()))


def rows_of(name: str, part: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """A part of a run, by kind and batch or length."""
    rows = {(row["kind"], row.get("batch", row.get("tokens"))): row for row in result(name)[part]}
    if name == "cpu-large-zen4":
        rows |= {key: row for key, row in rows_of(LATER[0], part).items() if key[0] in LATER[1:]}
    return rows


def ratio(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f}-{spread['max']:.2f})"


def milliseconds(spread: dict[str, float]) -> str:
    median, least, most = (f"{1000 * spread[name]:.3g}" for name in ("median", "min", "max"))
    return f"{median} ({least}-{most})"


def table(page: Path, first_cell: str) -> list[list[str]]:
    """The rows of a page's table whose header begins so, without the header."""
    text = page.read_text()
    lines = text[text.index(f"| {first_cell}") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("model", SHOWN)
def test_steps_beside_llama_cpp(model: str) -> None:
    zen, xeon = rows_of(f"cpu-{model}-zen4", "decode"), rows_of(f"cpu-{model}", "decode")
    shown = [row for row in table(CPU, "model | weights | rows | Zen 4") if row[0] == SHOWN[model]]
    assert len(shown) >= 6
    for _, kind, batch, *cells in shown:
        expected = []
        for run in (zen, xeon):
            row = run[kind, int(batch)]
            expected += [milliseconds(row["systems"]["d3engine"]["seconds_per_step"]), ratio(row["over"]["llama.cpp"])]
        assert cells == expected, (kind, batch)


@pytest.mark.parametrize("model", SHOWN)
def test_prompts_beside_llama_cpp(model: str) -> None:
    zen, xeon = rows_of(f"cpu-{model}-zen4", "prompt"), rows_of(f"cpu-{model}", "prompt")
    shown = [row for row in table(CPU, "model | weights | tokens | Zen 4") if row[0] == SHOWN[model]]
    assert shown
    for _, kind, tokens, _, over_zen, _, over_xeon in shown:
        found = [ratio(run[kind, int(tokens)]["over"]["llama.cpp"]) for run in (zen, xeon)]
        assert [over_zen, over_xeon] == found, kind


@pytest.mark.parametrize("model", SHOWN)
def test_what_depth_gives_of_what_its_layers_promise(model: str) -> None:
    run = rows_of(f"cpu-{model}-zen4", "depth")
    shown = [row for row in table(CPU, "model | weights | rows | D3") if row[0] == SHOWN[model]]
    assert len(shown) >= 4
    for _, kind, batch, *cells in shown:
        row = run[kind, int(batch)]
        bound = f"{row['layer_bound']:.2f}"
        assert cells == [ratio(row["d3_over_full_depth"]), bound, ratio(row["realisation_ratio"])], (kind, batch)


@pytest.mark.parametrize(("name", "shown"), [("demo", "the bundled model"), ("large", "random weights")])
def test_decoding_beside_transformers(name: str, shown: str) -> None:
    run = result(f"decode-{name}-cpu")
    (row,) = [row for row in table(CPU, "float32, batch 1 |") if row[0].startswith(shown)]
    rates = [run["systems"][system]["tokens_per_second"]["median"] for system in ("transformers", "full_depth", "d3")]
    assert [float(cell.removesuffix(" tok/s").replace(",", "")) for cell in row[1:4]] == pytest.approx(rates, rel=0.01)
    over = run["full_depth_over_transformers"]["median"], run["d3_over_full_depth"]["median"]
    assert [float(cell.split(" ")[0]) for cell in row[4:6]] == pytest.approx(over, rel=0.01)
    assert float(row[7]) == pytest.approx(run["realisation_ratio"], abs=0.006)


def test_a_gguf_file_beside_llama_cpp() -> None:
    figures = result("gguf-coder-1.5b-avx512")["figures"]
    rows = table(GGUF, "| d3engine | llama.cpp")
    measures = {"one answer": "rows 1", "eight at once": "rows 8", "a prompt of 512": "prompt 512"}
    measures |= {"a prompt of 2,048": "prompt 2048", "until it can": "load", "memory": "bytes"}
    assert len(rows) == len(measures)
    for what, *cells in rows:
        (measure,) = [name for start, name in measures.items() if what.startswith(start)]
        scale = 1e9 if measure == "bytes" else 1
        for cell, system in zip(cells, ("d3engine", "llama.cpp"), strict=True):
            shown = float(cell.split(" ")[0])
            assert shown == pytest.approx(figures[system][measure]["value"] / scale, rel=0.05), (what, system)


@pytest.mark.parametrize(("name", "words"), [("smollm2", "SmolLM2"), ("coder-0.5b", "0.5B"), ("coder-1.5b", "1.5B")])
def test_activations_of_8_bits(name: str, words: str) -> None:
    figures = result(f"activations-{name}")["figures"]
    (row,) = [row for row in table(GGUF, "file | positions") if words in row[0]]
    kl, same = ("{value:.5f} ({low:.5f} to {high:.5f})".format(**figures["kl"]), figures["same"])
    share = f"{100 * same['value']:.1f} % ({100 * same['low']:.1f} to {100 * same['high']:.1f})"
    assert row[1:] == [f"{figures['positions']:,}", kl, share]


def test_a_cache_of_8_bits() -> None:
    run = {(row["depth"], row["cache"], row["texts"]): row for row in result("kv-cache-smollm2")["rows"]}
    rows = table(ROOT / "docs" / "how-to" / "quantize.md", "depth | cache")
    assert rows
    for depth, cache, kl, *_, perplexity in rows:
        found = run[depth, cache, "all"]
        assert float(kl.split(" ")[0]) == pytest.approx(found["kl"]["value"], abs=6e-5)
        assert float(perplexity) == pytest.approx(found["perplexity"], abs=6e-4)


def test_all_policies_at_one_mean_depth() -> None:
    lines = policies.markdown(result("policies-demo-cpu")).splitlines()
    page = (ROOT / "docs" / "explanation" / "method.md").read_text().splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line not in page] == []
