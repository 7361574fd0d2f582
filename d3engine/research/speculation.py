"""Drafters and draft lengths against no drafts, over the user's prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.depth.speculative_config import policy_of_config
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.errors import require
from d3engine.model.config import ModelConfig
from d3engine.request.params import SamplingParams
from d3engine.research.equality import CHAT, CODE, as_chat, questions
from d3engine.text.prompts import Prompt

MAX_MODEL_LEN = 2048
"""Tokens of a sequence at most, unless the caller says otherwise."""

BUILT_IN = (CODE, CHAT, *questions(2))
"""Prompts where none are given: an edit of code, a chat, two word problems."""

METHODS = {"ngram": "lookup", "suffix": "suffix", "draft_model": "draft model"}
"""Method of `speculative_config` -> what the table calls it."""

NONE = "none"


@dataclass(frozen=True)
class Candidate:
    """A way to draft, as `speculative_config` spells it; None: no drafts."""

    config: Mapping[str, Any] | None

    @property
    def drafter(self) -> str:
        return NONE if self.config is None else METHODS[self.config["method"]]

    @property
    def length(self) -> int | None:
        """Tokens of a draft; None: as many as pay."""
        return None if self.config is None else self.config.get("num_speculative_tokens")

    @property
    def policy(self) -> DepthPolicy:
        return FullDepth() if self.config is None else policy_of_config(self.config)


@dataclass(frozen=True)
class Measured:
    """What a candidate took for all prompts, and what came of its drafts.

    `accepted_at[i]` counts the accepted tokens that were the i-th of their draft. `equal` counts the answers whose
    tokens are those of no drafts.
    """

    candidate: Candidate
    tokens: int
    seconds: float
    drafted: int
    accepted: int
    verifications: int
    accepted_at: tuple[int, ...]
    answers: int
    equal: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answers over all seconds, prompts included."""
        return self.tokens / self.seconds

    @property
    def tokens_per_verification(self) -> float | None:
        """Accepted tokens and the model's own one; None where nothing was drafted."""
        return 1 + self.accepted / self.verifications if self.verifications else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of the drafts whose i-th token was accepted."""
        return [count / self.verifications for count in self.accepted_at] if self.verifications else []

    @property
    def is_equal(self) -> bool:
        return self.equal == self.answers


@dataclass(frozen=True)
class TuneReport:
    """Every candidate, measured after a pass without drafts and before another one."""

    model: str
    draft_model: str | None
    prompts: int
    before: Measured
    after: Measured
    candidates: Sequence[Measured] = ()

    @property
    def plain_rate(self) -> float:
        """Tokens a second without drafts, over both passes."""
        return (self.before.tokens + self.after.tokens) / (self.before.seconds + self.after.seconds)

    def gain(self, one: Measured) -> float:
        """Tokens a second over those without drafts."""
        return one.tokens_per_second / self.plain_rate

    @property
    def best(self) -> Candidate:
        """The fastest whose answers are equal; no drafts where none is faster than both passes without."""
        least = max(self.before.tokens_per_second, self.after.tokens_per_second)
        faster = [one for one in self.candidates if one.is_equal and one.tokens_per_second > least]
        return max(faster, key=self.gain).candidate if faster else self.before.candidate

    @property
    def holds(self) -> bool:
        """Whether the answers of every candidate are those of no drafts."""
        return all(one.is_equal for one in (*self.candidates, self.after))

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "prompts": self.prompts,
            "equal": self.holds,
            "best": self.best.config,
            "rows": [self._row(one) for one in (self.before, *self.candidates, self.after)],
        }

    def _row(self, one: Measured) -> dict[str, Any]:
        counted = {name: value for name, value in vars(one).items() if name != "candidate"}
        return {
            "drafter": one.candidate.drafter,
            "speculative_config": one.candidate.config,
            **counted,
            "tokens_per_verification": one.tokens_per_verification,
            "acceptance_by_position": one.acceptance_by_position,
            "tokens_per_second": one.tokens_per_second,
            "gain": self.gain(one),
        }


def candidates_of(lengths: Sequence[int], draft_model: str | None) -> Iterator[Candidate]:
    """Every drafter with each of these lengths, and with as many tokens as pay."""
    configs: list[dict[str, Any]] = [{"method": "ngram"}, {"method": "suffix"}]
    if draft_model is not None:
        configs.append({"method": "draft_model", "model": draft_model})
    for config in configs:
        yield from (Candidate({**config, "num_speculative_tokens": length}) for length in lengths)
        yield Candidate(config)


def tune(
    model: str,
    arguments: Mapping[str, Any],
    *,
    draft_model: str | None,
    prompts: Sequence[str],
    lengths: Sequence[int],
    max_tokens: int,
    temperature: float,
    at_once: int,
    done: Callable[[Candidate, int], None],
) -> TuneReport:
    """Answer all prompts by each candidate, `at_once` together, on one engine with `arguments`.

    `done` is called with a candidate and the number of prompts that it has answered together. Raises what `Engine`
    raises, and `InvalidValueError` where an answer without drafts has no token.
    """
    length = min(ModelConfig.from_directory(model_directory(model)).default_length, MAX_MODEL_LEN)
    plain, *candidates = [Candidate(None), *candidates_of(lengths, draft_model)]
    # An answer that a lookup finds must be another prompt's, and no prompt be cheaper than the first time.
    common = {"max_model_len": length, "max_num_seqs": at_once, "enable_prefix_caching": False}
    with Engine(model, **common | dict(arguments), speculative_config=candidates[-1].config) as engine:
        asked = Asked([as_chat(engine, prompt) for prompt in prompts], at_once, max_tokens, temperature)
        for candidate in (plain, candidates[-1]):  # a warm-up
            replace(asked, prompts=asked.prompts[:1], max_tokens=8).answered_by(engine, candidate)
        first, wanted = asked.answered_by(engine, plain, done=done)
        require(all(wanted), "max_tokens", max_tokens, "enough for a token of each answer")
        rows = [asked.answered_by(engine, candidate, wanted, done)[0] for candidate in (*candidates, plain)]
    return TuneReport(str(model), draft_model, len(prompts), first, rows[-1], rows[:-1])


@dataclass(frozen=True)
class Asked:
    """What every candidate answers: the prompts, `at_once` together."""

    prompts: list[Prompt]
    at_once: int
    max_tokens: int
    temperature: float

    def answered_by(
        self,
        engine: Engine,
        candidate: Candidate,
        wanted: list[list[int]] | None = None,
        done: Callable[[Candidate, int], None] = lambda candidate, prompts: None,
    ) -> tuple[Measured, list[list[int]]]:
        """One pass over the prompts, and the tokens of the answers; `wanted` are those that they must be."""
        engine.reset_prefix_cache()
        found: list[list[int]] = []
        params = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, depth=candidate.policy)
        before, begun = engine.stats(), time.perf_counter()
        for start in range(0, len(self.prompts), self.at_once):
            group = self.prompts[start : start + self.at_once]
            seeded = [replace(params, seed=start + nth) for nth in range(len(group))]
            outputs = engine.generate(group, seeded, use_tqdm=False)
            found += [output.outputs[0].token_ids for output in outputs]
            done(candidate, len(group))
        seconds, after = time.perf_counter() - begun, engine.stats()
        measured = Measured(
            candidate,
            sum(map(len, found)),
            seconds,
            after.drafted_tokens - before.drafted_tokens,
            after.accepted_tokens - before.accepted_tokens,
            after.verifications - before.verifications,
            _without_end(new - old for new, old in zip(after.accepted_at, before.accepted_at, strict=True)),
            len(found),
            sum(own == other for own, other in zip(found, found if wanted is None else wanted, strict=True)),
        )
        return measured, found


def _without_end(counts: Iterator[int]) -> tuple[int, ...]:
    found = list(counts)
    while found and not found[-1]:
        found.pop()
    return tuple(found)
