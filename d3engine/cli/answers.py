"""Answers as they grow: text cut into tokens with their depths, and the figures of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from d3engine.cli.terminal import DepthColours, Writer
from d3engine.engine.call_lock import Interrupt, held_back
from d3engine.errors import FailedError
from d3engine.request.params import RequestOutputKind
from d3engine.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.outputs import CompletionOutput
    from d3engine.request.params import SamplingParams
    from d3engine.text.prompts import Prompt
    from d3engine.text.tokenizer import Tokenizer


_log = logging.getLogger(__name__)


class Token(NamedTuple):
    """One generated token: the text that it settled (may be empty) and the layers it ran."""

    token_id: int
    text: str
    depth: int


class Answer:
    """One sequence of a request as it grows: what is new is added and shown, and what was there is left alone."""

    def __init__(self, request_id: str, index: int, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self.request_id = request_id
        self.index = index
        self.depths: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.has_begun = False
        """Whether the engine has returned anything of it."""
        self.is_new = True
        """Whether nothing of it has been taken to be shown."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizer: Detokenizer | None = None
        self._tokens: list[Token] = []
        self._texts: list[str] = []
        self._room = 0  # characters that may be shown and have not been
        self._place, self._shown = 0, 0  # the token that comes next, and how much of its text has been shown

    @property
    def finished(self) -> bool:
        """Whether no token will follow."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All the text so far."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def update(self, delta: CompletionOutput, prompt_token_ids: Sequence[int]) -> None:
        """Take in what is new, as the engine returned it."""
        self.has_begun = True
        self.depths += delta.depths
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self._texts.append(delta.text)
        self._room += len(delta.text)
        if self._tokenizer is None:
            return
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(
                self._tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=self._skip_special_tokens
            )
        for token_id, depth in zip(delta.token_ids, delta.depths, strict=False):
            self._tokens.append(Token(token_id, self._detokenizer.append(token_id), depth))
        if self.finished and self._tokens:
            last = self._tokens[-1]
            self._tokens[-1] = last._replace(text=last.text + self._detokenizer.finish())

    def tokens(self) -> list[Token]:
        """All tokens; the text of those behind a stop is cut off, for `text` says what is shown."""
        room = len(self.text)
        cut = []
        for token in self._tokens:
            cut.append(token._replace(text=token.text[:room]))
            room -= len(cut[-1].text)
        return cut

    def as_dict(self, num_layers: int, prompt: str) -> dict[str, Any]:
        """The answer for JSON, beside its prompt."""
        return {
            "prompt": prompt,
            "index": self.index,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "num_layers": num_layers,
            "mean_layers": sum(self.depths) / max(len(self.depths), 1),
            "tokens": [token._asdict() for token in self.tokens()],
        }

    def take(self) -> list[Token]:
        """The text that has become safe to show since the last call, by tokens."""
        self.is_new = False
        fresh = []
        while self._place < len(self._tokens):
            token = self._tokens[self._place]
            text = token.text[self._shown : self._shown + self._room]
            if text:
                fresh.append(token._replace(text=text))
            self._room -= len(text)
            self._shown += len(text)
            is_last = self._place == len(self._tokens) - 1  # whose text may still grow by what was held back
            if self._shown < len(token.text) or is_last:
                break
            self._place, self._shown = self._place + 1, 0
        return fresh


@dataclass
class Run:
    """What a batch of answers was, and what it cost."""

    answers: list[Answer]
    num_layers: int
    narrower: float = 0.0
    """Layers' worth of matrices, of all tokens, that a student's narrower MLPs did not run."""
    seconds: float = 0.0
    kv_bytes_saved: int = 0
    interrupted: bool = False
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    executor: str = ""

    @property
    def depths(self) -> list[int]:
        """Layers run, over all tokens of all answers."""
        return [depth for answer in self.answers for depth in answer.depths]

    @property
    def mean_layers(self) -> float:
        """Layers run for a token, over the tokens really generated."""
        return sum(self.depths) / max(len(self.depths), 1)

    def summary(self) -> str:
        """One line for people."""
        tokens = len(self.depths)
        words = [
            f"{tokens} token{'s' * (tokens != 1)}",
            *self._drafting_or_layers(),
            f"{_pace(tokens, self.seconds)} ({self.seconds:.2f} s)",
            *([f"KV cache saved: {readable_bytes(self.kv_bytes_saved)}"] if self.kv_bytes_saved else []),
            *([f"executor: {self.executor}"] if self.executor else []),
        ]
        if cut := sum(answer.finish_reason == "length" for answer in self.answers):
            whose = "" if len(self.answers) == 1 else f"{cut} of {len(self.answers)} answers "
            words.append(f"{whose}cut at the length limit")
        return ", ".join((["interrupted"] if self.interrupted else []) + words)

    def _drafting_or_layers(self) -> list[str]:
        """Of drafts, whose layers come on top of a token's own, their yield; else the layers of a token."""
        if not self.verifications:
            spared, worth = self.narrower / max(len(self.depths), 1), "' worth" if self.narrower else ""
            return [f"{self.mean_layers - spared:.2f} of {self.num_layers} layers{worth} per token"]
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

    An engine that has adapters has one, which answers.

    Ctrl-C ends the requests after the step that runs. Raises `FailedError` for an answer that a fault ended.
    """
    adapter = next(iter(engine.lora_adapters), None)
    ids = [f"prompt-{number}" for number in range(len(prompts))]
    params = replace(params, output_kind=RequestOutputKind.DELTA)
    hides = params.skip_special_tokens
    answers = [Answer(i, index, engine.tokenizer, hides) for i in ids for index in range(params.n)]
    before = engine.stats()
    run = Run(answers, engine.config.num_layers, executor=before.executor)
    began = time.perf_counter()
    with held_back() as interrupt:
        try:
            for request_id, prompt in zip(ids, prompts, strict=True):
                engine.add_request(request_id, prompt, params, lora_request=adapter)
            _step_until_done(engine, run, show, interrupt)
        finally:
            engine.abort_request(ids)
            if engine.has_unfinished_requests():
                engine.step()  # takes the last outputs of the aborted requests, so that none is left for a later run
    run.seconds = time.perf_counter() - began
    after = engine.stats()
    run.kv_bytes_saved = after.kv_bytes_saved_at_end - before.kv_bytes_saved_at_end
    policy = params.depth or engine.depth
    run.narrower = sum(engine.bridges.students_save(policy, len(answer.depths)) for answer in answers)
    for name in ("drafted_tokens", "accepted_tokens", "verifications"):
        setattr(run, name, getattr(after, name) - getattr(before, name))
    return run


def _step_until_done(engine: Engine, run: Run, show: Callable[[Answer], None], interrupt: Interrupt) -> None:
    by_request = {(answer.request_id, answer.index): answer for answer in run.answers}
    turn = 0
    while engine.has_unfinished_requests() and not interrupt.seen:
        for output in engine.step(at_once=True):
            run.prompt_tokens[output.request_id] = len(output.prompt_token_ids)
            if output.finished:
                _log.debug("%s: %s", output.request_id, output.metrics)
            for completion in output.outputs:
                answer = by_request[output.request_id, completion.index]
                answer.update(completion, output.prompt_token_ids)
        while turn < len(run.answers) and run.answers[turn].has_begun:
            answer = run.answers[turn]
            show(answer)
            if not answer.finished:
                break
            turn += 1
            _raise_fault(answer)
    run.interrupted = interrupt.seen and engine.has_unfinished_requests()
    interrupt.forget_ctrl_c()


def _raise_fault(answer: Answer) -> None:
    if answer.finish_reason == "abort":
        raise FailedError(f"{answer.request_id} ended with a fault: {answer.stop_reason}")


def depths_of(engine: Engine, params: SamplingParams) -> list[int]:
    """All depths that a token of an answer can have, the first one's first."""
    policy, layers = params.depth or engine.depth, engine.config.num_layers
    rule = policy.exit_rule(layers)
    if rule is not None:
        return rule.depths(layers)
    schedule = policy.schedule(layers)
    steps = min(params.max_tokens or engine.max_model_len, engine.max_model_len)
    return [schedule.depth_at(first) for first, _ in schedule.runs(steps)]


def show_tokens(answer: Answer, writer: Writer, colours: DepthColours, *, suffix: bool = False) -> None:
    """Write what is new of an answer, coloured by depth, or with the depth behind every token."""
    for token in answer.take():
        writer.write(token.text, colours.style(token.depth))
        if suffix:
            writer.write(f"[{token.depth}]")
