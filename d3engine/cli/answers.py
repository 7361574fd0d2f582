"""Answers as they grow: text cut into tokens with their depths, and the figures of a run.

The one idea: answers come from the step API in one batch, and are shown one after another, the one in turn as it comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from d3engine.cli.terminal import DepthColours, Writer
from d3engine.detokenizer import Detokenizer
from d3engine.errors import FailedError
from d3engine.interrupts import Interrupt, held_back

if TYPE_CHECKING:
    from d3engine.engine import Engine
    from d3engine.prompts import Prompt
    from d3engine.request import CompletionOutput, SamplingParams
    from d3engine.tokenizer import Tokenizer


_log = logging.getLogger(__name__)


class Token(NamedTuple):
    """One generated token: the text that it settled (may be empty) and the layers it ran."""

    token_id: int
    text: str
    depth: int


class Answer:
    """One sequence of a request: its output so far, and its text by tokens."""

    def __init__(self, request_id: str, index: int, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self.request_id = request_id
        self.index = index
        self.output: CompletionOutput | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizer: Detokenizer | None = None
        self._tokens: list[Token] = []
        self._closed = False
        self.is_new = True
        """Whether nothing of it has been taken to be shown."""
        self._shown_tokens = 0
        self._shown_characters = 0  # of the token that comes next

    @property
    def finished(self) -> bool:
        """Whether no token will follow."""
        return self.output is not None and self.output.finish_reason is not None

    def update(self, output: CompletionOutput, prompt_token_ids: Sequence[int]) -> None:
        """Take in what the engine returned."""
        self.output = output
        if self._tokenizer is None:
            return
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(
                self._tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=self._skip_special_tokens
            )
        known = len(self._tokens)
        for token_id, depth in zip(output.token_ids[known:], output.depths[known:], strict=False):
            self._tokens.append(Token(token_id, self._detokenizer.append(token_id), depth))
        if output.finish_reason is not None and not self._closed and self._tokens:
            self._closed = True
            last = self._tokens[-1]
            self._tokens[-1] = last._replace(text=last.text + self._detokenizer.finish())

    def tokens(self) -> list[Token]:
        """All tokens; the text of those behind a stop is cut off, for `output.text` says what is shown."""
        room = len(self.output.text) if self.output else 0
        cut = []
        for token in self._tokens:
            cut.append(token._replace(text=token.text[:room]))
            room -= len(cut[-1].text)
        return cut

    def take(self) -> list[Token]:
        """The text that has become safe to show since the last call, by tokens."""
        self.is_new = False
        fresh = []
        for place, token in enumerate(self.tokens()[self._shown_tokens :], start=self._shown_tokens):
            shown = self._shown_characters if place == self._shown_tokens else 0
            if len(token.text) > shown:
                fresh.append(token._replace(text=token.text[shown:]))
            if token.text == self._tokens[place].text:
                self._shown_tokens, self._shown_characters = place + 1, 0
            else:
                self._shown_tokens, self._shown_characters = place, len(token.text)
                break
        return fresh


@dataclass
class Run:
    """What a batch of answers was, and what it cost."""

    answers: list[Answer]
    num_layers: int
    seconds: float = 0.0
    kv_bytes_saved: int = 0
    interrupted: bool = False
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0

    @property
    def depths(self) -> list[int]:
        """Layers run, over all tokens of all answers."""
        return [depth for answer in self.answers if answer.output for depth in answer.output.depths]

    @property
    def mean_layers(self) -> float:
        """Layers run for a token, over the tokens really generated."""
        return sum(self.depths) / max(len(self.depths), 1)

    def summary(self) -> str:
        """One line for people."""
        tokens = len(self.depths)
        words = [
            f"{tokens} tokens",
            *self._drafting_or_layers(),
            f"{_pace(tokens, self.seconds)} ({self.seconds:.2f} s)",
            f"KV cache saved: {readable_bytes(self.kv_bytes_saved)}",
        ]
        return ", ".join((["interrupted"] if self.interrupted else []) + words)

    def _drafting_or_layers(self) -> list[str]:
        """Of drafts, whose layers come on top of a token's own, their yield; else the layers of a token."""
        if not self.verifications:
            return [f"{self.mean_layers:.2f} of {self.num_layers} layers per token"]
        produced = 1 + self.accepted_tokens / self.verifications
        return [
            f"{self.accepted_tokens} of {self.drafted_tokens} drafted tokens accepted",
            f"{produced:.2f} tokens per verification",
            f"{self.mean_layers:.2f} layers run per token, drafts included (full depth: {self.num_layers})",
        ]


def _pace(tokens: int, seconds: float) -> str:
    """Tokens per second, or seconds per token where that is the larger number."""
    if 0 < tokens < seconds:
        return f"{seconds / tokens:.1f} s per token"
    return f"{tokens / max(seconds, 1e-9):.1f} tokens/s"


def readable_bytes(number: float) -> str:
    """`number` bytes in the unit that suits."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def run_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    show: Callable[[Answer], None] = lambda answer: None,
) -> Run:
    """Answer `prompts` in one batch; `show` is called in the order of the answers, until each has finished.

    Ctrl-C ends the requests after the step that runs. Raises `FailedError` for an answer that a fault ended.
    """
    ids = [f"prompt-{number}" for number in range(len(prompts))]
    hides = params.skip_special_tokens
    answers = [Answer(i, index, engine.tokenizer, hides) for i in ids for index in range(params.n)]
    run = Run(answers, engine.config.num_layers)
    before = engine.stats()
    began = time.perf_counter()
    with held_back() as interrupt:
        try:
            for request_id, prompt in zip(ids, prompts, strict=True):
                engine.add_request(request_id, prompt, params)
            _step_until_done(engine, run, show, interrupt)
        finally:
            engine.abort_request(ids)
    run.seconds = time.perf_counter() - began
    if run.interrupted:
        engine.step()  # takes the last outputs of the aborted requests, so that none is left for a later run
    after = engine.stats()
    run.kv_bytes_saved = after.kv_bytes_saved_at_end - before.kv_bytes_saved_at_end
    for name in ("drafted_tokens", "accepted_tokens", "verifications"):
        setattr(run, name, getattr(after, name) - getattr(before, name))
    return run


def _step_until_done(engine: Engine, run: Run, show: Callable[[Answer], None], interrupt: Interrupt) -> None:
    by_request = {(answer.request_id, answer.index): answer for answer in run.answers}
    turn = 0
    while engine.has_unfinished_requests() and not interrupt.seen:
        for output in engine.step():
            run.prompt_tokens[output.request_id] = len(output.prompt_token_ids)
            if output.finished:
                _log.debug("%s: %s", output.request_id, output.metrics)
            for completion in output.outputs:
                answer = by_request[output.request_id, completion.index]
                answer.update(completion, output.prompt_token_ids)
        while turn < len(run.answers) and run.answers[turn].output is not None:
            answer = run.answers[turn]
            show(answer)
            if not answer.finished:
                break
            turn += 1
            _raise_fault(answer)
    run.interrupted = interrupt.seen and engine.has_unfinished_requests()


def _raise_fault(answer: Answer) -> None:
    assert answer.output is not None
    if answer.output.finish_reason == "abort":
        raise FailedError(f"{answer.request_id} ended with a fault: {answer.output.stop_reason}")


def show_tokens(answer: Answer, writer: Writer, colours: DepthColours, *, suffix: bool = False) -> None:
    """Write what is new of an answer, coloured by depth, or with the depth behind every token."""
    for token in answer.take():
        writer.write(token.text, colours.style(token.depth))
        if suffix:
            writer.write(f"[{token.depth}]")
