"""The form in which an engine holds its matrices: as they are in the file, or as what decodes reads them best.

The one idea: whatever the form, the values are the same, so it is chosen by speed and memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from d3engine.environment import NATIVE_ISA
from d3engine.kernels.lanes import in_lanes
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.library import reads_lanes
from d3engine.kernels.native.packing import packed
from d3engine.loading.settings import EngineSettings


def matrix_form(settings: EngineSettings) -> Callable[[Weight], Weight] | None:
    """What makes of a matrix the form that it is held in; None: all stay as they are.

    On a CPU bfloat16 is packed where the user asks for it (`kernels/packed.py`), and int8 and int4 lie in lanes where
    the native library reads them so (`kernels/lanes.py`).
    """
    changes: list[Callable[[Weight], Weight]] = []
    if settings.pack_weights:
        changes.append(packed)
    if settings.executor == "native" and reads_lanes(NATIVE_ISA.read()):
        changes.append(in_lanes)
    return (lambda matrix: reduce(lambda held, change: change(held), changes, matrix)) if changes else None
