"""Compiles the Triton kernels ahead of time and prints what they cost: no GPU is needed.

    python -m d3engine.kernels.inspect [--arch 90] [--shapes llama2-7b,llama3-8b] [--dtype bf16] [--json]

Every launch that `kernels/triton/launches.py` knows is compiled to a cubin with the specializations that the launcher
would get at run time. The exit code is 1 if a kernel uses local memory or a stack: then registers were spilled, and a
kernel whose limit is memory bandwidth pays for that twice. The interpreter's flag must be off: the two cannot share a
process.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from d3engine.kernels.triton.launches import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TRITON_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_ALIGNMENT = 16  # bytes for pointers, multiples for integers: what Triton specializes on


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled kernel needs; sizes in bytes, registers a thread."""

    shape: str
    operation: str
    label: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    stack: int
    local: int
    shared: int
    widest_load: int  # bytes of one thread's widest load from global memory
    wide_loads: float  # share of the statically loaded bytes that come in loads of 16 bytes

    @property
    def spills(self) -> bool:
        """Whether the kernel touches local memory."""
        return self.stack > 0 or self.local > 0


def main(arguments: list[str] | None = None) -> int:
    """Print a table or JSON of all launches; return 1 if any spills."""
    options = _parse(arguments)
    usages = list(inspect(options.shapes, options.arch, DTYPES[options.dtype], options.operations))
    if options.json:
        print(json.dumps([asdict(usage) | {"spills": usage.spills} for usage in usages], indent=1))
    else:
        print(_table(usages))
    return int(any(usage.spills for usage in usages))


def inspect(shapes: Iterable[str], arch: int, dtype: torch.dtype, operations: Iterable[str]) -> Iterator[Usage]:
    """Compile every registered launch of the named shapes (of `operations` only, if any) and yield what it needs.

    Raises `ValueError` for an unknown shape and `RuntimeError` where kernels cannot be compiled.
    """
    # Imported late: `--help` needs no Triton, and nothing but this module may import it without a GPU.
    import triton

    from d3engine.kernels.triton.launches import SHAPES, registered

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled in the same process")
    cuobjdump, wanted = _find_cuobjdump(), set(operations)
    for name in shapes:
        if name not in SHAPES:
            raise ValueError(f"shapes={name!r} is not allowed: one of {sorted(SHAPES)}")
        for operation, label, launch in registered(SHAPES[name], dtype):
            if wanted and operation not in wanted:
                continue
            compiled = compile_launch(launch, arch)
            yield _usage(name, operation, label, launch, compiled, cuobjdump)


def compile_launch(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel of `launch` for compute capability `arch` (90 is Hopper).

    The signature is what the JIT would derive: constexprs and None as constants, integers equal to 1 too, and pointers
    and integers divisible by 16 marked so (the launcher's tensors are taken to be aligned, as torch allocates them).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        specialized = not parameter.do_not_specialize
        aligned = specialized and not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TRITON_NAMES[value.dtype]
            if aligned:
                attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if aligned and value % _ALIGNMENT == 0:
                attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.compile_options)


def load_widths(ptx: str) -> dict[int, int]:
    """How many loads from global memory there are of each width in bytes, asynchronous copies included."""
    counts: dict[int, int] = {}
    for vector, bits in re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bfus](\d+)\s", ptx):
        width = int(vector or 1) * int(bits) // 8
        counts[width] = counts.get(width, 0) + 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^\n]*?,\s*(0x[0-9a-f]+|\d+)", ptx):
        width = int(size, 0)
        counts[width] = counts.get(width, 0) + 1
    return counts


def _usage(shape: str, operation: str, label: str, launch: Launch, compiled: Any, cuobjdump: str) -> Usage:
    widths = load_widths(compiled.asm["ptx"])
    total = sum(width * count for width, count in widths.items())
    resources = _resources(compiled.asm["cubin"], cuobjdump)
    return Usage(
        shape=shape,
        operation=operation,
        label=label,
        grid=launch.grid,
        warps=launch.num_warps,
        registers=resources["REG"],
        stack=resources["STACK"],
        local=resources["LOCAL"],
        shared=compiled.metadata.shared,
        widest_load=max(widths, default=0),
        wide_loads=16 * widths.get(16, 0) / total if total else 0.0,
    )


def _resources(cubin: bytes, cuobjdump: str) -> dict[str, int]:
    """REG, STACK, LOCAL and more of the one function in `cubin`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [cuobjdump, "--dump-resource-usage", str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", output)}
    if not {"REG", "STACK", "LOCAL"} <= fields.keys():
        raise RuntimeError(f"cuobjdump's answer has no REG, STACK and LOCAL: {output!r}")
    return fields


def _find_cuobjdump() -> str:
    """The tool inside the Triton package, else the one on the path."""
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(own) if own.is_file() else shutil.which("cuobjdump")
    if found is None:
        raise RuntimeError("cuobjdump is neither in the triton package nor on the path: install triton or CUDA")
    return found


def _table(usages: list[Usage]) -> str:
    header = ("shape", "operation", "launch", "grid", "warps", "regs", "stack", "local", "shared", "load", "16 B loads")
    rows = [
        (
            usage.shape,
            usage.operation,
            usage.label,
            "x".join(map(str, usage.grid)),
            str(usage.warps),
            str(usage.registers),
            str(usage.stack),
            str(usage.local),
            str(usage.shared),
            f"{usage.widest_load} B",
            f"{usage.wide_loads:.0%}" + (" SPILLS" if usage.spills else ""),
        )
        for usage in usages
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows])
    return "\n".join(line.rstrip() for line in lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m d3engine.kernels.inspect", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, default=90, help="compute capability without its point; 90 is Hopper")
    parser.add_argument("--shapes", type=_names, default=["llama2-7b", "llama3-8b"], help="names with commas")
    parser.add_argument("--operations", type=_names, default=[], help="names with commas; all if left out")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
