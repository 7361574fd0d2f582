"""Calls of functions, read from the text of an answer as it comes.

Arguments are passed on as the model writes them, letter by letter, so a stream of them is never behind;
only where one call ends and the next begins is found out here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.server.requests.tools import SPACE, Calling, CallStyle, bare_head
from d3engine.server.responses.context import RequestContext, TextPlaces
from d3engine.server.responses.extras import LogprobWords, of_prompt
from d3engine.server.schemas.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    DepthsOfTokens,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from d3engine.server.schemas.requests import ChatRequest

_OPENING = "<tool_call>"
_HEAD = re.compile(
    r'(?:[\s\[\],;}]|</?tool_call>|```(?:json)?)*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w-]+)"\s*,'
    r'\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
)
"""What stands between two calls, and before the first."""

_LONGEST_HEAD = 300
"""Characters in which a call must have begun that a model makes by itself; otherwise the answer is text."""


@dataclass(frozen=True)
class Piece:
    """What is new: of the text, or of the call `index`; `name` comes once, with the `id` of the call."""

    text: str
    index: int | None = None
    id: str | None = None
    name: str | None = None


class CallReader:
    """Of one answer."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self.num_calls = 0
        self._waiting = ""
        self._is_text = False
        self._awaits_opening = self._may_be_bare = calling.kind == "auto" and calling.style is CallStyle.HERMES
        self._arguments: _Arguments | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of the last call are incomplete, as a stop string may leave them."""
        return self._arguments is not None

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        """Take what is new of the answer."""
        if self._calling.kind == "named" and self._calling.style is None:
            begun = [self._begin(self._calling.names[0])] if not self.num_calls else []
            return [*begun, *([Piece(text, 0)] if text else [])]
        self._waiting += text
        found: list[Piece] = []
        while self._waiting and (new := self._next()) is not None:
            found.append(new)
        if is_last and self._calling.kind == "auto" and self._waiting and not self.num_calls:
            is_form = self._calling.style is CallStyle.HERMES and not self._awaits_opening
            found += [] if is_form or _OPENING[:6] in self._waiting else self._all_as_text()
        return [piece for piece in found if piece.text or piece.name]

    def _next(self) -> Piece | None:
        """The next piece of what waits; None where more must come first."""
        if self._is_text:
            return self._all_as_text()[0]
        if self._may_be_bare:
            is_bare = any(re.match(f"{bare_head(name)}{SPACE}\\{{", self._waiting) for name in self._calling.names)
            if not is_bare and _may_become_bare(self._waiting, self._calling.names):
                return None
            self._may_be_bare, self._awaits_opening = False, not is_bare
        if self._awaits_opening:
            return self._before_opening()
        if self._arguments is not None:
            end = self._arguments.end(self._waiting)
            piece, self._waiting = self._waiting[:end], self._waiting[end:]
            if self._arguments.is_over:
                self._arguments = None
            return Piece(piece, self.num_calls - 1)
        head = _HEAD.match(self._waiting)
        if head is not None and head[1] in self._calling.names:
            self._waiting = self._waiting[head.end() :]
            self._arguments = _Arguments()
            return self._begin(head[1])
        return self._all_as_text()[0] if self._must_be_text(head is not None) else None

    def _before_opening(self) -> Piece | None:
        """The text before a call in Hermes' syntax; what may belong to the opening waits."""
        place = self._waiting.find(_OPENING)
        self._awaits_opening = place < 0
        end = len(self._waiting) - _overlap(self._waiting) if place < 0 else place
        text = self._waiting[:end].rstrip()
        self._waiting = self._waiting[len(text) if place < 0 else place :]
        return Piece(text) if text or place >= 0 else None

    def _must_be_text(self, is_other_call: bool) -> bool:
        """Whether an answer that might call a function does not."""
        if self._calling.style is not CallStyle.LLAMA3 or self._calling.kind != "auto" or self.num_calls:
            return False
        begins = self._waiting.lstrip()
        return is_other_call or len(begins) > _LONGEST_HEAD or (begins != "" and not begins.startswith("{"))

    def _all_as_text(self) -> list[Piece]:
        self._is_text = True
        text, self._waiting = self._waiting, ""
        return [Piece(text)]

    def _begin(self, name: str) -> Piece:
        self.num_calls += 1
        return Piece("", self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)


def _may_become_bare(text: str, names: Sequence[str]) -> bool:
    """Whether a text can go on to be the head of a call without marks."""
    head = [["{"], ['"name"'], [":"], [f'"{name}"' for name in names], [","], ['"arguments"'], [":"], ["{"]]
    return len(text) < _LONGEST_HEAD and any(_may_become(text, [[fence], *head]) for fence in ("```json", "```", ""))


def _may_become(text: str, parts: Sequence[Sequence[str]]) -> bool:
    """Whether a text can go on to be these parts with space between them; each is one of several."""
    for options in parts:
        text = text.lstrip()
        found = next((option for option in options if text.startswith(option)), None)
        if found is None:
            return any(option.startswith(text) for option in options)
        text = text.removeprefix(found)
    return False


def _overlap(text: str) -> int:
    """How many characters at the end of a text are a beginning of the opening."""
    return next(size for size in reversed(range(len(_OPENING))) if text.endswith(_OPENING[:size]))


class _Arguments:
    """A JSON object on its way: where it ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_over = False

    def end(self, text: str) -> int:
        """How many characters of `text`, which goes on from the last one, belong to it."""
        for place, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return place + 1
        return len(text)


class ChatWriter:
    """Writes the answer to one POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        self._job = job
        self._asked = job.asked
        self._answers: dict[int, _Answer] = {}

    def taken(self, output: RequestOutput) -> RequestOutput:
        return output

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """What vLLM puts beside the choices, where a request asks for it."""
        found: dict[str, object] = {}
        if self._asked.return_token_ids:
            found["prompt_token_ids"] = self._job.prepared[0].prompt_token_ids
        if self._asked.prompt_logprobs is not None and outputs:
            found["prompt_logprobs"] = of_prompt(outputs[0].prompt_logprobs or [])
        return found

    def choices(self, outputs: Sequence[RequestOutput]) -> list[ChatChoice]:
        found = []
        for answer in outputs[0].outputs:
            new = self._answer(answer.index)
            choice: ChatChoice = {
                "index": answer.index,
                "message": new.message(answer),
                "logprobs": new.logprobs(answer),
                "finish_reason": new.finish_reason(answer),  # type: ignore[typeddict-item]  # no other is left here
            }
            if self._asked.return_token_ids:
                choice["token_ids"] = answer.token_ids
            if self._asked.return_depths:
                choice["d3ext"] = new.depths(answer)
            found.append(choice)
        return found

    def chunks(self, number: int, output: RequestOutput) -> list[ChatChunkChoice]:
        """What is new of each choice; its role comes first, by itself."""
        found = []
        for answer in output.outputs:
            if answer.index not in self._answers:
                content = "" if self._job.calling is None else None
                found.append(_chunk(answer.index, {"role": "assistant", "content": content}))
            new = self._answer(answer.index)
            deltas = new.deltas(answer)
            if not (deltas or answer.finish_reason or self._tells_tokens):
                continue
            nothing: ChatDelta = {} if answer.finish_reason or self._job.calling else {"content": ""}
            *before, delta = deltas or [nothing]
            found += [_chunk(answer.index, one) for one in before]
            chunk = _chunk(answer.index, delta)
            chunk["logprobs"] = new.logprobs(answer)
            chunk["finish_reason"] = new.finish_reason(answer)  # type: ignore[typeddict-item]  # no other is left here
            if self._asked.return_token_ids:
                chunk["token_ids"] = answer.token_ids
            if self._asked.return_depths:
                chunk["d3ext"] = new.depths(answer)
            found.append(chunk)
        return found

    @property
    def _tells_tokens(self) -> bool:
        """Whether there is something to tell of every token, be its text held back or not."""
        return bool(self._asked.logprobs or self._asked.return_token_ids or self._asked.return_depths)

    def _answer(self, index: int) -> _Answer:
        if index not in self._answers:
            self._answers[index] = _Answer(self._job)
        return self._answers[index]


class _Answer:
    """One answer, as far as it is written.

    The space between a prompt and an answer is no part of a message: one at its very beginning is dropped, unless the
    message goes on that the prompt ends with.
    """

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        asked = job.asked
        self._drops_space = not asked.continue_final_message
        self._wants_logprobs = bool(asked.logprobs)
        self._words = LogprobWords(asked.top_logprobs or 0, bool(asked.return_tokens_as_token_ids))
        self._job = job
        self._calls = None if job.calling is None else CallReader(job.calling)
        self._is_named = job.calling is not None and job.calling.kind == "named"

    @cached_property
    def _places(self) -> TextPlaces:
        served, prepared = self._job.served, self._job.prepared[0]
        hidden, drops_space = served.hidden_ids(prepared.params), not self._job.asked.continue_final_message
        return TextPlaces(served.texts, prepared.prompt_token_ids, hidden, drops_space=drops_space)

    def text(self, answer: CompletionOutput) -> str:
        """What is new of the message."""
        text = answer.text
        if text and self._drops_space:
            text, self._drops_space = text.removeprefix(" "), False
        return text

    def message(self, answer: CompletionOutput) -> ChatMessage:
        """The whole message."""
        if self._calls is None:
            return {"role": "assistant", "content": self.text(answer), "refusal": None}
        pieces = self._calls.read(self.text(answer), is_last=True)
        said = "".join(piece.text for piece in pieces if piece.index is None)
        calls = [_call(pieces, index) for index in range(self._calls.num_calls)]
        found: ChatMessage = {"role": "assistant", "content": said or None, "refusal": None}
        if calls:
            found["tool_calls"] = calls
        return found

    def deltas(self, answer: CompletionOutput) -> list[ChatDelta]:
        """What is new, if anything: of text, or of calls."""
        text = self.text(answer)
        if self._calls is None:
            return [{"content": text}] if text else []
        return [_delta(piece) for piece in self._calls.read(text, is_last=answer.finish_reason is not None)]

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """OpenAI's word: a function that had to be called by name is no reason of its own."""
        calls = self._calls
        if calls is None or self._is_named or not calls.num_calls or calls.is_cut or answer.finish_reason != "stop":
            return answer.finish_reason
        return "tool_calls"

    def logprobs(self, answer: CompletionOutput) -> ChatLogprobs | None:
        return self._words.of_chat(answer.token_ids, answer.logprobs or []) if self._wants_logprobs else None

    def depths(self, answer: CompletionOutput) -> DepthsOfTokens:
        return {"depths": answer.depths, "token_offsets": self._places.of_answer(answer.token_ids)}


def _call(pieces: Sequence[Piece], index: int) -> ToolCall:
    """One call of those that the pieces are of."""
    own = [piece for piece in pieces if piece.index == index]
    function: FunctionCall = {"name": own[0].name or "", "arguments": "".join(piece.text for piece in own)}
    return {"id": own[0].id or "", "type": "function", "function": function}


def _delta(piece: Piece) -> ChatDelta:
    if piece.index is None:
        return {"content": piece.text}
    call: ToolCallDelta = {"index": piece.index, "function": {"arguments": piece.text}}
    if piece.id is not None and piece.name is not None:
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": call["function"]}
        call["function"]["name"] = piece.name
    return {"tool_calls": [call]}


def _chunk(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
