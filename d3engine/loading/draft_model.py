"""A second model that drafts: loaded from its directory, and checked against the model it drafts for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from d3engine.cache.kv_cache import KVCache
from d3engine.errors import InvalidValueError, require
from d3engine.executor.eager import EagerExecutor
from d3engine.loading.executors import eager_executor, new_cache
from d3engine.loading.model_directory import model_directory, resolve_max_model_len
from d3engine.loading.resolve import held_config
from d3engine.loading.settings import EngineSettings
from d3engine.model.config import ModelConfig
from d3engine.model.source import files_of
from d3engine.model.weights import LlamaWeights, load_weights
from d3engine.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model: what runs it, and the block tables of its cache."""

    directory: str
    executor: EagerExecutor
    cache: KVCache


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model that fits the model it drafts for, without a cache yet."""

    directory: str
    config: ModelConfig
    weights: LlamaWeights


def load_draft_weights(given: str, settings: EngineSettings, tokenizer: Tokenizer | None) -> DraftWeights:
    """The model in directory `given`, to draft for the one of `settings`, whose tokenizer is `tokenizer`.

    Raises `InvalidValueError` naming `draft_model` where it does not fit the model that it is to draft for.
    """
    config, max_model_len = settings.config, settings.max_model_len
    try:
        directory = model_directory(given)
        own = held_config(ModelConfig.from_directory(directory), settings.device)
        resolve_max_model_len(max_model_len, own)
    except InvalidValueError as error:
        raise InvalidValueError("draft_model", given, f"a model for {max_model_len} tokens ({error})") from None
    same = f"a model with the vocabulary of its target, {config.vocab_size} tokens and not {own.vocab_size}"
    require(own.vocab_size == config.vocab_size, "draft_model", given, same)
    if tokenizer is not None and _has_tokenizer(directory):
        other = load_tokenizer(directory)
        differing = [token for token in range(own.vocab_size) if _piece(tokenizer, token) != _piece(other, token)]
        allowed = f"a model whose tokenizer is its target's ({len(differing)} tokens differ)"
        require(not differing, "draft_model", given, allowed)
    weights = load_weights(
        directory, own, dtype=settings.dtype, weight_dtype=settings.weight_dtype, device=settings.device
    )
    return DraftWeights(given, own, weights)


def with_cache(draft: DraftWeights, num_blocks: int, settings: EngineSettings) -> DraftModel:
    """The draft model with a cache for as many entries as `num_blocks` blocks hold at full depth of the first model."""
    own = draft.config
    blocks = max(-(-num_blocks * own.num_layers // settings.config.num_layers), own.num_layers)
    executor = eager_executor(settings, own, draft.weights, blocks)
    return DraftModel(draft.directory, executor, new_cache(settings, own, blocks))


def _has_tokenizer(directory: Path) -> bool:
    files = files_of(directory)
    return any(files.has(name) for name in ("tokenizer.json", "tokenizer.model"))


def _piece(tokenizer: Tokenizer, token: int) -> str | None:
    return tokenizer.convert_id_to_token(token)
