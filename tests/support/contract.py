"""One contract for everything that the engine may stand behind: another stack, our own server, a thread.
Whatever a stack is, it takes a question and gives the answer's text, and a reader may go away before the end. That
is all that is asked with here, so one contract holds for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

if TYPE_CHECKING:
    from d3engine import AsyncEngine, Engine, RequestOutput, SamplingParams

HANG_SECONDS = 500.0
"""Against stacks that hang: none is judged by it."""

BEHIND: Mapping[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**25}
"""Arguments of the engine behind a stack: it has room for fewer sequences than there are questions."""


@dataclass(frozen=True)
class Question:
    """What is asked; `depth` is a policy as d3.json has it, None the engine's own."""

    prompt: str
    max_tokens: int = 24
    depth: Mapping[str, Any] | None = None
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def params(self) -> SamplingParams:
        """As the engine takes it. Raises `InvalidValueError`."""
        from d3engine import SamplingParams
        from d3engine.depth.policy import policy_from_dict

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            depth=None if self.depth is None else policy_from_dict(self.depth),
        )

    def fields(self) -> dict[str, Any]:
        """As fields of a request, in OpenAI's and vLLM's names, without the prompt; what is not asked is absent."""
        found = {name: value for name, value in vars(self).items() if name != "prompt" and value is not None}
        return {name: value for name, value in found.items() if value is not False}


@dataclass(frozen=True)
class Figures:
    """What the engine behind a stack says of itself now."""

    blocks_in_use: float
    """Of the KV cache, or the share of it; those that the prefix cache alone holds do not count."""
    generated_tokens: int
    """Since it began."""


class Stack(Protocol):
    """What a stack's test fills in. Every method is called from many threads at once."""

    # Its engine runs the bundled model with the arguments `BEHIND`.

    def answer(self, question: Question) -> str:
        """The whole text. Raises what the stack raises, in words that hold the engine's, for a question it refuses."""

    def leave(self, question: Question) -> None:
        """Ask, and go away as soon as something of the answer has come."""

    def figures(self) -> Figures:
        """What its engine says."""


WORDS = "Question: Tom has {} pens. Tom finds {}. Tom buys {}. How many pens does Tom have now?\nAnswer:"
DEPTHS: Sequence[Mapping[str, Any] | None] = (
    None,
    {"policy": "full"},
    {"policy": "d3", "alpha": 0.9, "start": 0.6},
    {"policy": "d3", "alpha": 0.8, "start": 0.5},
)
ANSWERED = [
    Question(
        WORDS.format(nth + 3, nth % 5 + 1, 3),
        max_tokens=16 + nth,
        depth=DEPTHS[nth % len(DEPTHS)],
        temperature=0.0 if nth % 3 else 0.8,
        seed=None if nth % 3 else nth,
    )
    for nth in range(21)
]
LEFT = [Question(WORDS.format(7, 7, nth), max_tokens=900, depth=DEPTHS[nth], ignore_eos=True) for nth in (1, 2)]
BAD = Question(WORDS.format(1, 2, 3), depth={"policy": "d3", "alpha": 2.0, "start": 0.6})
NAMED = "alpha"
"""What a stack must say of the bad one."""


def answers_wanted(engine: Engine) -> list[RequestOutput]:
    """What an engine without any stack answers."""
    return engine.generate([q.prompt for q in ANSWERED], [q.params() for q in ANSWERED], use_tqdm=False)


def check_contract(stack: Stack, wanted: Sequence[RequestOutput], *, hears_of_leaving: bool = True) -> None:
    """Ask 24 questions at once, of mixed depths: two are left alone, one is bad."""
    # The others are answered as an engine of one's own answers them (`wanted`); the bad one hurts none; those that
    # were left end before their time, unless the stack does not hear of it; and no block is held afterwards.
    before = stack.figures()
    with ThreadPoolExecutor(len(ANSWERED) + len(LEFT) + 1) as threads:
        bad = threads.submit(stack.answer, BAD)
        left = [threads.submit(stack.leave, question) for question in LEFT]
        answers = [threads.submit(stack.answer, question) for question in ANSWERED]
        _check_answers(answers, wanted)
        for one in left:
            one.result(HANG_SECONDS)
        error = bad.exception(HANG_SECONDS)
    assert NAMED in str(error), f"the bad question is refused by name, not with {error!r}"
    _check_nothing_is_held(stack)
    generated = stack.figures().generated_tokens - before.generated_tokens
    to_their_end = sum(len(output.outputs[0].token_ids) for output in wanted) + sum(one.max_tokens for one in LEFT)
    if hears_of_leaving:
        assert generated < to_their_end, "those who left were answered to their end"
    else:
        assert generated == to_their_end, "the stack hears of those who leave, after all"


def _check_answers(answers: Sequence[Future[str]], wanted: Sequence[RequestOutput]) -> None:
    for answer, output in zip(answers, wanted, strict=True):
        text, own = answer.result(HANG_SECONDS), output.outputs[0].text
        assert text == own, f"{output.prompt!r} is answered {text!r}, not {own!r}"


def _check_nothing_is_held(stack: Stack) -> None:
    """Who has left is noticed a moment later over a network: so this waits until nothing is held."""
    until = time.monotonic() + HANG_SECONDS
    while (held := stack.figures().blocks_in_use) and time.monotonic() < until:
        time.sleep(0.01)
    assert held == 0, f"{held} of the KV cache are held by nobody"


class OnThread:
    """The contract's own first stack: an asynchronous engine, read from threads."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine.sync()

    def answer(self, question: Question) -> str:
        outputs = list(self._engine.generate(question.prompt, question.params()))
        return outputs[-1].outputs[0].text

    def leave(self, question: Question) -> None:
        with closing(self._engine.generate(question.prompt, question.params())) as outputs:
            next(outputs)

    def figures(self) -> Figures:
        stats = self._engine.stats()
        return Figures(stats.kv_blocks_in_use, stats.generated_tokens)


class OverOpenAI:
    """A stack that has the routes of our server somewhere: POST `completions`, and GET `metrics` for the figures.

    Args:
        url: what both routes are under, as "http://127.0.0.1:8000".
        model: the id of the model.
        completions: where to post.
        metrics: where the engine tells its metrics.
    """

    def __init__(
        self, url: str, model: str = "demo", *, completions: str = "/v1/completions", metrics: str = "/metrics"
    ) -> None:
        self._http = httpx.Client(base_url=url, timeout=HANG_SECONDS, limits=httpx.Limits(max_connections=None))
        self._model = model
        self._completions, self._metrics = completions, metrics

    def answer(self, question: Question) -> str:
        return "".join(self._pieces(question))

    def leave(self, question: Question) -> None:
        with closing(self._pieces(question)) as pieces:
            next(pieces)

    def _pieces(self, question: Question) -> Any:
        body = {"model": self._model, "prompt": question.prompt, "stream": True, **question.fields()}
        with self._http.stream("POST", self._completions, json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(data)
                yield event["choices"][0]["text"]

    def figures(self) -> Figures:
        text = self._http.get(self._metrics).raise_for_status().text
        return Figures(metric(text, "kv_cache_usage_perc"), int(metric(text, "generation_tokens_total")))


def metric(text: str, name: str) -> float:
    """The sum of one of the engine's metrics over its labels, in Prometheus' text format."""
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == f"d3engine:{name}"]
    assert lines, f"there is no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
