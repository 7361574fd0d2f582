"""Codes and scales of blocks as floats, on the device: what each type of `split_blocks.py` stands for, to the bit.

A step of a product has whole blocks of 256 columns, and takes them in tiles of 32 bytes a row. These are the codes of
one run of 32 columns, or of two that share bytes. A run of a row has one scale, or two, and maybe a minimum: its values
are code x scale + minimum, rounded once, as the product fits a float32.

Of small blocks the last step may have less than 256 columns. Then the last tile is read again, where x is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d3engine.kernels.triton.small_values import has_ptx

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)

# In what follows 32 columns are a run, and 256 the largest block: in the interpreter Triton's own constants have no
# remainders.
BLOCK = 256
"""Columns of the largest blocks, of which a step has whole ones."""


@triton.constexpr_function
def runs_of(TYPE):
    """Runs that share the bytes of a tile."""
    return 1 if TYPE in ("Q8_0", "U8_32", "U8_128") else 2


@triton.constexpr_function
def tiles_of(TYPE, columns):
    """Tiles of a step of `columns` columns."""
    return columns // (32 if TYPE in ("Q8_0", "U8_32", "U8_128") else 64)


@triton.constexpr_function
def run_column(TYPE, tile, nth):
    """The first column in its step of the run `nth` of a tile."""
    if TYPE == "Q6_K":
        return tile // 2 * 128 + tile % 2 * 32 + nth * 64
    return 32 * (tile if TYPE in ("Q8_0", "U8_32", "U8_128") else 2 * tile + nth)


@triton.constexpr_function
def _block_bytes(TYPE):
    """Bytes of the codes of 256 columns, where they are no whole tiles alone; 0 for others."""
    return {"Q4_K": 128, "Q5_K": 160, "Q6_K": 192}.get(TYPE, 0)


@triton.constexpr_function
def _offset(TYPE):
    """What codes have too much."""
    return {"Q4_0": 8.0, "Q5_0": 16.0, "Q6_K": 32.0, "Q8_0": 128.0}.get(TYPE, 0.0)


@triton.constexpr_function
def _scale_columns(TYPE):
    """Columns of whole numbers that share a word; 0 for ggml's types."""
    return {"U4_32": 32, "U8_32": 32, "U4_128": 128, "U8_128": 128}.get(TYPE, 0)


@triton.constexpr_function
def _fifth_word(TYPE):
    """Which of the words of 32 columns has their fifth bits; -1 for types without such a word."""
    return {"Q5_0": 0, "Q5_1": 1}.get(TYPE, -1)


@triton.constexpr_function
def _more_mask(TYPE):
    """What more of a code lies in separate bytes: one bit or two; 0 for none."""
    return {"Q5_K": 1, "Q6_K": 3}.get(TYPE, 0)


@triton.constexpr_function
def _more_place(TYPE, of_block):
    """The first bit of that in its byte, in the run `of_block` of a block."""
    return of_block % 4 * 2 if TYPE == "Q6_K" else of_block


@triton.constexpr_function
def _to_floats(TYPE, nth, place):
    """PTX that makes of four bytes of codes 2^23 + each; `place` is the first bit of what more there is of them."""
    if TYPE == "Q8_0":
        lines = ["xor.b32 a, $4, 0x80808080"]  # what is signed becomes what has an offset
    elif runs_of(TYPE) == 1:
        lines = ["mov.b32 a, $4"]
    else:
        lines = [f"shr.b32 a, $4, {4 * nth}", "and.b32 a, a, 0x0f0f0f0f"]
    if _more_mask(TYPE):
        mask = 0x10101010 * _more_mask(TYPE)
        shift = f"shl.b32 b, $5, {4 - place}" if place <= 4 else f"shr.b32 b, $5, {place - 4}"
        lines += [shift, f"and.b32 b, b, {mask}", "or.b32 a, a, b"]
    lines += [f"prmt.b32 ${byte}, a, 0x4B000000, 0x744{byte}" for byte in range(4)]
    return "{ .reg .b32 a, b; " + " ".join(f"{line};" for line in lines) + " }"


@triton.jit
def load_codes(code_rows, TYPE: tl.constexpr, start, TILE: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """uint8 [rows, 32]: a tile of the step that begins at column `start`, of rows at `code_rows` [rows]."""
    tl.static_assert(BLOCK_K % 256 == 0, "a step has whole blocks")
    BYTES: tl.constexpr = _block_bytes(TYPE)
    if BYTES > 0:
        tl.static_assert(K % BLOCK_K == 0, "a row has whole steps")
        FIRST: tl.constexpr = 32 if TYPE == "Q5_K" else 0  # behind its fifth bits
        first = start // 256 * BYTES + (TILE // 4 * BYTES + FIRST + TILE % 4 * 32)
    else:
        COLUMNS: tl.constexpr = 32 * runs_of(TYPE)
        first = _at_most(start // COLUMNS + TILE, (K - 1) // COLUMNS, K, BLOCK_K) * 32
    return _load_tile(code_rows, first)


@triton.jit
def run_values(
    codes, code_rows, scale_rows, TYPE: tl.constexpr, start, TILE: tl.constexpr, NTH: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [rows, 32]: the run NTH of the tile whose bytes are `codes`."""
    # The number of a run in its block, of K-quants.
    OF_BLOCK: tl.constexpr = run_column(TYPE, TILE, NTH) % 256 // 32
    PLACE: tl.constexpr = _more_place(TYPE, OF_BLOCK)
    scale, minimum = _run_scales(scale_rows, TYPE, start, TILE, NTH, K, BLOCK_K)
    more = codes
    if TYPE == "Q5_K":
        more = _load_tile(code_rows, start // 256 * 160 + TILE // 4 * 160)
    elif TYPE == "Q6_K":
        more = _load_tile(code_rows, start // 256 * 192 + (TILE // 4 * 192 + 128 + TILE % 4 // 2 * 32))
    if (_fifth_word(TYPE) >= 0) or (_INTERPRETED or not has_ptx()):
        numbers = codes.to(tl.int32)
        if runs_of(TYPE) == 2:
            numbers = (numbers >> (4 * NTH)) & 15
        if _more_mask(TYPE) > 0:
            numbers |= ((more.to(tl.int32) >> PLACE) & _more_mask(TYPE)) << 4
        elif _fifth_word(TYPE) >= 0:
            WORD: tl.constexpr = _fifth_word(TYPE)
            group = _at_most(start // 32 + (2 * TILE + NTH), K // 32 - 1, K, BLOCK_K)
            fifth = tl.load(scale_rows + (group * (WORD + 1) + WORD))[:, None] >> tl.arange(0, 32)[None, :]
            numbers |= (fifth & 1) << 4
        elif TYPE == "Q8_0":
            numbers ^= 128  # what is signed becomes what has an offset
        floats = (numbers | 0x4B000000).to(tl.float32, bitcast=True)
    else:
        floats = tl.inline_asm_elementwise(
            _to_floats(TYPE, NTH, PLACE), "=r,=r,=r,=r,r,r", [codes, more], tl.float32, True, 4
        )
    values = (floats - (8388608.0 + _offset(TYPE))) * scale
    if _offset(TYPE) == 0:
        values += minimum
    return values


@triton.jit
def _run_scales(
    scale_rows, TYPE: tl.constexpr, start, TILE: tl.constexpr, NTH: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scale and minimum of a run: float32 [rows, 1], or [rows, 32] where it has two scales. None has both an offset and
    a minimum."""
    COLUMN: tl.constexpr = run_column(TYPE, TILE, NTH)
    OF_BLOCK: tl.constexpr = COLUMN % 256 // 32
    block = start // 256 + COLUMN // 256
    group = _at_most(start // 32 + COLUMN // 32, K // 32 - 1, K, BLOCK_K)  # of 32 columns
    if TYPE == "Q6_K":
        d = _half_of(tl.load(scale_rows + (K // 256 * 4 + block // 2)), block % 2 * 16)
        word = tl.load(scale_rows + (block * 4 + OF_BLOCK // 2)) >> (OF_BLOCK % 2 * 16)  # two signed bytes
        first = d * _float_of((word & 255) ^ 128, 128.0)
        second = d * _float_of(((word >> 8) & 255) ^ 128, 128.0)
        scale = tl.where((tl.arange(0, 32) < 16)[None, :], first[:, None], second[:, None])
        minimum = scale
    elif _block_bytes(TYPE) > 0:
        words = scale_rows + block * 4
        halves, scales, minima = tl.load(words), tl.load(words + 1), tl.load(words + 2)
        PLACE: tl.constexpr = 8 * (OF_BLOCK % 4)
        if OF_BLOCK < 4:
            scales = (scales >> PLACE) & 63
            minima = (minima >> PLACE) & 63
        else:  # four bits in the last word, and two above one of the first four
            low = tl.load(words + 3) >> PLACE
            scales = (low & 15) | ((scales >> (PLACE + 2)) & 48)
            minima = ((low >> 4) & 15) | ((minima >> (PLACE + 2)) & 48)
        scale = (_half_of(halves, 0) * _float_of(scales, 0.0))[:, None]
        minimum = -(_half_of(halves, 16) * _float_of(minima, 0.0))[:, None]
    elif _scale_columns(TYPE) > 0:  # a float of 24 bits, and a zero point
        word = tl.load(scale_rows + group // (_scale_columns(TYPE) // 32))
        whole = (word & -256).to(tl.float32, bitcast=True)
        scale = whole[:, None]
        minimum = -(_float_of(word & 255, 0.0) * whole)[:, None]
    elif _offset(TYPE) > 0:
        FIRST: tl.constexpr = K // 32 * (_fifth_word(TYPE) + 1)  # behind the fifth bits
        scale = _half_of(tl.load(scale_rows + (FIRST + group // 2)), group % 2 * 16)[:, None]
        minimum = scale
    else:
        word = tl.load(scale_rows + group * (2 if TYPE == "Q5_1" else 1))
        scale, minimum = _half_of(word, 0)[:, None], _half_of(word, 16)[:, None]
    return scale, minimum


@triton.jit
def _load_tile(rows, first):
    """uint8 [rows, 32] from byte `first` of each row on. Weights are read once: they need not stay in the L2 cache."""
    return tl.load(rows[:, None] + (first + tl.arange(0, 32))[None, :], eviction_policy="evict_first")


@triton.jit
def _at_most(number, last, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """`number`, or the last there is, where steps go beyond the last column."""
    if K % BLOCK_K == 0:
        return number
    else:  # noqa: RET505
        return tl.minimum(number, last)


@triton.jit
def _float_of(number, less: tl.constexpr):
    """Whole numbers from 0 to 2^23 - 1 minus another one, as float32: they become the mantissa of 2^23."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + less)


@triton.jit
def _half_of(word, place):
    """The float16 that stands in 16 bits of a word, from the bit `place` on, as float32."""
    return ((word >> place) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
