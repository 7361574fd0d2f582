"""The files that a model directory may hold beside its weights: what is read of one, written into one, and fetched."""

from __future__ import annotations

from d3engine.model.config import GENERATION_CONFIG_FILE
from d3engine.model.model_files import CONFIG_FILE

COMPANIONS = (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "prompt_form.json",
    "d3.json",
)
