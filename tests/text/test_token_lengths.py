"""The bound by which a text is refused before it is encoded is never above the number of its tokens."""

import random
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from small_tokenizers import CORPUS, save_byte_fallback_json, save_byte_level, save_word_level, train_byte_level
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from d3engine.model.config import ModelConfig
from d3engine.request.params import SamplingParams
from d3engine.text import prompts
from d3engine.text.tokenizer import load_tokenizer
from d3engine.text.tokenizer_files import MOST_COMPOSED, TokenLengths

DEMO = Path(prompts.__file__).parents[1] / "demo_model" / "tokenizer.json"
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a" * 1000,
    " \t\n" * 300,
    "\u00e9" * 300,
    "e\u0301" * 300,
    "\u1100\u1161\u11a8" * 200,  # three letters of Hangul that compose one syllable
    "\u03b1\u0313\u0301\u0345" * 200,  # four that compose one
    "\u212b\u2126\u212a" * 100,  # characters that stand for others
    "\U0001f642 " * 200,
    "\x00\x1c\ufeff" * 50,
    "<tool>" * 100,
]


def byte_level(normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    backend = train_byte_level(CORPUS, 330)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    return tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))


def test_no_character_is_composed_of_more() -> None:
    """Each of a text's characters is one or more of its decomposition, and these make up one character at most."""
    decomposed = (unicodedata.normalize("NFD", chr(code)) for code in range(sys.maxunicode + 1))
    assert max(map(len, decomposed)) == MOST_COMPOSED


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(),
        byte_level(normalizers.NFC()),
        byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")])),
        byte_fallback(),
        tokenizers.Tokenizer.from_file(str(DEMO)),
    ],
    ids=["bytes", "NFC", "sequence", "fallback", "demo"],
)
def test_no_text_has_fewer_tokens(backend: tokenizers.Tokenizer) -> None:
    lengths = TokenLengths.of(backend)
    assert lengths is not None
    numbers = random.Random(1)
    vocabulary = sorted(backend.get_vocab())
    texts = [*TEXTS, *("".join(numbers.choices(vocabulary, k=200)) for _ in range(20))]
    texts += [longest * 100 for longest in sorted(vocabulary, key=len)[-5:]]
    texts += ["".join(map(chr, numbers.choices([*range(0xD800), *range(0xE000, 0x11000)], k=300))) for _ in range(20)]
    for text in texts:
        fewest = lengths.fewest_tokens(text)
        assert 0 <= fewest <= len(backend.encode(text, add_special_tokens=False).ids), text
        if len(text) > 100:
            assert fewest > 0


def test_the_bound_is_reached_by_the_longest_token() -> None:
    backend = byte_level()
    backend.add_tokens(["<a quite long token>"])
    lengths = TokenLengths.of(backend)
    assert lengths is not None
    text = "<a quite long token>" * 50
    assert lengths.fewest_tokens(text) == len(backend.encode(text).ids) == 50


def test_whitespace_taken_by_an_added_token_does_not_count() -> None:
    """Whitespace that an added token takes with it does not count."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<end>", lstrip=True, rstrip=True)])
    lengths = TokenLengths.of(backend)
    assert lengths is not None
    for space in (" ", "\u3000", "\x85\xa0", " \u2003\n"):
        text = space * 5000 + "<end>" + space * 5000
        assert lengths.fewest_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids) == 1


def dropping() -> dict[str, tokenizers.Tokenizer]:
    found = {
        "lower case": byte_level(normalizers.Lowercase()),
        "NFKC": byte_level(normalizers.NFKC()),
        "strips": byte_level(normalizers.Strip()),
        "a pattern": byte_level(normalizers.Replace(Regex(" +"), " ")),
        "a shorter text": byte_level(normalizers.Replace("aa", "a")),
        "inside of others": byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("aa", "a")])),
    }
    for name, split in {
        "spaces": pre_tokenizers.Whitespace(),
        "removed": pre_tokenizers.Split(" ", "removed"),
        "removed later": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.WhitespaceSplit()]),
    }.items():
        found[name] = byte_level()
        found[name].pre_tokenizer = split
    fused = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)
    found["unknown"] = tokenizers.Tokenizer(fused)
    found["some bytes"] = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "<0x0A>": 1}, [], byte_fallback=True))
    found["words"] = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return found


@pytest.mark.parametrize("why", dropping())
def test_a_pipeline_that_drops_something_has_no_bound(why: str) -> None:
    assert TokenLengths.of(dropping()[why]) is None


@pytest.mark.parametrize("save", [save_byte_level, lambda folder: save_byte_fallback_json(folder, True)])
def test_long_texts_and_many_have_the_ids_of_short_ones(save, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = " ".join(CORPUS * 60)
    assert len(text) > 4096
    assert tokenizer.encode(text) == tokenizer._tokenizer.encode(text).ids  # type: ignore[attr-defined]
    several = [text, "", "a b", text[:100]]
    assert tokenizer.encode_all(several, add_special_tokens=False) == [
        tokenizer.encode(one, add_special_tokens=False) for one in several
    ]
    ids = tokenizer.encode(text)
    short = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    assert tokenizer.decode(ids * 3)[: len(short)] == short


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    encoded: list[int] = []
    encode_all = tokenizer.encode_all
    tokenizer.encode_all = lambda texts, **named: encoded.extend(map(len, texts)) or encode_all(texts, **named)  # type: ignore[method-assign, func-returns-value]
    config = ModelConfig.__new__(ModelConfig)
    object.__setattr__(config, "eos_token_ids", frozenset())
    object.__setattr__(config, "vocab_size", tokenizer.vocab_size)
    reader = prompts.PromptReader(config, tokenizer, max_model_len=100)
    with pytest.raises(prompts.InvalidValueError, match=r"prompt must be shorter than max_model_len=100.*at least"):
        reader.read("xy" * 100_000, SamplingParams())
    assert encoded == []
    assert reader.read("ab", SamplingParams())[0] == "ab"
    assert encoded == [2]


def test_words_have_no_bound(tmp_path: Path) -> None:
    save_word_level(tmp_path)
    assert load_tokenizer(tmp_path).fewest_tokens("the cat " * 1000) == 0
