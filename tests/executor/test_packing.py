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


KINDS = {"Record": Record}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**62,
        0.1,
        "ä\n",
        [],
        [1, [2, "x"], None],
        (1, (2,), []),
        range(3, 9),
        {1: [2], "two": (3,), (4, 5): None},
        Record("one", Record("two", (range(2), [0.5]))),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = unpack(pack(value), KINDS)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_come_back_whole_and_can_be_written_to(dtype: str, shape: tuple[int, ...]) -> None:
    """Arrays come back with dtype and shape and can be written to."""
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    first, second = unpack(pack([array, Record("strided", array.copy(order="F"))]), KINDS)
    for found in (first, second.what):
        assert found.dtype == array.dtype
        assert found.shape == shape
        assert np.array_equal(found, array)
    first[...] = 1


def test_numbers_of_numpy_are_numbers_and_sets_are_tuples() -> None:
    assert unpack(pack([np.int64(3), np.float32(0.5), frozenset({7})]), {}) == [3, 0.5, (7,)]


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(KeyError, match="Record"):
        unpack(pack(Record("x", 1)), {})
