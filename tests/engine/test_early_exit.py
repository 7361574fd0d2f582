"""Early exit gives the tokens and depths of a slow oracle on transformers' own layers, alone and in any company.
Confidences of neighbouring layers differ by far more than float32's noise here, so depths must be equal one for one."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from depth_oracle import DepthAnswer, Exit, greedy_with_exits
from fixture_types import MakeLlama, MakePrompts
from stepping import generated, greedy
from tiny_models import TinyLlama
from transformers_oracle import assert_answers, assert_same_tokens, greedy_after
from watching import watch

from d3engine import D3, Engine, EngineDeadError, FullDepth, InvalidValueError, RequestOutput, SamplingParams
from d3engine.depth import NEVER, DepthPolicy, EarlyExit, ExitRule, Schedule
from d3engine.depth.schedule import OnSkip
from d3engine.executor import early_exit
from d3engine.model.llama import Llama
from d3engine.scheduling.sequence import Sequence

LAYERS, NUM_TOKENS = 8, 20
DEEP: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "head_dim": 12}
# This model's confidences by quarters: softmax_max 0.03, 0.04, 0.06; softmax_diff 0, 0.01, 0.02; cosine 0.7, 0.8, 0.9.
RULES = {
    "softmax_max": EarlyExit(0.07),
    "softmax_diff": EarlyExit(0.03, "softmax_diff", decay=0),
    "cosine": EarlyExit(0.9, "cosine"),
    "softmax_max, each third layer from 1": EarlyExit(0.06, min_layer=1, every=3),
    "cosine, each second layer from 2": EarlyExit(0.89, "cosine", min_layer=2, every=2, decay=9),
}
AT_ONCE = {"softmax_max": EarlyExit(0.045, batch="batch_min"), "cosine": EarlyExit(0.88, "cosine", batch="batch_min")}


@pytest.fixture(scope="module")
def tiny(tiny_llama: MakeLlama) -> TinyLlama:
    return tiny_llama(**DEEP)


def oracle(
    tiny: TinyLlama, policy: EarlyExit, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> list[DepthAnswer]:
    rule = Exit(policy.confidence, policy.threshold, policy.decay, policy.min_layer, policy.every)
    batch_min = policy.batch == "batch_min"
    return greedy_with_exits(tiny.model, prompts, num_tokens, rule, policy.on_skip, batch_min=batch_min)


def params(depth: DepthPolicy | None = None, max_tokens: int = NUM_TOKENS, **changes: Any) -> SamplingParams:
    return greedy(max_tokens, depth=depth, **changes)


def run(
    tiny: TinyLlama, depth: DepthPolicy, prompts: list[list[int]], given: SamplingParams | None = None, **options: Any
) -> list[RequestOutput]:
    return generated(tiny.directory, prompts, given or params(), depth=depth, **options)


@pytest.mark.parametrize(
    ("name", "on_skip"),
    [
        *product(["softmax_max", "softmax_diff", "cosine"], ["project", "copy"]),
        ("softmax_max, each third layer from 1", "copy"),
        ("cosine, each second layer from 2", "project"),
    ],
)
def test_per_row_equals_the_oracle_alone_and_in_a_batch(
    name: str, on_skip: OnSkip, tiny: TinyLlama, make_prompts: MakePrompts
) -> None:
    policy = replace(RULES[name], on_skip=on_skip)
    prompts = make_prompts([5, 17, 1])
    expected = oracle(tiny, policy, prompts)
    assert_answers(run(tiny, policy, prompts, block_size=4), expected)
    assert_answers(run(tiny, policy, prompts[1:2], block_size=16), expected[1:2])
    depths = {depth for answer in expected for depth in answer.depths}
    assert len(depths) >= 3, "tokens that all leave at one layer would prove little"


@pytest.mark.parametrize(("name", "on_skip"), [("softmax_max", "copy"), ("cosine", "project")])
def test_batch_min_equals_the_published_rule(
    name: str, on_skip: OnSkip, tiny: TinyLlama, make_prompts: MakePrompts
) -> None:
    policy = replace(AT_ONCE[name], on_skip=on_skip)
    prompts = make_prompts([5, 17, 9])
    expected = oracle(tiny, policy, prompts)
    assert_answers(run(tiny, policy, prompts), expected)
    together = [answer.depths for answer in expected]
    assert together[0] == together[1] == together[2]
    assert len(set(together[0])) > 1
    assert oracle(tiny, replace(policy, batch="per_row"), prompts)[0].depths != together[0], (
        "company made no difference"
    )
    assert_answers(run(tiny, policy, prompts[:1]), oracle(tiny, policy, prompts[:1]))


def test_batch_min_lets_all_rows_of_a_step_leave_together(tiny: TinyLlama, make_prompts: MakePrompts) -> None:
    """Under batch_min all rows of a step leave together, late ones too."""
    waiting = make_prompts([5, 17, 9, 3, 12, 30])
    seen: dict[str, int] = {}
    together: list[set[int]] = []
    with Engine(tiny.directory, depth=AT_ONCE["softmax_max"], skip_tokenizer_init=True, max_num_seqs=3) as engine:
        for step in range(200):
            if waiting and step % 5 == 0:
                engine.add_request(str(len(waiting)), waiting.pop(), params(max_tokens=12))
            new: list[int] = []
            for output in engine.step():
                depths = output.outputs[0].depths
                new += depths[max(1, seen.get(output.request_id, 0)) :]  # the first token is the prompt pass's
                seen[output.request_id] = len(depths)
            together.append(set(new))
            engine.scheduler.check_integrity()
    assert list(seen.values()) == [12] * 6
    assert max(map(len, together)) == 1
    assert len(set().union(*together)) > 2


def test_early_exit_keeps_stops_logprobs_and_answers() -> None:
    """Stop strings, logprobs and several answers are those of the tokens that left early."""
    # On the demo model, since stop strings need text. A problem is its own invention; of an answer it is sure.
    prompt = "Question:"
    given = params(max_tokens=20, n=2, seed=1, temperature=1.0, logprobs=2, stop=".", depth=EarlyExit(0.8, min_layer=9))
    with Engine("demo") as engine:
        whole, stopped = engine.generate([prompt, prompt], [replace(given, stop=None), given], use_tqdm=False)
    for output, other in zip(stopped.outputs, whole.outputs, strict=True):
        assert (output.finish_reason, output.stop_reason) == ("stop", ".")
        assert output.text == other.text.partition(".")[0]
        count = len(output.token_ids)
        assert output.token_ids == other.token_ids[:count]
        assert output.depths == other.depths[:count]
        assert output.logprobs is not None
        assert all(row[token].logprob <= 0 for row, token in zip(output.logprobs, output.token_ids, strict=True))
    assert min(depth for output in whole.outputs for depth in output.depths) == 10
    assert whole.outputs[0].token_ids != whole.outputs[1].token_ids


def test_batch_min_binds_rows_of_equal_rules_alone(tiny: TinyLlama, make_prompts: MakePrompts) -> None:
    """Rows of another policy, or of the same options under "per_row", neither wait nor are waited for."""
    bound = AT_ONCE["softmax_max"]
    free = replace(bound, batch="per_row")
    prompts = make_prompts([5, 17, 9, 12])
    policies: list[DepthPolicy] = [bound, free, FullDepth(), bound]
    outputs = generated(tiny.directory, prompts, [params(policy) for policy in policies])
    assert_answers([outputs[0], outputs[3]], oracle(tiny, bound, [prompts[0], prompts[3]]))
    assert_answers(outputs[1:2], oracle(tiny, free, prompts[1:2]))
    deep = outputs[2].outputs[0].token_ids
    assert_same_tokens(deep, greedy_after(tiny.model, prompts[2], deep))


@pytest.mark.parametrize("confidence", ["softmax_max", "softmax_diff", "cosine"])
@pytest.mark.parametrize("batch", ["per_row", "batch_min"])
def test_a_threshold_that_no_confidence_reaches_is_full_depth(
    confidence: Any, batch: Any, tiny: TinyLlama, make_prompts: MakePrompts
) -> None:
    prompts = make_prompts([4, 21])
    for output, prompt in zip(run(tiny, EarlyExit(2, confidence, batch=batch), prompts), prompts, strict=True):
        (completion,) = output.outputs
        assert completion.depths == [LAYERS] * NUM_TOKENS
        assert_same_tokens(completion.token_ids, greedy_after(tiny.model, prompt, completion.token_ids))


def test_threshold_of_zero_leaves_after_the_first_check(tiny: TinyLlama, make_prompts: MakePrompts) -> None:
    """A threshold of zero leaves after the first checked layer."""
    (output,) = run(tiny, EarlyExit(0, min_layer=2), make_prompts([4]))
    assert output.outputs[0].depths == [LAYERS] + [3] * (NUM_TOKENS - 1)


@pytest.mark.parametrize("confidence", ["softmax_max", "softmax_diff"])
def test_exit_confidence_equal_to_threshold_leaves(
    confidence: Any, tiny: TinyLlama, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A threshold is reached by its very value, and not by the next one below."""
    seen: list[float] = []
    found = early_exit._SOFTMAX[confidence]

    def watching(logits: torch.Tensor) -> torch.Tensor:
        confidences = found(logits)
        seen.extend(confidences.double().tolist())
        return confidences

    monkeypatch.setitem(early_exit._SOFTMAX, confidence, watching)
    run(tiny, EarlyExit(2, confidence, decay=0), make_prompts([4]), params(max_tokens=2))
    largest = max(seen)
    layers = seen.index(largest) + 1
    for threshold, depth in ((largest, layers), (math.nextafter(largest, 2), LAYERS)):
        policy = EarlyExit(threshold, confidence, decay=0)
        (output,) = run(tiny, policy, make_prompts([4]), params(max_tokens=2))
        assert output.outputs[0].depths == [LAYERS, depth]


def test_min_layer_at_the_last_layer_is_full_depth(
    tiny: TinyLlama, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A min layer at the last layer is full depth and looks at nothing."""
    heads = _count_heads(monkeypatch)
    (output,) = run(tiny, EarlyExit(0, min_layer=LAYERS - 1), make_prompts([4]), enforce_eager=True)
    assert output.outputs[0].depths == [LAYERS] * NUM_TOKENS
    assert heads == [1] * NUM_TOKENS


def test_a_row_that_leaves_does_not_run_the_head_a_second_time(
    tiny: TinyLlama, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = _count_heads(monkeypatch)
    (output,) = run(tiny, RULES["softmax_max"], make_prompts([4]), enforce_eager=True)
    depths = output.outputs[0].depths
    assert sum(heads) == 1 + sum(depths[1:]), "one head after every layer that ran, the last one's the answer"
    heads.clear()
    run(tiny, RULES["cosine"], make_prompts([4]), enforce_eager=True)
    assert heads == [1] * NUM_TOKENS


def _count_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call of the LM head in PyTorch from now on."""
    return watch(monkeypatch, Llama, "logits", lambda model, hidden, *_, **__: len(hidden))


def test_a_step_in_which_nobody_may_leave_does_nothing_of_this(
    tiny: TinyLlama, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("asked for an exit")

    monkeypatch.setattr("d3engine.executor.eager.EarlyExits", refuse)
    run(tiny, D3(0.9, 0.5), make_prompts([4]))
    run(tiny, EarlyExit(0), make_prompts([4]), params(max_tokens=1))  # step 0 is the prompt pass's
    with pytest.raises(EngineDeadError, match="asked for an exit"):
        run(tiny, EarlyExit(0), make_prompts([4]), params(max_tokens=2))


def test_the_threshold_falls_over_the_requests_own_max_tokens(tiny: TinyLlama, make_prompts: MakePrompts) -> None:
    """N is what the request asks for, not what the model could hold; so a shorter request leaves earlier."""
    policy = EarlyExit(0.08, decay=15)
    prompts = make_prompts([90, 70], seed=3)
    for tokens in (12, 30):
        outputs = run(tiny, policy, prompts, params(max_tokens=tokens))
        assert_answers(outputs, oracle(tiny, policy, prompts, tokens))
    assert ExitRule("softmax_max", 0.5).threshold_at(0, 100) == 0.5
    assert ExitRule("softmax_max", 0.5).threshold_at(25, 100) == pytest.approx(0.45 + 0.05 * 0.36787944117)


@pytest.mark.parametrize("on_skip", ["project", "copy"])
def test_replay_leaves_the_entries_that_were_there(on_skip: OnSkip, tiny: TinyLlama, make_prompts: MakePrompts) -> None:
    """A replay leaves the entries that were there although it would now leave elsewhere."""
    # Under "batch_min" a token leaves where its company of that step let it; a replay has other company.
    policy = replace(AT_ONCE["softmax_max"], on_skip=on_skip)
    with Engine(tiny.directory, depth=policy, skip_tokenizer_init=True, block_size=4) as engine:
        for nth, prompt in enumerate(make_prompts([5, 17])):
            engine.add_request(str(nth), prompt, params())
        sequence = engine.scheduler._waiting.first
        while sequence.step < 15:
            engine.step()
        before, depths = entries_of(engine, sequence), list(sequence.depths)
        assert len(set(depths)) > 2
        engine.scheduler._preempt(sequence)
        while sequence.step < 17:
            engine.step()
            engine.scheduler.check_integrity()
        assert sequence.depths[:15] == depths
        torch.testing.assert_close(entries_of(engine, sequence)[:, :, : before.shape[2]], before, atol=1e-4, rtol=1e-4)


def entries_of(engine: Engine, sequence: Sequence) -> torch.Tensor:
    """All keys and values of a running sequence, [L, 2, positions, heads, channels]: a copy."""
    count = sequence.num_tokens - 1
    blocks = -(-count // engine.scheduler.cache.block_size)
    tables = torch.from_numpy(engine.scheduler.cache.tables[sequence.slot, :, :blocks].astype("int64"))
    entries = engine.executor.pool[tables].transpose(1, 2)  # [L, 2, blocks, block_size, heads, channels]
    return entries.flatten(2, 3)[:, :, :count].clone()


def test_a_pool_too_small_for_all_changes_no_token_and_no_depth(tiny: TinyLlama, make_prompts: MakePrompts) -> None:
    prompts = make_prompts([17, 5, 22, 9])
    policies: list[DepthPolicy] = [
        RULES["softmax_max"],
        replace(RULES["cosine"], on_skip="copy"),
        D3(0.9, 0.5),
        replace(RULES["softmax_diff"], on_skip="copy"),
    ]
    entry = 2 * 2 * 12 * 4  # bytes: keys and values of two heads of 12 float32
    bytes_ = LAYERS * (22 + NUM_TOKENS) * entry * 3 // 2
    with Engine(tiny.directory, skip_tokenizer_init=True, block_size=4, kv_cache_memory_bytes=bytes_) as engine:
        outputs = engine.generate(prompts, [params(policy) for policy in policies], use_tqdm=False)
        assert engine.stats().num_preemptions > 0
    for place in (0, 1, 3):
        policy = policies[place]
        assert isinstance(policy, EarlyExit)
        assert_answers([outputs[place]], oracle(tiny, policy, [prompts[place]]))


class RuleBesideASkippingSchedule(DepthPolicy):
    """A user's own policy whose schedule would leave layers out that its rule knows nothing of."""

    def schedule(self, num_layers: int) -> Schedule:
        return Schedule.nested([NEVER] * (num_layers - 1) + [3], "project")

    def exit_rule(self, num_layers: int) -> ExitRule:
        return ExitRule("softmax_max", 0.5)


class RuleThatLeavesHoles(RuleBesideASkippingSchedule):
    def schedule(self, num_layers: int) -> Schedule:
        return Schedule.nested([NEVER] * num_layers)


@pytest.mark.parametrize("policy", [RuleBesideASkippingSchedule(), RuleThatLeavesHoles()])
def test_rule_with_an_unfit_schedule_is_refused_by_name(policy: DepthPolicy, tiny: TinyLlama) -> None:
    """A rule with a schedule that it cannot work with is refused by name."""
    with pytest.raises(InvalidValueError, match=r"depth must be of full depth beside its exit rule"):
        run(tiny, policy, [[1]])
