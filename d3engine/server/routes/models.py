"""GET /v1/models and /v1/models/{id}: the model, and what it is called at other depths."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from d3engine.server.answers import json_response
from d3engine.server.served import served_by


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": served_by(request).models.cards()})


async def show_model(request: Request) -> Response:
    """The card of one id, which may hold slashes."""
    return json_response(served_by(request).models.card(request.path_params["name"]))
