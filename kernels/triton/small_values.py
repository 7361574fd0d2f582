"""Stored int8, 4-bit and e4m3 values as floats, on the device: two values an instruction where floats are of 16 bits.

A byte becomes the low mantissa of a float whose exponent makes its unit 1: 0x4300 is 128 in bfloat16 and 0x6400 is 1024
in float16, and whatever stands in their lowest bits adds to that. Then 128 or 1024 is taken off again, together with
what the stored form has added. All of it is exact. What does so is PTX, since Triton computes in bfloat16 one value at
a time and by way of float32; in the interpreter, and for float32, a like way through the mantissa of 2^23 serves.
For e4m3 devices have an instruction, but not to bfloat16, whose bits are put together here.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@tl.core.builtin
def has_ptx(_semantic=None):
    """Whether what is being compiled is for a back end that takes PTX. Not for the interpreter."""
    return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


def _ptx(*lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 a, b, c, d, e, f; " + " ".join(f"{line};" for line in lines) + " }")


# Bfloat16 has 7 bits of mantissa, so the sign bit goes into a float of its own: 0x4300 is 128 and 0x4380 is 256.
INT8_TO_BF16: tl.constexpr = _ptx(
    "prmt.b32 a, $2, 0x43434343, 0x4140",
    "prmt.b32 b, $2, 0x43434343, 0x4342",
    "and.b32 c, a, 0xff80ff80",
    "and.b32 d, b, 0xff80ff80",
    "and.b32 a, a, 0xff7fff7f",
    "and.b32 b, b, 0xff7fff7f",
    "mov.b32 e, 0xbf80bf80",
    "fma.rn.bf16x2 $0, c, e, a",
    "fma.rn.bf16x2 $1, d, e, b",
)
INT8_TO_FP16: tl.constexpr = _ptx(
    "xor.b32 c, $2, 0x80808080",
    "prmt.b32 a, c, 0x64646464, 0x4140",
    "prmt.b32 b, c, 0x64646464, 0x4342",
    "mov.b32 e, 0x64806480",
    "sub.rn.f16x2 $0, a, e",
    "sub.rn.f16x2 $1, b, e",
)


def _int4_to(magic: str, *minus: str) -> tl.constexpr:
    """Low values to the first two results, high ones to the others; `minus` takes off what is in `e`."""
    lines = ["shr.b32 f, $4, 4"]
    for source, results in (("$4", ("$0", "$1")), ("f", ("$2", "$3"))):
        for result, bytes_of_pair in zip(results, ("0x4140", "0x4342"), strict=True):
            lines += [f"prmt.b32 a, {source}, {magic}, {bytes_of_pair}", "and.b32 a, a, 0xff0fff0f"]
            lines += [line.format(result=result) for line in minus]
    return _ptx(*lines)


INT4_TO_BF16: tl.constexpr = _int4_to(
    "0x43434343", "mov.b32 d, 0x3f803f80", "mov.b32 e, 0xc308c308", "fma.rn.bf16x2 {result}, a, d, e"
)
INT4_TO_FP16: tl.constexpr = _int4_to("0x64646464", "mov.b32 e, 0x64086408", "sub.rn.f16x2 {result}, a, e")
# Of sign, four bits of exponent and three of mantissa the bits stand in a bfloat16 as they do in the byte, four places
# lower; that is 2^120 too small, of denormal values too.
FP8_TO_BF16: tl.constexpr = _ptx(
    "and.b32 a, $2, 0x80808080",
    "shr.b32 b, $2, 4",
    "and.b32 b, b, 0x07070707",
    "or.b32 a, a, b",
    "shl.b32 b, $2, 4",
    "and.b32 b, b, 0xf0f0f0f0",
    "prmt.b32 c, b, a, 0x5140",
    "prmt.b32 d, b, a, 0x7362",
    "mov.b32 e, 0x7b807b80",
    "mov.b32 f, 0x80008000",
    "fma.rn.bf16x2 $0, c, e, f",
    "fma.rn.bf16x2 $1, d, e, f",
)
FP8_TO_FP16: tl.constexpr = _ptx(
    ".reg .b16 low, high",
    "mov.b32 {low, high}, $2",
    "cvt.rn.f16x2.e4m3x2 $0, low",
    "cvt.rn.f16x2.e4m3x2 $1, high",
)


@triton.jit
def int8_values(stored, dtype: tl.constexpr):
    """int8 as `dtype`, or as float32, which rounds to it without loss."""
    if (dtype == tl.float32) or (_INTERPRETED or not has_ptx()):
        raised = stored.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080  # the sign bit's place counts +128
        return raised.to(tl.float32, bitcast=True) - 8388736.0
    elif dtype == tl.bfloat16:  # noqa: RET505 (Triton needs the other branches of a constexpr)
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [stored], tl.bfloat16, True, 4)
    else:
        return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [stored], tl.float16, True, 4)


@triton.jit
def int4_values(packed, dtype: tl.constexpr):
    """The low and the high four bits of uint8, each less 8, as `dtype`, or as float32, which rounds without loss."""
    if (dtype == tl.float32) or (_INTERPRETED or not has_ptx()):
        low = ((packed.to(tl.int32) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        high = (((packed >> 4).to(tl.int32)) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        return low, high
    elif dtype == tl.bfloat16:  # noqa: RET505
        return tl.inline_asm_elementwise(INT4_TO_BF16, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        return tl.inline_asm_elementwise(INT4_TO_FP16, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), True, 4)


@triton.jit
def byte_values(stored, dtype: tl.constexpr):
    """int8, or finite e4m3, as `dtype`, or as float32, which rounds to it without loss."""
    if stored.dtype == tl.int8:
        return int8_values(stored, dtype)
    elif (dtype == tl.float32) or (_INTERPRETED or not has_ptx()):  # noqa: RET505
        return stored.to(tl.float32)
    elif dtype == tl.bfloat16:
        words = stored.to(tl.uint8, bitcast=True)
        return tl.inline_asm_elementwise(FP8_TO_BF16, "=r,=r,r", [words], tl.bfloat16, True, 4)
    else:
        words = stored.to(tl.uint8, bitcast=True)
        return tl.inline_asm_elementwise(FP8_TO_FP16, "=r,=r,r", [words], tl.float16, True, 4)


@triton.jit
def fp8_values(stored, dtype: tl.constexpr):
    """e4m3 as float16 or float32, in the layout in which it was loaded."""
    if (dtype != tl.float16) or (_INTERPRETED or not has_ptx()):
        return stored.to(dtype)
    else:  # noqa: RET505
        # Said not to be pure, so that it stays where it stands. Triton would move it behind the change to the layout of
        # tensor cores, whose columns of values in 8 bits come from shared memory byte by byte; of float16 an
        # instruction turns whole tiles.
        words = stored.to(tl.uint8, bitcast=True)
        return tl.inline_asm_elementwise(FP8_TO_FP16, "=r,=r,r", [words], tl.float16, False, 4)
