"""What is told of depth, where a request asks for it (`return_depths`): `d3ext`, by token and over the request."""

from __future__ import annotations

from typing import Any

from d3engine.depth import Schedule
from d3engine.request.outputs import RequestOutput
from d3engine.request.prepared import EngineRequest
from d3engine.server.answering.job import RequestContext
from d3engine.server.shapes.answers import DepthSummary


class DepthCount:
    """The layers that the tokens of one request ran."""

    def __init__(self, job: RequestContext[Any]) -> None:
        self._job = job
        self._layers = 0
        self._tokens: dict[tuple[int, int], int] = {}
        self._first: float | None = None
        self._last: float | None = None

    def add(self, number: int, output: RequestOutput) -> None:
        """Take in what is new of the choices of the prompt of this number."""
        for answer in output.outputs:
            self._layers += sum(answer.depths)
            key = number, answer.index
            self._tokens[key] = self._tokens.get(key, 0) + len(answer.depths)
        first, last = output.metrics.first_token_time, output.metrics.last_token_time
        if first is not None and last is not None:
            self._first = first if self._first is None else min(self._first, first)
            self._last = last if self._last is None else max(self._last, last)

    def summary(self) -> DepthSummary:
        num_layers = self._job.served.client.config.num_layers
        tokens = sum(self._tokens.values())
        saved = [self._blocks_saved(self._job.prepared[number], length) for (number, _), length in self._tokens.items()]
        return {
            "policy": self._job.policy.describe(),
            "certified": self._job.served.certification.covers(self._job.policy),
            "num_layers": num_layers,
            "mean_layers": self._layers / tokens if tokens else None,
            "layers_run": self._layers,
            "layers_saved": num_layers * tokens - self._layers,
            "kv_bytes_saved": sum(saved) * self._job.served.client.settings.block_bytes,
            "decode_seconds": None if self._first is None or self._last is None else self._last - self._first,
        }

    def _blocks_saved(self, prepared: EngineRequest, length: int) -> int:
        """Blocks that a sequence did not hold at its end although full depth would, of `length` generated tokens."""
        if prepared.draft_rule is not None or length == 0:
            return 0
        size = self._job.served.client.settings.block_size
        entries = len(prepared.prompt_token_ids) + length - 1  # the last token is never fed
        return layers_given_back(prepared.schedule, length) * -(-entries // size)


def layers_given_back(schedule: Schedule, step: int) -> int:
    """Layers whose entries are gone before this step: those that run no more, where nothing fills them."""
    if schedule.on_skip != "none":
        return 0
    return schedule.num_layers - schedule.depth_at(step)
