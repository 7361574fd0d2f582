"""JSON answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A 200 with this content as JSON."""
    return Response(orjson.dumps(content), headers=dict(headers or {}), media_type="application/json")
