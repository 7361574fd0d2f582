"""Health: what /health and /ready say, from what can be known without asking the engine.

The one idea: an engine that hangs cannot answer, so nothing here waits for it. It leaves a heartbeat, and whoever asks
compares that with the clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

from d3engine.async_engine.client import Heartbeat
from d3engine.server.guards.traffic import AdmissionControl

Status: TypeAlias = Literal["ok", "dead", "hung", "draining", "full"]


@dataclass(frozen=True, slots=True)
class Health:
    """What is so now, and why."""

    status: Status
    reason: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def health(heartbeat: Heartbeat, traffic: AdmissionControl, stall_seconds: float, now: float | None = None) -> Health:
    """Whether the server can be expected to answer; `now` is a time of `time.monotonic()`, without one it is now."""
    if heartbeat.error is not None:
        return Health("dead", "the engine has ended after a fault of its own")
    since = (time.monotonic() if now is None else now) - heartbeat.last_turn
    if heartbeat.is_working and since > stall_seconds:
        return Health("hung", f"requests wait, and no step has ended for {since:.0f} seconds")
    if traffic.is_draining:
        return Health("draining", "the server is shutting down, and finishes what it has begun")
    return Health("ok")


def readiness(healthy: Health, traffic: AdmissionControl) -> Health:
    """Whether it would take a request now."""
    if healthy.is_ok and traffic.is_full:
        return Health("full", "the queue is full")
    return healthy
