"""A GGUF file's tokenizer splits texts as the model's own does, which the name in `tokenizer.ggml.pre` stands for.
The oracle is the published pre-tokenizer, built with `tokenizers` beside the words and merges of the file: what
SmolLM2's, Llama 3's, Qwen2's and GPT-2's own tokenizer.json have, and for "default" what llama.cpp does.
transformers' GGUF loader reads the same files, and the texts on which it differs are of one kind for each name."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

import sentencepiece
from gguf_files import SMALL, bpe_keys, corpus, many_texts, sentencepiece_keys, sentencepiece_model, write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from typer.testing import CliRunner

from d3engine.cli import app
from d3engine.errors import ModelFormatError
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf
from d3engine.model.source import files_of
from d3engine.text.tokenizer import load_tokenizer
from d3engine.text.tokenizer_files import byte_level_bpe

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""That of Phi-4-mini, which tiktoken calls o200k."""
PUBLISHED: dict[str, tuple[tuple[str, ...], bool]] = {
    "smollm": ((r"\p{N}", GPT2), False),
    "gpt-2": ((GPT2,), False),
    "llama-bpe": ((CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,), True),
    "qwen2": ((CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST,), False),
    "dbrx": ((CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,), False),
    "seed-coder": (
        (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
        False,
    ),
    "gpt-4o": ((O200K,), False),
    "deepseek-coder": (
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
        False,
    ),
    "minicpm5": ((r"\p{N}{1,3}", CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + REST), True),
    "glm4": ((CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,), False),
    "exaone4": ((GPT2,), False),
    "default": ((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), False),
}
"""What is split off, one pattern after the other, and whether a word that is a token is never merged."""


TEXTS = many_texts()


def has_number(text: str) -> bool:
    return any(unicodedata.category(character)[0] == "N" for character in text)


@pytest.fixture(scope="module")
def keys() -> dict[str, Any]:
    """A vocabulary in which "\u0120whole" is a token that no merge makes."""
    keys = bpe_keys()
    tokens = list(keys["tokenizer.ggml.tokens"])
    tokens[-1] = "\u0120whole"
    kinds = [*keys["tokenizer.ggml.token_type"][:-1], 1]
    return keys | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


@pytest.fixture(scope="module")
def written(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A GGUF file whose tokenizer has that `pre`."""
    folder = tmp_path_factory.mktemp("gguf")

    def write(pre: str) -> Path:
        return write_gguf(folder / f"{pre}.gguf", tokenizer=keys | {"tokenizer.ggml.pre": pre}, **SMALL)

    return write


def published(path: Path, pre: str) -> Tokenizer:
    """The oracle: words and merges of a file, split by `PUBLISHED`."""
    metadata = open_gguf(path).metadata
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    patterns, whole_words = PUBLISHED[pre]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    )
    return backend


@pytest.mark.parametrize("pre", PUBLISHED)
def test_token_ids_are_those_of_the_published_pre_tokenizer(written: Callable[[str], Path], pre: str) -> None:
    path = written(pre)
    ours, oracle = load_tokenizer(path), published(path, pre)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", PUBLISHED)
def test_built_tokenizer_reads_as_its_tokenizer_json(written: Callable[[str], Path], pre: str) -> None:
    """The tokenizer that is put together reads as its tokenizer.json does."""
    files = files_of(written(pre))
    pipeline = files.byte_level_bpe()
    assert pipeline is not None
    assert json.loads(files.read_text("tokenizer.json")) == pipeline
    assert byte_level_bpe(pipeline).to_str() == Tokenizer.from_str(files.read_text("tokenizer.json")).to_str()


DIFFERENT: dict[str, Callable[[str], bool]] = {
    "smollm": has_number,  # transformers leaves the digits together
    "gpt-2": lambda text: False,
    "qwen2": lambda text: False,
    "llama-bpe": lambda text: " whole" in text,  # transformers merges what is a token already
    "tekken": lambda text: " whole" in text,
    "default": lambda text: True,  # transformers splits as for gpt-2
}
"""On which texts transformers' GGUF loader may give other ids than the published pre-tokenizer."""


@pytest.mark.parametrize("pre", DIFFERENT)
def test_transformers_gives_equal_ids_but_for_one_kind_of_text(written: Callable[[str], Path], pre: str) -> None:
    """Transformers gives the same ids but for one kind of texts."""
    path = written(pre)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    differing = [text for text in TEXTS if ours.encode(text, False) != theirs.encode(text, add_special_tokens=False)]
    assert all(DIFFERENT[pre](text) for text in differing)
    assert bool(differing) == (pre not in ("gpt-2", "qwen2"))


@pytest.mark.parametrize("pre", ["viking", "Smollm", "gpt2", None])
def test_a_name_that_stands_for_nothing_known_is_refused(tmp_path: Path, keys: dict[str, Any], pre: str | None) -> None:
    given = {name: value for name, value in keys.items() if name != "tokenizer.ggml.pre"}
    changes = {} if pre is None else {"tokenizer.ggml.pre": pre}
    path = write_gguf(tmp_path / "model.gguf", tokenizer=given, changes=changes, **SMALL)
    with pytest.raises(ModelFormatError, match=rf"tokenizer\.ggml\.pre must be one of .*, smollm.*; got {pre!r}"):
        load_tokenizer(path)


def test_file_of_an_unknown_name_runs_with_a_given_tokenizer(tmp_path: Path, keys: dict[str, Any]) -> None:
    """What the refusal advises is an option of the commands."""
    known, unknown = (
        write_gguf(tmp_path / f"{pre}.gguf", tokenizer=keys | {"tokenizer.ggml.pre": pre}, **SMALL)
        for pre in ("smollm", "viking")
    )
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_bytes(files_of(known).read_bytes("tokenizer.json"))
    words = ["generate", "a block", "--max-tokens", "4", "--temperature", "0", "--max-model-len", "32"]
    refused, answered, wanted = (
        CliRunner().invoke(app, [words[0], str(model), *words[1:], *more])
        for model, more in ((unknown, []), (unknown, ["--tokenizer", str(tmp_path / "own")]), (known, []))
    )
    assert "or give a directory with the model's tokenizer.json as tokenizer" in " ".join(refused.stderr.split())
    assert answered.exit_code == wanted.exit_code == 0
    assert answered.stdout == wanted.stdout != ""


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("smollm", False)])
@pytest.mark.parametrize("given", [None, True, False])
def test_bos_is_first_by_the_flag_or_else_by_the_name(
    tmp_path: Path, keys: dict[str, Any], pre: str, begins: bool, given: bool | None
) -> None:
    """BOS comes first where the flag says so, and without one where the name does."""
    leave = ("tokenizer.ggml.add_bos_token",) if given is None else ()
    changes = {"tokenizer.ggml.pre": pre} | ({} if given is None else {"tokenizer.ggml.add_bos_token": given})
    path = write_gguf(tmp_path / "model.gguf", tokenizer=keys, changes=changes, leave=leave, **SMALL)
    ours = load_tokenizer(path)
    assert (ours.encode("a")[0] == keys["tokenizer.ggml.bos_token_id"]) == (begins if given is None else given)
    assert ours.encode("a", add_special_tokens=False)[0] != keys["tokenizer.ggml.bos_token_id"]


def test_flag_for_a_token_absent_from_the_file_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    """A flag for a token that the file does not name is refused."""
    leave = ("tokenizer.ggml.bos_token_id",)
    path = write_gguf(tmp_path / "model.gguf", tokenizer=keys, leave=leave, **SMALL)
    with pytest.raises(ModelFormatError, match=r"add_bos_token must be false without tokenizer\.ggml\.bos_token_id"):
        load_tokenizer(path)


@pytest.mark.parametrize("prefixes", [True, False])
def test_a_sentencepiece_tokenizer_is_the_model_it_came_from(tmp_path: Path, prefixes: bool) -> None:
    """Also without a space before a text, as Gemma's, whose files say so."""
    model = sentencepiece_model(add_dummy_prefix=prefixes)
    keys = sentencepiece_keys(model) | ({} if prefixes else {"tokenizer.ggml.add_space_prefix": False})
    path = write_gguf(tmp_path / "model.gguf", tokenizer=keys, **SMALL)
    ours, original = load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        if not any(special in text for special in ("<|im_end|>", "</s>")):  # sentencepiece cuts these into pieces
            assert ours.encode(text) == [original.bos_id(), *original.encode(text)], text
            assert ours.decode(ours.encode(text)) == original.decode(original.encode(text)), text
    if prefixes:
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        plain = [line for line in corpus() if line and "  " not in line and line.isascii()][:200]
        assert [ours.encode(text) for text in plain] == [theirs.encode(text) for text in plain]
    assert ours.encode("<|im_end|>")[1:] == [original.piece_to_id("<|im_end|>")]
    assert ours.encode("<think>")[1:] == [original.piece_to_id("<think>")]  # no space comes before it


BPE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no merges": ({"merges": None}, "tokenizer.ggml.merges is missing or empty"),
    "empty merges": ({"merges": []}, "tokenizer.ggml.merges is missing or empty"),
    "few merges": ({"merges": ["i n"]}, "has no merge for .* tokens of several characters"),
    "merges of one token": ({"merges": ["he"]}, "tokenizer.ggml.merges must be pairs"),
    "merges of unknown tokens": ({"merges": ["zzz qqq"]}, "out of vocabulary"),
    "no tokens": ({"tokens": None, "token_type": None}, "tokenizer.ggml.tokens must be from 1 to"),
    "a space before a text": ({"add_space_prefix": True}, "add_space_prefix must be false with .*'gpt2'; got True"),
    "spaces removed": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces must be absent or false"),
    "a name that is none": ({"pre": [0.5]}, "tokenizer.ggml.pre must be one of"),
    "a map of characters": ({"precompiled_charsmap": [1]}, "precompiled_charsmap must be"),
}


@pytest.mark.parametrize("case", BPE_FAULTS)
def test_byte_level_tokenizer_that_lacks_something_is_refused(tmp_path: Path, keys: dict[str, Any], case: str) -> None:
    changes, message = BPE_FAULTS[case]
    changes = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    tokenizer = {key: value for key, value in (keys | changes).items() if value is not None and value != []}
    file = write_gguf(tmp_path / "model.gguf", tokenizer=tokenizer, **SMALL)
    with pytest.raises(ModelFormatError, match=message):
        print(ModelConfig.from_directory(file), load_tokenizer(file))


def test_byte_level_tokenizer_that_lacks_a_byte_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    """A byte-level tokenizer without a token for each byte is refused."""
    tokens = ["lost" if token == "q" else token for token in keys["tokenizer.ggml.tokens"]]
    merges = [merge for merge in keys["tokenizer.ggml.merges"] if "q" not in merge]
    changed = keys | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    file = write_gguf(tmp_path / "model.gguf", tokenizer=changed, **SMALL)
    with pytest.raises(ModelFormatError, match="has no token for 1 of the bytes of texts, such as 113"):
        load_tokenizer(file)


@pytest.mark.parametrize("change", ["no scores", "equal scores", "a byte less"])
def test_sentencepiece_tokenizer_that_is_incomplete_is_refused(tmp_path: Path, change: str) -> None:
    """A SentencePiece tokenizer that lacks something is refused."""
    keys = sentencepiece_keys(sentencepiece_model())
    if change == "no scores":
        del keys["tokenizer.ggml.scores"]
    elif change == "equal scores":
        keys["tokenizer.ggml.scores"] = [0.0] * len(keys["tokenizer.ggml.scores"])
    else:
        kinds = keys["tokenizer.ggml.token_type"]
        kinds[kinds.index(6)] = 1
    file = write_gguf(tmp_path / "model.gguf", tokenizer=keys, vocab_size=len(keys["tokenizer.ggml.tokens"]), layers=1)
    with pytest.raises(ModelFormatError):
        load_tokenizer(file)
