"""Outputs of one request that wait for their reader, as one: however slow he is, only one waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from d3engine.request.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True)
class _Part:
    """Deltas of one sequence; `last` has what they do not add up to."""

    last: CompletionOutput
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)

    def add(self, delta: CompletionOutput) -> None:
        self.last = delta
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.depths += delta.depths
        self.logprobs += delta.logprobs or ()

    def whole(self) -> CompletionOutput:
        last = self.last  # named in full, since `dataclasses.replace` takes several times as long
        return CompletionOutput(
            index=last.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            cumulative_logprob=last.cumulative_logprob,
            logprobs=None if last.logprobs is None else self.logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            depths=self.depths,
        )


class MergedDeltas:
    """Deltas of one request, joined at a cost that grows with what they hold and not with how many there are."""

    def __init__(self, first: RequestOutput) -> None:
        self._last = first
        self._parts: dict[int, _Part] = {}
        self._prompt_logprobs: list[Any] = []
        self.add(first)

    def add(self, delta: RequestOutput) -> None:
        self._last = delta
        self._prompt_logprobs += delta.prompt_logprobs or ()
        for output in delta.outputs:
            if output.index not in self._parts:
                self._parts[output.index] = _Part(output)
            self._parts[output.index].add(output)

    def whole(self) -> RequestOutput:
        """One delta that holds what all of them did."""
        last = self._last
        return RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt,
            prompt_token_ids=last.prompt_token_ids,
            prompt_logprobs=None if last.prompt_logprobs is None else self._prompt_logprobs,
            outputs=[self._parts[index].whole() for index in sorted(self._parts)],
            finished=last.finished,
            metrics=last.metrics,
            num_cached_tokens=last.num_cached_tokens,
        )
