"""Outputs that waited for their reader are handed on as one that has all that they had; those that come at once are not
joined until he has left them waiting."""

from dataclasses import fields
from typing import Any

import pytest

from d3engine.async_engine.dispatcher import MergedDeltas, ReplyFuture, ThreadWaker
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


def test_deltas_are_read_one_by_one_and_joined_where_left() -> None:
    """Deltas of one time are read one by one, and joined where the reader left them."""
    slot, deltas = ReplyFuture(1, ThreadWaker(), merges=True), [delta(n) for n in range(6)]
    assert slot.put(deltas[:2])
    assert slot.take() == deltas[:2]
    assert slot.put(deltas[2:4])
    assert not slot.put(deltas[4:5])
    assert not slot.put(deltas[5:])
    (joined,) = slot.take()
    assert joined.outputs[0].token_ids == [2, 3, 4, 5]
    assert slot.take() == []


def test_of_replies_that_are_no_deltas_the_latest_counts() -> None:
    slot = ReplyFuture(1, ThreadWaker())
    assert slot.put([delta(1), delta(2)])
    assert [reply.outputs[0].token_ids for reply in slot.take()] == [[2]]
    assert slot.put([delta(3)])
    assert not slot.put([delta(4)])
    assert [reply.outputs[0].token_ids for reply in slot.take()] == [[4]]


@pytest.mark.parametrize("merges", [False, True])
def test_error_is_raised_last_behind_what_came_before_it(merges: bool) -> None:
    """An error is raised behind what came before it, and is the last."""
    slot = ReplyFuture(1, ThreadWaker(), merges=merges)
    assert slot.put([delta(1)])
    assert not slot.put([ZeroDivisionError()])
    assert not slot.put([delta(2)])
    assert [reply.outputs[0].token_ids for reply in slot.take()] == [[1]]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            slot.take()
    alone = ReplyFuture(2, ThreadWaker(), merges=merges)
    assert alone.put([ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        alone.take()
