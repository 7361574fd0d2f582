"""Sampling parameters as stacks hand them on: a mapping out of JSON, whose fields are those of `SamplingParams`.

The one idea: a field is honoured or refused by its name; and a depth is read as our server reads one, so that no
request names code or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from d3engine.async_engine.client import EngineClient
from d3engine.errors import InvalidValueError, require
from d3engine.request.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from d3engine.server.errors import RequestError
from d3engine.server.requests.sampling import DepthPolicies
from d3engine.server.settings import ServerSettings

DECIDED = ("output_kind", "detokenize")
"""What the stack decides, and no request."""

FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in DECIDED)


class FieldReader:
    """Reads the parameters of the requests to one engine.

    Args:
        client: the engine, whose defaults hold where a request says nothing.
        settings: which depths requests may ask for; those of our server without them.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings | None = None) -> None:
        self._defaults = client.default_sampling_params
        self._depths = DepthPolicies(settings or ServerSettings(model_names=("model",)), client.depth)

    def params(self, given: Mapping[str, Any], kind: RequestOutputKind, *, detokenize: bool = True) -> SamplingParams:
        """The parameters of one request; null stands for what is not said. Raises `InvalidValueError`."""
        require(isinstance(given, Mapping), "sampling parameters", given, "an object")
        for name, value in given.items():
            require(name in FIELDS, name, value, f"absent, since the sampling parameters are {', '.join(FIELDS)}")
        wanted = {name: value for name, value in given.items() if value is not None}
        if "depth" in wanted:
            wanted["depth"] = self._depth(wanted["depth"])
        if "structured_outputs" in wanted:
            wanted["structured_outputs"] = _form(wanted["structured_outputs"])
        return replace(self._defaults, **wanted, output_kind=kind, detokenize=detokenize)

    def _depth(self, asked: object) -> Any:
        require(isinstance(asked, str | Mapping), "depth", asked, 'a name, or an object with "policy"')
        try:
            return self._depths.read("", asked, None)  # type: ignore[arg-type]  # it is one of the two
        except RequestError as error:
            raise InvalidValueError("depth", asked, f"one that is allowed here ({error.message})") from None


def _form(given: object) -> StructuredOutputsParams:
    require(isinstance(given, Mapping), "structured_outputs", given, "an object")
    assert isinstance(given, Mapping)
    said = {name: value for name, value in given.items() if value is not None}
    for name, value in said.items():
        names = StructuredOutputsParams.names()
        require(name in names, f"structured_outputs.{name}", value, f"absent; there are {', '.join(names)}")
    return StructuredOutputsParams(**said)
