"""What users send, checked against the model before anything is queued: prompts become token ids, words become ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from d3engine.errors import InvalidValueError, require
from d3engine.model.config import ModelConfig
from d3engine.request import SamplingParams
from d3engine.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""


class PromptReader:
    """Reads prompts and checks parameters for one model."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        own_eos = tokenizer.eos_token_id if tokenizer else None
        self.eos_token_ids = frozenset(config.eos_token_ids) | ({own_eos} if own_eos is not None else set())

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where it came as one, and its token ids."""
        text, ids = self._text_and_ids(prompt)
        require(len(ids) > 0, "prompt", prompt, "a prompt of at least one token")
        require(
            len(ids) < self._max_model_len,
            "prompt",
            f"{len(ids)} tokens",
            f"shorter than max_model_len={self._max_model_len}, so that a token can follow",
        )
        for token in ids:
            self._check_id("prompt_token_ids", token)
        return text, [int(token) for token in ids]

    def _text_and_ids(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            require(
                len(prompt) == 1 and set(prompt) <= known,
                "prompt",
                prompt,
                'a mapping with one of the keys "prompt" and "prompt_token_ids"',
            )
            (value,) = prompt.values()
            is_text = "prompt" in prompt
            fits = isinstance(value, str) if is_text else isinstance(value, Sequence) and not isinstance(value, str)
            require(fits, next(iter(prompt)), value, "a text" if is_text else "a list of token ids")
            prompt = value
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidValueError(
                    "prompt", prompt, "token ids, since the engine has no tokenizer (skip_tokenizer_init)"
                )
            return prompt, self._tokenizer.encode(prompt)
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
        require(is_list, "prompt", prompt, "a text, a list of token ids, or a mapping of one")
        return None, prompt  # type: ignore[return-value]

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that this model or engine cannot honour, by name."""
        for field, ids in params.named_token_ids().items():
            for token in ids:
                self._check_id(field, token)
        if self._tokenizer is None:
            require(not params.stop_strings, "stop", params.stop, "None, since the engine has no tokenizer")
            require(not params.bad_words, "bad_words", params.bad_words, "None, since the engine has no tokenizer")

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences of the bad words, at the beginning of a text and after a space."""
        if not params.bad_words or self._tokenizer is None:
            return ()
        spellings: set[tuple[int, ...]] = set()
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                spellings.add(tuple(self._tokenizer.encode(text, add_special_tokens=False)))
        return tuple(sorted(spellings - {()}))

    def may_share(self, token_ids: list[int]) -> bool:
        """Whether a prompt's entries depend on its tokens alone, so that the prefix cache may hold them.

        With dynamic rope the angles of a long prompt depend on its length too.
        """
        return self._config.rope.rope_type != "dynamic" or len(token_ids) <= self._config.max_position_embeddings

    def _check_id(self, field: str, token: object) -> None:
        size = self._config.vocab_size
        is_id = hasattr(token, "__index__") and not isinstance(token, bool)
        require(is_id and 0 <= token < size, field, token, f"ids from 0 to {size - 1}, the rows of the embedding")  # type: ignore[operator]
