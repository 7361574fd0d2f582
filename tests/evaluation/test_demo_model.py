"""The bundled model's weights: what is said of them, where a few answers can check it."""

from __future__ import annotations

from itertools import islice

import pytest

from d3engine import D3, Engine, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.evaluation.word_problems import PROMPT_SUFFIX, extract_answer, problems


@pytest.mark.parametrize("depth", ["auto", D3(alpha=0.8, start=0.7)], ids=["own", "decay"])
def test_a_prompt_that_stops_before_the_answer_is_answered_right_under_depth_decay(depth: DepthPolicy | str) -> None:
    """Then the model writes the end of the form itself, at the depths of generated tokens."""
    asked = list(islice(problems("test", 3), 16))
    prompts = [problem.prompt.removesuffix(PROMPT_SUFFIX) for problem in asked]
    with Engine("demo", depth=depth, device="cpu", kv_cache_memory_bytes=2**25) as engine:
        answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    texts = [answer.outputs[0].text for answer in answers]
    assert [text[: len(PROMPT_SUFFIX)] for text in texts] == [PROMPT_SUFFIX] * len(asked)
    assert [extract_answer(text) for text in texts] == [problem.answer for problem in asked]
