"""The engine's outputs as OpenAI's text completions; a whole answer is its only delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.server.responses.context import LogprobWords, RequestContext, Row, TextPlaces, Writer, of_prompt
from d3engine.server.schemas.answers import CompletionChoice, CompletionLogprobs
from d3engine.server.schemas.requests import CompletionRequest


class CompletionWriter(Writer):
    """Writes the answer to one POST /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, job: RequestContext[CompletionRequest]) -> None:
        self._job = job
        self._n = job.asked.n or 1
        self._awaits_prompt = bool(job.asked.echo) and job.asked.logprobs is not None
        asked = job.asked
        self._tells_tokens = bool(asked.logprobs is not None or asked.return_token_ids or asked.return_depths)
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._prompt_rows: list[list[Row | None]] = [[] for _ in job.prepared]
        self._waiting: list[list[CompletionOutput]] = [[] for _ in job.prepared]

    def taken(self, output: RequestOutput) -> RequestOutput:
        """Without its token, where max_tokens is 0: the engine always generates one."""
        if self._job.asked.max_tokens != 0:
            return output
        return replace(output, outputs=[_without_tokens(answer) for answer in output.outputs])

    def choices(self, outputs: Sequence[RequestOutput]) -> list[CompletionChoice]:
        """Those of each prompt in turn; of more than were asked for (`best_of`) the best."""
        found = []
        for number, output in enumerate(outputs):
            self._prompt_rows[number] += output.prompt_logprobs or []
            for rank, answer in enumerate(best_of(output.outputs, self._n)):
                choice = self._choice(number, rank).write(answer)
                if self._job.asked.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = of_prompt(output.prompt_logprobs or [])
                found.append(choice)
        return found

    def chunks(self, number: int, output: RequestOutput) -> list[CompletionChoice]:
        """What is new; nothing of a choice before all that is to be known of its prompt is known."""
        outputs = self._once_prompt_is_known(number, output) if self._awaits_prompt else output.outputs
        found = []
        for answer in outputs:
            # A delta whose text is held back is worth a chunk only where there is something to tell of its tokens.
            if answer.text or answer.finish_reason or self._tells_tokens:
                found.append(self._choice(number, answer.index).write(answer))
        return found

    def _once_prompt_is_known(self, number: int, output: RequestOutput) -> list[CompletionOutput]:
        """All that has come so far, when the log-probabilities of the whole prompt have; until then nothing."""
        rows, waiting = self._prompt_rows[number], self._waiting[number]
        rows += output.prompt_logprobs or []
        waiting += output.outputs
        if len(rows) < len(self._job.prepared[number].prompt_token_ids):
            return []
        self._waiting[number] = []
        return waiting

    def _choice(self, number: int, index: int) -> _Choice:
        if (number, index) not in self._choices:
            self._choices[number, index] = _Choice(self._job, number, index, self._prompt_rows[number])
        return self._choices[number, index]


class _Choice:
    """One answer to one prompt, as far as it is written."""

    def __init__(
        self, job: RequestContext[CompletionRequest], number: int, index: int, prompt_rows: Sequence[Row | None]
    ) -> None:
        self._asked = job.asked
        self._index = number * (job.asked.n or 1) + index
        self._prepared = job.prepared[number]
        self._prompt_rows = prompt_rows
        self._texts = job.served.texts
        self._hidden = job.served.hidden_ids(self._prepared.params)
        self._words = LogprobWords(job.asked.logprobs or 0, bool(job.asked.return_tokens_as_token_ids))
        self._echo = self._prompt_text(job) if job.asked.echo else ""
        self._tells_places = job.asked.logprobs is not None or bool(job.asked.return_depths)
        self._has_begun = False

    def _prompt_text(self, job: RequestContext[CompletionRequest]) -> str:
        """As it came, or what its token ids read as."""
        if self._prepared.prompt is not None:
            return self._prepared.prompt
        skips = self._prepared.params.skip_special_tokens
        return job.served.tokenizer.decode(self._prepared.prompt_token_ids, skip_special_tokens=skips)

    @cached_property
    def _places(self) -> TextPlaces:
        return TextPlaces(self._texts, self._prepared.prompt_token_ids, self._hidden, start=len(self._echo))

    def write(self, answer: CompletionOutput) -> CompletionChoice:
        """What is new of it, its prompt included at the first time where that is asked for."""
        is_first, self._has_begun = not self._has_begun, True
        asked = self._asked
        places = self._places.of_answer(answer.token_ids) if self._tells_places else []
        choice: CompletionChoice = {
            "index": self._index,
            "text": self._echo + answer.text if is_first else answer.text,
            "logprobs": self._logprobs(answer, places, is_first) if asked.logprobs is not None else None,
            "finish_reason": answer.finish_reason,  # type: ignore[typeddict-item]  # no other is left here
        }
        if asked.return_token_ids:
            choice["token_ids"] = answer.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prepared.prompt_token_ids
        if asked.return_depths:
            choice["d3ext"] = {"depths": answer.depths, "token_offsets": places}
        return choice

    def _logprobs(self, answer: CompletionOutput, places: list[int], is_first: bool) -> CompletionLogprobs:
        if not (is_first and self._asked.echo):
            return self._words.of_completion(answer.token_ids, answer.logprobs or [], places)
        prompt = self._prepared.prompt_token_ids
        return self._words.of_completion(
            [*prompt, *answer.token_ids],
            [*self._prompt_rows, *(answer.logprobs or [])],
            [*TextPlaces(self._texts, (), self._hidden).of_answer(prompt), *places],
            first=self._texts.of(prompt[0], is_first=True)[0],
        )


def best_of(answers: Sequence[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n answers whose tokens were likeliest on average, best first; all in their order if there are no more."""
    if len(answers) <= n:
        return list(answers)
    return sorted(answers, key=lambda one: -(one.cumulative_logprob or 0.0) / max(1, len(one.token_ids)))[:n]


def _without_tokens(answer: CompletionOutput) -> CompletionOutput:
    reason = None if answer.finish_reason is None else "length"
    logprobs = answer.logprobs and []
    return replace(answer, text="", token_ids=[], logprobs=logprobs, depths=[], finish_reason=reason)
