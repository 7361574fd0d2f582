"""What a GGUF file says beyond what is read is refused, unless it says what is computed anyway."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import SMALL, bpe_keys, write_gguf

from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_metadata import _NEUTRAL, _TOKENIZER_NEUTRAL
from d3engine.text.tokenizer import load_tokenizer

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


def test_factor_of_yarns_attention_is_read_where_it_counts(tmp_path: Path) -> None:
    """Converters write transformers' attention_factor, which is the default's value, or vLLM's attn_factor of it."""
    key = "rope.scaling.yarn_attn_factor"
    usual = read(tmp_path, **YARN)
    for same in (1.0, 1.138629436):
        assert read(tmp_path, **YARN, **{key: same}) == usual
    assert read(tmp_path, **YARN, **{key: 0.875}).rope == replace(usual.rope, attn_factor=0.875)


def test_special_tokens_that_end_answers_need_no_key(tmp_path: Path) -> None:
    """A special token is an end by its name, and special where a file calls it plain."""
    keys = bpe_keys()
    first, kinds = keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.token_type"]
    leave, ends = ("tokenizer.ggml.eot_token_id",), {"tokenizer.ggml.eos_token_id": first}
    file = write_gguf(tmp_path / "m.gguf", changes=ends, leave=leave, **SMALL)
    assert ModelConfig.from_directory(file).eos_token_ids == (first, first + 2)
    plain = {"tokenizer.ggml.token_type": [*kinds[: first + 2], 1, *kinds[first + 3 :]]}
    file = write_gguf(tmp_path / "m.gguf", changes=ends | plain, leave=leave, **SMALL)
    assert ModelConfig.from_directory(file).eos_token_ids == (first, first + 2)
    assert load_tokenizer(file).encode("<|im_end|>", add_special_tokens=False) == [first + 2]
