"""Tokens are chosen as written down: against known answers, slow references in plain Python, and statistics."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import d3engine.kernels.random
from d3engine import Engine, FullDepth, SamplingParams
from d3engine.kernels.random import gumbel, philox
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights, random_weights
from d3engine.plan import Plan, PromptRows, Sampled
from d3engine.request.sequence import Sequence
from d3engine.sampling.sampler import FAULT, Sampler

MASK = 0xFFFFFFFF
EOS = 9


# -- plain Python --------------------------------------------------------------------------------------------------


def slow_philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 word by word, from the paper's description."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & MASK, (first >> 32) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def slow_gumbel(seed: int, index: int, step: int, token: int) -> float:
    word = slow_philox((seed & MASK, seed >> 32), (token // 4, step, index, 0))[token % 4]
    return -math.log(-math.log(((word >> 9) + 0.5) / 2**23))


def slow_scores(logits: list[float], sequence: Sequence) -> list[float]:
    """What a row's logits become before the noise, one token after the other."""
    params, generated = sequence.params, sequence.token_ids
    scores = [logit + (params.logit_bias or {}).get(token, 0.0) for token, logit in enumerate(logits)]
    for token in range(len(scores)):
        excluded = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for word in sequence.bad_word_ids:
            before = list(word[:-1])
            excluded |= word[-1] == token and generated[len(generated) - len(before) :] == before
        if len(generated) < params.min_tokens:
            excluded |= token in sequence.eos_token_ids or token in (params.stop_token_ids or ())
        if excluded:
            scores[token] = -math.inf
        if token in sequence.prompt_token_ids or token in generated:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * generated.count(token)
        scores[token] -= params.presence_penalty * (token in generated)
    if params.greedy:
        return scores
    return slow_cut([score / params.temperature for score in scores], params)


def slow_softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return [weight / sum(weights) for weight in weights]


def slow_cut(scores: list[float], params: SamplingParams) -> list[float]:
    probabilities = slow_softmax(scores)
    kept = {token for token, p in enumerate(probabilities) if p >= params.min_p * max(probabilities)}
    by_rank = sorted(kept, key=lambda token: -scores[token])[: params.top_k or len(scores)]
    left = slow_softmax([score if token in by_rank else -math.inf for token, score in enumerate(scores)])
    reached, chosen = 0.0, set()
    for token in by_rank:
        if reached >= params.top_p and params.top_p < 1 and chosen:
            break
        chosen.add(token)
        reached += left[token]
    return [score if token in chosen else -math.inf for token, score in enumerate(scores)]


def slow_token(logits: list[float], sequence: Sequence) -> int:
    scores = slow_scores(logits, sequence)
    if not sequence.params.greedy:
        noise = [slow_gumbel(sequence.seed, sequence.index, sequence.step, t) for t in range(len(scores))]
        scores = [score + more for score, more in zip(scores, noise, strict=True)]
    return max(range(len(scores)), key=lambda token: scores[token])


# -- rows to sample ------------------------------------------------------------------------------------------------


def sequence_of(
    params: SamplingParams,
    *,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    index: int = 0,
) -> Sequence:
    return Sequence(
        request_id="r",
        index=index,
        prompt_token_ids=prompt or [0],
        params=params,
        schedule=FullDepth().schedule(2),
        eos_token_ids=frozenset() if params.ignore_eos else frozenset({EOS}),
        bad_word_ids=bad_words,
        seed=params.seed or 0,
        priority=0,
        arrival=0,
        max_length=10**6,
        token_ids=list(generated or []),
    )


def sample(logits: torch.Tensor, sequences: list[Sequence], **plan: Any) -> Sampled:
    fields: dict[str, Any] = {"sequences": sequences, "sampled": np.arange(len(sequences)), "prompt_rows": ()}
    fields["greedy"] = False
    return Sampler()(logits, cast(Plan, SimpleNamespace(**(fields | plan))))


def tokens_of(sampled: Sampled) -> list[int]:
    """The token of each row, where every row has one."""
    return [token for (token,) in sampled.token_ids]


def random_logits(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 2.5


# -- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    wanted = tuple(int(word, 16) for word in words.split())
    assert slow_philox((k0, k1), (c0, c1, c2, c3)) == wanted
    tensors = [torch.tensor([word]) for word in (k0, k1, c0, c1, c2, c3)]
    found = philox((tensors[0], tensors[1]), (tensors[2], tensors[3], tensors[4], tensors[5]))
    assert tuple(int(word) for word in found) == wanted


def test_philox_equals_its_plain_python_form_for_any_words() -> None:
    numbers = random.Random(1)
    rows = [[numbers.randrange(2**32) for _ in range(6)] for _ in range(300)]
    k0, k1, c0, c1, c2, c3 = torch.tensor(rows).unbind(1)
    found = torch.stack(torch.broadcast_tensors(*philox((k0, k1), (c0, c1, c2, c3))), dim=1).tolist()
    assert found == [list(slow_philox((r[0], r[1]), (r[2], r[3], r[4], r[5]))) for r in rows]


def test_gumbel_noise_equals_its_plain_python_form() -> None:
    keys = [(0, 0, 0), (2**63 - 1, 3, 7), (12345678901234, 63, 10**6), (2**32, 0, 2**24)]
    seeds, indices, steps = torch.tensor(keys).unbind(1)
    noise = gumbel(seeds, indices, steps, 37)
    assert noise.shape == (4, 37)
    assert noise.dtype == torch.float32
    wanted = torch.tensor([[slow_gumbel(*key, token) for token in range(37)] for key in keys])
    torch.testing.assert_close(noise, wanted, rtol=1e-5, atol=1e-5)


def test_the_highest_and_lowest_words_still_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 24 bits and a half, float32 rounds the highest word to 1: one token in 16 million was always chosen."""

    def extremes(key: object, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows, groups = counter[1].shape[0], counter[0].shape[1]
        return tuple(torch.full((rows, groups), word) for word in (0, MASK, 1, MASK - 1))

    monkeypatch.setattr(d3engine.kernels.random, "philox", extremes)
    noise = gumbel(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), 4)
    assert noise.isfinite().all()
    assert noise[0, 1] > 14 > 0 > noise[0, 0]


def test_noise_depends_on_seed_index_step_and_token_alone() -> None:
    numbers = random.Random(2)
    keys = [(numbers.randrange(2**63), numbers.randrange(64), numbers.randrange(5000)) for _ in range(40)]
    together = gumbel(*torch.tensor(keys).unbind(1), num_tokens=301)
    for row, key in enumerate(keys):
        alone = gumbel(*torch.tensor([key]).unbind(1), num_tokens=301)
        assert torch.equal(alone[0], together[row])
    shorter = gumbel(*torch.tensor(keys).unbind(1), num_tokens=10)
    torch.testing.assert_close(shorter, together[:, :10], rtol=1e-6, atol=1e-6)
    base = (5, 1, 9)
    rows = gumbel(*torch.tensor([base, (6, 1, 9), (5, 2, 9), (5, 1, 10), (5 + 2**32, 1, 9)]).unbind(1), num_tokens=50)
    for other in range(1, 5):
        assert (rows[0] != rows[other]).sum() > 45


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 7 tokens, 6 degrees of freedom: 22.5 is exceeded once in a thousand."""
    logits, draws = random_logits(1, 7, seed=4) / 2, 20000
    sequences = [sequence_of(SamplingParams(temperature=1.0, seed=seed)) for seed in range(draws)]
    found = torch.bincount(torch.tensor(tokens_of(sample(logits.expand(draws, -1), sequences))), minlength=7)
    wanted = logits[0].softmax(dim=-1) * draws
    assert float(((found - wanted) ** 2 / wanted).sum()) < 22.5


def test_the_steps_of_one_seed_and_the_sequences_of_one_request_are_draws_of_their_own() -> None:
    logits, draws = torch.zeros(1, 5), 4000
    params = SamplingParams(temperature=1.0, seed=77)
    by_step = [sequence_of(params, generated=[0] * step) for step in range(draws)]
    by_index = [sequence_of(params, index=index) for index in range(draws)]
    for sequences in (by_step, by_index):
        tokens = torch.tensor(tokens_of(sample(logits.expand(draws, -1), sequences)))
        counts = torch.bincount(tokens, minlength=5).float()
        assert float(((counts - draws / 5) ** 2 / (draws / 5)).sum()) < 18.5  # 4 degrees of freedom
        pairs = torch.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25).float()
        assert float(((pairs - (draws - 1) / 25) ** 2 / ((draws - 1) / 25)).sum()) < 51.2  # 24


# -- one parameter at a time -----------------------------------------------------------------------------------------

WORDS = ((4,), (2, 5), (1, 1, 6), (8, 3))
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": t} for t in (0.0, 1e-6, 0.01, 0.5, 1.0, 2.0, 100.0)],
    "top_k": [{"top_k": k} for k in (1, 2, 5, 11, 12, 10**6)],
    "top_p": [{"top_p": p} for p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1.0)],
    "min_p": [{"min_p": p} for p in (0.0, 0.01, 0.1, 0.5, 1.0)],
    "presence_penalty": [{"presence_penalty": p} for p in (-2.0, -0.3, 0.7, 2.0)],
    "frequency_penalty": [{"frequency_penalty": p} for p in (-2.0, -0.3, 0.7, 2.0)],
    "repetition_penalty": [{"repetition_penalty": p} for p in (0.5, 0.9, 1.2, 5.0)],
    "logit_bias": [{"logit_bias": b} for b in ({0: 100.0}, {3: -100.0, 4: 1.5}, {11: 0.5, 1: -0.5})],
    "allowed_token_ids": [{"allowed_token_ids": a} for a in ([7], [1, 2, 3], [11, 0, 0], list(range(12)))],
    "min_tokens": [{"min_tokens": m, "stop_token_ids": [3, 8], "max_tokens": 50} for m in (0, 1, 4, 5, 6, 50)],
    "bad_words": [{}],
    "all": [
        {
            "temperature": 0.8,
            "top_k": 6,
            "top_p": 0.8,
            "min_p": 0.02,
            "presence_penalty": 0.4,
            "frequency_penalty": -0.2,
            "repetition_penalty": 1.4,
            "logit_bias": {2: 3.0, 9: -1.0},
            "allowed_token_ids": [0, 1, 2, 3, 5, 8, 9, 10],
            "min_tokens": 6,
            "max_tokens": 50,
        }
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_parameter_chooses_as_its_slow_reference_in_a_batch_with_all_others(name: str) -> None:
    numbers = random.Random(len(name))
    sequences = []
    for settings in SETTINGS[name]:
        for temperature in (0.0, 1.0, 1.3):
            for _ in range(12):
                params = SamplingParams(**({"temperature": temperature, "seed": numbers.randrange(2**63)} | settings))
                generated = numbers.choices(range(12), k=numbers.choice([0, 1, 2, 5, 9]))
                generated += numbers.choice([[], [2], [1, 1], [8]])
                words = WORDS if name in ("bad_words", "all") else ()
                prompt = numbers.choices(range(12), k=3)
                sequences.append(sequence_of(params, prompt=prompt, generated=generated, bad_words=words))
    others = [
        sequence_of(SamplingParams(**settings), generated=[1, 2, 2])
        for group in SETTINGS.values()
        for settings in group
    ]
    numbers.shuffle(both := sequences + others)
    logits = random_logits(len(both), 12, seed=len(name))
    found = sample(logits, both)
    assert not found.faults
    assert tokens_of(found) == [slow_token(row, one) for row, one in zip(logits.tolist(), both, strict=True)]
    # And each alone, without its neighbours.
    for row in range(0, len(both), 17):
        assert sample(logits[row : row + 1], [both[row]]).token_ids == [found.token_ids[row]]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.5}, 1),  # 0.5 is reached by the first: the smallest set is that one
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.8}, 3),
        ({"top_p": 0.01}, 1),
        ({"min_p": 0.3}, 2),
        ({"min_p": 0.5, "top_p": 0.99}, 2),
        ({"top_k": 4, "top_p": 0.9}, 3),  # 0.5, 0.25, 0.125, 0.0625 of 0.9375: 0.93 is reached by the third
        ({}, 8),
    ],
)
def test_truncation_keeps_exactly_the_likeliest_tokens(settings: dict[str, Any], kept: int) -> None:
    """Probabilities 1/2, 1/4, ... 1/128, 1/128, shuffled; 1500 draws see all that are kept."""
    order = torch.tensor([5, 0, 7, 2, 6, 1, 4, 3])
    logits = torch.full((8,), math.log(2.0)) * torch.tensor([7.0, 6, 5, 4, 3, 2, 1, 1])
    row = torch.empty(8).index_copy_(0, order, logits)
    sequences = [sequence_of(SamplingParams(seed=seed, **settings)) for seed in range(1500)]
    found = set(tokens_of(sample(row.expand(1500, -1), sequences)))
    likeliest = order.tolist()
    assert found in [set(likeliest[:kept]), set(likeliest[: kept - 1]) | {likeliest[7]}]


def test_temperature_makes_the_odds_a_power_of_what_they_were() -> None:
    row = torch.tensor([0.0, math.log(3.0)])
    for temperature, odds in ((0.5, 9.0), (1.0, 3.0), (2.0, math.sqrt(3.0))):
        sequences = [sequence_of(SamplingParams(seed=seed, temperature=temperature)) for seed in range(5000)]
        ones = sum(tokens_of(sample(row.expand(5000, -1), sequences)))
        expected = 5000 * odds / (1 + odds)
        deviation = math.sqrt(expected / (1 + odds))
        assert abs(ones - expected) < 3.5 * deviation


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution_whatever_is_done_to_it() -> None:
    logits = random_logits(4, 30, seed=8)
    twisted = {"temperature": 3.0, "top_k": 2, "repetition_penalty": 2.0, "logit_bias": {5: 50.0}, "seed": 1}
    sequences = [
        sequence_of(SamplingParams(logprobs=5, **twisted), prompt=[1, 2, 5]),
        sequence_of(SamplingParams(temperature=0, logprobs=0)),
        sequence_of(SamplingParams(temperature=0)),
        sequence_of(SamplingParams(seed=3, logprobs=64)),
    ]
    found = sample(logits, sequences)
    assert found.token_ids[0] == [5]
    assert found.logprobs is not None
    assert found.logprobs[2] is None
    tokens = tokens_of(found)
    for row, count in ((0, 5), (1, 0), (3, 30)):
        raw = [math.log(p) for p in slow_softmax(logits[row].double().tolist())]
        ranked = sorted(range(30), key=lambda token: -raw[token])
        of_row = found.logprobs[row]
        assert of_row is not None
        (logprobs,) = of_row
        assert next(iter(logprobs)) == tokens[row]
        assert set(logprobs) == {tokens[row], *ranked[:count]}
        for token, logprob in logprobs.items():
            assert logprob.logprob == pytest.approx(raw[token], abs=1e-5)
            assert logprob.rank == ranked.index(token) + 1


def test_prompt_logprobs_are_those_of_each_rows_next_prompt_token() -> None:
    logits = random_logits(1 + 3 + 2, 30, seed=9)
    first = sequence_of(SamplingParams(prompt_logprobs=2, temperature=0.0), prompt=[3, 4, 5, 6, 7, 8])
    second = sequence_of(SamplingParams(prompt_logprobs=0, seed=1), prompt=[20, 21, 22])
    rows = (PromptRows(first, 2, range(0, 3)), PromptRows(second, 0, range(4, 6)))
    found = sample(logits, [first, second], sampled=np.array([1]), prompt_rows=rows)
    assert len(found.token_ids) == 1
    wanted = [[6, 7, 8], [21, 22]]
    assert [[next(iter(entry)) for entry in entries] for entries in found.prompt_logprobs] == wanted
    for offset, entries in zip((1, 4), found.prompt_logprobs, strict=True):
        for row, entry in enumerate(entries):
            raw = [math.log(p) for p in slow_softmax(logits[offset + row].double().tolist())]
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(raw[token], abs=1e-5)
                assert logprob.rank == sorted(raw, reverse=True).index(raw[token]) + 1
    assert {len(entry) for entry in found.prompt_logprobs[0]} <= {2, 3}
    assert {len(entry) for entry in found.prompt_logprobs[1]} == {1}


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all excluded"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_that_is_not_finite_fails_alone_and_its_neighbours_draw_the_same_bits(poison: Any, greedy: bool) -> None:
    logits = random_logits(5, 40, seed=11)
    kinds = [{"temperature": 0}] * 5 if greedy else [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {}]
    sequences = [sequence_of(SamplingParams(seed=n, **kind)) for n, kind in enumerate(kinds)]
    healthy = sample(logits, sequences, greedy=greedy)
    assert not healthy.faults
    broken = logits.clone()
    if poison == "all excluded":
        broken[2] = -math.inf
    else:
        broken[2, 17] = poison
    found = sample(broken, sequences, greedy=greedy)
    assert found.faults == {2: FAULT}
    assert [t for row, t in enumerate(found.token_ids) if row != 2] == [
        t for row, t in enumerate(healthy.token_ids) if row != 2
    ]


def test_minus_infinity_excludes_a_token_and_harms_nobody() -> None:
    logits = random_logits(2, 10, seed=12)
    logits[0, :9] = -math.inf
    found = sample(logits, [sequence_of(SamplingParams(seed=n, top_p=0.9)) for n in range(2)])
    assert not found.faults
    assert found.token_ids[0] == [9]


def test_a_row_of_which_every_token_is_excluded_by_its_own_parameters_fails_alone() -> None:
    logits = random_logits(2, 12, seed=13)
    impossible = SamplingParams(allowed_token_ids=[EOS], min_tokens=3, seed=1)
    found = sample(logits, [sequence_of(impossible), sequence_of(SamplingParams(seed=2))])
    assert found.faults == {0: FAULT}


# -- through the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    directory: Path = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    raw = random_weights(ModelConfig.from_directory(directory), dtype=torch.float32, device="cpu", seed=1)
    weights = LlamaWeights(raw.embedding * 50, raw.layers, raw.final_norm, raw.lm_head * 25)

    def make(**changes: Any) -> Engine:
        arguments = {"weights": weights, "skip_tokenizer_init": True, "max_num_seqs": 4, "device": "cpu"} | changes
        return Engine(directory, **arguments)

    return make


@pytest.mark.parametrize("rows", [4, 512])
def test_prompt_logprobs_equal_the_logprobs_of_forcing_each_prompt_token(
    make_engine: Callable[..., Engine], rows: int
) -> None:
    prompt = [5, 17, 3, 44, 21, 8, 8, 30, 12]
    engine = make_engine(max_num_batched_tokens=rows, block_size=2)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    engine.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # the prefix is cached, and must not be used
    output = engine.generate(prompt, params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        forced = SamplingParams(allowed_token_ids=[prompt[position]], logprobs=0, max_tokens=1, seed=0)
        answer = engine.generate(prompt[:position], forced, use_tqdm=False)[0].outputs[0]
        assert answer.token_ids == [prompt[position]]
        assert answer.logprobs is not None
        assert answer.cumulative_logprob == answer.logprobs[0][prompt[position]].logprob
        logprobs = output.prompt_logprobs[position]
        assert logprobs is not None
        assert logprobs[prompt[position]].logprob == pytest.approx(answer.cumulative_logprob, abs=1e-4)
        assert min(logprob.rank for logprob in logprobs.values()) == 1


def test_a_preempted_prompt_has_its_logprobs_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=2)
    prompt = list(range(2, 19))
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    alone = make_engine().generate(prompt, params, use_tqdm=False)[0]
    engine.add_request("a", prompt, params)
    outputs = []
    for step in range(40):
        if step in (2, 5) and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[0])
        outputs += engine.step()
        if not engine.has_unfinished_requests():
            break
    found = outputs[-1].prompt_logprobs
    assert found is not None
    assert alone.prompt_logprobs is not None
    assert [None if row is None else list(row) for row in found] == [None, *([token] for token in prompt[1:])]
    for row, other in zip(found[1:], alone.prompt_logprobs[1:], strict=True):
        assert row is not None
        assert other is not None
        (one,), (two,) = row.values(), other.values()
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_sequences_of_a_request_differ_and_a_seed_repeats_them_anywhere(make_engine: Callable[..., Engine]) -> None:
    params = SamplingParams(n=5, temperature=1.5, seed=123, max_tokens=12)
    answers = []
    for engine in (make_engine(), make_engine(seed=9, max_num_batched_tokens=4)):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=2), use_tqdm=False)
        output = engine.generate([7, 8, 9], params, use_tqdm=False)[0]
        answers.append([completion.token_ids for completion in output.outputs])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 5


def test_without_a_seed_the_engines_own_decides_and_no_two_requests_draw_alike(
    make_engine: Callable[..., Engine],
) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12)

    def answers(seed: int) -> list[tuple[int, ...]]:
        outputs = make_engine(seed=seed).generate([[7, 8, 9]] * 4, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    assert answers(0) == answers(0)
    assert len(set(answers(0))) == 4
    assert set(answers(0)) & set(answers(100)) == set()
