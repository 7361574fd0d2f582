"""A GGUF file in several parts is read as one, and no count or name in its parts is believed."""

import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf import GGUFReader, GGUFWriter
from gguf_files import SMALL, write_gguf
from typer.testing import CliRunner

from d3engine import Engine, SamplingParams
from d3engine.cli import app
from d3engine.errors import D3EngineError, ModelFormatError
from d3engine.model.gguf_file import open_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three parts of a model."""
    folder = tmp_path_factory.mktemp("original")
    write_gguf(folder / "model.gguf", part_tensors=5, **SMALL)
    return sorted(folder.iterdir())


@pytest.fixture
def parts(original: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(part, tmp_path)) for part in original]


def set_key(path: Path, key: str, value: int) -> None:
    """Overwrite a number in a file's header."""
    GGUFReader(path, "r+").fields[key].parts[-1][0] = value


def answer(model: Path) -> list[int]:
    with Engine(model, device="cpu", max_model_len=64) as engine:
        return list(engine.generate([[5, 300, 17]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_parts_are_the_model_that_they_are_parts_of(tmp_path: Path, parts: list[Path]) -> None:
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    whole = open_gguf(write_gguf(tmp_path / "whole.gguf", **SMALL))
    file = open_gguf(parts[0])
    assert file.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert np.array_equal(file.read(name), whole.read(name))
    assert answer(parts[0]) == answer(whole.path)


def test_a_first_part_may_have_no_tensors_and_each_its_alignment(original: list[Path], tmp_path: Path) -> None:
    file = open_gguf(original[0])
    first = GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    second = GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "llama")
    second.add_custom_alignment(128)
    for name in file.tensors:
        second.add_tensor(name, file.read(name))
    for number, writer in enumerate((first, second)):
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = open_gguf(tmp_path / "m-00001-of-00002.gguf")
    for name in file.tensors:
        assert np.array_equal(found.read(name), file.read(name))


def test_a_directory_of_parts_is_converted_as_one_file(original: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["weights", "convert", "gguf", str(original[0].parent), str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert answer(tmp_path / "new") == answer(original[0])


def test_headers_are_parsed_once_until_a_part_changes(parts: list[Path]) -> None:
    long_ago = time.time() - 60
    for part in parts:
        os.utime(part, (long_ago, long_ago))
    first = open_gguf(parts[0])
    assert open_gguf(parts[0]) is first
    os.utime(parts[2], (long_ago + 1, long_ago + 1))
    assert open_gguf(parts[0]) is not first
    with pytest.raises(ModelFormatError, match=r"model-00003-of-00003\.gguf has changed since its header was read"):
        first.read(max(first.tensors.values(), key=lambda tensor: tensor.path).name)


REFUSED: dict[str, tuple[int, str, int, str]] = {
    "fewer parts than the name says": (0, "split.count", 2, r"must be called NAME-00001-of-00002\.gguf"),
    "more parts than the name says": (0, "split.count", 60_000, r"must be called NAME-00001-of-60000\.gguf"),
    "a first part that is another": (0, "split.no", 1, r"00001-of-00003.gguf: split.no must be 0.*; got 1"),
    "a part with another count": (1, "split.count", 4, r"00002-of-00003.gguf: split.count must be 3.*; got 4"),
    "a part in another's place": (2, "split.no", 1, r"00003-of-00003.gguf: split.no must be 2.*; got 1"),
    "too many tensors": (0, "split.tensors.count", 13, r"00002-.*: split.tensors.count must be what it is in .*got 12"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_counts_that_do_not_agree_are_refused_by_their_key(case: str, parts: list[Path]) -> None:
    number, key, value, message = REFUSED[case]
    set_key(parts[number], key, value)
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(parts[0])


def test_a_number_of_tensors_that_parts_agree_on_is_counted(parts: list[Path]) -> None:
    for part in parts:
        set_key(part, "split.tensors.count", 14)
    with pytest.raises(ModelFormatError, match=r"split.tensors.count must be .* in all parts, 12; got 14"):
        open_gguf(parts[0])


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFormatError, match=r"model-00002-of-00003\.gguf is missing: .* is the first of 3 parts"):
        open_gguf(parts[0])


def test_a_later_part_names_the_first(parts: list[Path]) -> None:
    with pytest.raises(ModelFormatError, match=r"split.no must be 0: .*model-00001-of-00003\.gguf; got 2"):
        Engine(parts[2])


def test_a_first_part_under_another_name_is_refused(parts: list[Path]) -> None:
    with pytest.raises(ModelFormatError, match=r"model\.gguf: .* must be called NAME-00001-of-00003\.gguf"):
        open_gguf(parts[0].rename(parts[0].with_name("model.gguf")))


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    set_key(parts[2], "split.no", 2)
    with pytest.raises(ModelFormatError, match=r"tensor 'blk\..*' is in both .*00002-of-.* and .*00003-of-"):
        open_gguf(parts[0])


def test_parts_cut_or_damaged_anywhere_are_refused_or_run(parts: list[Path]) -> None:
    whole, rng, refused = [part.read_bytes() for part in parts], random.Random(0), 0
    for _ in range(60):
        number = rng.randrange(3)
        raw = bytearray(whole[number])
        if rng.random() < 0.3:
            raw = raw[: rng.randrange(len(raw) - 64)]
        else:
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(400)] = rng.randrange(256)
        parts[number].write_bytes(raw)
        try:
            file = open_gguf(parts[0])
            for name in file.tensors:
                file.read(name)
        except D3EngineError:
            refused += 1
        parts[number].write_bytes(whole[number])
    assert refused > 30
