"""Arrays, numbers and small records as bytes, from one process of an engine to the others of it.

The one idea: a message is JSON with arrays beside it. Nothing that comes can be code, and a record is of a kind that
both sides name beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def pack(value: Any) -> bytes:
    """`value` as bytes: None, bools, numbers, strings, lists, tuples, ranges, dicts by strings, arrays and records.

    Tuples come back as tuples; an enum comes back as its number.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    head = json.dumps([[array.dtype.str, array.shape] for array in arrays], separators=(",", ":")).encode()
    lengths = np.array([len(text), len(head)], np.int64)
    return b"".join([lengths.tobytes(), text, head, *(np.ascontiguousarray(array).data for array in arrays)])


def unpack(message: bytes, kinds: Mapping[str, type]) -> Any:
    """The value again; records are of these `kinds`, by name. Arrays may be written to."""
    text_length, head_length = np.frombuffer(message, np.int64, 2).tolist()
    end = 16 + text_length
    arrays, start = [], end + head_length
    for dtype, shape in json.loads(message[end:start]):
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(message, kind, count, start).reshape(shape).copy())
        start += count * kind.itemsize
    return _value(json.loads(message[16:end]), arrays, kinds)


def _plain(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "record": type(value).__name__,
            "of": {field.name: _plain(getattr(value, field.name), arrays) for field in fields(value)},
        }
    if isinstance(value, range):
        return {"range": [value.start, value.stop]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, arrays), _plain(item, arrays)] for key, item in value.items()]}
    if isinstance(value, tuple | frozenset):
        return {"tuple": [_plain(item, arrays) for item in value]}
    return [_plain(item, arrays) for item in value] if isinstance(value, list) else value


def _value(plain: Any, arrays: list[np.ndarray[Any, Any]], kinds: Mapping[str, type]) -> Any:
    if isinstance(plain, list):
        return [_value(item, arrays, kinds) for item in plain]
    match plain:
        case {"array": index}:
            return arrays[index]
        case {"record": name, "of": found}:
            return kinds[name](**{field: _value(item, arrays, kinds) for field, item in found.items()})
        case {"range": [start, stop]}:
            return range(start, stop)
        case {"tuple": items}:
            return tuple(_value(item, arrays, kinds) for item in items)
        case {"dict": items}:
            return {_value(key, arrays, kinds): _value(item, arrays, kinds) for key, item in items}
    return plain
