"""The header of a GGUF file: nothing in it is believed before it is held against what the file has."""

import os
import random
import struct
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import SMALL, bpe_keys, write_gguf

from d3engine.errors import MissingExtraError, ModelFormatError
from d3engine.model.families import GGUF_FAMILIES
from d3engine.model.family import TensorNames
from d3engine.model.gguf_file import forget_header, open_gguf
from d3engine.model.source import files_of


def test_strings_across_read_borders_are_whole(tmp_path: Path) -> None:
    """Strings that cross the borders of what is read at once are whole."""
    words = ["é" * length for length in (300_000, 5, 700_000, 0, 1, 1_100_000, 3)]
    path = write_gguf(tmp_path / "model.gguf", changes={"general.tags": words}, **SMALL)
    assert open_gguf(path).metadata["general.tags"] == words
    assert open_gguf(path).metadata["tokenizer.ggml.tokens"] == bpe_keys()["tokenizer.ggml.tokens"]


def test_a_row_is_the_row_of_the_whole_tensor(tmp_path: Path) -> None:
    file = open_gguf(write_gguf(tmp_path / "model.gguf", **SMALL))
    for name in ("token_embd.weight", "blk.0.ffn_up.weight", "output_norm.weight"):
        whole = file.read(name).reshape(-1, file.tensors[name].shape[-1])
        assert np.array_equal(file.read_rows(name, len(whole) - 1, 1)[0], whole[-1])


def test_a_type_of_tensor_that_is_not_read_is_named(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", **SMALL)
    name = b"token_embd.weight"
    raw = bytearray(source.read_bytes())
    place = raw.index(name) + len(name) + 4 + 2 * 8
    raw[place : place + 4] = struct.pack("<I", 16)
    source.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=r"token_embd.weight' is of ggml's type 16 \(IQ2_XXS\)"):
        open_gguf(source)


# -- hostile files -----------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "model.gguf", **SMALL).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 200, 3), *random.Random(0).sample(range(200, len(whole) - 64), 60)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            open_gguf(cut)


def header(tensors: int, keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def key_of(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


def tensor_of(shape: tuple[int, ...], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    dimensions = struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
    return struct.pack("<Q", len(name)) + name + dimensions + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "another file": (b"PK\x03\x04" + bytes(64), "is not a GGUF file"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "the other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 tensors": (header(2**60, 0), "claims"),
    "2^60 keys": (header(0, 2**60), "claims"),
    "a string of 2^62 bytes": (header(0, 1, struct.pack("<Q", 2**62) + b"k"), "asks for"),
    "an array of 2^62 numbers": (header(0, 1, key_of(9, struct.pack("<IQ", 0, 2**62))), "elements"),
    "an array of more strings than bytes": (header(0, 1, key_of(9, struct.pack("<IQ", 8, 10**6))), "asks for"),
    "an array of arrays": (header(0, 1, key_of(9, struct.pack("<IQ", 9, 1))), "unknown type 9"),
    "an unknown type of value": (header(0, 1, key_of(77, b"")), "unknown type 77"),
    "bytes that are no text": (header(0, 1, key_of(8, struct.pack("<Q", 2) + b"\xff\xfe")), "UTF-8"),
    "the same key twice": (header(0, 2, key_of(0, b"\1") * 2), "twice"),
    "the same tensor twice": (header(2, 0, tensor_of((1,)) * 2 + bytes(64)), "twice"),
    "a tensor of 2^120 values": (header(1, 0, tensor_of((2**60, 2**60)) + bytes(64)), "takes from byte"),
    "an empty tensor": (header(1, 0, tensor_of((0,)) + bytes(64)), "shape"),
    "2^31 dimensions": (header(1, 0, struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**31)), "dimensions"),
    "an offset behind the end": (header(1, 0, tensor_of((4,), offset=2**63) + bytes(64)), "takes from byte"),
    "a crooked offset": (header(1, 0, tensor_of((4,), offset=3) + bytes(64)), "multiple of 32"),
    "tensors in one place": (
        header(2, 0, tensor_of((9,)) + tensor_of((9,), offset=32, name=b"u") + bytes(128)),
        "overlaps",
    ),
    "half a block": (header(1, 0, tensor_of((33,), kind=8) + bytes(128)), "blocks of 32"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_lying_header_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    """A header that lies is refused before anything is made of it."""
    content, message = HOSTILE[name]
    (tmp_path / "model.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match=rf"model\.gguf.*{message}"):
            open_gguf(tmp_path / "model.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"reading GGUF files needs the package 'gguf': .*\[gguf\]"):
        open_gguf(tmp_path / "model.gguf")


def test_a_pipe_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFormatError, match=r"is missing|is not a regular file"):
            open_gguf(path)


def test_a_header_is_parsed_once_until_the_file_changes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", **SMALL)
    assert open_gguf(path) is not open_gguf(path), "a file written just now may change within its time stamp"
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))
    first = open_gguf(path)
    assert open_gguf(path) is first
    os.utime(path, (long_ago + 1, long_ago + 1))
    second = open_gguf(path)
    assert second is not first
    forget_header()
    assert open_gguf(path) is not second


def test_tensors_have_the_familys_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, layout = GGUF_FAMILIES["llama"]
    named = replace(family, names=TensorNames(prefix="nova."))
    monkeypatch.setitem(GGUF_FAMILIES, "llama", (named, replace(layout, modules={"attn_q": "attention.query"})))
    with files_of(write_gguf(tmp_path / "model.gguf", **SMALL)).open_checkpoint() as checkpoint:
        assert {"nova.embed_tokens.weight", "nova.layers.0.attention.query.weight"} < checkpoint.entries.keys()
