"""The blocks of an Anthropic message, as they open, grow and close: a text, or calls of functions."""

from __future__ import annotations

import json
from typing import Any

from d3engine.server.answering.single import Delta
from d3engine.server.shapes.answers import DepthsOfTokens


class MessageBlocks:
    """Of one message.

    Args:
        begins_with_text: it can be nothing but a text, whose block therefore opens at once.
    """

    def __init__(self, *, begins_with_text: bool) -> None:
        self._begins_with_text = begins_with_text
        self._index = -1
        self._kind: str | None = None
        self._waiting: DepthsOfTokens = {"depths": [], "token_offsets": []}
        self._has_depths = False
        self.has_calls = False

    def first_events(self) -> list[dict[str, Any]]:
        """Before anything is known of the answer."""
        return self._open("text", {"type": "text", "text": ""}) if self._begins_with_text else []

    def events(self, news: Delta) -> list[dict[str, Any]]:
        """What is new; `d3ext` goes with the first that has words to it."""
        found: list[dict[str, Any]] = []
        if (told := news.d3ext.get("d3ext")) is not None:
            self._has_depths = True
            self._waiting["depths"] += told["depths"]
            self._waiting["token_offsets"] += told["token_offsets"]
        if news.text:
            if self._kind != "text":
                found += [*self.close(), *self._open("text", {"type": "text", "text": ""})]
            found.append(self._delta({"type": "text_delta", "text": news.text}))
        for call in news.calls:
            if "id" in call:
                self.has_calls = True
                block: dict[str, Any] = {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"].get("name"),
                    "input": {},
                }
                found += [*self.close(), *self._open("tool_use", block)]
            found.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        if self._has_depths and self._waiting["depths"] and self._kind is not None:
            empty = {"text": {"type": "text_delta", "text": ""}}
            found.append(self._delta(empty.get(self._kind, {"type": "input_json_delta", "partial_json": ""})))
        return found

    def close(self) -> list[dict[str, Any]]:
        """The end of the block that is open, if one is."""
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._kind, self._index = kind, self._index + 1
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "content_block_delta", "index": self._index, "delta": delta}
        if self._waiting["depths"]:
            event["d3ext"], self._waiting = self._waiting, {"depths": [], "token_offsets": []}
        return event


def whole_blocks(news: Delta, *, begins_with_text: bool) -> list[dict[str, Any]]:
    """The blocks of a whole answer; a call that was cut off within its arguments is none."""
    found: list[dict[str, Any]] = []
    if news.text or begins_with_text:
        found.append({"type": "text", "text": news.text})
    for call in news.calls:
        arguments = _object(call["function"]["arguments"])
        if arguments is not None:
            name = call["function"].get("name")
            found.append({"type": "tool_use", "id": call.get("id"), "name": name, "input": arguments})
    if found:
        found[0] |= news.d3ext
    return found


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
