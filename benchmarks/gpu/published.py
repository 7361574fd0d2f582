"""Decode speeds of others on real GPUs, to set beside what `benchmarks.gpu_model` computes: its upper bound."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A figure at batch 1. `share` is of the bandwidth that the GPU's maker names, by the bytes of the weights."""

    weights: str
    share: float
    figure: str
    source: str


PUBLISHED = (
    Published("bf16", 0.78, "Llama-1B on an H100, one kernel for all layers", "Hazy Research, megakernel"),
    Published("bf16", 0.75, "Llama-3-8B on an H100, 6.4 ms a step", "SGLang, torch.compile"),
    Published("bf16", 0.65, "Llama-3-8B on an H100, 7.4 ms a step", "SGLang, CUDA graphs"),
    Published("bf16", 0.82, "Llama-2-7B on an A100, 105 tokens/s", "gpt-fast"),
    Published("bf16", 0.57, "Llama-3-8B on an H100, 127 tokens/s", "torchao"),
    Published("int8", 0.45, "Llama-3-8B on an H100, 199 tokens/s", "torchao"),
    Published("int4", 0.30, "Llama-3-8B on an H100, 241 tokens/s", "torchao"),
)


def published_shares(weights: str, batch: int) -> tuple[float, float] | None:
    """The lowest and the highest share of others; None where no figure is known."""
    shares = [one.share for one in PUBLISHED if one.weights == weights]
    return (min(shares), max(shares)) if shares and batch == 1 else None
