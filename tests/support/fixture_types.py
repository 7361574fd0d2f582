"""The types of the functions that fixtures of `tests/conftest.py` hand out."""

from collections.abc import Callable

from batches import Request
from tiny_models import TinyLlama

from d3engine import Engine
from d3engine.request.outputs import RequestOutput

MakeEngine = Callable[..., Engine]
MakeLlama = Callable[..., TinyLlama]
MakePrompts = Callable[..., list[list[int]]]
Solo = Callable[[Request], RequestOutput]
