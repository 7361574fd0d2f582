"""How byte-level BPE splits a text into words before it merges anything, by the names that GGUF files have for that.

The one idea: a name stands for the pre-tokenizer of the model's own tokenizer.json, so what it comes to is written in
that file's terms. A name that is not known is no reason to guess: ids of other tokens would follow, and poor answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Words:
    """The steps of a pre-tokenizer, the last of which turns bytes into characters.

    `whole_words`: a word that is a token is that token, whatever the merges say (`ignore_merges`). `begins`: BOS comes
    first unless the file says otherwise.
    """

    steps: tuple[dict[str, Any], ...]
    whole_words: bool = False
    begins: bool = False


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """Bytes as characters; with `use_regex` after GPT-2's own splitting, which `tokenizers` has built in."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> tuple[dict[str, Any], ...]:
    """What each pattern finds in the pieces that the one before has left stands alone; and so does the rest."""
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return *steps, byte_level(use_regex=False)


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"]+[\r\n]*|", "]+|")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"

_AS_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")
_AS_GPT2 = ("gpt-2", "mellum", "trillion", "granite-docling")
_AS_SMOLLM = ("smollm", "starcoder", "refact", "command-r", "minerva-7b")
_AS_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez")

_GPT2_WORDS = Words((byte_level(use_regex=True),))
_DIGITS_ALONE = Words(({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)))

WORDS: dict[str, Words] = {
    **dict.fromkeys(_AS_LLAMA3, Words(_split(_LLAMA3), whole_words=True, begins=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), Words(_split(_LLAMA3))),
    **dict.fromkeys(_AS_QWEN2, Words(_split(_QWEN2))),
    "seed-coder": Words(_split(_SEED)),
    **dict.fromkeys(_AS_GPT2, _GPT2_WORDS),
    **dict.fromkeys(_AS_SMOLLM, _DIGITS_ALONE),
    "tekken": Words(_split(_TEKKEN), whole_words=True, begins=True),
    "default": Words(_split(_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""What `tokenizer.ggml.pre` stands for."""
