"""How a chat template shows functions to the model and writes calls, found by rendering one call."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from d3engine.async_engine.client import EngineClient
from d3engine.errors import InvalidValueError
from d3engine.text.tokenizer import Tokenizer

_NAME = "shown_function"
_DESCRIPTION = "Described to the model."
_TOOL = {"name": _NAME, "description": _DESCRIPTION, "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "shownCall", "type": "function", "function": {"name": _NAME, "arguments": {"value": 1}}}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "A question."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_HERMES = re.compile(rf'<tool_call>\s*{{"name":\s*"{_NAME}",\s*"arguments":\s*{{"value":\s*1}}}}\s*</tool_call>')
_LLAMA3_MARK = "<|python_tag|>"
_NUM_KEPT = 8


class CallStyle(Enum):
    """The syntax in which a model calls functions by itself."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes 2 and 3, Qwen2.5 and Qwen3 write it."""
    LLAMA3 = "llama3"
    """`{"name": ..., "parameters": {...}}` as the whole answer."""


@dataclass(frozen=True)
class ToolStyle:
    """What is known of a template: whether it shows functions, and the syntax of calls, None where it is unknown."""

    shows_tools: bool
    calls: CallStyle | None


class ToolStyles:
    """The styles of one model's own template and of the last few that requests brought."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._known: OrderedDict[str | None, ToolStyle] = OrderedDict()

    async def of(self, template: str | None) -> ToolStyle:
        """The style of a request's template; None stands for the model's own."""
        if template not in self._known:
            self._known[template] = await self._find(template)
            if len(self._known) > _NUM_KEPT:
                self._known.popitem(last=False)
        return self._known[template]

    async def _find(self, template: str | None) -> ToolStyle:
        tokenizer = self._client.tokenizer
        assert tokenizer is not None
        try:
            prompt = await self._client.chat_prompt(
                _MESSAGES,
                tools=[{"type": "function", "function": _TOOL}],
                chat_template=template,
                add_generation_prompt=False,
            )
        except InvalidValueError:  # the template refuses functions or calls
            return ToolStyle(False, None)
        # An answer's text lacks special tokens, and so must the marks of a call that is found in it.
        text = await asyncio.to_thread(tokenizer.decode, prompt["prompt_token_ids"], skip_special_tokens=True)
        if _HERMES.search(text):
            return ToolStyle(_DESCRIPTION in text, CallStyle.HERMES)
        return ToolStyle(_DESCRIPTION in text, CallStyle.LLAMA3 if _is_llama3(tokenizer) else None)


def _is_llama3(tokenizer: Tokenizer) -> bool:
    return any(tokenizer.convert_id_to_token(token) == _LLAMA3_MARK for token in tokenizer.special_ids)
