"""The text edge: from the tokens of a step to the RequestOutputs that users see.

The core knows tokens of sequences; here they become text of requests. Whatever fails here (a tokenizer that cannot
decode an id, say) ends that request alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from d3engine.plan import Plan, PromptRows, Sampled
from d3engine.request.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.request.sequence import Sequence, Status
from d3engine.scheduling.tally import NewTokens
from d3engine.text.detokenizer import Detokenizer, PlacedTexts, TokenTexts
from d3engine.text.tokenizer import Tokenizer

Finish = Callable[[Sequence, FinishReason, "str | int | None"], None]
"""`Scheduler.finish`: how the text edge ends a sequence (a stop string was found)."""


@dataclass(slots=True)
class _Answer:
    """One sequence of a request, and the text it has become.

    `num_given` tokens and the finish reason, once `end_given`, were in a delta before; `new_text` was in none yet, and
    is None where no deltas are wanted. `texts` says what its tokens read as, where their log-probabilities
    are wanted with text.
    """

    sequence: Sequence
    detokenizer: Detokenizer | None
    depths: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    texts: PlacedTexts | None = None
    closed: bool = False
    new_text: list[str] | None = None
    num_given: int = 0
    end_given: bool = False

    def output(self) -> CompletionOutput:
        """All there is so far."""
        return self._output(self.detokenizer.text if self.detokenizer else "", since=0)

    def delta(self) -> CompletionOutput:
        """What is new since the last delta, and nothing else copied."""
        output = self._output("".join(self.new_text or ()), since=self.num_given)
        self.new_text = []
        self.num_given = len(self.sequence.token_ids)
        self.end_given = self.sequence.finish_reason is not None
        return output

    def add_text(self, text: str) -> None:
        """Take in what the detokenizer has let go."""
        if self.new_text is not None:
            self.new_text.append(text)

    def with_texts(self, logprobs: dict[int, Logprob], place: int) -> dict[int, Logprob]:
        """The same, with what each token would read as at this place of prompt and answer."""
        if self.texts is None:
            return logprobs
        texts = self.texts
        return {i: Logprob(known.logprob, known.rank, *texts.at(place, i)) for i, known in logprobs.items()}

    def forget_unread(self, most: int) -> None:
        """Drop of its last `most` tokens those that come behind one of which no text could be made."""
        if self.detokenizer is not None and not self.closed:
            known = max(self.detokenizer.num_tokens, len(self.sequence.token_ids) - most)
            del self.sequence.token_ids[known:], self.sequence.depths[known:], self.depths[known:]

    @property
    def has_news(self) -> bool:
        """Whether the next delta would hold anything."""
        grown = len(self.sequence.token_ids) > self.num_given
        return grown or (self.sequence.finish_reason is not None and not self.end_given)

    def _output(self, text: str, since: int) -> CompletionOutput:
        sequence = self.sequence
        wants_logprobs = sequence.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=sequence.token_ids[since:],
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs[since:] if wants_logprobs else None,
            finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
            stop_reason=sequence.stop_reason,
            depths=self.depths[since:],
        )


@dataclass(slots=True)
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    answers: list[_Answer]
    kind: RequestOutputKind
    arrival_time: float
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    prompt_given: list[int] | None = None
    num_prompt_logprobs_given: int = 0
    num_waiting: int | None = None

    def is_due(self, interval: int) -> bool:
        """Whether what is new of it is worth an output; what follows is counted anew then.

        So it is where no token is among it, and where the first one is.
        """
        if self.num_waiting is not None and 0 < self.num_waiting < interval:
            return False
        self.num_waiting = None if self.first_token_time is None else 0
        return True

    def count_tokens(self, count: int) -> None:
        """So many tokens are new."""
        if self.num_waiting is not None:
            self.num_waiting += count

    @property
    def finished(self) -> bool:
        return all(answer.sequence.status is Status.FINISHED for answer in self.answers)

    def output(self, *, finished: bool) -> RequestOutput:
        """What the kind of output asks for, as it stands now."""
        if self.kind is not RequestOutputKind.DELTA:
            prompt = list(self.prompt_token_ids)  # a reader may do with them what he likes
            return self._output(prompt, [answer.output() for answer in self.answers], 0, finished)
        if self.prompt_given is None:
            self.prompt_given = list(self.prompt_token_ids)
        changed = [answer.delta() for answer in self.answers if answer.has_news]
        output = self._output(self.prompt_given, changed, self.num_prompt_logprobs_given, finished)
        self.num_prompt_logprobs_given = len(self.prompt_logprobs or ())
        return output

    def _output(
        self, prompt_token_ids: list[int], answers: list[CompletionOutput], since: int, finished: bool
    ) -> RequestOutput:
        """Made for every token of a stream, so that it counts what it takes: one loop, over one sequence mostly."""
        scheduled, num_preemptions, num_cached, drafts = None, 0, 0, False
        for answer in self.answers:
            sequence = answer.sequence
            num_preemptions += sequence.num_preemptions
            num_cached = max(num_cached, sequence.num_cached_tokens)
            drafts = drafts or sequence.draft is not None
            began = sequence.scheduled_time
            if began is not None and (scheduled is None or began < scheduled):
                scheduled = began
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs[since:],
            outputs=answers,
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finished_time=time.monotonic() if finished else None,
                num_preemptions=num_preemptions,
                first_scheduled_time=scheduled,
                last_token_time=self.last_token_time,
                **(_counts_of_drafts(self.answers) if drafts else {}),
            ),
            num_cached_tokens=num_cached,
        )


def _counts_of_drafts(answers: list[_Answer]) -> dict[str, int]:
    """What `RequestMetrics` counts of drafts."""
    drafts = [answer.sequence.draft for answer in answers if answer.sequence.draft is not None]
    return {
        "num_drafted_tokens": sum(draft.num_drafted for draft in drafts),
        "num_accepted_tokens": sum(draft.num_accepted for draft in drafts),
        "num_discarded_tokens": sum(draft.num_discarded for draft in drafts),
        "num_discarded_layers": sum(draft.discarded_layers for draft in drafts),
        "num_verifications": sum(draft.num_verifications for draft in drafts),
    }


class OutputProcessor:
    """All unfinished requests, as text."""

    def __init__(self, tokenizer: Tokenizer | None, finish: Finish, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._finish = finish
        self._requests: dict[str, _Request] = {}
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, sequences: list[Sequence], prompt: str | None, kind: RequestOutputKind) -> None:
        """Begin a request of these sequences, whose outputs are of this kind."""
        first, wants_deltas = sequences[0], kind is RequestOutputKind.DELTA
        request = _Request(
            request_id=first.request_id,
            prompt=prompt,
            prompt_token_ids=first.prompt_token_ids,
            answers=[
                _Answer(
                    sequence,
                    self._detokenizer(sequence),
                    texts=self._placed_texts(sequence),
                    new_text=[] if wants_deltas else None,
                )
                for sequence in sequences
            ],
            kind=kind,
            arrival_time=time.monotonic(),
        )
        if first.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._requests[first.request_id] = request

    def _detokenizer(self, sequence: Sequence) -> Detokenizer | None:
        params = sequence.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids=sequence.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _placed_texts(self, sequence: Sequence) -> PlacedTexts | None:
        params = sequence.params
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if self._texts is None or not params.detokenize or not wants_logprobs:
            return None
        return self._texts.placed(sequence.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def process(self, plan: Plan, sampled: Sampled, tokens: Iterable[NewTokens]) -> list[RequestOutput]:
        """Take in a step's tokens; returns the requests that have grown or finished, in the order of the batch.

        Of steps that a reader takes at once, each token is worth an output where it would be if it had come alone.
        """
        grown: dict[str, _Request] = {}
        outputs: list[RequestOutput] = []
        are_read = plan.multi_step is not None and plan.multi_step.control is not None
        now = time.monotonic()
        first = now if sampled.opened is None else sampled.opened
        for rows, found in zip(plan.prompt_rows, sampled.prompt_logprobs, strict=True):
            request = self._requests[rows.sequence.request_id]
            try:
                self._take_prompt_logprobs(request, rows, found)
            except Exception as error:
                self._end_faulty(request, error)
                grown[request.request_id] = request
        for new in tokens:
            request = self._requests[new.sequence.request_id]
            self._take(request, new, first, now)
            if are_read and plan.num_steps > 1:
                outputs += self._outputs([request])
            else:
                grown[request.request_id] = request
        return outputs + self._outputs(grown.values())

    def end(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The last output of requests whose sequences were ended from outside; they are forgotten."""
        ended = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in ended:
            for answer in request.answers:
                with suppress(Exception):  # it has ended already; what text could be decoded stands
                    self._close(answer)
        return self._outputs(ended)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose outputs nobody will ask for."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _outputs(self, requests: Iterable[_Request]) -> list[RequestOutput]:
        outputs = []
        for request in requests:
            finished = request.finished
            if finished:
                del self._requests[request.request_id]
            streams = request.kind is not RequestOutputKind.FINAL_ONLY
            if finished or (streams and request.is_due(self._stream_interval)):
                outputs.append(request.output(finished=finished))
        return outputs

    def _take(self, request: _Request, new: NewTokens, first: float, last: float) -> None:
        """Add tokens, made between these times, to their answer; a fault here ends the request and nobody else's."""
        if new.token_ids:
            request.last_token_time = last
            request.count_tokens(len(new.token_ids))
            if request.first_token_time is None:
                request.first_token_time = first
        answer = request.answers[new.sequence.index]
        try:
            self._extend(answer, new)
        except Exception as error:
            answer.forget_unread(len(new.token_ids) - 1)
            self._end_faulty(request, error)

    def _end_faulty(self, request: _Request, error: Exception) -> None:
        """End all sequences of a request that met a fault, those that had just ended otherwise included."""
        for answer in request.answers:
            sequence, reason = answer.sequence, f"{type(error).__name__}: {error}"
            self._finish(sequence, FinishReason.ABORT, reason)
            sequence.finish_reason, sequence.stop_reason = FinishReason.ABORT, reason
            answer.closed = True

    def _extend(self, answer: _Answer, new: NewTokens) -> None:
        sequence, token_ids = answer.sequence, new.token_ids
        if sequence.finish_reason is FinishReason.ABORT or not token_ids:
            return
        answer.depths += new.depths
        for token, logprobs in zip(token_ids, new.logprobs or (), strict=False):
            place = len(sequence.prompt_token_ids) + len(answer.logprobs)
            answer.logprobs.append(answer.with_texts(logprobs, place))
            if answer.texts is not None:
                answer.texts.grow(token, place)
            answer.cumulative_logprob += logprobs[token].logprob
        if answer.detokenizer is None:
            return
        stops = sequence.finish_reason is FinishReason.STOP and sequence.would_end(token_ids[-1], after=0)
        hides_last = stops and not sequence.params.include_stop_str_in_output
        answer.add_text(answer.detokenizer.extend(token_ids[:-1] if hides_last else token_ids))
        if answer.detokenizer.stop_reason is not None:
            self._stop(answer)
        if sequence.status is Status.FINISHED:
            self._close(answer)

    def _stop(self, answer: _Answer) -> None:
        """End a sequence at its stop string, which takes precedence over the length that may have ended it."""
        sequence = answer.sequence
        reason = answer.detokenizer.stop_reason if answer.detokenizer else None
        self._finish(sequence, FinishReason.STOP, reason)
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, reason

    def _close(self, answer: _Answer) -> None:
        if answer.detokenizer is not None and not answer.closed:
            answer.closed = True
            answer.add_text(answer.detokenizer.finish())

    def _take_prompt_logprobs(self, request: _Request, rows: PromptRows, found: list[dict[int, Logprob]]) -> None:
        known = request.prompt_logprobs
        assert known is not None
        # A preempted prompt comes again from its beginning; what is known already stays.
        for row in found[max(0, len(known) - 1 - rows.position) :]:
            known.append(request.answers[0].with_texts(row, len(known)))
