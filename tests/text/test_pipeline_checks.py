"""A tokenizer.json that lacks what its other parts need is refused, whatever it lacks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import save_byte_level

from d3engine.errors import ModelFormatError
from d3engine.text.tokenizer import load_tokenizer

Edit = Callable[[dict[str, Any]], Any]


def without_bytes(pipeline: dict[str, Any]) -> None:
    vocabulary = pipeline["model"]["vocab"]
    del vocabulary["q"]
    pipeline["model"]["merges"] = [pair for pair in pipeline["model"]["merges"] if "q" not in "".join(pair)]


def no_tokens(pipeline: dict[str, Any]) -> None:
    pipeline["model"] |= {"vocab": {}, "merges": []}
    pipeline |= {"added_tokens": [], "post_processor": None}


BROKEN: dict[str, tuple[Edit, str]] = {
    "no merges": (lambda found: found["model"].update(merges=[]), "has no merge for .* of its .* tokens of several"),
    "few merges": (
        lambda found: found["model"].update(merges=found["model"]["merges"][:5]),
        "has no merge for .* tokens of several characters",
    ),
    "a byte without a token": (without_bytes, "has no token for 1 of the bytes of texts, such as 113"),
    "no tokens": (no_tokens, "has no tokens"),
    "no decoder": (lambda found: found.update(decoder=None), 'has "ByteLevel" in its normalizer or pre_tokenizer, but'),
    "no pre_tokenizer": (
        lambda found: found.update(pre_tokenizer=None),
        'has "ByteLevel" in its decoder, but neither in its normalizer nor in its pre_tokenizer',
    ),
    "no vocabulary": (lambda found: found["model"].pop("vocab"), "is no valid tokenizer.json"),
    "another kind of model": (lambda found: found["model"].update(type="Unigram"), "is no valid tokenizer.json"),
    "merges of no tokens": (
        lambda found: found["model"]["merges"].append(["\u0120zz", "zz"]),
        "is no valid tokenizer.json: .*out of vocabulary",
    ),
    "no model": (lambda found: found.pop("model"), "is no valid tokenizer.json"),
    "a list": (lambda found: found.update(model=[]), "is no valid tokenizer.json"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_tokenizer_needs_is_there_or_it_is_refused(tmp_path: Path, case: str) -> None:
    save_byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    assert load_tokenizer(tmp_path).encode("quick") != []
    edit, message = BROKEN[case]
    pipeline = json.loads(path.read_text())
    edit(pipeline)
    path.write_text(json.dumps(pipeline))
    with pytest.raises(ModelFormatError, match=f"{path}: {message}"):
        load_tokenizer(tmp_path)
