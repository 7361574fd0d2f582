"""Scores are transformers' probabilities of one token against another after the prompt."""

from pathlib import Path

import pytest
import torch
from tiny_models import random_prompts, save_tiny_llama

from d3engine import Engine, InvalidValueError
from d3engine.request.scoring import answer_params, judgement, score_of

PROMPTS = random_prompts([1, 7, 40, 200])
YES, NO = 5, 9


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_scores_equal_transformers(tmp_path: Path, enforce_eager: bool) -> None:
    tiny = save_tiny_llama(tmp_path)
    with Engine(tiny.directory, dtype="float32", skip_tokenizer_init=True, enforce_eager=enforce_eager) as engine:
        yes, no = (engine.generate(PROMPTS, answer_params([one], "yes"), use_tqdm=False) for one in (YES, NO))
        assert [output.num_cached_tokens for output in no] == [0, 0, 32, 192]  # whole blocks of 16
    for prompt, one, other in zip(PROMPTS, yes, no, strict=True):
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([prompt])).logits[0, -1]
        assert abs(score_of(one, other) - float(logits[[YES, NO]].softmax(0)[0])) < 1e-5


def test_an_answer_of_several_tokens_has_no_score() -> None:
    with pytest.raises(InvalidValueError, match="model must be one whose tokenizer has a single token for 'yes'"):
        answer_params([1, 2], "yes")


def test_a_judgement_has_the_words_of_qwen3_reranker() -> None:
    system, user = judgement("q", "d", "i")
    assert system["content"].startswith("Judge whether the Document meets the requirements based on the Query")
    assert user["content"] == "<Instruct>: i\n<Query>: q\n<Document>: d"
