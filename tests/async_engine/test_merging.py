"""Outputs that waited for their reader are handed on as one that has all that they had."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from d3engine.async_engine.merging import MergedDeltas
from d3engine.request.outputs import CompletionOutput, RequestOutput


def filled(kind: Any, **known: Any) -> Any:
    """One with something of its own in every field, those that come later included."""
    return kind(**{field.name: known.get(field.name, object()) for field in fields(kind)})


def delta(token: int) -> RequestOutput:
    logprobs: list[Any] = [{token: object()}]
    answer = filled(
        CompletionOutput, index=0, text=f"<{token}>", token_ids=[token], logprobs=logprobs, depths=[token + 9]
    )
    output: RequestOutput = filled(RequestOutput, prompt_logprobs=[None], outputs=[answer])
    return output


def test_a_merged_delta_keeps_every_field() -> None:
    alone, first, last = delta(1), delta(1), delta(2)
    assert MergedDeltas(alone).whole() == alone
    merged = MergedDeltas(first)
    merged.add(last)
    found = merged.whole()
    (before,), (after,), (answer,) = first.outputs, last.outputs, found.outputs
    assert (answer.text, answer.token_ids, answer.depths) == ("<1><2>", [1, 2], [10, 11])
    assert answer.logprobs == [*(before.logprobs or ()), *(after.logprobs or ())]
    assert found.prompt_logprobs == [None, None]
    joined = {"text", "token_ids", "depths", "logprobs", "prompt_logprobs", "outputs"}
    for whole, latest in ((found, last), (answer, after)):
        for field in fields(whole):
            assert field.name in joined or getattr(whole, field.name) is getattr(latest, field.name), field.name
