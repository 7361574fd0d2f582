"""What a GGUF file says beyond what is read is refused, unless it says what is computed anyway."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import SMALL, write_gguf

from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_metadata import _NEUTRAL, _TOKENIZER_NEUTRAL

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def read(folder: Path, **changes: Any) -> ModelConfig:
    keys = {key if key.startswith("tokenizer.") else f"llama.{key}": value for key, value in changes.items()}
    return ModelConfig.from_directory(write_gguf(folder / "m.gguf", changes=keys, **SMALL))


@pytest.mark.parametrize("key", {**_NEUTRAL, **_TOKENIZER_NEUTRAL})
def test_unread_key_with_an_effect_is_refused(tmp_path: Path, key: str) -> None:
    """A key that is not read is refused unless its value has no effect."""
    usual, neutral = read(tmp_path), {**_NEUTRAL, **_TOKENIZER_NEUTRAL}[key]
    for value in neutral:
        if value != []:  # which the writer cannot write
            assert read(tmp_path, **{key: value}) == usual
            assert read(tmp_path, **{key: value if isinstance(value, bool) else float(value)}) == usual
    others = [not neutral[0]] if isinstance(neutral[0], bool) else [value for value in (7.5, 0) if value not in neutral]
    for value in others if neutral != ([],) else ["x"]:
        with pytest.raises(ModelFormatError, match=f"{key} must be .* since it is not supported; got"):
            read(tmp_path, **{key: value})


@pytest.mark.parametrize("value", [0, 0.0, False, 1, "none"])
def test_unknown_key_is_refused_whatever_its_value(tmp_path: Path, value: object) -> None:
    """A key that nothing is known of is refused whatever its value."""
    with pytest.raises(ModelFormatError, match=r"llama\.some\.key must be absent, since it is not supported; got"):
        read(tmp_path, **{"some.key": value})


@pytest.mark.parametrize(("kind", "value"), [(YARN, 0.0), (YARN, 0.5), ({}, 1.0), ({}, 0.5)])
def test_a_factor_of_extrapolation_is_that_of_the_type(tmp_path: Path, kind: dict[str, Any], value: float) -> None:
    usual = 1.0 if kind else 0.0
    for same in (-1.0, usual):
        assert read(tmp_path, **kind, **{"rope.scaling.yarn_ext_factor": same}) == read(tmp_path, **kind)
    with pytest.raises(ModelFormatError, match="yarn_ext_factor must be absent or -1 or"):
        read(tmp_path, **kind, **{"rope.scaling.yarn_ext_factor": value})


def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path: Path) -> None:
    linear = read(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert linear.rope.rope_type == "linear"
    assert read(tmp_path, **{"rope.scaling.factor": 4.0}) == linear
    assert read(tmp_path, **{"rope.scale_linear": 4.0}) == linear
    assert read(tmp_path, **{"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}) == linear
    for nothing in ({"rope.scaling.factor": 0.0}, {"rope.scale_linear": 0.0}, {"rope.scaling.factor": 1.0}):
        assert read(tmp_path, **nothing) == read(tmp_path)
    assert read(tmp_path, **{"rope.scaling.type": "none", "rope.scaling.factor": 4.0}) == read(tmp_path)
