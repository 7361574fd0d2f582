"""The file of bridges: what is written is read again, and what is damaged is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.model.bridges import FORMAT, Bridge, Bridges, read_bridges, write_bridges

SIZE = 6
METADATA = {"format": FORMAT, "fingerprint": "sha256:0", "num_layers": "4", "hidden_size": f"{SIZE}", "about": "{}"}


def test_bridges_are_read_as_they_were_written(tmp_path: Path) -> None:
    full = Bridge(1, 3, torch.randn(SIZE, SIZE), torch.randn(SIZE))
    low = Bridge(1, 4, torch.randn(SIZE, 2), torch.randn(SIZE), torch.randn(2, SIZE))
    bridges = Bridges("sha256:1", 4, SIZE, {(1, 3): full, (1, 4): low}, {"source": "a text"})
    write_bridges(bridges, tmp_path / "b.safetensors")
    found = read_bridges(tmp_path / "b.safetensors")
    assert (found.fingerprint, found.num_layers, found.about) == ("sha256:1", 4, {"source": "a text"})
    assert [(window, bridge.rank) for window, bridge in found.by_window.items()] == [((1, 3), None), ((1, 4), 2)]
    assert found.num_bytes == 4 * (SIZE * SIZE + SIZE + 4 * SIZE + SIZE)
    hidden = torch.randn(3, SIZE)
    for window, bridge in bridges.by_window.items():
        assert torch.equal(found.by_window[window].crossed(hidden), bridge.crossed(hidden))
    expected = hidden + hidden @ low.down.T @ low.weight.T + low.offset  # type: ignore[union-attr]
    torch.testing.assert_close(low.crossed(hidden), expected)


def _good() -> dict[str, Tensor]:
    return {"1:3.weight": torch.zeros(SIZE, SIZE), "1:3.offset": torch.zeros(SIZE)}


@pytest.mark.parametrize(
    ("change", "metadata", "complaint"),
    [
        ({}, {"format": "another"}, "its format is 'another'"),
        ({"3:5.offset": torch.zeros(SIZE)}, {}, "3:5.offset is of no window of 4 layers"),
        ({"1:2.offset": torch.zeros(SIZE)}, {}, "window 1:2 has offset, not weight, offset"),
        ({"1:3.weight": torch.zeros(SIZE, 5)}, {}, r"1:3.weight has shape \[6, 5\], not \[6, 6\]"),
        ({"1:3.down": torch.zeros(2, SIZE)}, {}, r"1:3.weight has shape \[6, 6\], not \[6, 2\]"),
        ({"1:3.down": torch.zeros(7, SIZE)}, {}, "1:3.down has rank 7, not one of 1 to 6"),
        ({"1:3.offset": torch.full((SIZE,), torch.nan)}, {}, "1:3.offset has numbers that are not finite"),
        ({"1:3.offset": torch.zeros(SIZE, dtype=torch.int64)}, {}, "1:3.offset is torch.int64"),
        ({"weight": torch.zeros(SIZE)}, {}, "invalid literal"),
        ({}, {"about": "[" * 50_000 + "]" * 50_000}, "about is not valid JSON: .*recursion"),
        ({}, {"about": '{"a": 1, "a": 2}'}, "about is not valid JSON: 'a' stands twice"),
        ({}, {"about": "[]"}, "its about is no JSON object"),
        ({}, {"num_layers": "9" * 5000}, "Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_damaged_file_is_refused_with_its_name(
    tmp_path: Path, change: dict[str, Tensor], metadata: dict[str, str], complaint: str
) -> None:
    path = tmp_path / "b.safetensors"
    save_file(_good() | change, path, METADATA | metadata)
    with pytest.raises(ModelFormatError, match=f"{path} is no file of bridges.*{complaint}"):
        read_bridges(path)


def test_bridges_of_another_size_are_refused_unread(tmp_path: Path) -> None:
    """Bridges of another size are refused before a tensor is read."""
    path = tmp_path / "b.safetensors"
    save_file(_good() | {"1:3.offset": torch.full((SIZE,), torch.nan)}, path, METADATA)
    with pytest.raises(ModelFormatError, match="it is for 4 layers of 6 numbers, not for 4 of 8"):
        read_bridges(path, (4, 8))
    with pytest.raises(ModelFormatError, match="not finite"):
        read_bridges(path, (4, SIZE))


def test_what_is_no_file_at_all_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    for path, complaint in ((tmp_path / "text", "is no file of bridges"), (tmp_path, "is not a regular file")):
        with pytest.raises(ModelFormatError, match=complaint):
            read_bridges(path)
