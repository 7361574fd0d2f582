"""One launch compiled without a GPU, and what its PTX and machine code say of it.

What `inspect.py` and the benchmarks ask: registers, shared memory, bytes in flight, instructions a byte. How these are
read off the machine code is in `machine_code.py`; here are the compiler and the tool that disassembles.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
import zlib
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from d3engine.kernels.machine_code import (
    LATENCY,
    barriers_of_the_last,
    before_the_wait,
    bytes_in_flight,
    instructions_a_byte,
    programs_a_processor,
    read_once,
    waits_before_streaming,
)
from d3engine.kernels.target import PROCESSORS, TARGETS

if TYPE_CHECKING:
    from d3engine.kernels.triton.launches import Launch

TRITON_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
}
_ALIGNMENT = 16  # bytes for pointers, multiples for integers: what Triton specializes on


def needs(launch: Launch, arch: int | str) -> dict[str, Any]:
    """What `launch` needs on the target `arch`, by `Usage`'s names."""
    target, compiled = TARGETS[arch], compile_launch(launch, arch)
    if not target.is_cuda:
        return _needs_of_amd(compiled)
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    widths = load_widths(ptx)
    total = sum(width * count for width, count in widths.items())
    resources = _resources(compiled.asm["cubin"])
    in_flight = per_byte = 0.0
    barriers = waits = barriers_before = 0
    if launch.streams:
        sass = _cuobjdump("--dump-sass", compiled.asm["cubin"])  # takes as long as compiling, so for nothing else
        fit = programs_a_processor(resources["REG"], shared, launch.num_warps, target.shared_kib * 1024)
        programs = min(fit, -(-math.prod(launch.grid) // PROCESSORS))
        once = read_once(ptx)
        in_flight = (
            32 * launch.num_warps * programs * bytes_in_flight(sass, LATENCY, launch.rounds, launch.loads_before) * once
        )
        per_byte = instructions_a_byte(sass) / once
        if launch.turns:
            barriers = barriers_of_the_last(sass, launch.turns)
            waits, barriers_before = waits_before_streaming(sass)
    has_wait = bool(launch.for_target(target)[0].get("PDL"))
    return {
        "registers": resources["REG"],
        "stack": resources["STACK"],
        "local": resources["LOCAL"],
        "shared": shared,
        "streams": launch.streams,
        "in_flight": int(in_flight),
        "instructions": round(per_byte, 3),
        "barriers": barriers,
        "waits": waits,
        "barriers_before": barriers_before,
        "too_early": tuple(before_the_wait(ptx)) if has_wait else (),
        "widest_load": max(widths, default=0),
        "wide_loads": 16 * widths.get(16, 0) / total if total else 0.0,
    }


def _needs_of_amd(compiled: Any) -> dict[str, Any]:
    """What the assembler's own notes say; nothing is known of bytes in flight."""
    notes = dict(
        re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", compiled.asm["amdgcn"])
    )
    return {
        "registers": int(notes["vgpr_count"]),
        "stack": int(notes["private_segment_fixed_size"]),
        "local": 4 * int(notes["vgpr_spill_count"]),
        "shared": compiled.metadata.shared,
        "widest_load": 0,
        "wide_loads": 0.0,
    }


def machine_code_of(launch: Launch, arch: int) -> str:
    """The SASS of `launch` for compute capability `arch`, as cuobjdump prints it."""
    return _cuobjdump("--dump-sass", compile_launch(launch, arch).asm["cubin"])


def compile_launch(launch: Launch, arch: int | str) -> Any:
    """Triton's compiled kernel of `launch` for one of `TARGETS`: 90 is Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes, options = specialization(launch, arch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    backend = TARGETS[arch].backend
    return triton.compile(source, target=GPUTarget(backend, arch, 32 if backend == "cuda" else 64), options=options)


def specialization(
    launch: Launch, arch: int | str
) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any], dict[str, Any]]:
    """Signature, constants, attributes and compile options, as the JIT would derive them.

    Constexprs and None are constants, integers equal to 1 too, and pointers and integers divisible by 16 are marked so
    (the launcher's tensors are taken to be aligned, as torch allocates them).
    """
    arguments, options = launch.for_target(TARGETS[arch])
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        specialized = not parameter.do_not_specialize
        aligned = specialized and not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TRITON_NAMES[value.dtype]
            if aligned:
                attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if aligned and value % _ALIGNMENT == 0:
                attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    return signature, constants, attributes, options


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


def _resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and more of the one function in `cubin`."""
    usage = _cuobjdump("--dump-resource-usage", cubin)
    fields = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    if not {"REG", "STACK", "LOCAL"} <= fields.keys():
        raise RuntimeError(f"cuobjdump's answer has no REG, STACK and LOCAL: {usage!r}")
    return fields


def _cuobjdump(option: str, cubin: bytes) -> str:
    """What the tool says of `cubin`; kept in Triton's cache, as an inspection that was cut off goes on from there."""
    from triton.runtime.cache import get_cache_manager

    tool = _find_cuobjdump()
    cache, name = get_cache_manager(sha256(tool.encode() + cubin).hexdigest()), f"cuobjdump{option}.z"
    if (kept := cache.get_file(name)) is not None:
        return zlib.decompress(Path(kept).read_bytes()).decode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        answer = subprocess.run([tool, option, str(path)], capture_output=True, text=True, check=True).stdout
    cache.put(zlib.compress(answer.encode()), name)
    return answer


def _find_cuobjdump() -> str:
    """The tool inside the Triton package, else the one on the path."""
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(own) if own.is_file() else shutil.which("cuobjdump")
    if found is None:
        raise RuntimeError("cuobjdump is neither in the triton package nor on the path: install triton or CUDA")
    return found
