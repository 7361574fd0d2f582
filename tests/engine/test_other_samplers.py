"""Samplers that the host alone has: the same tokens alone, in a batch, and with drafts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from d3engine import Engine, FullDepth, InvalidValueError, PromptLookup, SamplingParams

PROMPTS = [
    "Question: Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:",
    "Question: Ann has 41 cups. Ann loses 7. How many cups does Ann have now?\nAnswer:",
    "Tom has 5 pens. Tom has 5 pens. Tom has 5 pens. Tom has",
]
KINDS: list[dict[str, Any]] = [
    {"typical_p": 0.5, "temperature": 1.5},
    {"top_n_sigma": 1.0, "temperature": 3.0},
    {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    {"dry_multiplier": 4.0, "temperature": 0.0},
    {"dry_multiplier": 4.0, "dry_sequence_breakers": [" "], "temperature": 0.0},
    {},
]


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**25) as engine:
        yield engine


def tokens(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    return [list(found.outputs[0].token_ids) for found in engine.generate(prompts, params, use_tqdm=False)]


def test_batch_of_all_samplers_is_each_alone_and_with_drafts(engine: Engine) -> None:
    """A batch of all kinds is what each is alone and with drafts."""
    asked = [(prompt, SamplingParams(seed=3, max_tokens=24, **kind)) for prompt in PROMPTS for kind in KINDS]
    alone = [tokens(engine, [prompt], [params])[0] for prompt, params in asked]
    assert tokens(engine, [prompt for prompt, _ in asked], [params for _, params in asked]) == alone
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**25, depth=PromptLookup()) as drafting:
        drafted = tokens(drafting, [prompt for prompt, _ in asked], [params for _, params in asked])
    full = [tokens(engine, [p], [SamplingParams(**vars(q) | {"depth": FullDepth()})])[0] for p, q in asked]
    assert drafted == full


def test_dry_breaks_a_repetition_and_a_breaker_keeps_it(engine: Engine) -> None:
    assert engine.tokenizer is not None
    five = engine.tokenizer.encode("a5", add_special_tokens=False)[-1]
    forced: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "logit_bias": {five: 100.0}, "dry_multiplier": 50.0}
    dry, broken = (
        tokens(engine, PROMPTS[2:], [SamplingParams(**forced, dry_sequence_breakers=breakers)])[0]
        for breakers in ([], ["5"])
    )
    assert broken == [five] * 24
    assert 0 < dry.count(five) < 24


def test_a_truncated_prompt_is_its_last_tokens(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = engine.generate(PROMPTS[:1], params, use_tqdm=False)[0].prompt_token_ids
    cut = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=5)
    found = engine.generate(PROMPTS[:1], cut, use_tqdm=False)[0]
    assert found.prompt_token_ids == ids[-5:]
    assert found.outputs == engine.generate([{"prompt_token_ids": ids[-5:]}], params, use_tqdm=False)[0].outputs
    long = {"prompt_token_ids": list(ids) * 200}
    with pytest.raises(InvalidValueError, match="max_model_len"):
        engine.generate([long], params, use_tqdm=False)
    fitting = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=-1)
    assert len(engine.generate([long], fitting, use_tqdm=False)[0].prompt_token_ids) == engine.max_model_len - 4


def test_logits_processors_see_tokens_and_decide_logits(engine: Engine) -> None:
    """Functions of a request see its tokens and decide the logits."""
    seen: list[tuple[int, list[int]]] = []

    def only_five(prompt: list[int], generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((len(prompt), list(generated)))
        return torch.full_like(logits, -1.0).index_fill_(0, torch.tensor([5]), 1.0)

    def next_one(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(len(generated))

    plain = tokens(engine, PROMPTS[:1], [SamplingParams(temperature=0, max_tokens=6)])
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logits_processors=[only_five, next_one])
    both = tokens(engine, PROMPTS[:1] * 2, [asked, SamplingParams(temperature=0, max_tokens=6)])
    assert both == [[5, 6, 7, 8, 9, 10], plain[0]]
    assert [generated for _, generated in seen] == [list(range(5, 5 + n)) for n in range(6)]
    drafted = engine.generate(PROMPTS[:1], replace(asked, depth=PromptLookup()), use_tqdm=False)
    assert list(drafted[0].outputs[0].token_ids) == both[0]


def test_logits_processor_may_be_a_module_with_gradients(engine: Engine) -> None:
    """What a function returns may ask for gradients, as the parameters of a module do."""
    bias = torch.zeros(engine.config.vocab_size, requires_grad=True)
    plain = SamplingParams(temperature=0, max_tokens=4)
    added = replace(plain, logits_processors=[lambda generated, logits: logits + bias])
    assert tokens(engine, PROMPTS[:1], [added]) == tokens(engine, PROMPTS[:1], [plain])


def test_what_a_function_raises_ends_its_request_alone(engine: Engine) -> None:
    def fails(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(generated) == 2:
            raise ValueError("no more")
        return logits

    def shortens(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:3]

    plain = SamplingParams(temperature=0, max_tokens=6)
    asked = [replace(plain, logits_processors=[one]) for one in (fails, shortens)]
    first, second, third = engine.generate(PROMPTS[:1] * 3, [*asked, plain], use_tqdm=False)
    assert (len(first.outputs[0].token_ids), first.outputs[0].finish_reason) == (2, "abort")
    assert "raised ValueError: no more" in str(first.outputs[0].stop_reason)
    assert (len(second.outputs[0].token_ids), second.outputs[0].finish_reason) == (0, "abort")
    assert list(third.outputs[0].token_ids) == tokens(engine, PROMPTS[:1], [plain])[0]
