"""The choices of a chat's answer, whole and as chunks of a stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.server.responses.context import LogprobWords, RequestContext, TextPlaces, Writer, of_prompt
from d3engine.server.responses.reading import CallReader, Piece, ReasoningReader
from d3engine.server.schemas import answers
from d3engine.server.schemas.requests import ChatRequest


class ChatWriter(Writer):
    """Writes the answer to one POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: RequestContext[ChatRequest]) -> None:
        self._job = job
        self._asked = job.asked
        self._answers: dict[int, _Answer] = {}

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """What vLLM puts beside the choices, where a request asks for it."""
        found: dict[str, object] = {}
        if self._asked.return_token_ids:
            found["prompt_token_ids"] = self._job.prepared[0].prompt_token_ids
        if self._asked.prompt_logprobs is not None and outputs:
            found["prompt_logprobs"] = of_prompt(outputs[0].prompt_logprobs or [])
        return found

    def choices(self, outputs: Sequence[RequestOutput]) -> list[answers.ChatChoice]:
        found = []
        for answer in outputs[0].outputs:
            new = self._answer(answer.index)
            choice: answers.ChatChoice = {
                "index": answer.index,
                "message": new.message(answer),
                "logprobs": None,
                "finish_reason": None,
            }
            self._tell_tokens(choice, new, answer)
            found.append(choice)
        return found

    def chunks(self, number: int, output: RequestOutput) -> list[answers.ChatChunkChoice]:
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
            nothing: answers.ChatDelta = {} if answer.finish_reason or self._job.calling else {"content": ""}
            *before, delta = deltas or [nothing]
            found += [_chunk(answer.index, one) for one in before]
            chunk = _chunk(answer.index, delta)
            self._tell_tokens(chunk, new, answer)
            found.append(chunk)
        return found

    def _tell_tokens(
        self, choice: answers.ChatChoice | answers.ChatChunkChoice, new: _Answer, answer: CompletionOutput
    ) -> None:
        choice["logprobs"] = new.logprobs(answer)
        choice["finish_reason"] = new.finish_reason(answer)  # type: ignore[arg-type]  # no other is left here
        if self._asked.return_token_ids:
            choice["token_ids"] = answer.token_ids
        if self._asked.return_depths:
            choice["d3ext"] = new.depths(answer)

    @property
    def _tells_tokens(self) -> bool:
        """Whether there is something to tell of every token, be its text held back or not."""
        return bool(self._asked.logprobs or self._asked.return_token_ids or self._asked.return_depths)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(one.num_reasoning_tokens for one in self._answers.values())

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
        thinking = job.thinking
        self._reasonings = None if thinking is None else ReasoningReader(thinking.format, is_open=thinking.is_open)
        self._reasoning_offsets: list[int] = []
        self._is_named = job.calling is not None and job.calling.kind == "named"

    def _new_places(self) -> TextPlaces:
        served, prepared = self._job.served, self._job.prepared[0]
        hidden, drops_space = served.hidden_ids(prepared.params), not self._job.asked.continue_final_message
        return TextPlaces(served.texts, prepared.prompt_token_ids, hidden, drops_space=drops_space)

    _places = cached_property(_new_places)
    _reasoning_places = cached_property(_new_places)

    def text(self, answer: CompletionOutput) -> str:
        text = answer.text
        if text and self._drops_space:
            text, self._drops_space = text.removeprefix(" "), False
        return text

    def message(self, answer: CompletionOutput) -> answers.ChatMessage:
        reasoning, text = self._parted(answer, is_last=True)
        found: answers.ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            found["content"] = text or None
            found["reasoning_content"] = reasoning
        if self._calls is None:
            return found
        pieces = self._calls.read(text, is_last=True)
        found["content"] = "".join(piece.text for piece in pieces if piece.index is None) or None
        if calls := [_call(pieces, index) for index in range(self._calls.num_calls)]:
            found["tool_calls"] = calls
        return found

    def _parted(self, answer: CompletionOutput, *, is_last: bool) -> tuple[str, str]:
        """What is new of the reasoning, and of what follows it."""
        if self._reasonings is None or self._reasonings.is_over:
            return "", self.text(answer)
        self._reasoning_offsets += self._reasoning_places.of_answer(answer.token_ids)
        return self._reasonings.read(self.text(answer), is_last=is_last)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of its reasoning so far, the marks around it included."""
        return 0 if self._reasonings is None else bisect_left(self._reasoning_offsets, self._reasonings.end)

    def deltas(self, answer: CompletionOutput) -> list[answers.ChatDelta]:
        is_last = answer.finish_reason is not None
        reasoning, text = self._parted(answer, is_last=is_last)
        found: list[answers.ChatDelta] = [{"reasoning_content": reasoning}] if reasoning else []
        if self._calls is None:
            return [*found, {"content": text}] if text else found
        return [*found, *map(_delta, self._calls.read(text, is_last=is_last))]

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """OpenAI's word: a function that had to be called by name is no reason of its own."""
        calls = self._calls
        if calls is None or self._is_named or not calls.num_calls or calls.is_cut or answer.finish_reason != "stop":
            return answer.finish_reason
        return "tool_calls"

    def logprobs(self, answer: CompletionOutput) -> answers.ChatLogprobs | None:
        return self._words.of_chat(answer.token_ids, answer.logprobs or []) if self._wants_logprobs else None

    def depths(self, answer: CompletionOutput) -> answers.DepthsOfTokens:
        return {"depths": answer.depths, "token_offsets": self._places.of_answer(answer.token_ids)}


def _call(pieces: Sequence[Piece], index: int) -> answers.ToolCall:
    own = [piece for piece in pieces if piece.index == index]
    function: answers.FunctionCall = {"name": own[0].name or "", "arguments": "".join(piece.text for piece in own)}
    return {"id": own[0].id or "", "type": "function", "function": function}


def _delta(piece: Piece) -> answers.ChatDelta:
    if piece.index is None:
        return {"content": piece.text}
    call: answers.ToolCallDelta = {"index": piece.index, "function": {"arguments": piece.text}}
    if piece.id is not None and piece.name is not None:
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": call["function"]}
        call["function"]["name"] = piece.name
    return {"tool_calls": [call]}


def _chunk(index: int, delta: answers.ChatDelta) -> answers.ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
