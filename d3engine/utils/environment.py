"""The environment variables that d3engine reads: how something is computed or where it is
kept, never what, and one secret."""

from __future__ import annotations

import os
from dataclasses import dataclass

from d3engine.errors import require


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, its allowed values, and what it says; the first value is what holds without it."""

    name: str
    allowed: tuple[str, ...]
    meaning: str
    takes_any: bool = False
    """Whether `allowed` holds only its default: a path can be anything."""

    def read(self) -> str:
        """The variable's value now; raises `InvalidValueError` for one that is not allowed."""
        value = os.environ.get(self.name, self.allowed[0])
        require(self.takes_any or value in self.allowed, self.name, value, f"one of {', '.join(self.allowed)}")
        return value


KERNELS = Variable(
    "D3ENGINE_KERNELS",
    ("auto", "reference", "native", "triton"),
    "which implementation of the operations runs: auto is triton on a GPU, and on a CPU native for decoding, where the"
    " library was built, beside reference; triton on a CPU needs TRITON_INTERPRET=1",
)

NATIVE_ISA = Variable(
    "D3ENGINE_NATIVE_ISA",
    ("auto", "amx", "avx512-vnni", "avx512", "avx2", "neon", "portable"),
    "which instruction set the native library uses; auto is the best that the machine has",
)

PROGRAMMATIC_LAUNCH = Variable(
    "D3ENGINE_PROGRAMMATIC_LAUNCH",
    ("auto", "off"),
    "whether a kernel may begin while the one before it ends; auto is on GPUs of compute capability 9.0 and later that"
    " have passed a trial when the engine starts",
)

CACHE = Variable(
    "D3ENGINE_CACHE",
    ("",),
    "the folder that fetched models are kept in; without it d3engine's own in XDG_CACHE_HOME, or in ~/.cache",
    takes_any=True,
)

API_KEY = Variable(
    "D3ENGINE_API_KEY",
    ("",),
    "the key that `d3engine serve` asks its clients for, or several with commas between them",
    takes_any=True,
)

VARIABLES = (KERNELS, NATIVE_ISA, PROGRAMMATIC_LAUNCH, CACHE, API_KEY)
