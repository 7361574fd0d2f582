"""Every figure of the analyses against transformers' own hidden states, on tiny random models."""

from typing import Any

import numpy as np
import pytest
import torch
from configs import llama3_rope
from depth_oracle import d3, greedy_at_depth
from fixture_types import MakeLlama
from observers import observer_of
from tiny_models import random_prompts
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers_oracle import greedy

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.depth import NEVER, Distilled, LayerTable
from d3engine.errors import InvalidValueError
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.copying import Grid, Outcome, TailCopied, measure_copying
from d3engine.research.analysis.observer import Observer
from d3engine.research.analysis.saturation import (
    AnswerSaturation,
    Saturation,
    measure_flow,
    measure_perplexity,
    measure_saturation,
    saturation,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_hidden_layers": 6},
    "biases, tied, llama3 rope": {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}
    | {"tie_word_embeddings": True, "rope_parameters": llama3_rope(16, rope_theta=10_000.0)},
}

PROMPT_LENGTHS = [5, 12]
TOKENS = 9


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def model(request: pytest.FixtureRequest, tiny_llama: MakeLlama) -> Any:
    return tiny_llama(**LAYOUTS[request.param])


@pytest.fixture(scope="module")
def observer(model: Any) -> Observer:
    return observer_of(model.directory)


@pytest.fixture(scope="module")
def answered(model: Any) -> list[Answered]:
    found = []
    for prompt in random_prompts(PROMPT_LENGTHS):
        answer = greedy(model.model, prompt, TOKENS)
        depths = [model.model.config.num_hidden_layers] * TOKENS
        found.append(Answered("", prompt, answer.token_ids, answer.logprobs, depths, "", True))
    return found


@torch.inference_mode()
def hidden_states(model: LlamaForCausalLM, token_ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """transformers' residual stream before every layer and after the last [T, H] each, and each attention's output."""
    attention: list[Tensor] = []
    last: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *a: attention.append(a[2][0][0])) for layer in model.model.layers
    ]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0][0])))
    try:
        output = model(torch.tensor([token_ids]), output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [*(states[0] for states in output.hidden_states[:-1]), last[0]], attention


def test_the_observer_sees_what_transformers_computes(model: Any, observer: Observer, answered: list[Answered]) -> None:
    for one in answered:
        expected, attention = hidden_states(model.model, one.sequence)
        count = 0
        for states in observer.layers(one.sequence, len(one.prompt_ids)):
            count += 1
            assert states.num_rows == len(one.sequence)
            torch.testing.assert_close(states.before, expected[states.layer], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(states.after, expected[states.layer + 1], rtol=1e-4, atol=1e-4)
            added = states.after_attention - states.before
            torch.testing.assert_close(added, attention[states.layer], rtol=1e-3, atol=1e-3)
        assert count == len(model.model.model.layers)
        logits = observer.logits(states.after)[one.answer_rows]
        assert logits.argmax(dim=-1).tolist() == one.token_ids


def test_the_observer_sees_an_answer_at_its_own_depths(model: Any, observer: Observer) -> None:
    prompt, layers = list(range(7, 17)), len(model.model.model.layers)
    policy = D3(alpha=0.8, start=0.3)
    tokens = greedy_at_depth(model.model, prompt, TOKENS, d3(layers, 0.8, 0.3)).token_ids
    assert tokens != greedy(model.model, prompt, TOKENS).token_ids  # the depth shows
    schedule = policy.schedule(layers)
    sequence = prompt + tokens[:-1]
    for states in observer.layers(sequence, len(prompt), schedule):
        steps = range(-len(prompt) + 1, len(tokens))  # of each row; the last row of the prompt yields token 0
        runs = [bool(schedule.active(max(step, -1))[states.layer]) for step in steps]
        assert runs == [row < states.num_rows for row in range(len(sequence))]
        torch.testing.assert_close(states.after[states.num_rows :], states.before[states.num_rows :], rtol=0, atol=0)
    assert observer.logits(states.after[len(prompt) - 1 :]).argmax(dim=-1).tolist() == tokens


def test_layers_that_wake_up_again_cannot_be_observed(tiny_llama: MakeLlama) -> None:
    waking = LayerTable([[0, 1, 2], [0, 2], [0, 1, 2]]).schedule(3)
    with pytest.raises(InvalidValueError, match="schedule"):
        next(observer_of(tiny_llama().directory).layers([1, 2, 3], 1, waking))


def test_observer_refuses_a_student(tiny_llama: MakeLlama) -> None:
    """An observer has the model's own layers alone: a student's would pass for full depth."""
    schedule = Distilled(student="own.safetensors").schedule(3)
    with pytest.raises(InvalidValueError, match=r"student must be absent.*got 'own.safetensors'"):
        next(observer_of(tiny_llama().directory).layers([1, 2, 3], 1, schedule))


# -- saturation --------------------------------------------------------------------------------------------------------


def test_a_prediction_is_settled_once_it_stays() -> None:
    choices = np.array([[3, 5, 1], [4, 5, 7], [3, 5, 2], [3, 5, 7]])
    chances = np.arange(12).reshape(4, 3) / 12
    found = saturation(choices, chances)
    assert found.layers.tolist() == [3, 1, 4]  # the first is right after layer 0 too, but does not stay so
    assert found.confidence.tolist() == [chances[2, 0], chances[0, 1], chances[3, 2]]
    assert found.final_confidence.tolist() == chances[3].tolist()


def test_saturation_is_of_transformers_hidden_states(model: Any, observer: Observer, answered: list[Answered]) -> None:
    result = measure_saturation(observer, answered)
    llama, layers = model.model, len(model.model.model.layers)
    for one, found in zip(answered, result.answers, strict=True):
        states, _ = hidden_states(llama, one.sequence)
        with torch.inference_mode():
            chances = [llama.lm_head(llama.model.norm(state)).softmax(-1) for state in states[1:]]
        for place, token in enumerate(one.token_ids):
            row = len(one.prompt_ids) - 1 + place
            best = [int(chance[row].argmax()) for chance in chances]
            assert best[-1] == token
            depth = layers
            while depth > 1 and best[depth - 2] == token:
                depth -= 1
            assert found.layers[place] == depth
            assert found.confidence[place] == pytest.approx(float(chances[depth - 1][row].max()), abs=1e-4)
            assert found.final_confidence[place] == pytest.approx(float(chances[-1][row].max()), abs=1e-4)
    share = result.settled_share()
    assert (share[0], share[-1]) == (0, 1)
    everything = np.concatenate([answer.layers for answer in result.answers])
    assert np.diff(share).sum() == 1
    assert (layers - share[1:].sum() + 1) == pytest.approx(everything.mean())  # the mean is the area above the curve
    rows = result.table().rows
    assert sum(int(row[1]) for row in rows[:-1]) == int(rows[-1][1]) == len(answered) * TOKENS


# -- perplexity --------------------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_transformers_loss(model: Any, answered: list[Answered]) -> None:
    with Engine(model.directory, skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes=2**23) as engine:
        prompts = [one.prompt_ids for one in answered]
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
        outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
    own = [
        Answered("", prompt, out.token_ids, [known[token].logprob for token, known in pairs], [], "", True)
        for prompt, out in zip(prompts, outputs, strict=True)
        for pairs in [list(zip(out.token_ids, out.logprobs or [], strict=True))]
    ]
    result = measure_perplexity(own)
    losses = []
    for one in own:
        ids = torch.tensor([one.prompt_ids + one.token_ids])
        labels = ids.clone()
        labels[0, : len(one.prompt_ids)] = -100
        with torch.inference_mode():
            losses.append(float(model.model(ids, labels=labels).loss))
    assert result.at(range(TOKENS))[1] == pytest.approx(np.mean(losses), rel=1e-4)
    assert result.as_dict()["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    values, counts = result.by_step()
    assert counts.tolist() == [len(own)] * TOKENS
    assert values.mean() == pytest.approx(np.mean(losses), rel=1e-4)


def test_answers_that_end_early_count_where_they_are() -> None:
    one, other = (Answered("", [1], [2] * n, [-1.0 * n] * n, [], "", False) for n in (3, 1))
    result = measure_perplexity([one, other])
    values, counts = result.by_step()
    assert counts.tolist() == [2, 1, 1]
    assert values.tolist() == pytest.approx([2, 3, 3])
    steps = result.as_dict()["steps"]
    assert [(one["step"], one["answers"]) for one in steps] == [(0, 2), (1, 1), (2, 1)]
    assert [one["perplexity"] for one in steps] == pytest.approx([np.exp(2), np.exp(3), np.exp(3)])


def test_certainty_is_no_negative_number() -> None:
    result = measure_perplexity([Answered("", [1], [2], [0.0], [], "", True)])
    assert result.table().title.endswith("1 answer")
    assert list(result.table().rows) == [("0", "1", "1.0000", "0"), ("all", "1", "1.0000", "0")]


def test_late_tokens_are_compared_with_early_ones_of_their_text() -> None:
    """Late tokens are compared with early ones of the same text, over texts."""
    early, late, other = range(4, 16), range(32, 40), [9.0] * 16
    texts = [[1.0] * 4 + [base] * len(early) + other + [base + add] * len(late) for base, add in ((5, -1), (70, -3))]
    short = [100.0] * 32  # not in the comparison, since it has no late part
    result = measure_perplexity(
        [Answered("", [1], [2] * len(t), [-v for v in t], [], "", True) for t in [*texts, short]]
    )
    found = result.as_dict()["late_less_early"]
    assert (found["texts"], found["value"]) == (2, pytest.approx(-2))
    assert found["arm_95"] == pytest.approx(12.706, abs=0.001), "two texts, one away from their mean each"
    groups = result.as_dict()["by_step"]
    assert [one["steps"] for one in groups] == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-39"]
    assert [one["mean"] for one in groups[-2:]] == [pytest.approx((9 + 9 + 100) / 3), pytest.approx((4 + 67) / 2)]
    (note,) = result.table().notes
    assert "over 2 texts that reach them: -2.00 nats (95 %: -14.71 to +10.71)" in note
    settled = Saturation(80, [AnswerSaturation(np.array(t, dtype=int), np.array(t), np.array(t)) for t in texts])
    assert "-2.00 layers" in settled.table().notes[0]
    assert settled.table().rows[-1][2].startswith(f"{np.mean(texts):.2f} +- ")
    assert measure_perplexity([Answered("", [1], [2], [0.0], [], "", True)]).table().notes == ()


# -- copying -----------------------------------------------------------------------------------------------------------


def test_copied_layers_are_a_schedule() -> None:
    schedule = TailCopied(layers=2, from_step=4).schedule(5)
    assert schedule.cutoffs.tolist() == [NEVER, NEVER, NEVER, 4, 4]
    assert TailCopied(layers=0, from_step=1).schedule(5) == FullDepth().schedule(5)
    with pytest.raises(InvalidValueError, match=r"layers must be .*; got 6"):
        TailCopied(layers=6, from_step=1).schedule(5)


def test_copied_layers_give_tokens_of_an_oracle_that_copies_kv(tiny_llama: MakeLlama) -> None:
    """Copied layers give the tokens of an oracle that copies their KV."""
    tiny = tiny_llama(num_hidden_layers=6)
    prompt = [3, 1, 4, 1, 5, 9]
    with Engine(tiny.directory, skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes=2**23) as engine:
        for layers, step in ((0, 1), (2, 3), (3, 1)):
            params = SamplingParams(temperature=0, max_tokens=TOKENS, depth=TailCopied(layers, step))
            tokens = engine.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

            def active(now: int, layers: int = layers, step: int = step) -> set[int]:
                return set(range(6 - layers if now >= step else 6))

            assert tokens == greedy_at_depth(tiny.model, prompt, TOKENS, active, on_skip="copy").token_ids
            if layers == 0:
                assert tokens == greedy(tiny.model, prompt, TOKENS).token_ids


def test_the_grid_asks_for_every_pair_and_for_full_depth_once() -> None:
    asked: list[TailCopied] = []

    def outcome(policy: TailCopied) -> Outcome:
        asked.append(policy)
        return Outcome(answers=20, right=10 * policy.layers, cut_off=policy.from_step)

    result = measure_copying(outcome, Grid("share", 9, [4, 5] * 9 + [9, 9], [1, 2], [1, 4]))
    assert asked == [TailCopied(0, 1), TailCopied(1, 1), TailCopied(1, 4), TailCopied(2, 1), TailCopied(2, 4)]
    assert result.table().title == "share, 20 answers of at most 9 tokens"
    # Wilson's interval of 10 of 20 is known from tables. Step 4 yields the fifth token: 9 answers end before it.
    assert result.table().rows[0] == ("0 (full depth)", "-", "0.0%", "0.0% to 16.1%", "-", "1")
    assert result.table().rows[2] == ("1", "4", "50.0%", "29.9% to 70.1%", "11", "4")
    assert result.table().rows[3] == ("2", "1", "100.0%", "83.9% to 100.0%", "20", "1")
    cell = result.as_dict()["grid"][1]
    assert cell.pop("interval_95") == pytest.approx({"low": 0.299, "high": 0.701}, abs=5e-4)
    assert cell == {
        "layers_copied": 1,
        "from_step": 4,
        "answers_that_reach_step": 11,
        "right": 10,
        "share": 0.5,
        "cut_off": 4,
    }


def test_an_answer_that_ends_before_the_step_does_not_change(tiny_llama: MakeLlama) -> None:
    tiny = tiny_llama(num_hidden_layers=6)
    prompt = [3, 1, 4, 1, 5, 9]
    with Engine(tiny.directory, skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes=2**23) as engine:

        def tokens(policy: TailCopied) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=TOKENS, depth=policy)
            return engine.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

        full = tokens(TailCopied(0, 1))
        steps = range(1, len(full) + 2)
        result = measure_copying(
            lambda policy: Outcome(1, int(tokens(policy) == full), 1), Grid("same", TOKENS, [len(full)], [3], steps)
        )
    reached = [result.reaching(step) == 1 for step in steps]
    assert reached == [step < len(full) for step in steps]
    changed = [outcome.right == 0 for outcome in result.outcomes[0]]
    assert any(changed)
    assert not any(change and not reach for change, reach in zip(changed, reached, strict=True))


# -- flow --------------------------------------------------------------------------------------------------------------


def test_flow_is_that_of_transformers_hidden_states(model: Any, observer: Observer, answered: list[Answered]) -> None:
    result = measure_flow(observer, answered)
    prompts = sum(len(one.prompt_ids) - 1 for one in answered)
    assert result.tokens == (len(answered) * TOKENS, prompts)
    order = result.least_influence_first()
    assert sorted(order, key=lambda layer: 1 - result.cosine[0, 0, layer]) == order
    assert [row[1] for row in result.table().rows] == [str(order.index(layer) + 1) for layer in range(len(order))]
    for layer in range(len(model.model.model.layers)):
        pairs: dict[str, list[list[tuple[Tensor, Tensor]]]] = {part: [[], []] for part in ("block", "attention", "mlp")}
        for one in answered:
            states, attention = hidden_states(model.model, one.sequence)
            before, after = states[layer], states[layer + 1]
            middle = before + attention[layer]
            for part, (a, b) in {
                "block": (before, after),
                "attention": (before, middle),
                "mlp": (middle, after),
            }.items():
                first = len(one.prompt_ids) - 1
                pairs[part][0].append((a[first:], b[first:]))
                pairs[part][1].append((a[:first], b[:first]))
        for place, part in enumerate(pairs):
            for kind in (0, 1):
                a, b = (torch.cat(side) for side in zip(*pairs[part][kind], strict=True))
                cosine = float((a * b).sum(-1).div(a.norm(dim=-1) * b.norm(dim=-1)).mean())
                assert result.cosine[kind, place, layer] == pytest.approx(cosine, abs=1e-4)
                assert result.distance[kind, place, layer] == pytest.approx(float((a - b).norm(dim=-1).mean()), 1e-3)
