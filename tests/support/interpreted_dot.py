"""Triton's interpreter with a GPU's products of tiles: what becomes of a row does not depend on its place in the tile.
The interpreter leaves them to NumPy's BLAS. Where that has AVX2 alone (OpenBLAS's kernels for Haswell), it takes the
sums of some rows of a tile in another order than those of others."""

from types import SimpleNamespace
from typing import Any


def multiply_row_by_row() -> None:
    """From now on, for the whole process: each row of a tile meets the other tile alone."""
    import numpy as np
    from triton.runtime import interpreter

    def matmul(rows: Any, columns: Any, **named: Any) -> Any:
        alone = rows[..., :, None, :], columns[..., None, :, :]
        return np.matmul(*alone, **named)[..., 0, :]

    interpreter.np = SimpleNamespace(**{**vars(np), "matmul": matmul})
