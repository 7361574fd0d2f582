"""The engine's outputs as OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.server.answering.job import Job
from d3engine.server.answering.logprobs import LogprobWords, of_prompt
from d3engine.server.answering.places import TextPlaces
from d3engine.server.shapes.answers import ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, DepthsOfTokens
from d3engine.server.shapes.requests import ChatRequest


class ChatWriter:
    """Writes the answer to one POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: Job[ChatRequest]) -> None:
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
                "message": {"role": "assistant", "content": new.text(answer), "refusal": None},
                "logprobs": new.logprobs(answer),
                "finish_reason": answer.finish_reason,  # type: ignore[typeddict-item]  # no other is left here
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
                found.append(_chunk(answer.index, {"role": "assistant", "content": ""}))
            new = self._answer(answer.index)
            text = new.text(answer)
            if not (text or answer.finish_reason or self._tells_tokens):
                continue
            chunk = _chunk(answer.index, {"content": text} if text or not answer.finish_reason else {})
            chunk["logprobs"] = new.logprobs(answer)
            chunk["finish_reason"] = answer.finish_reason  # type: ignore[typeddict-item]  # no other is left here
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

    def __init__(self, job: Job[ChatRequest]) -> None:
        asked, (prepared,) = job.asked, job.prepared
        self._drops_space = not asked.continue_final_message
        self._wants_logprobs = bool(asked.logprobs)
        self._words = LogprobWords(asked.top_logprobs or 0, bool(asked.return_tokens_as_token_ids))
        hidden = job.served.hidden_ids(prepared.params)
        texts, prompt = job.served.texts, prepared.prompt_token_ids
        self._places = TextPlaces(texts, prompt, hidden, drops_space=self._drops_space)

    def text(self, answer: CompletionOutput) -> str:
        """What is new of the message."""
        text = answer.text
        if text and self._drops_space:
            text, self._drops_space = text.removeprefix(" "), False
        return text

    def logprobs(self, answer: CompletionOutput) -> ChatLogprobs | None:
        return self._words.of_chat(answer.token_ids, answer.logprobs or []) if self._wants_logprobs else None

    def depths(self, answer: CompletionOutput) -> DepthsOfTokens:
        return {"depths": answer.depths, "token_offsets": self._places.of_answer(answer.token_ids)}


def _chunk(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
