"""vLLM's `speculative_config` says which policy drafts, and whatever else it says is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from d3engine import D3, Engine, FullDepth, InvalidValueError, PromptLookup, SamplingParams, Speculative
from d3engine.depth.speculative_config import HISTORY_OF_SUFFIX, policy_of_config

ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 128}


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({"method": "draft_model", "model": "small"}, Speculative("small")),
        ({"model": Path("small"), "num_speculative_tokens": 3}, Speculative("small", 3)),
        ({"method": "ngram"}, PromptLookup()),
        ({"method": "suffix", "num_speculative_tokens": 8}, PromptLookup(8, HISTORY_OF_SUFFIX)),
        ('{"method": "ngram", "num_speculative_tokens": 8}', PromptLookup(8)),
    ],
)
def test_config_names_the_policy(config: Any, policy: Any) -> None:
    assert policy_of_config(config) == policy


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "medusa", "model": "x"}, r"must be one of 'draft_model', 'eagle3', 'ngram', 'suffix'"),
        ({}, r"""speculative_config\["method"\] must be one of"""),
        ({"method": "draft_model"}, r"""speculative_config\["model"\] must be the draft model"""),
        ({"method": "ngram", "model": "x"}, r"""speculative_config\["model"\] must be absent with "ngram\""""),
        ({"model": ""}, r"""speculative_config\["model"\] must be a Llama model"""),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"""\["num_speculative_tokens"\] must be"""),
        ({"method": "ngram", "prompt_lookup_max": 4}, r"config\['prompt_lookup_max'\] must be absent: the keys"),
        ("{", "speculative_config must be a mapping such as .* or its JSON text"),
        ("[1]", "speculative_config must be a mapping"),
    ],
)
def test_other_configs_are_refused_by_key(config: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        policy_of_config(config)


def test_config_stands_in_the_place_of_the_depth() -> None:
    with Engine("demo", speculative_config={"method": "ngram"}, **ENGINE) as engine:
        assert engine.depth == PromptLookup()
    with Engine("demo", draft_model="demo", depth=FullDepth(), **ENGINE) as engine:
        assert engine.depth == Speculative("demo")
    with pytest.raises(InvalidValueError, match="draft_model must be absent with depth="):
        Engine("demo", draft_model="demo", depth=D3(0.9, 0.6), **ENGINE)
    with pytest.raises(InvalidValueError, match="draft_model must be absent with speculative_config"):
        Engine("demo", draft_model="demo", speculative_config={"method": "ngram"}, **ENGINE)
    for odd in ("", 5):
        with pytest.raises(InvalidValueError, match="draft_model must be a Llama model"):
            Engine("demo", draft_model=odd, **ENGINE)  # type: ignore[arg-type]


def test_a_request_turns_drafts_off_for_itself() -> None:
    """The model that drafts is the target, so every draft that pays is right."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    off = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, depth=FullDepth())
    prompt = "Tom has 3 apples. He buys 4 more. How many apples does he have?"
    config = {"model": "demo", "num_speculative_tokens": 4}
    with Engine("demo", speculative_config=config, **ENGINE) as engine:
        plain = engine.generate(prompt, off, use_tqdm=False)[0]
        assert engine.stats().drafted_tokens == 0
        drafted = engine.generate(prompt, params, use_tqdm=False)[0]
        stats = engine.stats()
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.acceptance_rate == 1
    assert plain.metrics.acceptance_rate is None
    assert sum(stats.accepted_at) == stats.accepted_tokens
    assert stats.accepted_at[3] == stats.accepted_tokens // 4
