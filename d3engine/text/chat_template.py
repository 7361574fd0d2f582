"""Conversations to prompts, by the model's Jinja chat template or a given one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

from d3engine.errors import NOTHING, InvalidValueError, ModelFormatError, require
from d3engine.model.source import TOOLS_TEMPLATE_FILE, ModelSource, files_of
from d3engine.text.chat_messages import MessageFormat, check_messages, plain
from d3engine.text.limited_process import LimitError, ProcessLimits, ask
from d3engine.text.tokenizer import Tokenizer
from d3engine.text.tokenizer_files import named_special_tokens, read_tokenizer_config
from d3engine.utils.files import CONFIG_BYTES

_TEMPLATE_FILE = "chat_template.jinja"
_JOB = "d3engine.text.template_sandbox:answer"

# Follows the text of a message to be continued; letters only, which no filter escapes.
_END_MARK = "endOfTheMessageThatD3engineContinues"

ROLES = ("system", "user", "assistant", "tool")
"""What many templates write by any role's name, known to the model or not."""

DEVELOPER = "developer"
"""OpenAI's newer word for "system", whose messages most templates would leave out without a word."""

_WORD = re.compile(r"['\"]([\w.-]+)['\"]")


class ChatTemplateError(InvalidValueError):
    """The template refuses these messages, fails on them, or exceeds its limits; `said` is the verb and the reason."""

    def __init__(self, messages: object, said: str) -> None:
        super().__init__("messages", messages, f"a conversation that the chat template can render, but it {said}")


def load_chat_template(model: ModelSource) -> ChatTemplate | None:
    """Return the chat template of a model, None if it has none.

    `chat_template.jinja` takes precedence over the field of tokenizer_config.json, which is a template or a list of
    named ones: "default", and "tool_use" where tools are given; beside the file, that is `TOOLS_TEMPLATE_FILE`. Raises
    `ModelFormatError` for a template that does not compile.
    """
    files = files_of(model)
    config = read_tokenizer_config(files)
    special_tokens = named_special_tokens(config)
    if files.has(_TEMPLATE_FILE):
        named = {"default": _TEMPLATE_FILE, "tool_use": TOOLS_TEMPLATE_FILE}
        sources = {name: files.read_text(file, CONFIG_BYTES) for name, file in named.items() if files.has(file)}
    else:
        sources = _templates_of_config(config.get("chat_template"))
    if not sources:
        return None
    for_tools = ChatTemplate(sources["tool_use"], special_tokens=special_tokens) if "tool_use" in sources else None
    return ChatTemplate(sources["default"], special_tokens=special_tokens, for_tools=for_tools)


def _templates_of_config(value: object) -> dict[str, str]:
    """The templates of tokenizer_config.json by name; a single one is named "default"."""
    if value is None:
        return {}
    named = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(named, list) and all(isinstance(entry, dict) for entry in named):
        sources = {entry.get("name"): entry.get("template") for entry in named}
        if "default" in sources and all(isinstance(text, str) for pair in sources.items() for text in pair):
            return sources
    raise ModelFormatError(
        "tokenizer_config.json: chat_template must be a string, or a list of {name, template} with 'default'"
    )


class ChatTemplate:
    """A chat template; threads may share it.

    A template is untrusted code, so it is compiled and run in a limited process (`limited_process`), on plain JSON.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: ProcessLimits | None = None,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        """Check that `source` compiles; `special_tokens` are its variables `bos_token` etc.

        `for_tools` replaces it where tools are given. Raises `ModelFormatError`, and `LimitedProcessError` where no
        process for templates can be started.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or ProcessLimits()
        self._for_tools = for_tools
        if len(source) > self._limits.characters:
            raise ModelFormatError(f"chat template: {len(source)} characters, more than {self._limits.characters}")
        try:
            reply = ask(_JOB, {"source": source, "variables": None}, self._limits)
        except LimitError as error:
            raise ModelFormatError(f"chat template: to compile it takes more than {error}") from None
        if "failed" in reply:
            raise ModelFormatError(f"chat template: {reply['failed']}")
        form = reply["form"]
        self._form = MessageFormat(**form | {"reasoning_fields": tuple(form["reasoning_fields"])})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt, to be encoded with `add_special_tokens=False`: the template writes BOS itself.

        With `continue_final_message` (and without a generation prompt) it ends where the last message's content ends.
        `variables` are passed to the template and override the special tokens. A content given as text parts stays a
        list for a template that iterates over parts, and is joined by line feeds for every other. `reasoning_content`,
        `reasoning` and `thinking` are one field of a message, under the name that the template reads. Keys with the
        value None are left out. A role must be one of `ROLES` or quoted in the template; that of a developer is the
        system's where it is not. Raises `InvalidValueError` naming a malformed field, `ChatTemplateError` when the
        template refuses, fails or exceeds its limits, and `LimitedProcessError`.
        """
        if tools is not None and self._for_tools is not None:
            return self._for_tools.render(
                messages, add_generation_prompt, continue_final_message, tools=tools, documents=documents, **variables
            )
        checked = self._with_known_roles(check_messages(messages, self._form))
        if continue_final_message:
            _require_continuable(checked, add_generation_prompt)
            _mark_end(checked[-1])
        text = self._write(
            {
                **self._special_tokens,
                **{name: plain(name, value) for name, value in variables.items()},
                "messages": checked,
                "tools": plain("tools", tools),
                "documents": plain("documents", documents),
                "add_generation_prompt": bool(add_generation_prompt),
            },
            messages,
        )
        return _before_end_mark(text, messages) if continue_final_message else text

    def _with_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if all(message["role"] in ROLES for message in messages):
            return messages
        named = frozenset(_WORD.findall(self.source))
        allowed = " or ".join(map(repr, (*ROLES, DEVELOPER))) + ", or a role that the chat template names"
        for place, message in enumerate(messages):
            role = message["role"]
            require(role in named or role in (*ROLES, DEVELOPER), f"messages[{place}].role", role, allowed)
            if role == DEVELOPER and role not in named:
                message["role"] = "system"
        return messages

    def _write(self, variables: dict[str, Any], messages: object) -> str:
        try:
            reply = ask(_JOB, {"source": self.source, "variables": variables}, self._limits)
        except LimitError as error:
            raise ChatTemplateError(messages, f"takes more than {error}") from None
        if "failed" in reply:
            raise ChatTemplateError(messages, f"fails: {reply['failed']}")
        if "too_long" in reply:
            raise ChatTemplateError(messages, f"writes more than {self._limits.characters} characters")
        return str(reply["text"])


# A message to be continued


def _require_continuable(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    allowed = "false together with add_generation_prompt, which begins a message"
    require(not add_generation_prompt, "continue_final_message", NOTHING, allowed)
    has_content = bool(messages) and bool(messages[-1].get("content"))
    require(has_content, "continue_final_message", NOTHING, "false unless the last message has a content")


def _mark_end(message: dict[str, Any]) -> None:
    """Append the mark and a space to the message's text; a template that trims it removes the space."""
    if isinstance(message["content"], str):
        message["content"] += _END_MARK + " "
    else:
        parts = message["content"]
        message["content"] = [*parts[:-1], parts[-1] | {"text": parts[-1]["text"] + _END_MARK + " "}]


def _before_end_mark(text: str, messages: object) -> str:
    """Return what stands before the mark; trimmed if the template trims a content, which it does at its end."""
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise ChatTemplateError(messages, "does not write the last one as it is, so that cannot be continued")
    return before if after.startswith(" ") else before.rstrip()


Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: `{"role": ..., "content": ...}` each."""

_OWN_ARGUMENTS = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}


class ChatPrompts:
    """The prompts of one model's conversations, as token ids."""

    def __init__(self, directory: Path, tokenizer: Tokenizer | None) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._given: ChatTemplate | None = None

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's template, None without one; its files are read once, at the first use."""
        return load_chat_template(self._directory)

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
            own = self.template
            if own is None:
                raise InvalidValueError(
                    "chat_template", None, f"given for chat(), since {self._directory} has no chat template"
                )
            return own
        if self._given is None or self._given.source != source:
            self._given = self._read(source)
        return self._given

    def _read(self, source: object) -> ChatTemplate:
        if not (isinstance(source, str) and "{" in source):
            allowed = "the text of a Jinja template, not a file's name, or None"
            raise InvalidValueError("chat_template", source, allowed)
        try:
            return ChatTemplate(source, special_tokens=self._special_tokens)
        except ModelFormatError as error:
            raise InvalidValueError("chat_template", source, f"a Jinja template that compiles ({error})") from None


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """A list of conversations, or a single one as a list."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    require(is_list and len(messages) > 0, "messages", messages, "a list of at least one message, or of conversations")
    return cast(list[Messages], [messages] if isinstance(messages[0], Mapping) else list(messages))


def _checked_variables(given: object) -> dict[str, Any]:
    """The template's variables; raises `InvalidValueError` for one that is an argument of chat()."""
    if given is None:
        return {}
    is_mapping = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    require(is_mapping, "chat_template_kwargs", given, "a mapping of names to JSON values, or None")
    assert isinstance(given, Mapping)
    for name in sorted(_OWN_ARGUMENTS.intersection(given)):
        raise InvalidValueError("chat_template_kwargs", given, f"without {name!r}, which is an argument of its own")
    return dict(given)
