"""What a kernel is compiled for: Triton's back end, the architecture, and what these have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

PROGRAMMATIC_CAPABILITY = 90
"""The first compute capability, without its point, that has programmatic dependent launch."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU, as Triton names it: a compute capability without its point, or an AMD architecture.

    `shared_kib` is the shared memory that one program may have.
    """

    backend: str  # "cuda" or "hip"
    arch: int | str
    shared_kib: int

    @property
    def is_cuda(self) -> bool:
        return self.backend == "cuda"

    @property
    def name(self) -> str:
        """As its maker writes it: 8.9, gfx942."""
        return f"{self.arch / 10}" if isinstance(self.arch, int) else self.arch

    @property
    def has_programmatic_launch(self) -> bool:
        """Whether a kernel may begin before the one in front of it has ended."""
        return isinstance(self.arch, int) and self.arch >= PROGRAMMATIC_CAPABILITY

    def has(self, capability: int) -> bool:
        """Whether it has the instructions of this compute capability; AMD's are Triton's business."""
        return not isinstance(self.arch, int) or self.arch >= capability

    def stages(self, wanted: int) -> int:
        """Stages of a pipeline, of `wanted` ones for devices with 99 KiB of shared memory or more."""
        return wanted if self.shared_kib >= _USUAL_SHARED else min(wanted, _FEW_STAGES)

    def options(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The compile options of `wanted` that its back end has: Triton raises for others."""
        return wanted if self.is_cuda else {name: wanted[name] for name in wanted if name not in _CUDA_OPTIONS}


_CUDA_OPTIONS = ("maxnreg", "launch_pdl")
_USUAL_SHARED = 99  # of consumer cards by NVIDIA, which every tile fits
_FEW_STAGES = 2  # AMD's pipeline keeps one tile less in shared memory than it has stages

# CUDA C++ Programming Guide, table of technical specifications; AMD's instruction set guides, LDS of a compute unit.
_SHARED: dict[int | str, int] = {
    **{80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99},
    **{"gfx942": 64, "gfx950": 160},
}
TARGETS = {arch: Target("cuda" if isinstance(arch, int) else "hip", arch, kib) for arch, kib in _SHARED.items()}
"""Those whose kernels can be inspected."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200, which stand for any device where there is none to ask."""

NO_TARGET = Target("cuda", 0, _USUAL_SHARED)
"""Where nothing is compiled: in the interpreter, and for tensors without memory."""


def target_of(device: torch.device) -> Target:
    """The target that a GPU is; `NO_TARGET` for other devices."""
    if device.type != "cuda":
        return NO_TARGET
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        return TARGETS.get(name, Target("hip", name, 64))
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    return TARGETS.get(capability, Target("cuda", capability, _USUAL_SHARED))


@cache
def processors_of(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU, or compute units."""
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
