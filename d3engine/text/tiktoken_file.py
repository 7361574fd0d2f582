"""Meta's own tokenizer.model of Llama 3: a list of byte strings with their ranks, in base64, as tiktoken reads it.

The one idea: byte-pair encoding joins the two neighbours whose union has the lowest rank, so every way to split a token
into two others is a merge, in the order of the ranks, and `tokenizers` can run it. The pattern is Meta's (llama-models,
models/llama3/tokenizer.py), the special tokens have the names of Llama 3.1's tokenizer.json.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from d3engine.errors import ModelFormatError
from d3engine.text.byte_level import byte_of_character
from d3engine.text.special_tokens import added_tokens, named_special_tokens

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")
_LONGEST_TOKEN = 1024  # bytes; the longest of Llama 3 has 128
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)
_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def is_tiktoken(content: bytes) -> bool:
    """Whether a tokenizer.model is such a file, and not one of sentencepiece."""
    return _FIRST_LINE.match(content) is not None


def read_tiktoken(path: Path, content: bytes, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a file, and the names of its special tokens.

    The special tokens are those of tokenizer_config.json (`added_tokens_decoder`), without it the 256 of Llama 3.
    Raises `ModelFormatError` naming the line that is wrong.
    """
    ranks = _read_ranks(path, content)
    text = _texts(ranks)
    merges = [(text[left], text[right]) for left, right in _merges(ranks)]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    names = _add_special_tokens(path, tokenizer, len(ranks), config)
    bos = tokenizer.token_to_id(names.get("bos_token", ""))
    if bos is not None and config.get("add_bos_token") is not False:
        single = f"{names['bos_token']} $A"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(names["bos_token"], bos)]
        )
    return tokenizer, names


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ModelFormatError(f"{path}: line {number} must be a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(content.splitlines()))):
        raise ModelFormatError(f"{path}: its tokens must have the ranks from 0 on, each once")
    if max(map(len, ranks)) > _LONGEST_TOKEN or b"" in ranks:
        raise ModelFormatError(f"{path}: a token must have 1 to {_LONGEST_TOKEN} bytes")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFormatError(f"{path}: each of the 256 bytes must be a token")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _texts(ranks: Mapping[bytes, int]) -> dict[bytes, str]:
    character = {byte: char for char, byte in byte_of_character().items()}
    return {token: "".join(character[byte] for byte in token) for token in ranks}


def _add_special_tokens(path: Path, tokenizer: Tokenizer, first: int, config: Mapping[str, Any]) -> dict[str, str]:
    added = added_tokens(path.parent, config)
    names = named_special_tokens(config)
    if not added:
        added = {first + i: {"content": content} for i, content in enumerate(_SPECIAL_TOKENS)}
        names = _NAMES | names
    for token_id, token in sorted(added.items()):
        flags = {flag: bool(token.get(flag)) for flag in ("lstrip", "rstrip", "single_word")}
        is_special = bool(token.get("special", True))
        tokenizer.add_tokens([AddedToken(token["content"], special=is_special, normalized=False, **flags)])
        if tokenizer.token_to_id(token["content"]) != token_id:
            raise ModelFormatError(f"{path}: {token['content']!r} cannot have the id {token_id}: ids leave no gap")
    return names
