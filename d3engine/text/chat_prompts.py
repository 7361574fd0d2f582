"""Conversations to the token ids of their prompts, by the model's chat template or one that the caller brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

from d3engine.errors import InvalidValueError, ModelFormatError, require
from d3engine.text.chat_template import ChatTemplate, load_chat_template
from d3engine.text.special_tokens import named_special_tokens, read_tokenizer_config
from d3engine.text.tokenizer import Tokenizer

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: `{"role": ..., "content": ...}` each."""

_OWN_ARGUMENTS = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}


class ChatPrompts:
    """Writes the prompts of one model's conversations."""

    def __init__(self, directory: Path, tokenizer: Tokenizer | None) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._own: ChatTemplate | None = None
        self._is_loaded = False
        self._given: ChatTemplate | None = None

    def load(self) -> ChatTemplate | None:
        """The model's own template, None without one; its files are read at the first call and never again."""
        if not self._is_loaded:
            self._own = load_chat_template(self._directory)
            self._is_loaded = True
        return self._own

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        return named_special_tokens(read_tokenizer_config(self._directory))

    def token_ids(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a conversation; the arguments are those of `Engine.chat`."""
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            require(isinstance(value, bool), name, value, "True or False")
        is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
        require(tools is None or is_list, "tools", tools, "a list of JSON objects, or None")
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidValueError("skip_tokenizer_init", True, "False for chat(), which writes text")
        text = self._template(chat_template).render(
            messages,
            add_generation_prompt,
            continue_final_message,
            tools=tools,
            **_checked_variables(chat_template_kwargs),
        )
        return tokenizer.encode(text, add_special_tokens=False)  # the template writes BOS itself

    def _template(self, source: str | None) -> ChatTemplate:
        if source is None:
            own = self.load()
            if own is None:
                raise InvalidValueError(
                    "chat_template", None, f"given for chat(), since {self._directory} has no chat template"
                )
            return own
        if self._given is None or self._given.source != source:
            self._given = self._read(source)
        return self._given

    def _read(self, source: object) -> ChatTemplate:
        if not isinstance(source, str):
            raise InvalidValueError("chat_template", source, "the text of a Jinja template, or None")
        try:
            return ChatTemplate(source, special_tokens=self._special_tokens)
        except ModelFormatError as error:
            raise InvalidValueError("chat_template", source, f"a Jinja template that compiles ({error})") from None


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """The conversations of a list of them, or of one alone."""
    require(len(messages) > 0, "messages", messages, "at least one message")
    return cast(list[Messages], [messages] if isinstance(messages[0], Mapping) else list(messages))


def _checked_variables(given: object) -> dict[str, Any]:
    """The template's own variables; those that are arguments of chat() are not among them."""
    if given is None:
        return {}
    is_mapping = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    require(is_mapping, "chat_template_kwargs", given, "a mapping of names to JSON values, or None")
    assert isinstance(given, Mapping)
    for name in sorted(_OWN_ARGUMENTS.intersection(given)):
        raise InvalidValueError("chat_template_kwargs", given, f"without {name!r}, which is an argument of its own")
    return dict(given)
