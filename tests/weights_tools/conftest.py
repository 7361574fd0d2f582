"""Quantized directories, made once for all tests here. What imports Triton waits for a fixture, as elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fixture_types import MakeLlama


@pytest.fixture(scope="session")
def quantized_directory(
    tiny_llama: MakeLlama, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """`quantized_directory(scheme, layout)` -> (float directory, quantized directory), made once; read-only."""
    from quantized_weights import LAYOUTS

    from d3engine.weights_tools.quantize import quantize_model

    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(scheme: str, layout: str) -> tuple[Path, Path]:
        if (scheme, layout) not in made:
            source = tiny_llama(**LAYOUTS[layout]).directory
            target = tmp_path_factory.mktemp("quantized")
            quantize_model(source, target, scheme, show_progress=False)
            made[scheme, layout] = source, target
        return made[scheme, layout]

    return make
