"""The bundled model's weights: what is said of them, where a few answers can check it."""

from itertools import islice

import pytest

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.research.evaluation.word_problems import PROMPT_SUFFIX, extract_answer, problems


def answers(prompts: list[str], depth: DepthPolicy | str) -> list[str]:
    """The bundled model's greedy answers."""
    with Engine("demo", depth=depth, device="cpu", kv_cache_memory_bytes=2**25) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("depth", ["auto", D3(alpha=0.8, start=0.7)], ids=["own", "decay"])
def test_prompt_cut_before_the_answer_is_right_under_decay(depth: DepthPolicy | str) -> None:
    """A prompt that stops before the answer is answered right under depth decay."""
    # Then the model writes the end of the form itself, at the depths of generated tokens.
    asked = list(islice(problems("test", 3), 16))
    texts = answers([problem.prompt.removesuffix(PROMPT_SUFFIX) for problem in asked], depth)
    assert [text[: len(PROMPT_SUFFIX)] for text in texts] == [PROMPT_SUFFIX] * len(asked)
    assert [extract_answer(text) for text in texts] == [problem.answer for problem in asked]


@pytest.mark.parametrize("depth", ["auto", FullDepth()], ids=["own", "full"])
def test_a_question_of_one_step_is_answered_right(depth: DepthPolicy | str) -> None:
    """The problems that the model is measured on begin at two steps; a visitor's first question has one."""
    asked = list(islice(problems("test", 3, fewest=1, most=1), 16))
    texts = answers([problem.prompt for problem in asked], depth)
    assert texts == [f" {problem.solution}" for problem in asked]
