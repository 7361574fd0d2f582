"""What tests of ranks share."""

import os
from pathlib import Path
from typing import Any

import pytest

from d3engine import D3, Engine, SamplingParams

PROMPT = [5, 250, 17, 3, 99, 180, 44]


def left_to_test_parallel() -> None:
    """Skip what starts more processes than the suite has time for."""
    if os.environ.get("PARALLEL_TESTS") != "all":
        pytest.skip("more ranks and processes: make test-parallel")


def asked() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, depth=D3(0.8, 0.3))


def engine_of(directory: Path, **options: Any) -> Engine:
    given = {"max_num_seqs": 4, "block_size": 4, "max_model_len": 64, "enforce_eager": True} | options
    return Engine(directory, dtype="float32", skip_tokenizer_init=True, **given)
