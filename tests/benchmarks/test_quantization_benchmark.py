"""The benchmark of quantization measures the loss that the engine has, and reports each scheme at each depth."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixture_types import MakeLlama
from quantized_weights import SCHEMES

from benchmarks import quantization as benchmark
from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.engine.model_directory import model_directory
from d3engine.research.evaluation.accuracy import take_problems


@pytest.fixture(scope="module")
def reader(tiny_llama: MakeLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads the word problems with the bundled model's tokenizer."""
    directory = tmp_path_factory.mktemp("reader")
    source = tiny_llama(vocab_size=768, hidden_size=128, num_hidden_layers=2, eos_token_id=2).directory
    for file in source.iterdir():
        shutil.copyfile(file, directory / file.name)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(model_directory("demo") / name, directory / name)
    (directory / "d3.json").write_text('{"depth": {"policy": "d3", "alpha": 0.9, "start": 0.5}}')
    return directory


def test_benchmark_finds_the_engines_loss_of_a_prompt(reader: Path) -> None:
    """The benchmark finds the loss that the engine gives for a prompt."""
    # At full depth a solution costs the same whether it is generated step by step or read as part of a prompt.
    given = take_problems("validation", 0, 2)
    with Engine(reader, device="cpu", dtype="float32", enforce_eager=True) as engine:
        found = benchmark.answer(engine, given, FullDepth(), 4)
        shallow = benchmark.answer(engine, given, D3(0.5, 0.5), 4)
        solutions = [benchmark.solution_of(engine, problem) for problem in given]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, depth=FullDepth())
        prompts = [{"prompt_token_ids": one.prompt + one.answer} for one in solutions]
        outputs = engine.generate(prompts, params, use_tqdm=False)
    for place, (output, solution) in enumerate(zip(outputs, (one.answer for one in solutions), strict=True)):
        assert output.prompt_logprobs is not None
        read = zip(output.prompt_logprobs[-len(solution) :], solution, strict=True)
        assert found.losses[place] == pytest.approx(-sum(at[token].logprob for at, token in read), rel=1e-4)
        assert found.lengths[place] == len(solution)
        assert solution[-1] == 2
        assert abs(shallow.losses[place] - found.losses[place]) > 0.1
    assert [len(tokens) for tokens in found.token_ids] == [4, 4]


def test_the_benchmark_reports_each_scheme_at_each_depth(reader: Path, tmp_path: Path) -> None:
    options = [f"--model={reader}", "--problems=3", "--max-tokens=4", f"--json={tmp_path / 'report.json'}"]
    assert benchmark.main(options) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert str(reader.parent) not in (tmp_path / "report.json").read_text()
    rows = {row["weights"]: row for row in report["rows"]}
    assert list(rows) == ["float32", *SCHEMES]
    assert rows["int4"]["weight_bytes"] < rows["int8"]["weight_bytes"] < rows["float32"]["weight_bytes"]
    assert 0 == rows["float32"]["relative_error"] < rows["int8"]["relative_error"] < rows["int4"]["relative_error"]
    for row in rows.values():
        assert list(row["depths"]) == ["full depth", "d3"]
        for figures in row["depths"].values():
            assert all(f["low"] <= f["value"] <= f["high"] for f in figures.values())
    for figures in rows["float32"]["depths"].values():
        assert figures["perplexity_over_float"] == {"value": 1, "low": 1, "high": 1}
        assert figures["identical_answers"]["value"] == 1
    for depth in ("full depth", "d3"):
        perplexities = [row["depths"][depth]["perplexity"]["value"] for row in rows.values()]
        ratios = [row["depths"][depth]["perplexity_over_float"]["value"] for row in rows.values()]
        assert ratios == pytest.approx([perplexity / perplexities[0] for perplexity in perplexities])
        assert 0 < abs(ratios[1] - 1) < 0.1


def test_the_page_says_what_the_result_shows() -> None:
    root = Path(__file__).parents[2]
    report = json.loads((root / "benchmarks" / "results" / "quantization-demo.json").read_text())
    page = " ".join((root / "docs" / "how-to" / "quantize.md").read_text().split())
    figures = [row["depths"][depth] for row in report["rows"] for depth in ("full depth", "d3")]
    assert [row["weights"] for row in report["rows"]] == ["float32", "int8", "int4", "fp8"]
    assert all(one["exact_match"]["value"] == one["identical_answers"]["value"] == 1 for one in figures)
    assert "The bundled model answers all of 500 word problems right and alike under int8, int4 `--rtn` and fp8" in page


def test_the_ratio_of_perplexities_pairs_the_problems() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(50, generator=generator, dtype=torch.float64).numpy()
    found = benchmark.Answers([], [], losses, losses * 0 + 10)
    worse = replace(found, losses=losses + 0.5)
    ratio = benchmark.perplexity_ratio(worse, found)
    assert list(ratio.values()) == pytest.approx([math.exp(0.05)] * 3)  # every problem by the same: no spread at all
    alone = benchmark.perplexity(worse)
    assert alone["value"] == pytest.approx(math.exp((losses.mean() + 0.5) / 10))
    assert alone["high"] - alone["low"] > 0.001
