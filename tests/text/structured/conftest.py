"""Random models over every kind of tokenizer: what they write is held together by its form alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tiny_models import TinyLlama

    from d3engine import Engine
    from d3engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tokenizer_of(kind)`: where a tokenizer of this kind stands."""
    from gguf_files import SMALL, write_gguf
    from small_tokenizers import save_byte_fallback_json, save_byte_level

    import d3engine

    @cache
    def place(kind: str) -> Path:
        directory = tmp_path_factory.mktemp("tokenizer")
        if kind == "sentencepiece":
            for name in ("tokenizer.model", "tokenizer_config.json"):
                shutil.copy(Path(d3engine.__file__).parent / "demo_model" / name, directory)
            return directory
        if kind == "gguf":
            return write_gguf(directory / "model.gguf", **SMALL)
        if kind == "byte level":
            save_byte_level(directory)
        else:
            save_byte_fallback_json(directory, strip=True)
        return directory

    return place


@pytest.fixture(scope="session")
def random_engine(tiny_llama: Callable[..., TinyLlama], tokenizer_of: Callable[[str], Path]) -> Callable[..., Engine]:
    """`random_engine(kind, **arguments)`: random weights, five rows of the embedding more than there are tokens."""
    from d3engine import Engine, FullDepth
    from d3engine.text.tokenizer import load_tokenizer

    def make(kind: str, **arguments: Any) -> Engine:
        tokenizer = load_tokenizer(tokenizer_of(kind))
        ends = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else max(tokenizer.special_ids)
        llama = tiny_llama(
            vocab_size=tokenizer.vocab_size + 5, num_hidden_layers=4, hidden_size=32, eos_token_id=ends, seed=1
        )
        given: dict[str, Any] = {"device": "cpu", "depth": FullDepth(), "kv_cache_memory_bytes": 2**23} | arguments
        return Engine(llama.directory, tokenizer=tokenizer_of(kind), **given)

    return make


@pytest.fixture(scope="session")
def tokenizer(tokenizer_of: Callable[[str], Path]) -> Tokenizer:
    """The bundled model's tokenizer, as tokenizer.model alone."""
    from d3engine.text.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer_of("sentencepiece"))
