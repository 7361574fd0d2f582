"""A request's fault ends that request alone, an engine's fault the engine."""

from collections.abc import Callable
from typing import Any

import pytest
from fixture_types import MakeEngine
from scripted import executor_of, greedy, likeliest
from stepping import finish

from d3engine import Engine, EngineDeadError, RequestOutput, SamplingParams
from d3engine.text.detokenizer import TokenTexts


def test_a_request_whose_logits_are_not_finite_ends_alone(make_engine: MakeEngine) -> None:
    def run(poisoned: bool) -> dict[str, RequestOutput]:
        engine = make_engine()
        for name in ("a", "b", "c"):
            engine.add_request(name, f"prompt {name}", SamplingParams(temperature=3.0, seed=1, max_tokens=12))
        engine.step()
        engine.step()
        if poisoned:
            executor_of(engine).poisoned = {"b"}
        last = finish(engine)
        assert engine.stats().kv_blocks_in_use == 0
        return last

    healthy, broken = run(False), run(True)
    assert broken["b"].outputs[0].finish_reason == "abort"
    assert "not finite" in str(broken["b"].outputs[0].stop_reason)
    assert broken["b"].outputs[0].token_ids == healthy["b"].outputs[0].token_ids[:2]
    for name in ("a", "c"):
        assert broken[name].outputs == healthy[name].outputs


class FailingTokenizer:
    """The demo's tokenizer, which fails at one id."""

    def __init__(self, real: Any, at: int) -> None:
        self._real, self._at = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def convert_id_to_token(self, token: int) -> Any:
        if token == self._at:
            raise RuntimeError("this id has no piece")
        return self._real.convert_id_to_token(token)

    def decode(self, tokens: list[int], **options: Any) -> Any:
        if self._at in tokens:
            raise RuntimeError("this id has no text")
        return self._real.decode(tokens, **options)


def with_failing_tokenizer(engine: Engine, at: int) -> Engine:
    outputs, failing = engine._in_flight.outputs, FailingTokenizer(engine.tokenizer, at)
    outputs._tokenizer, outputs._texts = failing, TokenTexts(failing)  # type: ignore[assignment, arg-type]
    return engine


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_request_whose_text_cannot_be_made_ends_alone(make_engine: MakeEngine, logprobs: Any) -> None:
    scripts = {(11,): [100, 101, 150, 102, 103, 104], (12,): [100, 101, 102, 103, 104, 105]}
    params = greedy(6, logprobs=logprobs)
    healthy = make_engine(scripts).generate([[12], [12]], params, use_tqdm=False)
    engine = with_failing_tokenizer(make_engine(scripts), at=150)
    outputs = engine.generate(
        [[12], [11], [12]], [params, likeliest(6, logprobs=logprobs, n=2), params], use_tqdm=False
    )
    for completion in outputs[1].outputs:
        assert completion.finish_reason == "abort"
        assert "RuntimeError: this id has no" in str(completion.stop_reason)
    assert [outputs[0].outputs, outputs[2].outputs] == [healthy[0].outputs, healthy[1].outputs]
    assert engine.stats().kv_blocks_in_use == 0
    assert engine.generate([12], params, use_tqdm=False)[0].outputs == healthy[0].outputs


def test_text_failing_at_the_last_token_is_an_abort(make_engine: MakeEngine) -> None:
    """Text that fails at the last token is an abort and no length."""
    engine = with_failing_tokenizer(make_engine({(11,): [100, 101, 150]}), at=150)
    output = engine.generate([11], greedy(3), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "abort"
    assert "this id has no piece" in str(output.stop_reason)


def test_prompt_logprobs_without_text_end_their_request_alone(make_engine: MakeEngine) -> None:
    """Prompt logprobs whose text cannot be made end their request alone."""
    engine = with_failing_tokenizer(make_engine(), at=150)
    params = [greedy(3, prompt_logprobs=0), greedy(3)]
    outputs = engine.generate([[5, 150, 6], [5, 6]], params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length"]


def test_an_encoder_that_fails_queues_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> list[int]:
        raise RuntimeError("no ids for this")

    engine.add_request("other", "a", greedy(3))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.tokenizer, "encode", fail)
        with pytest.raises(RuntimeError, match="no ids"):
            engine.generate(["a", "b"], greedy(), use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 1
    assert finish(engine)["other"].outputs[0].token_ids == [100, 101, 102]


def test_engine_fault_ends_the_engine_for_every_caller(engine: Engine) -> None:
    """An engine fault ends the engine for every caller with its cause."""
    engine.add_request("waits", "a", greedy(5))
    stream = engine.stream("b", greedy(5))
    next(stream)
    fault = ZeroDivisionError("in the middle of a layer")
    executor_of(engine).fault = fault
    assert [output.request_id for output in engine.step()] == ["waits"]  # its output of the step before
    with pytest.raises(EngineDeadError, match="in the middle of a layer") as caught:
        engine.step()
    assert caught.value.__cause__ is fault
    executor_of(engine).fault = None  # the engine does not come back although the cause is gone
    calls: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.generate("a", greedy(), use_tqdm=False),
        lambda: engine.prepare("a"),
        lambda: engine.add_request("new", "a", greedy()),
        lambda: engine.stream("a", greedy()),
        lambda: next(stream),
        engine.step,
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="in the middle of a layer") as caught:
            call()
        assert caught.value.__cause__ is fault
    engine.close()


def test_interrupt_keeps_its_name_and_ends_the_engine(engine: Engine) -> None:
    """An interrupt keeps its name and leaves no engine to go on with."""
    engine.add_request("a", "a", greedy(5))
    executor_of(engine).fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()
