"""d3engine: a Llama inference engine in which a skipped layer is time and memory really saved.

The public names are imported on first use, so that `d3engine schedule` needs no torch and `import d3engine` is quick.
"""

from __future__ import annotations

import os
import sys
import warnings

# `python -m d3engine` searches the working directory first, which may be the folder of a downloaded model.
if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].partition(".")[0].endswith("d3engine")
    and not sys.flags.safe_path
    and sys.path[0] != os.path.dirname(os.path.dirname(__file__))
):
    del sys.path[0]

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3engine.utils.version import __version__

_PACKAGE = Path(__file__).parent
if not (_PACKAGE / "kernels").is_dir() and (_PACKAGE.parent / "kernels").is_dir():
    # A bare checkout: `kernels/` and `weights_tools/` stand beside the package, not yet mapped into it by an install.
    __path__.append(str(_PACKAGE.parent))

_PUBLIC = {
    "Engine": "d3engine.engine.engine",
    "EngineConfig": "d3engine.engine.engine_config",
    "AsyncEngine": "d3engine.async_engine.async_engine",
    "LLM": "d3engine.integrations.llm",
    "LoRARequest": "d3engine.request.params",
    "SamplingParams": "d3engine.request.params",
    "StructuredOutputsParams": "d3engine.request.params",
    "Capture": "d3engine.request.hidden_states",
    "Steer": "d3engine.request.hidden_states",
    "HiddenStates": "d3engine.request.hidden_states",
    "RequestOutput": "d3engine.request.outputs",
    "RequestOutputKind": "d3engine.request.params",
    "CompletionOutput": "d3engine.request.outputs",
    "FullDepth": "d3engine.depth",
    "D3": "d3engine.depth",
    "SkipDecode": "d3engine.depth",
    "UnifiedSkip": "d3engine.depth",
    "EvenSkip": "d3engine.depth",
    "FixedSkip": "d3engine.depth",
    "Distilled": "d3engine.depth",
    "Width": "d3engine.depth",
    "TailSkip": "d3engine.depth",
    "EarlyExit": "d3engine.depth",
    "LayerTable": "d3engine.depth",
    "Nested": "d3engine.depth",
    "SelfSpeculative": "d3engine.depth",
    "Lossless": "d3engine.depth",
    "DraftAndVerify": "d3engine.depth",
    "Speculative": "d3engine.depth",
    "PromptLookup": "d3engine.depth",
    "Immediate": "d3engine.request.admission",
    "IntervalAdmission": "d3engine.request.admission",
    "D3EngineError": "d3engine.errors",
    "InvalidValueError": "d3engine.errors",
    "ModelFormatError": "d3engine.errors",
    "EngineBusyError": "d3engine.errors",
    "EngineClosedError": "d3engine.errors",
    "EngineDeadError": "d3engine.errors",
}
_RENAMED = {"Waves": "IntervalAdmission"}
"""Old names, which work for one release."""

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine as AsyncEngine
    from d3engine.depth import D3 as D3
    from d3engine.depth import Distilled as Distilled
    from d3engine.depth import DraftAndVerify as DraftAndVerify
    from d3engine.depth import EarlyExit as EarlyExit
    from d3engine.depth import EvenSkip as EvenSkip
    from d3engine.depth import FixedSkip as FixedSkip
    from d3engine.depth import FullDepth as FullDepth
    from d3engine.depth import LayerTable as LayerTable
    from d3engine.depth import Lossless as Lossless
    from d3engine.depth import Nested as Nested
    from d3engine.depth import PromptLookup as PromptLookup
    from d3engine.depth import SelfSpeculative as SelfSpeculative
    from d3engine.depth import SkipDecode as SkipDecode
    from d3engine.depth import Speculative as Speculative
    from d3engine.depth import TailSkip as TailSkip
    from d3engine.depth import UnifiedSkip as UnifiedSkip
    from d3engine.depth import Width as Width
    from d3engine.engine.engine import Engine as Engine
    from d3engine.engine.engine_config import EngineConfig as EngineConfig
    from d3engine.errors import D3EngineError as D3EngineError
    from d3engine.errors import EngineBusyError as EngineBusyError
    from d3engine.errors import EngineClosedError as EngineClosedError
    from d3engine.errors import EngineDeadError as EngineDeadError
    from d3engine.errors import InvalidValueError as InvalidValueError
    from d3engine.errors import ModelFormatError as ModelFormatError
    from d3engine.integrations.llm import LLM as LLM
    from d3engine.request.admission import Immediate as Immediate
    from d3engine.request.admission import IntervalAdmission as IntervalAdmission
    from d3engine.request.hidden_states import Capture as Capture
    from d3engine.request.hidden_states import HiddenStates as HiddenStates
    from d3engine.request.hidden_states import Steer as Steer
    from d3engine.request.outputs import CompletionOutput as CompletionOutput
    from d3engine.request.outputs import RequestOutput as RequestOutput
    from d3engine.request.params import LoRARequest as LoRARequest
    from d3engine.request.params import RequestOutputKind as RequestOutputKind
    from d3engine.request.params import SamplingParams as SamplingParams
    from d3engine.request.params import StructuredOutputsParams as StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"d3engine.{name} is now d3engine.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _PUBLIC:
        raise AttributeError(f"module 'd3engine' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
