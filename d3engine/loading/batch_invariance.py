"""What an engine must be, and what a request may ask of it, where no bit of an answer may depend on its neighbours.

The one idea: every position is computed by one path, on a GPU by Triton's kernels in tiles of one size, on a CPU by the
native library, whose sums have one order. What would leave that path, or make others leave it, is refused by name.
"""

from __future__ import annotations

from d3engine.depth import DepthPolicy
from d3engine.environment import KERNELS
from d3engine.errors import require
from d3engine.loading.settings import EngineSettings

ARGUMENT = "batch_invariant"


def check_engine(settings: EngineSettings) -> None:
    """Refuse `batch_invariant=True` on what has no such path; raises `InvalidValueError`."""
    ranks = settings.tensor_parallel_size
    require(ranks == 1, ARGUMENT, True, f"False beside tensor_parallel_size={ranks}, whose sums have no fixed order")
    if settings.executor == "native":
        rope = settings.config.rope.rope_type
        require(rope != "dynamic", ARGUMENT, True, "False on a CPU for rope of the type dynamic")
        return
    kernels = KERNELS.read()
    is_triton = kernels == "triton" or (kernels == "auto" and settings.device.type == "cuda")
    needed = "dtype float32, no enforce_eager, a D3ENGINE_KERNELS with it"
    allowed = f"False on a CPU without the native library ({needed})"
    require(is_triton or settings.device.type != "cpu", ARGUMENT, True, allowed)
    require(is_triton, ARGUMENT, True, f"False beside {KERNELS.name}={kernels}: by Triton's kernels alone")


def check_policy(settings: EngineSettings, policy: DepthPolicy) -> None:
    """Refuse a policy that such an engine cannot run; raises `InvalidValueError` that names `depth`.

    They are what the native library leaves to PyTorch, whose sums depend on how many rows there are.
    """
    if not settings.batch_invariant:
        return
    layers = settings.config.num_layers
    exits = policy.exit_rule(layers) is not None
    require(
        not exits, "depth", policy, f"without early exits beside {ARGUMENT}=True, as PyTorch sums up their confidences"
    )
    if settings.executor == "native":
        drafts = policy.draft_rule(layers) is not None
        require(not drafts, "depth", policy, f"one that drafts nothing beside {ARGUMENT}=True on a CPU")
        fills = policy.schedule(layers).on_skip
        allowed = f'with on_skip="none" or "copy" beside {ARGUMENT}=True on a CPU'
        require(fills != "project", "depth", policy, allowed)
