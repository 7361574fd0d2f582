"""An engine on a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from d3engine.async_engine.dispatcher import Dispatcher
from d3engine.async_engine.engine_loop import EngineLoop, Message, Stop
from d3engine.engine.engine import Engine
from d3engine.errors import EngineDeadError


class EngineThread:
    """Runs the loop of one engine; whatever ends it, its readers hear of."""

    def __init__(self, engine: Engine, before_step: Callable[[], object] | None = None) -> None:
        self.dispatcher = Dispatcher(self.send)
        self._engine = engine
        self._loop = EngineLoop(engine, self.dispatcher.deliver, before_step)
        # Python does not wait for a hung one at its end.
        self._thread = threading.Thread(target=self._run, name="d3engine", daemon=True)
        self._thread.start()

    @property
    def last_turn(self) -> float:
        return self._loop.last_turn

    def send(self, message: Message) -> None:
        self._loop.inbox.put(message)

    def stop(self, timeout: float) -> None:
        """Close the engine after the step that is running; one that takes longer than `timeout` seconds is left."""
        self.send(Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self._thread.is_alive():
            self.dispatcher.end_all(EngineDeadError(f"the engine has not ended within {timeout:g} seconds"))

    def _run(self) -> None:
        self.dispatcher.end_all(self._loop.run_to_end())
        self._engine.close()
