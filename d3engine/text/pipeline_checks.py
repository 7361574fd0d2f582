"""What the parts of a tokenizer.json need of each other: without it texts become other tokens than in training."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from d3engine.text.byte_level import byte_of_character

_SELDOM = {*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)} - set(b"\t\n")
"""Bytes that real tokenizers may lack: of control characters and of rare ones, and those that UTF-8 never has."""
_BYTES, _SPACE_MARK = '"ByteLevel"', "\u2581"
_FEW = 16
"""So many tokens of several characters may be without a merge: they may have been added later."""


def missing_in(pipeline: Mapping[str, Any]) -> str | None:
    """What a parsed tokenizer.json lacks, as the end of a sentence; None where nothing is missing."""
    model = pipeline["model"]
    vocabulary = {token[0] if isinstance(token, list) else token for token in model["vocab"]}
    if not vocabulary:
        return "has no tokens"
    before = json.dumps([pipeline.get("normalizer"), pipeline.get("pre_tokenizer")], ensure_ascii=False)
    behind = json.dumps(pipeline.get("decoder"), ensure_ascii=False)
    for mark in (_BYTES, _SPACE_MARK):
        if mark in behind and mark not in before:
            return f"has {mark} in its decoder, but neither in its normalizer nor in its pre_tokenizer"
    if _BYTES in before and _BYTES not in behind:
        return f"has {_BYTES} in its normalizer or pre_tokenizer, but not in its decoder"
    if _BYTES in before and model.get("unk_token") is None and not model.get("byte_fallback"):
        table = byte_of_character()
        absent = [byte for char, byte in table.items() if char not in vocabulary and byte not in _SELDOM]
        if absent:
            return f"has no token for {len(absent)} of the bytes of texts, such as {min(absent)}"
    if model.get("byte_fallback") and model.get("unk_token") is None:
        absent = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
        if absent:
            return f"has no byte token <0x{absent[0]:02X}>"
    if model.get("type", "BPE") == "BPE":
        added = {token.get("content") for token in pipeline.get("added_tokens") or ()}
        return _missing_merges(model, vocabulary, added)
    return None


def _missing_merges(model: Mapping[str, Any], vocabulary: Collection[str], added: Collection[str]) -> str | None:
    """Most tokens of several characters come from a merge."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    made = {"".join(pair) for pair in pairs}
    long = [token for token in vocabulary if len(token) > 1 and token not in added and not token.startswith("<0x")]
    unmade = sum(token not in made for token in long)
    if unmade <= max(_FEW, len(long) // 2):
        return None
    return f"has no merge for {unmade:,} of its {len(long):,} tokens of several characters"
