"""What a model's own files say where the user says nothing: sampling defaults and the longest length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from d3engine.errors import InvalidValueError, ModelFormatError, require_integer
from d3engine.model.config import GENERATION_CONFIG_FILE, ModelConfig, load_generation_config, not_applied
from d3engine.model.model_files import CONFIG_FILE
from d3engine.request.params import SamplingParams

_log = logging.getLogger(__name__)


def default_sampling_params(directory: Path) -> SamplingParams:
    """What generation_config.json asks for, as vLLM reads it: greedy when it says `do_sample: false`.

    A warning names the keys that change an answer in transformers and are not applied here.
    Raises `ModelFormatError`, naming the file, for a value that `SamplingParams` refuses.
    """
    defaults: dict[str, Any] = load_generation_config(directory)
    defaults.pop("eos_token_ids", None)
    if ignored := not_applied(directory):
        named = ", ".join(f"{name}={value!r:.60}" for name, value in ignored.items())
        _log.warning("%s: these are not applied: %s", directory / GENERATION_CONFIG_FILE, named)
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    if defaults.pop("do_sample", True) is False:
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    try:
        return SamplingParams(**defaults)
    except InvalidValueError as error:
        raise ModelFormatError(f"{directory / GENERATION_CONFIG_FILE}: {error}") from None


def names_sampling(directory: Path) -> bool:
    """Whether the model's files say how to sample it. Raises `ModelFormatError`."""
    return bool({"do_sample", "temperature", "top_p", "top_k", "min_p"} & load_generation_config(directory).keys())


def resolve_max_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    """The most tokens of prompt and answer; beyond the positions that the model was made for only with dynamic rope.

    None is the model's own length, or its sliding window: up to there a window changes nothing, and further on the
    engine would attend to what the model does not. Raises `InvalidValueError` for a length beyond either.
    """
    window = config.sliding_window
    if max_model_len is None:
        return min(config.max_length, window or config.max_length)
    limit = None if config.rope.rope_type == "dynamic" else config.max_length
    length = require_integer("max_model_len", max_model_len, 2, limit)
    if window is not None and window < length:
        allowed = f"null or at least max_model_len={length} (max_model_len={window} is what can be run)"
        raise InvalidValueError(f"{CONFIG_FILE}: sliding_window", window, allowed)
    return length
