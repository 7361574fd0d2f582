"""The PTX that makes floats of stored small values, run here instruction by instruction for every byte there is.
Triton's interpreter does not know PTX, so nothing else runs it where there is no GPU."""

import re
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from d3engine.kernels.triton import block_values, small_values
from d3engine.kernels.triton.launches import BLOCKS

BYTES = torch.arange(256)
WORDS = BYTES | BYTES.roll(-64) << 8 | BYTES.roll(-128) << 16 | BYTES.roll(-192) << 24  # every byte in every place
E4M3 = BYTES.to(torch.uint8).view(torch.float8_e4m3fn).double()
SIGNED = BYTES.to(torch.uint8).view(torch.int8).double()


def run(ptx: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The registers, 32 bits each in int64, after the lines of `ptx`."""
    registers = dict(inputs)
    for line in ptx.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(" ", 1)
        if halves := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest):  # a word into registers of 16 bits
            registers |= {halves[1]: registers[halves[3]] & 65535, halves[2]: registers[halves[3]] >> 16}
            continue
        target, *sources = re.split(r",\s*", rest)
        registers[target] = step(name, [registers[s] if s in registers else torch.tensor(int(s, 0)) for s in sources])
    return registers


def step(name: str, sources: list[Tensor]) -> Tensor:
    """One instruction, as the PTX ISA defines it."""
    first, *others = sources
    if name == "mov.b32":
        return first
    if name == "and.b32":
        return first & others[0]
    if name == "xor.b32":
        return first ^ others[0]
    if name == "or.b32":
        return first | others[0]
    if name == "shl.b32":
        return first << others[0] & 0xFFFFFFFF
    if name == "shr.b32":
        return first >> others[0]
    if name == "prmt.b32":
        both = first | others[0] << 32
        places = [int(others[1]) >> 4 * nth & 7 for nth in range(4)]
        return sum((both >> 8 * place & 255) << 8 * nth for nth, place in enumerate(places))  # type: ignore[return-value]
    if name == "cvt.rn.f16x2.e4m3x2":
        return as_word([(first >> 8 * nth & 255).to(torch.uint8).view(torch.float8_e4m3fn).double() for nth in (0, 1)])
    dtype = torch.bfloat16 if "bf16x2" in name else torch.float16
    halves = [[halved.double() for halved in as_floats(source, dtype)] for source in sources]
    if name.startswith("fma.rn."):
        return as_word([a * b + c for a, b, c in zip(*halves, strict=True)], dtype)
    assert name.startswith("sub.rn.")
    return as_word([a - b for a, b in zip(*halves, strict=True)], dtype)


def as_floats(word: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, high = (word & 65535), word >> 16 & 65535
    return low.to(torch.uint16).view(dtype), high.to(torch.uint16).view(dtype)


def as_word(halves: list[Tensor], dtype: torch.dtype = torch.float16) -> Tensor:
    low, high = (half.to(dtype).view(torch.uint16).long() for half in halves)
    return low | high << 16


def floats(registers: dict[str, Tensor], names: tuple[str, ...], dtype: torch.dtype) -> list[Tensor]:
    """The values of the bytes, in the order of memory."""
    return [half.double() for name in names for half in as_floats(registers[name], dtype)]


LOW, HIGH = (BYTES & 15) - 8, (BYTES >> 4) - 8
VALUES = {"INT8": [SIGNED], "INT4": [LOW.double(), HIGH.double()], "FP8": [E4M3]}  # a byte has one or two


@pytest.mark.parametrize(("form", "dtype"), [("BF16", torch.bfloat16), ("FP16", torch.float16)])
@pytest.mark.parametrize("kind", VALUES)
def test_every_value_of_a_byte_becomes_the_same_float(kind: str, form: str, dtype: torch.dtype) -> None:
    """Also zeros of both signs; NaN in 8 bits is none in bfloat16."""
    done = run(getattr(small_values, f"{kind}_TO_{form}").value, {"$4" if kind == "INT4" else "$2": WORDS})
    for half, values in enumerate(VALUES[kind]):
        for nth, found in enumerate(floats(done, (f"${2 * half}", f"${2 * half + 1}"), dtype)):
            wanted = values.roll(-64 * nth)
            finite = wanted.isfinite()
            assert torch.equal(found[finite], wanted[finite])
            assert torch.equal(found[finite].signbit(), wanted[finite].signbit())
            assert form == "BF16" or torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("type_name", [name for name in BLOCKS if block_values._fifth_word(name) < 0])
def test_every_code_of_a_block_becomes_its_float(type_name: str) -> None:
    """2^23 and the code: with its further bits, and what is signed as if it had an offset."""
    further = WORDS.roll(37)
    runs, mask = block_values.runs_of(type_name), block_values._more_mask(type_name)
    for tile, nth in product(range(block_values.tiles_of(type_name, 256)), range(runs)):
        of_block = block_values.run_column(type_name, tile, nth) % 256 // 32
        place = block_values._more_place(type_name, of_block)
        done = run(block_values._to_floats(type_name, nth, place), {"$4": WORDS, "$5": further})
        for byte in range(4):
            stored, more = WORDS >> 8 * byte & 255, further >> 8 * byte & 255
            code = stored >> 4 * nth & 15 if runs == 2 else stored ^ (128 if type_name == "Q8_0" else 0)
            assert torch.equal(done[f"${byte}"], 0x4B000000 | code | (more >> place & mask) << 4)
