"""The types of the functions that fixtures of `tests/conftest.py` hand out."""

from collections.abc import Callable

from batches import Request
from tiny_models import TinyLlama
from torch import Tensor

from d3engine import Engine
from d3engine.request.outputs import RequestOutput

MakeEngine = Callable[..., Engine]
MakeLlama = Callable[..., TinyLlama]
MakePrompts = Callable[..., list[list[int]]]
Randn = Callable[..., Tensor]
Solo = Callable[[Request], RequestOutput]
