"""The one answer of a chat, for interfaces that know no choices: what is new of it, read from the chat's own writer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from d3engine.request.outputs import RequestOutput
from d3engine.server.answering.chat import ChatWriter
from d3engine.server.answering.job import RequestContext
from d3engine.server.answering.running import outputs_of
from d3engine.server.answering.tally import UsageCounter
from d3engine.server.shapes.answers import DepthsOfTokens, ToolCallDelta
from d3engine.server.shapes.requests import ChatRequest


@dataclass(frozen=True)
class Delta:
    """What is new of the answer.

    `calls` are pieces of the functions that it calls: of a whole answer each is whole, otherwise its id and its name
    come first and then its arguments as they are written. `finish_reason` is None until it ends; `stop_reason` is then
    the string or the token that ended it, if one did. `d3ext` is there where the request asks for it.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    d3ext: dict[str, DepthsOfTokens]
    calls: Sequence[ToolCallDelta] = ()


class SingleAnswer:
    """Runs a chat of one answer; `tally` counts what has come of it so far."""

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        self._job = job
        self._writer = ChatWriter(job)
        self.tally = UsageCounter(job)

    async def whole(self) -> Delta:
        """All of it. Raises `RequestError`."""
        found = None
        async with aclosing(outputs_of(self._job)) as outputs:
            async for _, output in outputs:
                self.tally.add(0, output)
                found = output
        assert found is not None  # every request has a last output
        (choice,) = self._writer.choices([found])
        whole: list[ToolCallDelta] = [
            {"index": index, "id": call["id"], "type": "function", "function": {**call["function"]}}
            for index, call in enumerate(choice["message"].get("tool_calls", ()))
        ]
        return _news(choice["message"]["content"] or "", whole, found, _depths(choice.get("d3ext")))

    def news(self, output: RequestOutput) -> Delta | None:
        """What a delta brings, if that is worth telling."""
        self.tally.add(0, output)
        chunks = self._writer.chunks(0, output)
        if not chunks:
            return None
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        return _news(text, calls, output, _depths(chunks[-1].get("d3ext")))


def _news(text: str, calls: Sequence[ToolCallDelta], output: RequestOutput, d3ext: dict[str, DepthsOfTokens]) -> Delta:
    (answer,) = output.outputs
    return Delta(text, answer.finish_reason, answer.stop_reason, d3ext, calls)


def _depths(found: DepthsOfTokens | None) -> dict[str, DepthsOfTokens]:
    return {} if found is None else {"d3ext": found}
