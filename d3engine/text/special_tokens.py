"""What a model directory says about its special tokens, beside the tokenizer itself.

The one idea: tokenizer_config.json, special_tokens_map.json and added_tokens.json say the same in three generations of
files. They are read into one list here, in transformers' order, because a token that has no id yet gets the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from d3engine.errors import ModelFormatError, must_be
from d3engine.model.model_files import ModelFiles
from d3engine.model.source import ModelSource, files_of

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_ALL_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
_FLAGS = ("lstrip", "rstrip", "single_word")


def read_tokenizer_config(model: ModelSource) -> dict[str, Any]:
    """Return tokenizer_config.json over special_tokens_map.json; missing files count as empty.

    Raises `ModelFormatError` when one is no JSON object, and for a switch that is neither true nor false.
    """
    files, config = files_of(model), dict[str, Any]()
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if files.has(name):
            config.update(files.read_json_object(name))
    for name in _SWITCHES:
        if not (config.get(name) is None or isinstance(config[name], bool)):
            raise ModelFormatError(must_be(f"tokenizer_config.json: {name}", config[name], "true, false or null"))
    return config


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `{"bos_token": "<s>", ...}` for the tokens a config names (a string or an AddedToken)."""
    named = {field: _content(field, config.get(field)) for field in _NAMED_TOKENS}
    return {field: content for field, content in named.items() if content is not None}


def special_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Return every special token that a config names, with those of its flags (lstrip, ...) that are set, in order."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise ModelFormatError(
            f"tokenizer_config.json: extra_special_tokens must be a list or an object, not {extra!r}"
        )
    values = [(field, config.get(field)) for field in _ALL_NAMED_TOKENS]
    values += [("extra_special_tokens", value) for value in (extra.values() if isinstance(extra, dict) else extra)]
    found: dict[str, dict[str, bool]] = {}
    for field, value in values:
        content = _content(field, value)
        if content:
            flags = value if isinstance(value, dict) else {}
            found.setdefault(content, {flag: True for flag in _FLAGS if flags.get(flag)})
    return found


def added_tokens(model: ModelSource, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens behind the vocabulary by id: `added_tokens_decoder`, else those of added_tokens.json.

    Each is an AddedToken's fields. Raises `ModelFormatError` for what is malformed.
    """
    files = files_of(model)
    path = files.place("tokenizer_config.json")
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ModelFormatError(f"{path}: added_tokens_decoder must be an object")
    if not entries and files.has("added_tokens.json"):
        return dict(_legacy_tokens(files, special_tokens(config)))
    added = {}
    for key, token in entries.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not (_is_text(content) and content and str(key).isdecimal() and len(key) < 10):
            raise ModelFormatError(f"{path}: added_tokens_decoder must map ids to objects with a non-empty content")
        added[int(key)] = token
    return added


def _legacy_tokens(files: ModelFiles, special: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    path = files.place("added_tokens.json")
    for content, token_id in files.read_json_object("added_tokens.json").items():
        if not (content and _is_text(content) and type(token_id) is int and token_id >= 0):
            raise ModelFormatError(f"{path}: must map non-empty tokens to ids, not {content!r} to {token_id!r}")
        yield token_id, {"content": content, "special": content in special, **special.get(content, {})}


def _content(field: str, value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not _is_text(content):
        raise ModelFormatError(f"tokenizer_config.json: {field} must be a string, not {content!r}")
    return content


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a string without lone surrogates, which JSON can spell and no text has."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
