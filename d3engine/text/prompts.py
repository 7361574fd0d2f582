"""Prompts, parameters and bad words of requests as token ids, checked against the model."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from d3engine.errors import InvalidValueError, ModelFormatError, TokenizerError, require
from d3engine.model.config import ModelConfig
from d3engine.model.source import ModelSource, files_of
from d3engine.request.params import SamplingParams
from d3engine.request.token_rules import BadWords, TokenRules, names_tokens
from d3engine.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; ids also as an array of numpy or torch."""


def as_list(prompts: Any) -> list[Prompt]:
    """A single prompt as a list of one; a list or a one-dimensional array of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if _is_array(prompts):
        prompts = prompts.tolist()
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray)
    require(is_list, "prompts", prompts, "a prompt (a text, token ids or a mapping), or a list of prompts")
    if len(prompts) > 0 and hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0:
        return [prompts]
    return list(prompts)


def _is_array(value: object) -> bool:
    """Whether this is an array of numpy or torch with at least one dimension."""
    return hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0


class PromptReader:
    """Reads prompts and checks parameters for one model."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._shorter = f"shorter than max_model_len={max_model_len}, so that a token can follow"
        self._rules: WeakValueDictionary[int, TokenRules] = WeakValueDictionary()
        own_eos = tokenizer.eos_token_id if tokenizer else None
        named = {*config.eos_token_ids, *(() if own_eos is None else (own_eos,))}
        # Files may name ids without a row in the embedding; these are never sampled.
        self.eos_token_ids = frozenset(token for token in named if self._has_row(token))

    def read(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt's text, if it was given as one, and its token ids, those that are kept."""
        text, ids = self._text_and_ids(prompt, is_truncated=params.truncate_prompt_tokens is not None)
        if params.truncate_prompt_tokens is not None:
            room = self._max_model_len - (params.max_tokens or 1)
            most = max(room, 1) if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            ids = ids[-most:]
        require(len(ids) > 0, "prompt", prompt, "a prompt of at least one token")
        require(len(ids) < self._max_model_len, "prompt", f"{len(ids)} tokens", self._shorter)
        return text, self._checked_ids(ids)

    def _text_and_ids(self, prompt: Any, *, is_truncated: bool) -> tuple[str | None, Sequence[int]]:
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
            is_list = _is_array(value) or (isinstance(value, Sequence) and not isinstance(value, str))
            fits = isinstance(value, str) if is_text else is_list
            require(fits, next(iter(prompt)), value, "a text" if is_text else "a list of token ids")
            prompt = value
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidValueError(
                    "prompt", prompt, "token ids, since the engine has no tokenizer (skip_tokenizer_init)"
                )
            fewest = 0 if is_truncated else self._tokenizer.fewest_tokens(prompt)  # before it is encoded
            require(fewest < self._max_model_len, "prompt", f"at least {fewest} tokens", self._shorter)
            (ids,) = self._encode("prompt", [prompt])
            return prompt, ids
        if _is_array(prompt):
            allowed = "an array of one dimension: the token ids of one prompt"
            require(prompt.ndim == 1, "prompt", f"an array of shape {tuple(prompt.shape)}", allowed)
            return None, prompt.tolist()
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
        require(is_list, "prompt", prompt, "a text, a list of token ids, or a mapping of one")
        return None, prompt

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that this model or engine cannot honour, by name."""
        for field, ids in params.named_token_ids().items():
            if ids and not self._has_row(max(ids)):
                self._checked_id(field, max(ids))
        if self._tokenizer is None:
            require(not params.stop_strings, "stop", params.stop, "None, since the engine has no tokenizer")
            require(not params.bad_words, "bad_words", params.bad_words, "None, since the engine has no tokenizer")
            needs_none = not params.dry_multiplier or not params.dry_sequence_breakers
            allowed = "[], since the engine has no tokenizer"
            require(needs_none, "dry_sequence_breakers", params.dry_sequence_breakers, allowed)

    def rules(self, params: SamplingParams) -> TokenRules | None:
        """The tokens that are allowed, None for all; requests with the same `params` share them."""
        if not names_tokens(params):
            return None
        found = self._rules.get(id(params))  # unique, as these rules keep `params` alive
        if found is None:
            self._rules[id(params)] = found = TokenRules(params, self._bad_words(params), self._breakers(params))
        return found

    def _breakers(self, params: SamplingParams) -> frozenset[int]:
        """The last token of each text that breaks repetitions, as it is spelled behind a letter."""
        if not params.dry_multiplier or self._tokenizer is None:
            return frozenset()
        texts = ["a" + text for text in params.dry_sequence_breakers]
        found = self._encode("dry_sequence_breakers", texts, add_special_tokens=False) if texts else []
        return frozenset(ids[-1] for ids in found)

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        """The token sequences of the bad words, at the beginning of a text and after a space.

        A spelling with an id beyond the embedding's rows can never be completed and is left out.
        """
        if not params.bad_words or self._tokenizer is None:
            return None
        texts = [text for word in params.bad_words for text in (word.lstrip(), " " + word.lstrip())]
        spellings = set(map(tuple, self._encode("bad_words", texts, add_special_tokens=False)))
        size = self._config.vocab_size
        return BadWords(sorted(word for word in spellings if word and max(word) < size))

    def may_share(self, token_ids: list[int]) -> bool:
        """Whether a prompt's KV depends on its tokens alone, so that the prefix cache may hold it.

        With dynamic rope the angles of a long prompt depend on its length too.
        """
        return self._config.rope.rope_type != "dynamic" or len(token_ids) <= self._config.max_position_embeddings

    def _encode(self, field: str, texts: list[str], **options: bool) -> list[list[int]]:
        """The ids of texts; raises `InvalidValueError` naming `field` where the tokenizer has none."""
        assert self._tokenizer is not None
        try:
            return self._tokenizer.encode_all(texts, **options)
        except InvalidValueError as error:
            raise InvalidValueError(field, error.value, error.allowed) from None
        except TokenizerError as error:
            if len(texts) > 1:  # find the one to name
                return [ids for text in texts for ids in self._encode(field, [text], **options)]
            allowed = f"a text that the model's tokenizer can encode ({error})"
            raise InvalidValueError(field, texts[0], allowed) from error

    def _has_row(self, token: int) -> bool:
        return 0 <= token < self._config.vocab_size

    def _checked_ids(self, ids: Sequence[Any]) -> list[int]:
        """The ids of a prompt, checked all at once in the usual case of plain integers."""
        if set(map(type, ids)) == {int} and self._has_row(min(ids)) and self._has_row(max(ids)):
            return list(ids)
        return [self._checked_id("prompt_token_ids", token) for token in ids]

    def _checked_id(self, field: str, token: Any) -> int:
        try:
            value = -1 if isinstance(token, bool) else operator.index(token)
        except TypeError:
            value = -1
        size = self._config.vocab_size
        require(self._has_row(value), field, token, f"ids from 0 to {size - 1}, the rows of the embedding")
        return value


QUESTION_TEMPLATE_FILE = "prompt_form.json"
_MAX_CHARACTERS = 1000


@dataclass(frozen=True)
class QuestionTemplate:
    """The text before a question and after it, such as "Question: " and "\\nAnswer:".

    A model without a chat template may have one for bare questions, in a file of its directory. `Engine` takes every
    prompt unchanged; a user interface may apply the template.
    """

    before: str
    after: str

    def complete(self, text: str) -> str:
        """The question of `text` in the template, even if one half of the template is there already.

        A text with a question and the beginning of its answer is returned unchanged, and so is one without a question.
        """
        if self.after in text:
            return text
        question = text.strip().removeprefix(self.before.strip()).removesuffix(self.after.strip()).strip()
        return f"{self.before}{question}{self.after}" if question else text

    def __str__(self) -> str:
        return f"{self.before}...{self.after}"


def load_question_template(model: ModelSource) -> QuestionTemplate | None:
    """The question template of a model; None without one. Raises `ModelFormatError` for a malformed file."""
    files = files_of(model)
    if not files.has(QUESTION_TEMPLATE_FILE):
        return None
    found = files.read_json_object(QUESTION_TEMPLATE_FILE)
    are_short = (isinstance(value, str) and len(value) <= _MAX_CHARACTERS for value in found.values())
    is_form = set(found) == {"before", "after"} and all(are_short)
    if not is_form or not found["after"].strip():
        allowed = f'"before" and "after", texts of at most {_MAX_CHARACTERS} characters, and "after" not empty'
        raise ModelFormatError(f"{files.place(QUESTION_TEMPLATE_FILE)} must hold {allowed}")
    return QuestionTemplate(**found)
