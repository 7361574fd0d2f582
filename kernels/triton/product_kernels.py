"""The one loop that all projections share, on the device: rows times a tile of weights, with the RMS norm folded in.

The sum of squares is gathered while the row passes by, and the scale is applied to the finished sums, so a norm costs
no launch. A single row is multiplied and summed without tensor cores, whose tiles would stay empty.

What a tile of weights holds follows from its pointer: int8 or e4m3 values (`ByteWeight`), uint8 pairs of 4-bit values
(`Int4Weight`), or floats. The scale of an output's bytes meets the finished sum (`SCALES_STRIDE` is 1), that of a group
the sum over that group (it is the number of groups, two at least). Where `TYPE` names a type of blocks
(`SplitBlockWeight`), their runs of columns become floats of x's type before the product (`block_values.py`).

More than `FEW_ROWS` rows a tile come without a norm, which others have applied and stored, and beside quantized weights
in half precision in the order of `places_of`: a round is loads, small values that become floats, and products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from d3engine.kernels.quantized import GROUP
from d3engine.kernels.triton.block_values import load_codes, run_column, run_values, runs_of, tiles_of
from d3engine.kernels.triton.launches import in_places
from d3engine.kernels.triton.small_values import byte_values, int4_values

FEW_ROWS: tl.constexpr = tl.constexpr(16)
"""Rows of a tile that carries the norm along, and takes columns in their own order."""

NOT_SPECIALIZED = {"do_not_specialize": ["total_rows"], "do_not_specialize_on_alignment": ["num_rows_ptr"]}
"""Options of `triton.jit` for every kernel: a new row count, or a view of another layer's count, compiles nothing."""

_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_GROUP: tl.constexpr = tl.constexpr(GROUP)


class ProductConfig(NamedTuple):
    """Constants of a product: a kernel makes one constexpr of its flat arguments, and passes it on."""

    # Pointers cannot be members. Triton 3.6 passes no tensors in a constexpr, and any other assignment of a tuple turns
    # its constants into tensors.
    K: int
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_K: int
    WEIGHTS_FIRST: bool
    STAGES: int
    PDL: bool
    SCALES_STRIDE: int
    TYPE: str | None  # of blocks; None for all else


@triton.constexpr_function
def is_of_bytes(dtype):
    """Whether stored values of this type are the bytes of a `ByteWeight`."""
    return dtype in (tl.int8, tl.float8e4nv)


@triton.constexpr_function
def is_of_groups(dtype, scales_stride):
    """Whether stored bytes have several scales an output."""
    return is_of_bytes(dtype) and scales_stride > 1


@triton.constexpr_function
def step_of(dtype, TYPE, block_k):
    """Columns of a step. Of int4 it is one group: two of them a round leave less of it to barriers and addresses."""
    return block_k // 2 if TYPE is None and dtype == tl.uint8 and block_k > GROUP else block_k


@triton.constexpr_function
def columns_at_once(dtype, TYPE, step):
    """Columns of x that a product of a step takes."""
    if TYPE is not None:
        return 32
    return step // 2 if dtype == tl.uint8 else step


@triton.jit
def hyperbolic_tangent(x):
    """tanh: a continued fraction near 0, where one minus an exponential would lose digits."""
    square = x * x
    near = x * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + square * 15.0))
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    return tl.where(square <= 1.0, near, far)


@triton.jit
def live_rows(num_rows_ptr, total_rows):
    """Rows to compute: all, or fewer if the device says so."""
    return tl.minimum(tl.load(num_rows_ptr), total_rows)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Under programmatic dependent launch: let the next kernel begin, and wait until the one before has ended.

    Every program of every kernel calls it before it reads what another kernel wrote, row counts included, and before it
    writes or returns. Then the end of a kernel means the end of all before it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prologue(weight_ptr, weight_stride, outputs, first_column, num_rows_ptr, total_rows, CONFIG: tl.constexpr):
    """How every kernel around `tile_product` begins: how many rows live, and, under programmatic launch, the first tile
    of weights, which is loaded before `wait_for_previous`."""
    first = 0  # unread; Triton 3.6 cannot return None
    if CONFIG.PDL:
        gdc_launch_dependents()
        first = _load_weights(weight_ptr + outputs.to(tl.int64) * weight_stride, first_column, CONFIG)
        gdc_wait()
    return first, live_rows(num_rows_ptr, total_rows)


@triton.jit
def tile_product(
    x_ptr,
    x_stride,
    count,  # rows that live
    norm_ptr,  # [K] norm weight, or None for no norm
    eps,
    weight_ptr,
    weight_stride,
    scales_ptr,  # None for floats
    outputs,  # [BLOCK_N] valid weight rows, in any order
    CONFIG: tl.constexpr,
    first,  # with PDL: what `prologue` has loaded
    begin=0,
    end=None,  # columns [begin, end), whole steps but the last; a norm needs all of them
):
    """The program's rows [BLOCK_T], which may lie beyond `count`, and [BLOCK_T, BLOCK_N] float32: (normed) rows of x
    times rows of weight, with the last row in place of those beyond."""
    rows = tl.program_id(0) * CONFIG.BLOCK_T + tl.arange(0, CONFIG.BLOCK_T)
    valid_rows = tl.minimum(rows, count - 1)
    weight_rows = weight_ptr + outputs.to(tl.int64) * weight_stride
    scale_rows = scales_ptr
    if scales_ptr is not None:
        scale_rows = scales_ptr + outputs.to(tl.int64) * CONFIG.SCALES_STRIDE
    x_rows = x_ptr + valid_rows.to(tl.int64) * x_stride
    if end is None:
        end = CONFIG.K
    if CONFIG.BLOCK_T == 1:
        sums = _sum_product(x_rows, norm_ptr, eps, weight_rows, scale_rows, first, begin, end, CONFIG)
    else:
        sums = _dot_product(x_rows, norm_ptr, eps, weight_rows, scale_rows, first, begin, end, CONFIG)
    if is_of_bytes(weight_rows.dtype.element_ty) and CONFIG.SCALES_STRIDE <= 1:
        sums *= tl.load(scale_rows)[None, :]
    return rows, sums


@triton.jit
def _sum_product(x_row, norm_ptr, eps, weight_rows, scale_rows, first, begin, end, CONFIG: tl.constexpr):
    """[1, BLOCK_N]: one row, on the ordinary cores; sums are taken across threads only once, at the end."""
    # What one thread loads at once, 16 bytes of each output, it adds up at once: one sum of each output.
    EACH: tl.constexpr = 128 // weight_rows.dtype.element_ty.primitive_bitwidth
    sums = tl.zeros((CONFIG.BLOCK_N, CONFIG.BLOCK_K // EACH), tl.float32)
    squares = tl.zeros((1, CONFIG.BLOCK_K // EACH), tl.float32)
    if CONFIG.PDL:
        sums, squares = _sum_step(sums, squares, first, x_row, norm_ptr, scale_rows, begin, CONFIG)
        begin += CONFIG.BLOCK_K
    # A launch's stages pipeline only loads that a product of tensor cores reads. A loop's own pipeline all: then
    # weights come by asynchronous copies, and how many are under way does not depend on where the compiler puts their
    # uses.
    for start in tl.range(begin, end, CONFIG.BLOCK_K, num_stages=CONFIG.STAGES):
        weight = _load_weights(weight_rows, start, CONFIG)
        sums, squares = _sum_step(sums, squares, weight, x_row, norm_ptr, scale_rows, start, CONFIG)
    total = tl.sum(sums, 1)[None, :]
    if norm_ptr is not None:
        total *= tl.rsqrt(tl.sum(squares) / CONFIG.K + eps)
    return total


@triton.jit
def _sum_step(sums, squares, weight, x_row, norm_ptr, scale_rows, start, CONFIG: tl.constexpr):
    """Add the columns [start, start + BLOCK_K) to both sums."""
    if is_of_bytes(weight.dtype):
        # 16 bytes are 16 columns of weights but only 8 of x (at half precision), and where a thread's columns differ,
        # Triton moves the weights through shared memory. So a tile is cut into halves of 8 columns a thread, and x is
        # loaded in the order of each.
        THREADS: tl.constexpr = CONFIG.BLOCK_K // 16
        halves = tl.split(tl.trans(tl.reshape(weight, (CONFIG.BLOCK_N, THREADS, 2, 8)), (0, 1, 3, 2)))
        if is_of_groups(weight.dtype, CONFIG.SCALES_STRIDE):
            groups = (start + tl.arange(0, THREADS) * 16) // _GROUP  # beyond the last one weights are 0
            group_scales = tl.load(scale_rows[:, None] + tl.minimum(groups, CONFIG.SCALES_STRIDE - 1)[None, :])
        for half in tl.static_range(2):
            nth = tl.arange(0, THREADS * 8)[None, :]
            columns = start + nth // 8 * 16 + half * 8 + nth % 8
            x, squares = _load_row(x_row, norm_ptr, squares, columns, THREADS, 8, CONFIG)
            part = tl.sum(byte_values(halves[half], tl.float32) * x, 2)
            if is_of_groups(weight.dtype, CONFIG.SCALES_STRIDE):
                part *= group_scales
            sums += part
    else:
        EACH: tl.constexpr = 128 // weight.dtype.primitive_bitwidth
        columns = start + tl.arange(0, CONFIG.BLOCK_K)[None, :]
        x, squares = _load_row(x_row, norm_ptr, squares, columns, CONFIG.BLOCK_K // EACH, EACH, CONFIG)
        sums += tl.sum(tl.reshape(weight.to(tl.float32), (CONFIG.BLOCK_N, CONFIG.BLOCK_K // EACH, EACH)) * x, 2)
    return sums, squares


@triton.jit
def _load_row(x_row, norm_ptr, squares, columns, THREADS: tl.constexpr, EACH: tl.constexpr, CONFIG: tl.constexpr):
    """[1, THREADS, EACH] float32 of the row, times the norm weight; and the squares with those of the row added."""
    x = _load_columns(x_row[:, None] + columns, columns, CONFIG.K, CONFIG.BLOCK_K, "evict_last").to(tl.float32)
    if norm_ptr is not None:
        squares += tl.sum(tl.reshape(x * x, (1, THREADS, EACH)), 2)
        x *= _load_columns(norm_ptr + columns, columns, CONFIG.K, CONFIG.BLOCK_K, "evict_last").to(tl.float32)
    return tl.reshape(x, (1, THREADS, EACH)), squares


@triton.jit
def _dot_product(x_rows, norm_ptr, eps, weight_rows, scale_rows, first, begin, end, CONFIG: tl.constexpr):
    """[BLOCK_T, BLOCK_N]: several rows, on tensor cores."""
    # The row times the norm weight, not yet scaled, can leave the range of float16. There the scale comes first, at the
    # price of reading the rows twice (they are in L2). bfloat16 has the range of float32.
    SCALE_FIRST: tl.constexpr = (norm_ptr is not None) and (x_rows.dtype.element_ty == tl.float16)
    STEP: tl.constexpr = step_of(weight_rows.dtype.element_ty, CONFIG.TYPE, CONFIG.BLOCK_K)
    # What one thread loads at once it adds up at once; sums are taken across threads only once, at the end.
    EACH: tl.constexpr = 128 // x_rows.dtype.element_ty.primitive_bitwidth
    AT_ONCE: tl.constexpr = columns_at_once(weight_rows.dtype.element_ty, CONFIG.TYPE, STEP)
    squares = tl.zeros((CONFIG.BLOCK_T, AT_ONCE // EACH), tl.float32)
    scale = tl.full((CONFIG.BLOCK_T,), 1.0, tl.float32)
    if SCALE_FIRST:
        for start in range(0, CONFIG.K, AT_ONCE):
            columns = start + tl.arange(0, AT_ONCE)[None, :]
            x = _load_columns(x_rows[:, None] + columns, columns, CONFIG.K, AT_ONCE, "evict_last").to(tl.float32)
            squares += tl.sum(tl.reshape(x * x, (CONFIG.BLOCK_T, AT_ONCE // EACH, EACH)), 2)
        scale = tl.rsqrt(tl.sum(squares, 1) / CONFIG.K + eps)

    if CONFIG.WEIGHTS_FIRST:
        sums = tl.zeros((CONFIG.BLOCK_N, CONFIG.BLOCK_T), tl.float32)
    else:
        sums = tl.zeros((CONFIG.BLOCK_T, CONFIG.BLOCK_N), tl.float32)
    if CONFIG.PDL:
        for column in tl.static_range(0, CONFIG.BLOCK_K, STEP):
            weight = first
            if column > 0:
                weight = _load_weights(weight_rows, begin + column, CONFIG)
            sums, squares = _dot_step(
                sums, squares, weight, x_rows, norm_ptr, scale, weight_rows, scale_rows, begin + column, CONFIG
            )  # fmt: skip
        begin += CONFIG.BLOCK_K
    # Of int4 and blocks no product reads the loads themselves, but parts of their bytes, and none reads scales of
    # groups: a launch's stages pass these by.
    IS_INT4: tl.constexpr = weight_rows.dtype.element_ty == tl.uint8
    HAS_GROUPS: tl.constexpr = is_of_groups(weight_rows.dtype.element_ty, CONFIG.SCALES_STRIDE)
    LOOP_STAGES: tl.constexpr = CONFIG.STAGES if IS_INT4 or HAS_GROUPS else None
    for start in tl.range(begin, end, CONFIG.BLOCK_K, num_stages=LOOP_STAGES):
        for column in tl.static_range(0, CONFIG.BLOCK_K, STEP):
            weight = _load_weights(weight_rows, start + column, CONFIG)
            sums, squares = _dot_step(
                sums, squares, weight, x_rows, norm_ptr, scale, weight_rows, scale_rows, start + column, CONFIG
            )  # fmt: skip
    if CONFIG.WEIGHTS_FIRST:
        sums = tl.trans(sums)
    if (norm_ptr is not None) and (not SCALE_FIRST):
        sums *= tl.rsqrt(tl.sum(squares, 1) / CONFIG.K + eps)[:, None]
    return sums


@triton.jit
def _dot_step(sums, squares, weight, x_rows, norm_ptr, scale, weight_rows, scale_rows, start, CONFIG: tl.constexpr):
    """Add the columns of the step that begins at `start` to both sums."""
    STEP: tl.constexpr = step_of(weight.dtype, CONFIG.TYPE, CONFIG.BLOCK_K)
    IS_SMALL: tl.constexpr = weight.dtype.primitive_bitwidth == 8
    IS_HALF: tl.constexpr = x_rows.dtype.element_ty.primitive_bitwidth == 16
    ARRANGED: tl.constexpr = CONFIG.BLOCK_T > FEW_ROWS and IS_SMALL and IS_HALF and CONFIG.TYPE is None
    WIDTH: tl.constexpr = (CONFIG.K + _GROUP - 1) // _GROUP * _GROUP if ARRANGED else CONFIG.K  # of rows of x
    if ARRANGED:  # as x is: see `places_of`
        weight = in_places(weight)
    if CONFIG.TYPE is not None:
        sums, squares = _block_step(
            sums, squares, weight, x_rows, norm_ptr, scale, weight_rows, scale_rows, start, CONFIG
        )  # fmt: skip
    elif weight.dtype == tl.uint8:
        tl.static_assert(STEP == _GROUP, "a step of int4 is one group")
        group_scales = tl.load(scale_rows + start // _GROUP)
        columns = start + tl.arange(0, STEP // 2)[None, :]
        x, squares = _load_rows(x_rows, norm_ptr, scale, squares, columns, WIDTH, STEP)
        low, high = int4_values(weight, x.dtype)
        group_sums = _dot(low, x, tl.zeros_like(sums), CONFIG.WEIGHTS_FIRST)
        columns += STEP // 2
        x, squares = _load_rows(x_rows, norm_ptr, scale, squares, columns, WIDTH, STEP)
        group_sums = _dot(high, x, group_sums, CONFIG.WEIGHTS_FIRST)
        sums += _scaled(group_sums, group_scales, CONFIG.WEIGHTS_FIRST)
    elif is_of_groups(weight.dtype, CONFIG.SCALES_STRIDE):
        tl.static_assert(_GROUP % STEP == 0, "a step lies in one group")
        group_scales = tl.load(scale_rows + start // _GROUP)
        columns = start + tl.arange(0, STEP)[None, :]
        x, squares = _load_rows(x_rows, norm_ptr, scale, squares, columns, WIDTH, STEP)
        group_sums = _dot(byte_values(weight, x.dtype), x, tl.zeros_like(sums), CONFIG.WEIGHTS_FIRST)
        sums += _scaled(group_sums, group_scales, CONFIG.WEIGHTS_FIRST)
    else:
        columns = start + tl.arange(0, STEP)[None, :]
        x, squares = _load_rows(x_rows, norm_ptr, scale, squares, columns, WIDTH, STEP)
        if is_of_bytes(weight.dtype):
            weight = byte_values(weight, x.dtype)
        sums = _dot(weight, x, sums, CONFIG.WEIGHTS_FIRST)
    return sums, squares


@triton.jit
def _block_step(sums, squares, first, x_rows, norm_ptr, scale, code_rows, scale_rows, start, CONFIG: tl.constexpr):
    """`_dot_step` on blocks, run by run; `first` are the codes of its first tile."""
    TYPE: tl.constexpr = CONFIG.TYPE
    K: tl.constexpr = CONFIG.K
    BLOCK_K: tl.constexpr = CONFIG.BLOCK_K
    TILES: tl.constexpr = tiles_of(TYPE, BLOCK_K)
    RUNS: tl.constexpr = runs_of(TYPE)
    for tile in tl.static_range(TILES):
        codes = first
        if tile > 0:
            codes = load_codes(code_rows, TYPE, start, tile, K, BLOCK_K)
        for nth in tl.static_range(RUNS):
            columns = start + run_column(TYPE, tile, nth) + tl.arange(0, 32)[None, :]
            x, squares = _load_rows(x_rows, norm_ptr, scale, squares, columns, K, BLOCK_K)
            values = run_values(codes, code_rows, scale_rows, TYPE, start, tile, nth, K, BLOCK_K)
            sums = _dot(values, x, sums, CONFIG.WEIGHTS_FIRST)
    return sums, squares


@triton.jit
def _scaled(sums, scales, WEIGHTS_FIRST: tl.constexpr):
    """Sums of each output times its scale."""
    if WEIGHTS_FIRST:
        return sums * scales[:, None]
    else:  # noqa: RET505
        return sums * scales[None, :]


@triton.jit
def _load_rows(x_rows, norm_ptr, scale, squares, columns, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The rows' `columns`, times scale and norm weight; and the squares with those of the columns added."""
    x = _load_columns(x_rows[:, None] + columns, columns, K, BLOCK_K, "evict_last")
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        if x.dtype == tl.float16:  # the scale comes first: see `_dot_product`
            wide *= scale[:, None]
        else:
            EACH: tl.constexpr = x.shape[1] // squares.shape[1]
            squares += tl.sum(tl.reshape(wide * wide, (squares.shape[0], squares.shape[1], EACH)), 2)
        norms = norm_ptr + columns
        if x.shape[1] <= _GROUP // 2:  # one row would be too narrow for asynchronous copies: once for each row
            norms += tl.zeros((x.shape[0], 1), tl.int32)
        wide *= _load_columns(norms, columns, K, BLOCK_K, "evict_last").to(tl.float32)
        x = wide.to(x.dtype)
    return x, squares


@triton.jit
def _dot(weight, x, sums, WEIGHTS_FIRST: tl.constexpr):
    """`sums` and the product of `x` and `weight`, which is rounded to x's type: small whole numbers stay exact."""
    weight = weight.to(x.dtype)
    if _INTERPRETED:  # its products of bfloat16 are wrong; rounded operands stay as they are
        weight, x = weight.to(tl.float32), x.to(tl.float32)
    if WEIGHTS_FIRST:
        return tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
    else:  # noqa: RET505
        return tl.dot(x, tl.trans(weight), sums, input_precision="ieee")


@triton.jit
def _load_weights(weight_rows, start, CONFIG: tl.constexpr):
    """The stored form of the step that begins at column `start`: [BLOCK_N, STEP], or half as many bytes under int4; of
    blocks the first tile."""
    # Weights are read once a token: they need not push the activations out of the L2 cache.
    STEP: tl.constexpr = step_of(weight_rows.dtype.element_ty, CONFIG.TYPE, CONFIG.BLOCK_K)
    if CONFIG.TYPE is not None:
        return load_codes(weight_rows, CONFIG.TYPE, start, 0, CONFIG.K, STEP)
    elif weight_rows.dtype.element_ty == tl.uint8:  # noqa: RET505
        BYTES: tl.constexpr = (CONFIG.K + _GROUP - 1) // _GROUP * (_GROUP // 2)
        places = start // 2 + tl.arange(0, STEP // 2)[None, :]
        return _load_columns(weight_rows[:, None] + places, places, BYTES, STEP // 2, "evict_first")
    else:
        columns = start + tl.arange(0, STEP)[None, :]
        return _load_columns(weight_rows[:, None] + columns, columns, CONFIG.K, STEP, "evict_first")


@triton.jit
def _load_columns(pointers, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr):
    """Load with zeros beyond column K; no mask at all where the step divides K."""
    if K % BLOCK_K == 0:
        return tl.load(pointers, eviction_policy=EVICTION)
    else:  # noqa: RET505
        return tl.load(pointers, mask=columns < K, other=0.0, eviction_policy=EVICTION)
