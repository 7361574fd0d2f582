"""What every route needs: the engine, the settings, and the ids under which the model is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from d3engine.server.model_ids import ModelIds
from d3engine.server.settings import ServerSettings


@dataclass(frozen=True)
class Served:
    """One engine behind one app."""

    client: Any
    settings: ServerSettings
    models: ModelIds


def served_by(request: Request) -> Served:
    """The engine behind the app that took this request."""
    return cast(Served, request.app.state.served)
