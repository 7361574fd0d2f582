"""The items of a response's output, as they begin, grow and end: a message of one text, or calls of functions."""

from __future__ import annotations

import uuid
from typing import Any

from d3engine.server.answering.single import Delta
from d3engine.server.shapes.answers import ToolCallDelta
from d3engine.server.shapes.responses import OutputCall, OutputMessage, OutputText


class OutputItems:
    """Of one response; `done` are those that have ended.

    Args:
        begins_with_text: the output can be nothing but a message, which therefore begins at once.
    """

    def __init__(self, *, begins_with_text: bool) -> None:
        self.begins_with_text = begins_with_text
        self.done: list[OutputMessage | OutputCall] = []
        self._message: OutputMessage | None = None
        self._call: OutputCall | None = None

    def first_events(self) -> list[dict[str, Any]]:
        """Before anything is known of the answer."""
        return self._begin_message() if self.begins_with_text else []

    def events(self, news: Delta) -> list[dict[str, Any]]:
        """What is new; `d3ext` goes with the first that has words to it."""
        found: list[dict[str, Any]] = []
        if news.text or (news.d3ext and self._call is None and not news.calls):
            found += [] if self._message else [*self.end("completed"), *self._begin_message()]
            found.append(self._grow_message(news.text))
        for call in news.calls:
            found += self._begin_call(call) if "id" in call else []
            found.append(self._grow_call(call["function"]["arguments"]))
        if news.d3ext:
            place = next((one for one in found if one["type"].endswith(".delta")), None)
            if place is None:
                found.append(place := self._grow_call(""))
            place |= news.d3ext
        return found

    def end(self, status: Any) -> list[dict[str, Any]]:
        """The end of the item that is open, if one is."""
        if self._message is not None:
            return self._end_message(self._message, status)
        return [] if self._call is None else self._end_call(self._call, status)

    # -- a message -------------------------------------------------------------------------------------------------

    def _begin_message(self) -> list[dict[str, Any]]:
        self._message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [_part("")],
        }
        begun = {**self._message, "content": []}
        return [self._of_item("added", begun), self._of_part("response.content_part.added", part=_part(""))]

    def _grow_message(self, text: str) -> dict[str, Any]:
        assert self._message is not None
        self._message["content"][0]["text"] += text
        return self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def _end_message(self, message: OutputMessage, status: Any) -> list[dict[str, Any]]:
        text = message["content"][0]["text"]
        message["status"] = status
        events = [
            self._of_part("response.output_text.done", text=text, logprobs=[]),
            self._of_part("response.content_part.done", part=_part(text)),
            self._of_item("done", message),
        ]
        self.done.append(message)
        self._message = None
        return events

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._message is not None
        place = {"item_id": self._message["id"], "output_index": len(self.done), "content_index": 0}
        return {"type": kind, **place, **fields}

    # -- a call ------------------------------------------------------------------------------------------------------

    def _begin_call(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        before = self.end("completed")
        self._call = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "",
            "status": "in_progress",
        }
        return [*before, self._of_item("added", {**self._call})]

    def _grow_call(self, arguments: str) -> dict[str, Any]:
        assert self._call is not None
        self._call["arguments"] += arguments
        return self._of_call("response.function_call_arguments.delta", delta=arguments)

    def _end_call(self, call: OutputCall, status: Any) -> list[dict[str, Any]]:
        call["status"] = status
        words = {"name": call["name"], "arguments": call["arguments"]}
        events = [self._of_call("response.function_call_arguments.done", **words), self._of_item("done", call)]
        self.done.append(call)
        self._call = None
        return events

    def _of_call(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._call is not None
        return {"type": kind, "item_id": self._call["id"], "output_index": len(self.done), **fields}

    def _of_item(self, what: str, item: Any) -> dict[str, Any]:
        return {"type": f"response.output_item.{what}", "output_index": len(self.done), "item": item}


def _part(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
