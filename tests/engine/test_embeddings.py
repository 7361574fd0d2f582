"""Embeddings are transformers' last hidden states, pooled as sentence-transformers pools them; scores are its
probabilities of one token against another after the prompt."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny_models import TinyLlama, random_prompts, save_random, save_tiny_llama
from transformers import Qwen2Config, Qwen2ForCausalLM

from d3engine import D3, Engine, InvalidValueError, SamplingParams
from d3engine.model.source import POOLING_FILE
from d3engine.request.scoring import answer_params, judgement, score_of

PROMPTS = random_prompts([1, 2, 7, 40, 200, 33])
TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}

FloatArray = npt.NDArray[np.float32]


def _pooled(tiny: TinyLlama, prompt: list[int], pooling: str, *, normalize: bool = True) -> FloatArray:
    """As sentence-transformers' Pooling and Normalize do, over transformers' last hidden states."""
    with torch.inference_mode():
        (states,) = tiny.model.model(torch.tensor([prompt])).last_hidden_state
    found = {"mean": states.mean(dim=0), "last": states[-1], "cls": states[0]}[pooling]
    if normalize:
        found = torch.nn.functional.normalize(found, dim=0)
    array: FloatArray = found.numpy()
    return array


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> Iterator[Engine]:
    with Engine(tiny.directory, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_embeddings_equal_transformers(tiny: TinyLlama, engine: Engine, pooling: str, enforce_eager: bool) -> None:
    with Engine(tiny.directory, enforce_eager=True, **OPTIONS) if enforce_eager else nullcontext(engine) as engine:
        found = engine.embed(PROMPTS, pooling=pooling, use_tqdm=False)
        raw = engine.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
    assert found.dtype == np.float32
    for prompt, row, raw_row in zip(PROMPTS, found, raw, strict=True):
        assert np.abs(row - _pooled(tiny, prompt, pooling)).max() < TOLERANCE
        assert np.abs(raw_row - _pooled(tiny, prompt, pooling, normalize=False)).max() < 10 * TOLERANCE


def test_embeddings_of_qwen2_equal_transformers(tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    tiny = save_random(tmp_path, Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, max_position_embeddings=512)))
    with Engine(tmp_path, **OPTIONS) as engine:
        found = engine.embed(PROMPTS, use_tqdm=False)
    assert np.abs(found - [_pooled(tiny, prompt, "mean") for prompt in PROMPTS]).max() < TOLERANCE


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_scores_equal_transformers(tiny: TinyLlama, enforce_eager: bool) -> None:
    prompts, ids = random_prompts([1, 7, 40, 200]), [5, 9]
    with Engine(tiny.directory, enforce_eager=enforce_eager, **OPTIONS) as engine:
        yes, no = (engine.generate(prompts, answer_params([one], "yes"), use_tqdm=False) for one in ids)
        assert [output.num_cached_tokens for output in no] == [0, 0, 32, 192]  # whole blocks of 16
    for prompt, one, other in zip(prompts, yes, no, strict=True):
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([prompt])).logits[0, -1]
        assert abs(score_of(one, other) - float(logits[ids].softmax(0)[0])) < 1e-5


def test_an_embedding_alone_is_the_one_in_a_batch(engine: Engine) -> None:
    together = engine.embed(PROMPTS, use_tqdm=False)
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert np.array_equal(engine.embed(prompt, use_tqdm=False)[0], row)


def test_a_depth_policy_changes_no_embedding(tiny: TinyLlama, engine: Engine) -> None:
    full = engine.embed(PROMPTS, use_tqdm=False)
    with Engine(tiny.directory, depth=D3(alpha=0.9, start=0.4), **OPTIONS) as shallow:
        assert np.array_equal(shallow.embed(PROMPTS, use_tqdm=False), full)


def test_dimensions_cut_before_the_norm(engine: Engine) -> None:
    raw = engine.embed(PROMPTS[3], normalize=False, use_tqdm=False)[0]
    cut = engine.embed(PROMPTS[3], dimensions=8, use_tqdm=False)[0]
    assert np.allclose(cut, raw[:8] / np.linalg.norm(raw[:8]), atol=1e-6)
    assert engine.embed([], use_tqdm=False).shape == (0, 48)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dimensions": 49}, "dimensions must be an integer from 1 to 48; got 49"),
        ({"pooling": "max"}, "pooling must be mean or last or cls; got 'max'"),
    ],
)
def test_what_cannot_be_embedded_is_refused(engine: Engine, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        engine.embed(PROMPTS, use_tqdm=False, **arguments)  # type: ignore[arg-type]


def test_the_models_own_pooling_is_the_default(tiny: TinyLlama, tmp_path: Path) -> None:
    for file in tiny.directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / POOLING_FILE).parent.mkdir()
    (tmp_path / POOLING_FILE).write_text('{"word_embedding_dimension": 48, "pooling_mode_lasttoken": true}')
    with Engine(tmp_path, **OPTIONS) as engine:
        found = engine.embed(PROMPTS, use_tqdm=False)
        assert np.array_equal(found, engine.embed(PROMPTS, pooling="last", use_tqdm=False))


def test_sampling_parameters_with_pooling_have_one_token() -> None:
    make: Callable[..., SamplingParams] = SamplingParams
    with pytest.raises(InvalidValueError, match="max_tokens must be 1, and n=1, where pooling is given; got 16"):
        make(pooling="mean")


def test_an_answer_of_several_tokens_has_no_score() -> None:
    with pytest.raises(InvalidValueError, match="model must be one whose tokenizer has a single token for 'yes'"):
        answer_params([1, 2], "yes")


def test_a_judgement_has_the_words_of_qwen3_reranker() -> None:
    system, user = judgement("q", "d", "i")
    assert system["content"].startswith("Judge whether the Document meets the requirements based on the Query")
    assert user["content"] == "<Instruct>: i\n<Query>: q\n<Document>: d"
