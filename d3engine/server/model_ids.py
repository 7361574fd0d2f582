"""The ids under which one model is served: its own, and one for each depth that the server's owner gave a name."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from d3engine.depth import DepthPolicy
from d3engine.loading.certification import Certification
from d3engine.server.errors import RequestError
from d3engine.server.settings import ServerSettings


class ModelExtra(TypedDict):
    """What is said of a model's depth."""

    num_layers: int
    depth: dict[str, object]
    calibrated: bool
    certified: bool


class ModelCard(TypedDict):
    """One entry of GET /v1/models."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    d3ext: NotRequired[ModelExtra]


class ModelIds:
    """Which ids there are, and the depth that each stands for."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        own: DepthPolicy,
        num_layers: int,
        max_model_len: int,
        certification: Certification,
        created: int,
    ) -> None:
        self.default = settings.model_names[0]
        self.aliases = dict(settings.depth_aliases)
        self._names = settings.model_names
        self._own = own
        self._num_layers = num_layers
        self._max_model_len = max_model_len
        self._certification = certification
        self._created = created

    def check(self, name: str | None) -> str:
        """The id of a request, which may leave it out. Raises `RequestError` for one that is not served."""
        if name is None:
            return self.default
        if name in self._names or name in self.aliases:
            return name
        raise no_such_model(name)

    def cards(self) -> list[ModelCard]:
        return [self.card(name) for name in (*self._names, *self.aliases)]

    def card(self, name: str) -> ModelCard:
        """The entry of one id; raises `RequestError` for one that is not served."""
        self.check(name)
        policy = self.aliases.get(name, self._own)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "d3engine",
            "root": self.default,
            "parent": self.default if name in self.aliases else None,
            "max_model_len": self._max_model_len,
            "d3ext": {
                "num_layers": self._num_layers,
                "depth": policy.describe(),
                "calibrated": self._certification.is_calibrated(policy),
                "certified": self._certification.covers(policy),
            },
        }


def no_such_model(name: str) -> RequestError:
    shown = name if len(name) <= 256 else name[:253] + "..."
    message = f"The model {shown!r} does not exist here; GET /v1/models lists those that do."
    return RequestError(404, message, param="model", code="model_not_found")
