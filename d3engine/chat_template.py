"""Chat messages to prompt text, by the Jinja template of a model directory.

The one idea: what goes in is checked, by field, and copied to plain JSON, so that a template sees no object with
methods of its own and a malformed message is named before a template stumbles over it. The template itself is a
program from a stranger and runs in `template_sandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d3engine.errors import InvalidValueError, ModelFormatError, require
from d3engine.files import CONFIG_BYTES, UnreadableFileError, is_there, read_text
from d3engine.template_sandbox import LimitError, RenderLimits, compile_template, render_template
from d3engine.tokenizer import named_special_tokens, read_tokenizer_config

__all__ = ["ChatTemplate", "ChatTemplateError", "RenderLimits", "load_chat_template"]


class ChatTemplateError(InvalidValueError):
    """The template refuses these messages, fails on them, or goes beyond its limits."""


def load_chat_template(directory: Path | str) -> ChatTemplate | None:
    """Return the chat template of a model directory, None if it has none.

    `chat_template.jinja` wins over the field of tokenizer_config.json, which is a template or a list of named
    ones; of a list the one named "default" is taken. Raises `ModelFormatError` for a template that does not
    compile.
    """
    directory = Path(directory)
    config = read_tokenizer_config(directory)
    special_tokens = named_special_tokens(config)
    path = directory / "chat_template.jinja"
    if is_there(path):
        try:
            return ChatTemplate(read_text(path, CONFIG_BYTES), special_tokens=special_tokens)
        except UnreadableFileError as error:
            raise ModelFormatError(str(error)) from None
    source = _template_of_config(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens=special_tokens)


def _template_of_config(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in value:
            named_default = isinstance(entry, dict) and entry.get("name") == "default"
            if named_default and isinstance(entry.get("template"), str):
                return str(entry["template"])
    raise ModelFormatError(
        "tokenizer_config.json: chat_template must be a string, or a list of {name, template} with 'default'"
    )


class ChatTemplate:
    """A compiled chat template. Every rendering has an environment of its own, so threads may share it."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """Compile `source`; `special_tokens` are its variables `bos_token` etc. Raises `ModelFormatError`."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or RenderLimits()
        if len(source) > self._limits.characters:
            raise ModelFormatError(f"chat template: {len(source)} characters, more than {self._limits.characters}")
        self._code = compile_template(source, self._limits)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt, to be encoded with `add_special_tokens=False`: the template writes BOS itself.

        `variables` are handed to the template and win over the special tokens. A content given as text parts
        is joined by line feeds. Raises `InvalidValueError` naming the field that is malformed, and
        `ChatTemplateError` when the template itself refuses or fails.
        """
        visible = {
            **self._special_tokens,
            **{name: _plain(name, value) for name, value in variables.items()},
            "messages": _check_messages(messages),
            "tools": _plain("tools", tools),
            "documents": _plain("documents", documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        try:
            return render_template(self._code, visible, self._limits)
        except LimitError as error:
            raise ChatTemplateError("messages", messages, f"the chat template goes beyond {error}") from None
        except Exception as error:  # a template can raise anything; its traceback shows only generated code
            said = str(error) or type(error).__name__
            raise ChatTemplateError("messages", messages, f"the chat template fails: {said}") from None


# Messages


def _check_messages(messages: object) -> list[dict[str, Any]]:
    require(isinstance(messages, list | tuple), "messages", messages, "a list of messages")
    assert isinstance(messages, list | tuple)
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    require(isinstance(message, Mapping), name, message, "an object with role and content")
    assert isinstance(message, Mapping)
    role = message.get("role")
    require(isinstance(role, str), f"{name}.role", role, "a string")
    plain: dict[str, Any] = _plain(name, message)
    # An assistant's message that only calls tools has no content.
    if message.get("content") is not None or not message.get("tool_calls"):
        plain["content"] = _text_of_content(f"{name}.content", message.get("content"))
    return plain


def _text_of_content(name: str, content: object) -> str:
    if isinstance(content, str):
        return str(content)
    require(isinstance(content, list | tuple), name, content, "a string or a list of text parts")
    assert isinstance(content, list | tuple)
    for i, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        require(is_text, f"{name}[{i}]", part, '{"type": "text", "text": a string}')
    return "\n".join(part["text"] for part in content)


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return a copy of JSON-like `value`, so that a template sees no object with methods of its own."""
    require(depth < 64, name, value, "nested less than 64 deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        require(all(isinstance(key, str) for key in value), name, value, "an object whose keys are strings")
        return {key: _plain(f"{name}.{key}", item, depth + 1) for key, item in value.items()}
    require(isinstance(value, list | tuple), name, value, "JSON: null, boolean, number, string, list or object")
    return [_plain(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value)]
