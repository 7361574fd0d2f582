"""Small tokenizers of every kind, trained and saved in a moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from d3engine.text.tokenizer import Tokenizer, load_tokenizer

LLAMA2 = Path(__file__).resolve().parents[3] / "shared" / "data" / "llama2"
CORPUS = ["the cat sat on the mat and the dog ate", "Größe, naïve café, 東京 日本語 🙂", "a b c\n\nd e f\n"] * 4


def train_byte_level(corpus: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE, built like Llama 3's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save_byte_level(directory: Path) -> None:
    tokenizer = train_byte_level(CORPUS, 330)
    # One added token in the byte table's alphabet, one outside of it, one that mixes both.
    tokenizer.add_tokens(["<tool>", "日本 x", "é!"])
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def save_byte_fallback_json(directory: Path, strip: bool) -> None:
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = byte_fallback(["<unk>", "<s>", *in_bytes, "\u2581", "\u2581\u2581", "\u2581a", "b", "日"], strip)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def byte_fallback(pieces: list[str], strip: bool) -> tokenizers.Tokenizer:
    """BPE with byte fallback, built like Llama 2's."""
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return tokenizer


def save_word_level(directory: Path) -> None:
    """No decoder at all: `tokenizers` then puts a space between any two words."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "the", "cat", "sat", "mat"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def save_sentencepiece(directory: Path, corpus: list[str] = CORPUS, vocab_size: int = 330, **options: Any) -> None:
    """A tokenizer.model trained as Llama 2's was: BPE with byte fallback, nothing normalised."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )


KINDS: dict[str, Callable[[Path], None]] = {
    "byte level": save_byte_level,
    "byte fallback": lambda directory: save_byte_fallback_json(directory, strip=True),
    "unstripped": lambda directory: save_byte_fallback_json(directory, strip=False),
    "sentencepiece": save_sentencepiece,
    "word level": save_word_level,
}


def made_tokenizer(kind: str, directory: Path) -> Tokenizer:
    """The tokenizer of one of the `KINDS`, or "llama 2" where its file is here."""
    if kind == "llama 2":
        if not (LLAMA2 / "tokenizer.model").is_file():
            pytest.skip("shared/data/llama2/tokenizer.model is not here")
        return load_tokenizer(LLAMA2)
    KINDS[kind](directory)
    return load_tokenizer(directory)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The bytes of a text as byte tokens, which every one can be written with."""
    first = next(i for i in range(300) if tokenizer.convert_id_to_token(i) == "<0x00>")
    return [first + byte for byte in text.encode()]
