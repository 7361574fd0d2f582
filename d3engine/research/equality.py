"""Bitwise equality of answers: alone, in a batch, in chunks, preempted, over a cached prefix and with drafts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any, TypeAlias

import torch

from d3engine.depth import FullDepth, PromptLookup, Speculative
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.model.config import ModelConfig
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.word_problems import problems
from d3engine.text.prompts import Prompt
from d3engine.utils.version import __version__

CHAT = "Why does bread become hard when it gets old, but biscuits become soft? Answer in a few sentences."
CODE = """Add a docstring to each function and answer with the whole code.

```python
def merge(first, second):
    merged = []
    while first and second:
        merged.append((first if first[0] <= second[0] else second).pop(0))
    return merged + first + second


def merge_sort(values):
    if len(values) < 2:
        return values
    middle = len(values) // 2
    return merge(merge_sort(values[:middle]), merge_sort(values[middle:]))
```"""
LONG = 320
"""Tokens of the long prompt at most, which is several texts in one."""

MAX_MODEL_LEN = 1024
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
AT_ONCE = 8
CHUNK = 32
DRAFTED, LOOKED_UP = 4, 8
"""Tokens of a draft, by a model and by lookups."""

STRANGERS, STRANGER_TOKENS = 8, 72
"""Of the check that preempts: requests that come first, and grow by several blocks each."""

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """A request whose answers are compared."""

    name: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What is compared of an answer: its tokens, and the log-probability of each, or none where none were asked for."""

    name: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, case: Case, output: RequestOutput) -> Answer:
        one = output.outputs[0]
        rows = one.logprobs or []
        logprobs = [row[token].logprob for token, row in zip(one.token_ids, rows, strict=bool(rows))]
        return cls(case.name, len(output.prompt_token_ids), one.token_ids, logprobs)

    def difference(self, wanted: Answer) -> str | None:
        """The first place where it differs from another, in words; None where they are equal to the bit."""
        lengths = len(self.token_ids), len(wanted.token_ids)
        if lengths[0] != lengths[1]:
            return f"{self.name}: {lengths[0]} tokens, not {lengths[1]}"
        for place, (token, other) in enumerate(zip(self.token_ids, wanted.token_ids, strict=True)):
            if token != other:
                return f"{self.name}: token {place} is {token}, not {other}"
            if not self.logprobs:
                continue
            own, logprob = self.logprobs[place], wanted.logprobs[place]
            if own.hex() != logprob.hex():
                return f"{self.name}: log-probability {place} is {own!r}, not {logprob!r}"
        return None


@dataclass(frozen=True)
class Outcome:
    """Outputs of a check, one a case, and the evidence that its situation occurred."""

    outputs: list[RequestOutput]
    evidence: str
    happened: bool


Run: TypeAlias = Callable[[Engine, Sequence[Case]], Outcome]


@dataclass(frozen=True)
class Check:
    """A situation in which answers must be those of each case alone.

    `engine` names its engine; checks of one engine stand together, since each is loaded once.
    """

    name: str
    engine: str
    run: Run


@dataclass(frozen=True)
class Result:
    """A check's verdict: equal where `difference` is None."""

    name: str
    tokens: int
    evidence: str
    difference: str | None


@dataclass(frozen=True)
class EqualityReport:
    """Results, the answers of each case alone, and their SHA-256 with what it depends on."""

    model: str
    draft_model: str | None
    computed_by: Mapping[str, str]
    answers: list[Answer]
    results: list[Result] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(result.difference is None for result in self.results)

    @property
    def sha256(self) -> str:
        """Of the answers as JSON; a float is written so that reading it gives the same bits."""
        content = json.dumps([vars(answer) for answer in self.answers], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "equal": self.holds,
            "sha256": self.sha256,
            "computed_by": dict(self.computed_by),
            "checks": [vars(result) | {"equal": result.difference is None} for result in self.results],
            "answers": [vars(answer) for answer in self.answers],
        }


# -- what is asked ---------------------------------------------------------------------------------------------


def cases_of(engine: Engine, max_tokens: int) -> list[Case]:
    """A chat, code and a long prompt, greedy and sampled; answers go on behind an end of text."""
    prompts: dict[str, Prompt] = {"chat": as_chat(engine, CHAT), "code": as_chat(engine, CODE)}
    text = "\n".join([CHAT, *questions(20), CODE])
    prompts["long"] = engine.get_tokenizer().encode(text)[: min(LONG, engine.max_model_len - max_tokens)]
    params = SamplingParams(max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    return [
        Case(f"{name}, {kind}", prompt, replace(params, temperature=temperature, seed=seed))
        for seed, (name, prompt) in enumerate(prompts.items())
        for kind, temperature in TEMPERATURES.items()
    ]


def as_chat(engine: Engine, text: str) -> Prompt:
    """The text as a user's message, where the model has a chat template."""
    return text if engine.chat_template() is None else engine.chat_prompt([{"role": "user", "content": text}])


def questions(count: int) -> list[str]:
    return [problem.question for problem in islice(problems("test", 0), count)]


def _strangers(count: int, max_tokens: int) -> list[Case]:
    """Requests with other prompts and parameters, whose answers are not looked at."""
    found = []
    for nth, question in enumerate(questions(count)):
        params = SamplingParams(temperature=nth % 3 / 2, seed=nth, max_tokens=max_tokens, ignore_eos=True)
        found.append(Case("stranger", question.partition(".")[0], params))
    return found


# -- the checks ------------------------------------------------------------------------------------------------


def _together(engine: Engine, cases: Sequence[Case]) -> list[RequestOutput]:
    engine.reset_prefix_cache()
    return engine.generate([case.prompt for case in cases], [case.params for case in cases], use_tqdm=False)


def alone(engine: Engine, cases: Sequence[Case]) -> list[RequestOutput]:
    """Each case by itself, without a cached prefix."""
    return [output for case in cases for output in _together(engine, [case])]


def _in_batch(engine: Engine, cases: Sequence[Case]) -> Outcome:
    strangers = _strangers(AT_ONCE - len(cases), cases[0].params.max_tokens or STRANGER_TOKENS)
    outputs = _together(engine, [*strangers, *cases])
    began = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
    ended = [output.metrics.finished_time or 0.0 for output in outputs]
    return Outcome(outputs[len(strangers) :], f"{len(outputs)} at once", max(began) < min(ended))


def _over_cached_prefix(engine: Engine, cases: Sequence[Case]) -> Outcome:
    outputs = []
    for case in cases:
        _together(engine, [case])
        outputs += engine.generate([case.prompt], case.params, use_tqdm=False)
    cached = [output.num_cached_tokens for output in outputs]
    return Outcome(outputs, f"{sum(cached)} prompt tokens from the cache", min(cached) > 0)


def _in_chunks(engine: Engine, cases: Sequence[Case]) -> Outcome:
    before = engine.stats().num_steps
    outputs = alone(engine, cases)
    decoded = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    steps = engine.stats().num_steps - before - decoded
    needed = sum(-(-len(output.prompt_token_ids) // CHUNK) for output in outputs)
    return Outcome(outputs, f"{steps} steps for {len(cases)} prompts", steps >= needed > len(cases))


def _preempted(engine: Engine, cases: Sequence[Case]) -> Outcome:
    strangers = _strangers(STRANGERS, STRANGER_TOKENS)
    # The last are preempted first: the short ones come last, so that it takes several of them.
    outputs = _together(engine, [*strangers, *reversed(cases)])[: -len(cases) - 1 : -1]
    times = [output.metrics.num_preemptions for output in outputs]
    evidence = f"{sum(count > 0 for count in times)} of {len(cases)} requests preempted"
    return Outcome(outputs, evidence, sum(times) > 0)


def _drafted(outputs: list[RequestOutput], cases: Sequence[Case]) -> Outcome:
    drafted = [output.metrics.num_drafted_tokens for output in outputs]
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    counts: dict[bool, int] = {}  # greedy ones, sampled ones: a lookup need not find something for each prompt
    for case, count in zip(cases, drafted, strict=True):
        counts[case.params.greedy] = counts.get(case.params.greedy, 0) + count
    return Outcome(outputs, f"{accepted} of {sum(drafted)} drafted tokens accepted", min(counts.values()) > 0)


def _drafted_alone(engine: Engine, cases: Sequence[Case]) -> Outcome:
    return _drafted(alone(engine, cases), cases)


def _drafted_and_preempted(engine: Engine, cases: Sequence[Case]) -> Outcome:
    found = _preempted(engine, cases)
    drafted = _drafted(found.outputs, cases)
    return Outcome(found.outputs, f"{found.evidence}, {drafted.evidence}", found.happened and drafted.happened)


def _as_many_as_pay(engine: Engine, cases: Sequence[Case]) -> Outcome:
    depth = engine.depth
    assert isinstance(depth, Speculative)
    found = _with(_drafted_alone, depth=replace(depth, draft_length=None))(engine, cases)
    return replace(found, happened=True)  # that none pay is an answer too


def _with(run: Run, **params: Any) -> Run:

    def run_with(engine: Engine, cases: Sequence[Case]) -> Outcome:
        return run(engine, [replace(case, params=replace(case.params, **params)) for case in cases])

    return run_with


ROOMY, CHUNKED, TIGHT, DRAFT_MODEL = "roomy", "chunked", "tight", "draft model"

# Without log-probabilities an executor may choose tokens by itself, for several steps at once.
CHECKS = (
    Check("in a batch of 8 with strangers", ROOMY, _in_batch),
    Check("in a batch of 8, tokens only", ROOMY, _with(_in_batch, logprobs=None)),
    Check("over a cached prefix", ROOMY, _over_cached_prefix),
    Check("drafted by lookups", ROOMY, _with(_drafted_alone, depth=PromptLookup(LOOKED_UP))),
    Check(
        "drafted by lookups, tokens only", ROOMY, _with(_drafted_alone, depth=PromptLookup(LOOKED_UP), logprobs=None)
    ),
    Check(f"prompts in chunks of {CHUNK}", CHUNKED, _in_chunks),
    Check("preempted", TIGHT, _preempted),
    Check("drafted by a model", DRAFT_MODEL, _drafted_alone),
    Check("drafted by a model, tokens only", DRAFT_MODEL, _with(_drafted_alone, logprobs=None)),
    Check("drafted by a model, as many as pay", DRAFT_MODEL, _as_many_as_pay),
    Check("drafted by a model, in a batch, preempted", DRAFT_MODEL, _drafted_and_preempted),
)
"""In this order; the first one's engine has also answered each case alone."""


def engine_arguments(name: str, draft_model: str | None, tight_bytes: int) -> dict[str, Any]:
    """Those of an engine with those that all have."""
    if name in (ROOMY, CHUNKED):
        return {"max_num_seqs": AT_ONCE} | ({"max_num_batched_tokens": CHUNK} if name == CHUNKED else {})
    tight = {"max_num_seqs": 2 * AT_ONCE, "kv_cache_memory_bytes": tight_bytes, "enable_prefix_caching": False}
    return tight | ({"depth": Speculative(draft_model or "", DRAFTED)} if name == DRAFT_MODEL else {})


def _tight_bytes(engine: Engine, answers: Sequence[Answer]) -> int:
    """Bytes of a cache with room for every prompt of the check that preempts, and for next to nothing more."""
    lengths = [answer.prompt_tokens for answer in answers]
    lengths += [len(engine.get_tokenizer().encode(str(case.prompt))) for case in _strangers(STRANGERS, 1)]
    blocks = sum(-(-(length + 1) // BLOCK) for length in lengths)
    return blocks * engine.config.num_layers * engine.settings.block_bytes


# -- the report -------------------------------------------------------------------------------------------------------


def checks_for(draft_model: str | None) -> list[Check]:
    """The checks that run: those of a draft model only with one."""
    return [check for check in CHECKS if draft_model is not None or check.engine != DRAFT_MODEL]


def verify_equality(
    model: str,
    arguments: Mapping[str, Any],
    *,
    draft_model: str | None = None,
    max_tokens: int = 32,
    done: Callable[[str], None] = lambda name: None,
) -> EqualityReport:
    """Run every check on a model, with `arguments` for all of its engines; `done` hears of each check that has run.

    Raises what `Engine` raises.
    """
    length = min(ModelConfig.from_directory(model_directory(model)).default_length, MAX_MODEL_LEN)
    common = {"depth": FullDepth(), "max_model_len": length, "block_size": BLOCK, **arguments}
    tight_bytes = 0
    found: EqualityReport | None = None
    cases: list[Case] = []
    for name, of_engine in groupby(checks_for(draft_model), key=lambda check: check.engine):
        with Engine(model, **common | engine_arguments(name, draft_model, tight_bytes)) as engine:
            if found is None:
                cases = cases_of(engine, max_tokens)
                answers = [Answer.of(*pair) for pair in zip(cases, alone(engine, cases), strict=True)]
                found = EqualityReport(str(model), draft_model, _computed_by(engine), answers)
                tight_bytes = _tight_bytes(engine, answers)
                done("alone")
            for check in of_engine:
                found.results.append(_result(check, check.run(engine, cases), cases, found.answers))
                done(check.name)
    assert found is not None
    return found


def _result(check: Check, outcome: Outcome, cases: Sequence[Case], wanted: Sequence[Answer]) -> Result:
    answers = [Answer.of(*pair) for pair in zip(cases, outcome.outputs, strict=True)]
    difference = next(filter(None, map(Answer.difference, answers, wanted)), None)
    if difference is None and not outcome.happened:
        difference = "the situation did not occur, so nothing is proven"
    return Result(check.name, sum(len(answer.token_ids) for answer in answers), outcome.evidence, difference)


def _computed_by(engine: Engine) -> dict[str, str]:
    """What the bits depend on beside the model."""
    settings = engine.settings
    names = ("dtype", "weight_dtype", "kv_dtype")
    return {
        "d3engine": __version__,
        "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",  # it computes log-probabilities
        "executor": engine.stats().executor,
        "activations": settings.activations,
        **{name: str(getattr(settings, name)).removeprefix("torch.") for name in names},
    }
