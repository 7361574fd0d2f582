"""What a request has come to so far, over all its prompts and choices: tokens and layers."""

from __future__ import annotations

from typing import Any

from d3engine.request.outputs import RequestOutput
from d3engine.server.answering.depth_extras import DepthCount
from d3engine.server.answering.job import RequestContext
from d3engine.server.shapes.answers import DepthSummary, Usage


class UsageCounter:
    """Counts over outputs, deltas or whole ones."""

    def __init__(self, job: RequestContext[Any]) -> None:
        self._prompt_tokens = sum(len(prepared.prompt_token_ids) for prepared in job.prepared)
        self._completion_tokens = 0
        self._cached = [0] * len(job.prepared)
        self._unfinished = len(job.prepared)
        self._depth = DepthCount(job) if job.asked.return_depths else None

    def add(self, number: int, output: RequestOutput) -> None:
        """Take in an output of the prompt of this number."""
        self._cached[number] = output.num_cached_tokens
        self._unfinished -= output.finished
        for answer in output.outputs:
            self._completion_tokens += len(answer.token_ids)
        if self._depth is not None:
            self._depth.add(number, output)

    @property
    def is_finished(self) -> bool:
        """Whether every prompt has had its last output."""
        return not self._unfinished

    def usage(self) -> Usage:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def depth(self) -> dict[str, DepthSummary]:
        """`d3ext` of the whole answer or the last chunk; nothing where it was not asked for."""
        return {} if self._depth is None else {"d3ext": self._depth.summary()}
