"""What tests of ranks that are processes share."""

import os

import pytest

from d3engine import D3, SamplingParams

PROMPT = [5, 250, 17, 3, 99, 180, 44]


def left_to_test_parallel() -> None:
    """Skip what starts more processes than the suite has time for."""
    if os.environ.get("PARALLEL_TESTS") != "all":
        pytest.skip("more ranks and processes: make test-parallel")


def asked() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, depth=D3(0.8, 0.3))
