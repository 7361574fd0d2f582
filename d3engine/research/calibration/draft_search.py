"""Which attentions and MLPs a model can draft without, by Bayesian search on the model itself."""

# What a draft leaves out cannot make an answer wrong: the draft by which answers come soonest is the best (Zhang et al.
# 2023, "Draft & Verify", section 3.3). Each part is a yes or a no for a tree of Parzen estimators; the authors' code
# takes numbers of a Gaussian process above a half for a yes, and the clock. Speed is counted here in weights read at
# batch 1, the same on every machine.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from d3engine.depth import DraftAndVerify
from d3engine.errors import MissingExtraError, require_integer
from d3engine.research.evaluation.accuracy import shape_of

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.params import SamplingParams
    from d3engine.research.evaluation.kept import Prompt


@dataclass(frozen=True)
class Drafted:
    """What came of some answers that were drafted by one policy.

    `gain` is the weights that full depth would have read for these tokens, over those that were read.
    """

    policy: DraftAndVerify
    tokens: int
    drafted: int
    accepted: int
    verifications: int
    gain: float
    seconds: float

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens of the answers that a verification yields."""
        return 1 + self.accepted / self.verifications if self.verifications else None

    @property
    def tokens_per_second(self) -> float:
        """By the clock, prompts included."""
        return self.tokens / self.seconds


def score_draft(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, policy: DraftAndVerify) -> Drafted:
    """What comes of these prompts by this policy, in one batch."""
    start = time.perf_counter()
    outputs = engine.generate(list(prompts), replace(params, depth=policy), use_tqdm=False)
    seconds = time.perf_counter() - start
    shape, metrics = shape_of(engine.config), [output.metrics for output in outputs]
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafted = sum(one.num_drafted_tokens for one in metrics)
    accepted = sum(one.num_accepted_tokens for one in metrics)
    verifications = sum(one.num_verifications for one in metrics)
    beyond = sum(one.num_discarded_tokens for one in metrics)
    decoded = tokens - len(outputs)  # each answer's first token comes out of its prompt
    # A pass at full depth yields a token, whether it verifies or not; accepted ones come on top.
    passes = decoded + beyond - accepted
    full = shape.num_layers * shape.layer_parameters + shape.head_parameters
    skipped = len(policy.skip_attention) * shape.attention_parameters + len(policy.skip_mlp) * shape.mlp_parameters
    gain = decoded * full / (passes * full + drafted * (full - skipped)) if decoded else 1.0
    return Drafted(policy, tokens, drafted, accepted, verifications, gain, seconds)


def search_draft(
    score: Callable[[DraftAndVerify], Drafted],
    num_layers: int,
    trials: int,
    *,
    seed: int = 0,
    by_clock: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[Drafted]:
    """Look at `trials` proposals for a model of this depth; returns the different drafts among them, as they came.

    A few drafts of an even pattern are the first. One that has come before counts, but does not run again. Raises
    `MissingExtraError` without the library that searches.
    """
    require_integer("trials", trials, 1)
    study = _study(seed)
    for first in _beginnings(num_layers):
        study.enqueue_trial(_parts_of(first, num_layers))
    tried: dict[DraftAndVerify, Drafted] = {}
    for _ in range(trials):
        trial = study.ask()
        policy = _policy(trial, num_layers)
        if policy is not None and policy not in tried:
            tried[policy] = score(policy)
        progress()
        # A draft that leaves out nothing is never worth while.
        study.tell(trial, 0.0 if policy is None else _score(tried[policy], by_clock=by_clock))
    return list(tried.values())


def best_draft(tried: Sequence[Drafted], *, by_clock: bool = False) -> Drafted:
    """The one by which answers came soonest; the first of equals."""
    return max(tried, key=lambda found: _score(found, by_clock=by_clock))


def _score(found: Drafted, *, by_clock: bool) -> float:
    return found.tokens_per_second if by_clock else found.gain


def _study(seed: int) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("optuna", "draft", "the search for a draft") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))


def _beginnings(num_layers: int) -> list[DraftAndVerify]:
    """Drafts that are tried first: every second layer, every third, the upper ones, and attentions alone."""
    second, third = range(1, num_layers - 1, 2), range(2, num_layers - 1, 3)
    upper, half = range(num_layers * 3 // 4, num_layers), range(num_layers // 2, num_layers)
    pairs = [(second, ()), (third, third), (second, second), (upper, upper), (half, half), (half, ())]
    return list(dict.fromkeys(DraftAndVerify(list(a), list(m)) for a, m in pairs if a or m))


def _parts_of(policy: DraftAndVerify, num_layers: int) -> dict[str, bool]:
    """Of each part of each layer, whether the draft leaves it out."""
    skipped = {"attention": policy.skip_attention, "mlp": policy.skip_mlp}
    return {f"{part} {layer}": layer in skipped[part] for part in skipped for layer in range(num_layers)}


def _policy(trial: Any, num_layers: int) -> DraftAndVerify | None:
    """The draft that a trial proposes; None where it leaves out nothing."""
    attention, mlp = (
        [layer for layer in range(num_layers) if trial.suggest_categorical(f"{part} {layer}", [False, True])]
        for part in ("attention", "mlp")
    )
    return DraftAndVerify(attention, mlp) if attention or mlp else None
