"""`d3engine serve`, which tells by which steps its requests came, so that the engine alone can be given the same."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from d3engine import Engine
from d3engine.cli import main as d3engine
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput


class Arrivals:
    """Requests that came before each step; `take` hands them out and begins anew."""

    def __init__(self) -> None:
        self._waiting = 0
        self._by_step: list[int] = []

    def add(self) -> None:
        """A request has come."""
        self._waiting += 1

    def took(self, steps: int) -> None:
        """`steps` steps have been taken at once since requests came."""
        self._by_step += [self._waiting] + [0] * (steps - 1)
        self._waiting = 0

    def take(self) -> list[int]:
        """The number before each of the steps since it was last asked."""
        taken, self._by_step = self._by_step, []
        return taken


def record(arrivals: Arrivals) -> None:
    """Have every engine of this process count."""
    add, step = Engine.add, Engine.step

    def counted_add(self: Engine, prepared: EngineRequest) -> str:
        arrivals.add()
        return add(self, prepared)

    def counted_step(self: Engine, *, at_once: bool = False) -> list[RequestOutput]:
        before = self.scheduler.counters.steps
        outputs = step(self, at_once=at_once)
        arrivals.took(max(1, self.scheduler.counters.steps - before))
        return outputs

    engine: Any = Engine
    engine.add, engine.step = counted_add, counted_step


def answer(arrivals: Arrivals) -> None:
    """A line for each that comes."""
    for _ in sys.stdin:
        print(json.dumps(arrivals.take()), flush=True)


if __name__ == "__main__":
    arrivals = Arrivals()
    record(arrivals)
    threading.Thread(target=answer, args=(arrivals,), daemon=True).start()
    sys.argv[0:1] = ["d3engine", "serve"]
    d3engine()
