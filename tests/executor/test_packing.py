"""What ranks tell each other arrives as it was, and nothing that arrives is anything but data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from d3engine.executor.tensor_parallel.plan_message import pack, unpack


@dataclass(frozen=True)
class Record:
    name: str
    what: Any


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_come_back_whole_and_can_be_written_to(dtype: str, shape: tuple[int, ...]) -> None:
    """Arrays come back with dtype and shape and can be written to."""
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    first, second = unpack(pack([array, Record("strided", array.copy(order="F"))]), {"Record": Record})
    for found in (first, second.what):
        assert found.dtype == array.dtype
        assert found.shape == shape
        assert np.array_equal(found, array)
    first[...] = 1


def test_values_come_back_and_unknown_records_are_refused() -> None:
    """Numbers of numpy are numbers, and sets are tuples; a record of no known kind is no object."""
    value = [(1, (2.5,), []), {1: ["ä\n"], (4, 5): None}, range(3, 9), True, 2**62]
    assert repr(unpack(pack(value), {})) == repr(value)
    assert unpack(pack([np.int64(3), np.float32(0.5), frozenset({7})]), {}) == [3, 0.5, (7,)]
    with pytest.raises(KeyError, match="Record"):
        unpack(pack(Record("x", 1)), {})
