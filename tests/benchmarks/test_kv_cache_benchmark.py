"""What `benchmarks.kv_cache_dtype` compares: that entries are changed where they are written, and figures from them."""

from typing import Any

import numpy as np
import pytest
import torch
from e4m3 import kept
from fixture_types import MakeEngine

from benchmarks import kv_cache_dtype as benchmark
from benchmarks.kv_cache_dtype import Largest, Text
from d3engine import D3

TEXTS = [Text("one", list(range(20, 33)), [40, 41, 42, 43, 44]), Text("other", [50, 51], [60, 61, 62])]
EAGER: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}


def test_rounding_kv_when_written_is_as_the_engines_cache_does(make_engine: MakeEngine) -> None:
    """Rounding KV as it is written is what the engine's own cache does."""
    floats, fp8 = make_engine(**EAGER), make_engine(kv_cache_dtype="fp8", **EAGER)
    depth = D3(0.8, 0.4)
    unchanged = benchmark.read(floats, TEXTS, depth)
    benchmark._set_rule(floats, benchmark.rules(Largest())["of each entry"])
    for rounded, found, before in zip(
        benchmark.read(floats, TEXTS, depth), benchmark.read(fp8, TEXTS, depth), unchanged, strict=True
    ):
        torch.testing.assert_close(rounded, found, rtol=1e-3, atol=1e-3)
        assert float((rounded - before).abs().max()) > 0.01


def test_text_is_compared_with_itself_and_other_distributions() -> None:
    """A text is compared with itself and with another distribution."""
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    text = Text("one", [0], [0, 1])
    kl, loss, same, count = benchmark.compared(text, found, reference)
    assert kl == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), rel=1e-5)
    assert (loss, same, count) == (pytest.approx(3 * np.log(2), rel=1e-5), 1, 2)
    assert benchmark.compared(text, reference, reference)[0] == 0


def test_rules_round_as_the_format_says() -> None:
    heads = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)) * 3
    largest = Largest()
    assert largest(3, heads) is heads
    rules = benchmark.rules(largest)
    torch.testing.assert_close(rules["of each entry"](3, heads), kept(heads), rtol=1e-5, atol=0)
    constant = rules["a constant for each head"](3, heads)
    assert constant.abs().amax() == heads.abs().amax()
    assert rules["a constant for each head"](3, 2 * heads).abs().amax() == heads.abs().amax(), "what is larger is cut"
