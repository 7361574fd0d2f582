"""A second model that drafts: loaded from its directory, and checked against the model it drafts for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.engine.executors import (
    draft_rows,
    eager_executor,
    graph_executor,
    matrix_form,
    native_executor,
    new_cache,
)
from d3engine.engine.model_directory import holds_eagle3, model_directory, resolve_max_model_len
from d3engine.engine.resolve import held_config, kept_by_default, multiplies_bytes, resolve_weight_dtype
from d3engine.engine.settings import EngineSettings
from d3engine.errors import InvalidValueError, ModelFormatError, require
from d3engine.executor.interface import Executor
from d3engine.kernels.blocks import ROUNDED_COLUMNS, BlockWeight, StackedWeight, quantize_blocks
from d3engine.kernels.matrices import Weight
from d3engine.model.config import ModelConfig
from d3engine.model.eagle3 import Eagle3Head, load_eagle3
from d3engine.model.source import files_of
from d3engine.model.weights import LlamaWeights, in_layout, load_weights
from d3engine.scheduling.kv_cache import KVCache
from d3engine.text.tokenizer import Tokenizer, load_tokenizer
from d3engine.utils.files import beside, is_there, read_json

DRAFT_VOCABULARY = 32_768
"""Tokens that a draft model may propose where its vocabulary is much larger.

Vocabularies of byte pairs are in the order in which pairs were merged, so the first tokens are the frequent ones of
English and code. The LM head of a small model with 150,000 tokens is a third of all that a step reads. A token that is
not among these is never drafted, which costs its draft and no more.
"""

DRAFT_TOKENS_FILE = "draft_tokens.json"
"""Beside a draft model's weights: tokens that it may propose before the first ones, those of the user's texts."""

MOST_LACKING = 0.01
"""The last part of the vocabulary that a draft model may be without: small models of a family have fewer rows of
padding, such as Qwen2.5's up to 3B (151,936) and its larger ones (152,064)."""

HEAD_ROWS = 16
"""Rows of a shortened head come in such groups: matrices may have them interleaved."""


ROUNDED_BITS = 5
"""ggml's blocks in the layers of a draft model are rounded to Q4_0, 4.5 bits a weight, where they take more than this.

No answer depends on it, and a draft step reads less. A file of small hidden size has few matrices in Q4_K, whose blocks
take 256 columns: of Qwen2.5-Coder-0.5B, Q4_K_M, the layers become a fifth smaller.
"""


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model that fits the model it drafts for, without a cache yet; `settings` are its own."""

    config: ModelConfig
    weights: LlamaWeights
    settings: EngineSettings


def load_head(given: str, settings: EngineSettings) -> Eagle3Head | None:
    """The EAGLE-3 head in directory `given`, for the model of `settings`; None where it holds a whole model.

    Raises `InvalidValueError` naming `draft_model` where the head does not fit, or cannot run there.
    """
    if not holds_eagle3(given):
        return None
    allowed = 'a whole model, or an EAGLE-3 head beside backend="torch"'
    require(settings.executor == "eager" and settings.tensor_parallel_size == 1, "draft_model", given, allowed)
    alone = "None with an EAGLE-3 head, which reads the hidden states of whole prompts"
    require(settings.prefix_cache_file is None, "prefix_cache_file", str(settings.prefix_cache_file), alone)
    return load_eagle3(model_directory(given), settings.config, dtype=settings.dtype, device=settings.device)


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
    lacking = config.vocab_size - own.vocab_size
    require(0 <= lacking <= MOST_LACKING * config.vocab_size, "draft_model", given, same)
    files = files_of(directory)
    if tokenizer is not None and any(files.has(name) for name in ("tokenizer.json", "tokenizer.model")):
        mine, others = tokenizer.convert_id_to_token, load_tokenizer(directory).convert_id_to_token
        differing = [token for token in range(own.vocab_size) if mine(token) != others(token)]
        allowed = f"a model whose tokenizer is its target's ({len(differing)} tokens differ)"
        require(not differing, "draft_model", given, allowed)
    whole = replace(own, vocab_size=config.vocab_size)
    of_draft = _settings_of(directory, whole, settings)
    form = _draft_form(of_draft) if of_draft.executor == "native" else None
    weights = load_weights(
        directory,
        own,
        dtype=of_draft.dtype,
        weight_dtype=of_draft.weight_dtype,
        device=of_draft.device,
        form=None if lacking else form,
        keeps_blocks=of_draft.keeps_blocks,
        splits_blocks=of_draft.splits_blocks,
    )
    if lacking:
        weights = _with_all_tokens(weights, whole.vocab_size, given, same)
        weights = weights if form is None else in_layout(weights, form)
    return DraftWeights(whole, weights, of_draft)


def _with_all_tokens(weights: LlamaWeights, vocab_size: int, given: str, allowed: str) -> LlamaWeights:
    """With the row of the last token for each that is lacking: whatever is drafted of them, verification refuses."""
    places = torch.arange(vocab_size, device=weights.device).clamp_(max=weights.embedding.shape[0] - 1)

    def whole(matrix: Weight) -> Any:
        if isinstance(matrix, Tensor):
            return matrix[places]
        if not hasattr(matrix, "at"):
            raise InvalidValueError("draft_model", given, allowed)
        return matrix.at(places)

    embedding = whole(weights.embedding)
    lm_head = embedding if weights.lm_head is weights.embedding else whole(weights.lm_head)
    return replace(weights, embedding=embedding, lm_head=lm_head)


def _settings_of(directory: Path, own: ModelConfig, settings: EngineSettings) -> EngineSettings:
    """The settings of a draft model beside those of its target: what makes it fast, since no answer depends on it."""
    if settings.executor != "native":
        return replace(settings, directory=directory, config=own, keeps_blocks=settings.splits_blocks)
    kept = kept_by_default("auto", directory, own, "native") or settings.weight_dtype
    has_blocks = files_of(directory).packed_bytes() is not None
    return replace(
        settings,
        directory=directory,
        config=own,
        weight_dtype=resolve_weight_dtype("auto", dtype=settings.dtype, device=settings.device, kept=kept),
        weight_compression="none",
        keeps_blocks=True,
        activations="int8" if has_blocks and multiplies_bytes() else "float32",
    )


def _draft_form(settings: EngineSettings) -> Callable[[Weight], Weight] | None:
    """What makes of a draft model's matrix the form that it is held in; None: all stay as they are."""
    form = matrix_form(settings)
    if settings.activations != "int8" or form is None:
        return form
    vocabulary = settings.config.vocab_size  # the rows of the head and the embedding, which stay as they are
    return lambda matrix: form(matrix if matrix.shape[0] == vocabulary else _rounded(matrix))


def _rounded(matrix: Weight) -> Weight:
    """A matrix in blocks in Q4_0, where it takes more than `ROUNDED_BITS` bits a weight."""
    rows, columns = matrix.shape
    is_large = 8 * matrix.nbytes > ROUNDED_BITS * rows * columns
    if not is_large or columns % ROUNDED_COLUMNS or not isinstance(matrix, BlockWeight | StackedWeight):
        return matrix
    return quantize_blocks(matrix.dequantize(torch.float32), "Q4_0")


def with_cache(
    draft: DraftWeights, num_blocks: int, settings: EngineSettings, *, native: bool
) -> tuple[Executor, KVCache]:
    """What runs the draft model, and a cache for as many entries as `num_blocks` blocks hold at the first's full depth.

    `native`: by the library that runs the first model.
    """
    own = draft.config
    blocks = max(-(-num_blocks * own.num_layers // settings.config.num_layers), own.num_layers)
    eager = eager_executor(draft.settings, own, draft.weights, blocks)
    executor: Executor = eager
    if native:
        executor = native_executor(draft.settings, eager, head_tokens(own, draft.settings.directory))
    # Some rotations depend on the length of a prompt, which graphs do not know.
    elif settings.executor == "graphs" and draft_rows(settings) and not eager.rope.depends_on_length:
        executor = graph_executor(draft.settings, eager, is_draft=True)
    return executor, new_cache(draft.settings, own, blocks)


def head_tokens(config: ModelConfig, directory: Path) -> Tensor | None:
    """The tokens that a draft model of `config` may propose, int64, ascending; None: all.

    Raises `ModelFormatError` for a file of counted tokens in `directory` that holds anything else.
    """
    if config.vocab_size < 2 * DRAFT_VOCABULARY:
        return None
    tokens = (*_counted_tokens(config, directory), *range(DRAFT_VOCABULARY))
    ranked = list(dict.fromkeys(token // HEAD_ROWS for token in tokens))[: DRAFT_VOCABULARY // HEAD_ROWS]
    ranked += [token // HEAD_ROWS for token in config.eos_token_ids]
    groups = {group for group in ranked if (group + 1) * HEAD_ROWS <= config.vocab_size}
    if len(groups) % 2:  # interleaved matrices have an even number of such groups
        groups.add(next(group for group in range(len(groups) + 1) if group not in groups))
    return (torch.tensor(sorted(groups))[:, None] * HEAD_ROWS + torch.arange(HEAD_ROWS)).flatten()


def _counted_tokens(config: ModelConfig, directory: Path) -> list[int]:
    """Those that `d3engine speculate tokens` has written, the most frequent first."""
    path = beside(directory, DRAFT_TOKENS_FILE)
    if not is_there(path):
        return []
    found = read_json(path)
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one < config.vocab_size for one in found):
        raise ModelFormatError(f"{path} must be a list of the model's token ids (d3engine speculate tokens)")
    return found
