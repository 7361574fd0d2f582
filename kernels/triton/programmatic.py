"""Whether a device takes programmatic dependent launch and keeps the order: it is asked before an engine relies on it.

That no kernel reads before its wait what another has written, nor writes before it, is seen in the machine code
(`kernels/inspect.py`). What is not seen there is whether driver and device take such launches, in a capture too. So
kernels are launched in a chain, each of which reads from afar what the one before has written, beside one of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from d3engine.kernels.triton.launches import Launch, ModelShape, meta

PROGRAMS = 1024
"""Programs a kernel of the chain: as many as stay together on a large device, so that the next ones do begin early."""

LINKS = 16
REPEATS = 3
_BLOCK = 256

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, and returns what repeats its launches, such as a graph of them."""


def fault(device: torch.device, record: Record) -> str | None:
    """What is wrong with programmatic launches on `device`, which must have them; None if nothing is.

    `launches.PROGRAMMATIC` must be on, as for any such launch. Never raises.
    """
    try:
        return None if _keeps_order(device, record) else "a kernel did not wait for the one before it"
    except Exception as error:  # of the driver, torch or the compiler: whatever it is, kernels run without
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _keeps_order(device: torch.device, record: Record) -> bool:
    size = PROGRAMS * _BLOCK
    values = torch.arange(size, dtype=torch.int32, device=device)
    others, ones = torch.empty_like(values), torch.ones_like(values)

    def chain() -> None:
        for link in range(LINKS):
            source, target = (values, others) if link % 2 == 0 else (others, values)
            link_launch(source, target, ones).run()
        values.add_(1)

    repeat = record(chain)
    for _ in range(REPEATS):
        repeat()
    expected = torch.arange(size, dtype=torch.int32) + (1 + REPEATS) * (LINKS + 1)
    return torch.equal(values.cpu(), expected)


def link_launch(source: Tensor, target: Tensor, ones: Tensor) -> Launch:
    """`target` becomes `source` backwards, plus `ones`, which no launch writes: all int32 [PROGRAMS * _BLOCK]."""
    arguments = {
        "source_ptr": source,
        "target_ptr": target,
        "ones_ptr": ones,
        "SIZE": source.shape[0],
        "BLOCK": _BLOCK,
    }
    return Launch(_link_kernel, (triton.cdiv(source.shape[0], _BLOCK),), arguments)


def launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What `kernels/inspect.py` compiles, the same for every model."""
    values = meta(PROGRAMS * _BLOCK, dtype=torch.int32)
    yield "link", link_launch(values, values, values)


@triton.jit
def _link_kernel(
    source_ptr,
    target_ptr,
    ones_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # As products do with their weights: what no launch writes is read before the wait.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
    ones = tl.load(ones_ptr + at, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    tl.store(target_ptr + at, tl.load(source_ptr + SIZE - 1 - at) + ones)
