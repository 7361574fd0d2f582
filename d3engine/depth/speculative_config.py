"""`speculative_config` as vLLM spells it: which policy drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from d3engine.depth.drafts import PromptLookup, Speculative
from d3engine.depth.policy import DepthPolicy
from d3engine.errors import InvalidValueError, require

METHODS = ("draft_model", "eagle3", "ngram", "suffix")
FIELD = "speculative_config"
HISTORY_OF_SUFFIX = 65_536
"""Tokens of earlier answers that "suffix" looks up: some hundred answers, gone through in a tenth of a millisecond."""


def policy_of_config(given: Mapping[str, Any] | str) -> DepthPolicy:
    """The policy of `{"method": "draft_model", "model": ..., "num_speculative_tokens": ...}`, or of its JSON text.

    "method" is "draft_model", also where only "model" is given; "eagle3", whose model is an EAGLE-3 head; "ngram",
    which looks up the text; or "suffix", which looks up earlier answers of the engine too. Without
    "num_speculative_tokens" each draft is as long as pays. Raises `InvalidValueError` for anything else, by the name of
    the key.
    """
    config = as_mapping(given)
    keys = ("method", "model", "num_speculative_tokens")
    for key in config:
        require(key in keys, f"{FIELD}[{key!r}]", config[key], f"absent: the keys are {', '.join(keys)}")
    model, length = config.get("model"), config.get("num_speculative_tokens")
    method = config.get("method", "draft_model" if model is not None else None)
    require(method in METHODS, f'{FIELD}["method"]', method, f"one of {', '.join(map(repr, METHODS))}")
    try:
        if method not in ("draft_model", "eagle3"):
            require(model is None, f'{FIELD}["model"]', model, f'absent with "{method}", which drafts without a model')
            return PromptLookup(length, HISTORY_OF_SUFFIX if method == "suffix" else 0)
        require(model is not None, f'{FIELD}["model"]', model, f'the draft model, with "{method}"')
        return Speculative(str(model), length)
    except InvalidValueError as error:
        names = {"draft_length": "num_speculative_tokens", "draft_model": "model"}
        if error.field not in names:
            raise
        raise InvalidValueError(f'{FIELD}["{names[error.field]}"]', error.value, error.allowed) from None


def as_mapping(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A `speculative_config`, or the mapping that its JSON text holds; raises `InvalidValueError` for another text."""
    allowed = 'a mapping such as {"method": "ngram"}, or its JSON text'
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(FIELD, given, f"{allowed} ({error})") from None
    if not isinstance(found, Mapping):
        raise InvalidValueError(FIELD, given, allowed)
    return found
