"""What `benchmarks.weight_forms` compares: matrices that were rounded as a scheme does, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from batches import CONFIG

from benchmarks import weight_forms as benchmark
from d3engine.kernels.quantized import quantize_fp8
from d3engine.model.config import QUANTIZATION_SCHEMES, ModelConfig
from d3engine.model.weights import random_weights


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_hold_what_the_scheme_keeps_and_the_head_stays(is_tied: bool) -> None:
    """The layers hold what the scheme keeps, and the head stays."""
    config = ModelConfig.from_dict(CONFIG | {"tie_word_embeddings": is_tied})
    weights = random_weights(config, dtype=torch.float32, device="cpu", seed=0)
    found = benchmark.stood_for(weights, "fp8")
    assert found.lm_head is weights.lm_head
    assert found.embedding is weights.embedding
    for layer, given in zip(found.layers, weights.layers, strict=True):
        assert isinstance(given.down, torch.Tensor)
        assert torch.equal(layer.down, quantize_fp8(given.down).dequantize(torch.float32))
        assert layer.attention_norm is given.attention_norm


@pytest.mark.parametrize(
    ("name", "forms"), [("weights", QUANTIZATION_SCHEMES), ("weights-groups", ("int4", "int4, groups of 32"))]
)
def test_the_page_has_the_figures_of_the_result(name: str, forms: tuple[str, ...]) -> None:
    root = Path(__file__).parents[2]
    report = json.loads((root / "benchmarks" / "results" / f"{name}-smollm2.json").read_text())
    page = (root / "docs" / "how-to" / "quantize.md").read_text()
    assert {row["weights"] for row in report["rows"]} == {"float32", *forms}
    for row in report["rows"]:
        if row["weights"] == "float32":
            continue
        kl, same, loss = (row[name] for name in ("kl", "same", "loss"))
        cells = [
            row["depth"],
            row["weights"],
            f"{kl['value']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})",
            f"{100 * same['value']:.1f} % ({100 * same['low']:.1f} to {100 * same['high']:.1f})",
            f"{loss['value']:+.4f} ({loss['low']:+.4f} to {loss['high']:+.4f})",
        ]
        assert f"| {' | '.join(cells)} |" in page
