"""Conversations that a model makes up itself, for bridges of which nobody has brought a text.

The one idea: a chat model has learned what users ask, too. Behind the beginning of a user's turn, sampled at
temperature 1, it writes such a question until the turn ends; its own answer at full depth is what the bridges will
meet. Known as a way to make training data from Xu et al. 2024, "Magpie".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d3engine.analysis.beginning import same_beginning
from d3engine.depth import FullDepth
from d3engine.errors import require
from d3engine.request.params import SamplingParams

if TYPE_CHECKING:
    from d3engine.engine import Engine

QUESTION_TOKENS = 64
"""A question is at most so long."""

BATCH = 64
"""Questions that are sampled at once."""

ATTEMPTS = 4
"""So many are sampled at most for each that is wanted; some never end."""


def made_up_prompts(engine: Engine, count: int, seed: int) -> list[str]:
    """`count` different questions of a user's, or fewer where the model repeats itself; the same for the same seed.

    Raises `InvalidValueError` for a model without a chat template, and for one that ends no question.
    """
    head, tail = _around_a_question(engine)
    found: dict[str, None] = {}
    for first in range(0, ATTEMPTS * count, BATCH):
        if len(found) >= count:
            break
        seeds = range(first, min(first + BATCH, ATTEMPTS * count))
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=QUESTION_TOKENS,
                stop_token_ids=tail,
                depth=FullDepth(),
                seed=seed * 2**20 + number,
            )
            for number in seeds
        ]
        for output in engine.generate([{"prompt_token_ids": head}] * len(params), params, use_tqdm=False):
            ended, text = output.outputs[0].finish_reason == "stop", output.outputs[0].text.strip()
            if ended and text:
                found[text] = None
    require(len(found) > 0, "--task", "chat", "that of a model which ends the questions that it makes up")
    return list(found)[:count]


def _around_a_question(engine: Engine) -> tuple[list[int], list[int]]:
    """The token ids before every first question of a conversation, and the one behind it."""
    one, other = (
        engine.chat_prompt([{"role": "user", "content": content}])["prompt_token_ids"] for content in ("How", "7")
    )
    return one[: same_beginning(one, other)], one[len(one) - same_beginning(one[::-1], other[::-1]) :][:1]
