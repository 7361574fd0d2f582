"""Request outputs: the text, tokens and metrics of requests, from the tokens of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AnySequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from d3engine.errors import FailedError
from d3engine.request.hidden_states import HiddenStates, StateCollector, path_of
from d3engine.request.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.request.pooling import FloatArray, PromptPooling
from d3engine.scheduling.plan import CapturedRows, Plan, PromptRows, Sampled
from d3engine.scheduling.running import NewTokens
from d3engine.scheduling.sequence import Sequence, Status
from d3engine.text.detokenizer import Detokenizer, PlacedTexts, TokenTexts
from d3engine.text.tokenizer import Tokenizer

Finish = Callable[[Sequence, FinishReason, "str | int | None"], None]
"""`Scheduler.finish`, by which a stop string or a fault ends a sequence."""


@dataclass(slots=True)
class _Completion:
    """One sequence of a request, and its text.

    `num_given` tokens and, with `end_given`, the finish reason were in an earlier delta; `new_text` was in none yet,
    and is None where no deltas are wanted. `texts` are those of single tokens, for log-probabilities with text.
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
    collector: StateCollector | None = None
    hidden_states: HiddenStates | None = None

    def output(self) -> CompletionOutput:
        """The whole output so far."""
        return self._output(self.detokenizer.text if self.detokenizer else "", since=0)

    def delta(self) -> CompletionOutput:
        """The output since the last delta; nothing else is copied."""
        output = self._output("".join(self.new_text or ()), since=self.num_given)
        self.new_text = []
        self.num_given = len(self.sequence.token_ids)
        self.end_given = self.sequence.finish_reason is not None
        return output

    def add_text(self, text: str) -> None:
        if self.new_text is not None:
            self.new_text.append(text)

    def with_texts(self, logprobs: dict[int, Logprob], place: int) -> dict[int, Logprob]:
        """The same, with each token's text at this place of prompt and output."""
        if self.texts is None:
            return logprobs
        texts = self.texts
        return {i: Logprob(known.logprob, known.rank, *texts.at(place, i)) for i, known in logprobs.items()}

    def drop_undecoded(self, most: int) -> None:
        """Drop those of the last `most` tokens that follow one that could not be decoded."""
        if self.detokenizer is not None and not self.closed:
            known = max(self.detokenizer.num_tokens, len(self.sequence.token_ids) - most)
            del self.sequence.token_ids[known:], self.sequence.depths[known:], self.depths[known:]

    @property
    def has_delta(self) -> bool:
        """Whether the next delta would not be empty."""
        grown = len(self.sequence.token_ids) > self.num_given
        return grown or (self.sequence.finish_reason is not None and not self.end_given)

    def _output(self, text: str, since: int) -> CompletionOutput:
        sequence = self.sequence
        wants_logprobs = sequence.params.logprobs is not None
        if sequence.params.pooling is not None:
            since = len(sequence.token_ids)  # no caller sees the one token that is made
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=sequence.token_ids[since:],
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs[since:] if wants_logprobs else None,
            finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
            stop_reason=sequence.stop_reason,
            depths=self.depths[since:],
            hidden_states=self.hidden_states,
        )


@dataclass(slots=True)
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[_Completion]
    kind: RequestOutputKind
    arrival_time: float
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    prompt_given: list[int] | None = None
    num_prompt_logprobs_given: int = 0
    num_waiting: int | None = None
    pooling: PromptPooling | None = None
    captures: bool = False

    def is_due(self, interval: int) -> bool:
        """Whether new tokens are due for an output; if so, resets their count.

        The first token is always due, and so is an output without new tokens.
        """
        if self.num_waiting is not None and 0 < self.num_waiting < interval:
            return False
        self.num_waiting = None if self.first_token_time is None else 0
        return True

    def count_tokens(self, count: int) -> None:
        if self.num_waiting is not None:
            self.num_waiting += count

    @property
    def finished(self) -> bool:
        return all(completion.sequence.status is Status.FINISHED for completion in self.completions)

    def output(self, *, finished: bool) -> RequestOutput:
        """The output of the request's kind, as of now."""
        if self.kind is not RequestOutputKind.DELTA:
            prompt = list(self.prompt_token_ids)  # a reader may change them
            return self._output(prompt, [completion.output() for completion in self.completions], 0, finished)
        if self.prompt_given is None:
            self.prompt_given = list(self.prompt_token_ids)
        changed = [completion.delta() for completion in self.completions if completion.has_delta]
        output = self._output(self.prompt_given, changed, self.num_prompt_logprobs_given, finished)
        self.num_prompt_logprobs_given = len(self.prompt_logprobs or ())
        return output

    def _output(
        self, prompt_token_ids: list[int], completions: list[CompletionOutput], since: int, finished: bool
    ) -> RequestOutput:
        """One loop, over mostly one sequence: its cost counts, as a stream makes one for every token."""
        scheduled, num_preemptions, num_cached, drafts = None, 0, 0, False
        for completion in self.completions:
            sequence = completion.sequence
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
            outputs=completions,
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finished_time=time.monotonic() if finished else None,
                num_preemptions=num_preemptions,
                first_scheduled_time=scheduled,
                last_token_time=self.last_token_time,
                **(_counts_of_drafts(self.completions) if drafts else {}),
            ),
            num_cached_tokens=num_cached,
            embedding=self.pooling.pooled() if self.pooling is not None and finished else None,
        )


def _counts_of_drafts(completions: list[_Completion]) -> dict[str, int]:
    drafts = [completion.sequence.draft for completion in completions if completion.sequence.draft is not None]
    return {
        "num_drafted_tokens": sum(draft.num_drafted for draft in drafts),
        "num_accepted_tokens": sum(draft.num_accepted for draft in drafts),
        "num_discarded_tokens": sum(draft.num_discarded for draft in drafts),
        "num_discarded_layers": sum(draft.discarded_layers for draft in drafts),
        "num_verifications": sum(draft.num_verifications for draft in drafts),
    }


class OutputProcessor:
    """The outputs of all unfinished requests. A fault here, such as an id that cannot be decoded, ends one request."""

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
        """Begin a request of these sequences, with outputs of `kind`."""
        first, wants_deltas = sequences[0], kind is RequestOutputKind.DELTA
        capture = first.params.captured
        request = _Request(
            request_id=first.request_id,
            prompt=prompt,
            prompt_token_ids=first.prompt_token_ids,
            completions=[
                _Completion(
                    sequence,
                    self._detokenizer(sequence),
                    texts=self._placed_texts(sequence),
                    new_text=[] if wants_deltas else None,
                    collector=None if capture is None else StateCollector(capture, len(sequence.prompt_token_ids)),
                )
                for sequence in sequences
            ],
            kind=kind,
            arrival_time=time.monotonic(),
            captures=capture is not None,
        )
        if first.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        if first.params.pooling is not None:
            request.pooling = PromptPooling(first.params.pooling)
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

    def process(
        self,
        plan: Plan,
        sampled: Sampled,
        tokens: Iterable[NewTokens],
        captured: AnySequence[FloatArray] = (),
        num_before: int = 0,
    ) -> list[RequestOutput]:
        """Add a step's tokens; returns the outputs of requests that have grown or finished, in the order of the batch.

        `captured` are the hidden states [S, rows, H] of the plan's captured rows, of the steps after `num_before`. In a
        multi-step run with a streaming reader each step gives the outputs that it would give alone.
        """
        grown: dict[str, _Request] = {}
        outputs: list[RequestOutput] = []
        is_streamed = plan.multi_step is not None and plan.multi_step.control is not None
        now = time.monotonic()
        first = now if sampled.opened is None else sampled.opened
        for rows, found in zip(plan.prompt_rows, sampled.prompt_logprobs, strict=True):
            request = self._requests[rows.sequence.request_id]
            try:
                self._take_prompt_logprobs(request, rows, found)
            except Exception as error:
                self._end_faulty(request, error)
                grown[request.request_id] = request
        for group, states in zip(plan.captured, captured, strict=True):
            self._take_states(plan, group, states, num_before)
        for new in tokens:
            request = self._requests[new.sequence.request_id]
            self._take(request, new, first, now)
            if is_streamed and plan.num_steps > 1:
                outputs += self._outputs([request])
            else:
                grown[request.request_id] = request
        return outputs + self._outputs(grown.values())

    def end(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The last output of requests whose sequences were ended from outside; removes them."""
        ended = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in ended:
            for completion in request.completions:
                with suppress(Exception):  # it has ended already, and keeps the text that could be decoded
                    self._close(completion)
        return self._outputs(ended)

    def drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _outputs(self, requests: Iterable[_Request]) -> list[RequestOutput]:
        outputs = []
        for request in requests:
            if request.captures:
                self._close_collectors(request)
            finished = request.finished
            if finished:
                del self._requests[request.request_id]
            streams = request.kind is not RequestOutputKind.FINAL_ONLY
            if finished or (streams and request.is_due(self._stream_interval)):
                outputs.append(request.output(finished=finished))
        return outputs

    def _take(self, request: _Request, new: NewTokens, first: float, last: float) -> None:
        """Add tokens, sampled between these times, to their completion; a fault ends only this request."""
        if new.token_ids:
            request.last_token_time = last
            request.count_tokens(len(new.token_ids))
            if request.first_token_time is None:
                request.first_token_time = first
        completion = request.completions[new.sequence.index]
        try:
            self._extend(completion, new)
        except Exception as error:
            completion.drop_undecoded(len(new.token_ids) - 1)
            self._end_faulty(request, error)

    def _end_faulty(self, request: _Request, error: Exception) -> None:
        """End all sequences of a request after a fault, those that had just ended otherwise included."""
        for completion in request.completions:
            sequence, reason = completion.sequence, f"{type(error).__name__}: {error}"
            self._finish(sequence, FinishReason.ABORT, reason)
            sequence.finish_reason, sequence.stop_reason = FinishReason.ABORT, reason
            completion.closed = True

    def _extend(self, completion: _Completion, new: NewTokens) -> None:
        sequence, token_ids = completion.sequence, new.token_ids
        if sequence.finish_reason is FinishReason.ABORT or not token_ids:
            return
        completion.depths += new.depths
        for token, logprobs in zip(token_ids, new.logprobs or (), strict=False):
            place = len(sequence.prompt_token_ids) + len(completion.logprobs)
            completion.logprobs.append(completion.with_texts(logprobs, place))
            if completion.texts is not None:
                completion.texts.grow(token, place)
            completion.cumulative_logprob += logprobs[token].logprob
        if completion.detokenizer is None:
            return
        stops = sequence.finish_reason is FinishReason.STOP and sequence.would_end(token_ids[-1], after=0)
        hides_last = stops and not sequence.params.include_stop_str_in_output
        completion.add_text(completion.detokenizer.extend(token_ids[:-1] if hides_last else token_ids))
        if completion.detokenizer.stop_reason is not None:
            self._stop(completion)
        if sequence.status is Status.FINISHED:
            self._close(completion)

    def _stop(self, completion: _Completion) -> None:
        """End a sequence at its stop string, which takes precedence over an end by length."""
        sequence = completion.sequence
        reason = completion.detokenizer.stop_reason if completion.detokenizer else None
        self._finish(sequence, FinishReason.STOP, reason)
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, reason

    def _close(self, completion: _Completion) -> None:
        if completion.detokenizer is not None and not completion.closed:
            completion.closed = True
            completion.add_text(completion.detokenizer.finish())

    def _take_states(self, plan: Plan, captured: CapturedRows, states: FloatArray, num_before: int) -> None:
        """Give the captured states [S, rows, H], of the steps after `num_before`, to their sequences."""
        chunks = plan.row_chunks[captured.rows]
        positions = plan.positions[captured.rows] + num_before + np.arange(len(states))[:, None]
        for chunk in np.unique(chunks).tolist():
            sequence, own = plan.sequences[chunk], chunks == chunk
            if sequence.status is Status.FINISHED:
                continue  # it has ended while a run went on, and its id may be another request's by now
            request = self._requests[sequence.request_id]
            at, found = positions[:, own].ravel(), states[:, own].reshape(-1, states.shape[2])
            collector = request.completions[sequence.index].collector
            if collector is not None:
                collector.take(captured.layer, at, found)
            elif request.pooling is not None:
                request.pooling.take(at, found)

    def _close_collectors(self, request: _Request) -> None:
        """Hand out the hidden states of sequences that have ended, and write those that belong in a file."""
        for completion in request.completions:
            sequence, collector = completion.sequence, completion.collector
            if collector is None or sequence.status is not Status.FINISHED:
                continue
            # The last token runs through no layer.
            length = sequence.num_tokens - bool(sequence.token_ids)
            completion.collector, completion.hidden_states = None, collector.collected(length)
            if (path := path_of(sequence.params.captured)) is not None:
                try:
                    completion.hidden_states.write(path, sequence.prompt_token_ids + sequence.token_ids)
                except OSError as error:
                    self._end_faulty(request, FailedError(f"{path} cannot be written: {error.strerror or error}"))

    def _take_prompt_logprobs(self, request: _Request, rows: PromptRows, found: list[dict[int, Logprob]]) -> None:
        known = request.prompt_logprobs
        assert known is not None
        # A preempted prompt is computed again from its beginning; known rows stay.
        for row in found[max(0, len(known) - 1 - rows.position) :]:
            known.append(request.completions[0].with_texts(row, len(known)))
