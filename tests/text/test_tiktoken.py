"""Meta's tokenizer.model of Llama 3 is read, and gives the tokens that its ranks mean."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from d3engine.errors import ModelFormatError
from d3engine.text.tokenizer import DecoderKind, load_tokenizer

WORDS = ["th", "the", " t", " the", " th", "in", "ing", " in", "12", "123", "日本", "\n\n", "  ", "   ", "an", "nan"]
TEXTS = [
    "the thing in the inn",
    "I'LL sing 12345 times,  then   rest\n\n\nthe end ",
    "café 日本語 🙂 naïve",
    "banana\tthe\r\n the",
    "",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nthe<|eot_id|>",
]


def rank_file(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def ranks() -> dict[bytes, int]:
    every = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), "é".encode()[:1] + b"x"]
    return {token: rank for rank, token in enumerate(dict.fromkeys(every))}


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(rank_file(list(ranks())))
    return tmp_path


def join_by_rank(word: bytes, known: dict[bytes, int]) -> list[int]:
    """As tiktoken does: a known word is one token; else the leftmost neighbours of the lowest rank join, repeatedly."""
    if word in known:
        return [known[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        joined = [known.get(left + right, len(known)) for left, right in pairwise(parts)]
        if not joined or min(joined) == len(known):
            return [known[part] for part in parts]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


class TestReading:
    def test_text_becomes_the_tokens_that_the_ranks_mean(self, meta: Path) -> None:
        pattern = TikTokenConverter().pattern
        tokenizer, known = load_tokenizer(meta), ranks()
        for text in TEXTS[:-1]:
            words = regex.findall(pattern, text)
            assert "".join(words) == text
            expected = [rank for word in words for rank in join_by_rank(word.encode(), known)]
            assert tokenizer.encode(text, add_special_tokens=False) == expected

    def test_the_tokenizer_equals_what_transformers_converts(self, meta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda _: ranks()))
        tokenizer = load_tokenizer(meta)
        special = [tokenizer.convert_id_to_token(i) for i in sorted(tokenizer.special_ids)]
        backend = TikTokenConverter("tokenizer.model", extra_special_tokens=special).converted()
        theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
        for text in TEXTS:
            assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).endswith(text)

    def test_llama_3s_256_special_tokens_follow_the_ranks(self, meta: Path) -> None:
        tokenizer, first = load_tokenizer(meta), len(ranks())
        names = {i: tokenizer.convert_id_to_token(first + i) for i in (0, 1, 6, 7, 8, 9, 10, 255)}
        assert list(names.values()) == [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
            "<|reserved_special_token_247|>",
        ]
        assert tokenizer.special_ids == set(range(first, first + 256))
        assert tokenizer.vocab_size == first + 256
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (first, first + 1)
        assert tokenizer.kind is DecoderKind.BYTE_LEVEL
        assert tokenizer.encode("the") == [first, ranks()[b"the"]]

    def test_tokens_that_the_config_names_take_their_place(self, meta: Path) -> None:
        first = len(ranks())
        added = {
            str(first): {"content": "<s>", "special": True},
            str(first + 1): {"content": "<tool>", "special": False},
        }
        fields: dict[str, Any] = {"added_tokens_decoder": added, "bos_token": "<s>", "add_bos_token": False}
        (meta / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
        tokenizer = load_tokenizer(meta)
        assert tokenizer.encode("<s><tool>the") == [first, first + 1, ranks()[b"the"]]
        assert (tokenizer.special_ids, tokenizer.eos_token_id) == ({first}, None)
        fields["added_tokens_decoder"] = {str(first + 5): {"content": "<s>"}}
        (meta / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
        with pytest.raises(ModelFormatError, match=rf"'<s>' cannot have the id {first + 5}"):
            load_tokenizer(meta)


BYTES = [bytes([byte]) for byte in range(256)]


class TestBrokenFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (rank_file(BYTES) + b"IQ== x\n", "line 257 must be a token in base64 and its rank"),
            (rank_file(BYTES) + b"I!Q== 256\n", "line 257 must be a token in base64 and its rank"),
            (rank_file(BYTES) + b"\n", "line 257 must be a token in base64 and its rank"),
            (rank_file(BYTES) + b"aGE= 300\n", "ranks from 0 on, each once"),
            (rank_file([*BYTES, b"a"]), "ranks from 0 on, each once"),
            (rank_file(BYTES[:-1]), "each of the 256 bytes must be a token"),
            (rank_file([*BYTES, b"a" * 1025]), "1 to 1024 bytes"),
        ],
        ids=["no rank", "no base64", "empty line", "a gap", "twice", "a byte is missing", "too long"],
    )
    def test_the_file_and_what_is_wrong_are_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelFormatError, match=rf"tokenizer\.model: .*{message}"):
            load_tokenizer(tmp_path)
