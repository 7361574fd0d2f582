"""Top-k, top-p, min-p and penalties agree with the reference on the same logits, ties included."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape

from d3engine.kernels import reference
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Draws, RowSampling, TokenCounts
from d3engine.kernels.sampling import Cuts, Penalties, SamplingRows

ROWS, STEPS, VOCAB = 12, 6, 301
NOTHING: dict[str, float] = {
    "min_p": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
}
KINDS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"top_k": 8, "top_p": 0.5},  # of equal scores four are exactly the half
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 40, "top_p": 0.9},
    {"repetition": 1.4, "presence": 0.5},
    {"repetition": 50.0},  # seen tokens of negative logits are out of reach
    {"frequency": 1.5, "presence": -0.5, "top_p": 0.8},
    {"repetition": 0.7, "frequency": -0.3, "top_k": 20, "min_p": 0.01},
]


@pytest.fixture(scope="module", params=["all different", "many alike"])
def case(request: pytest.FixtureRequest) -> Case:
    found = Case(Shape(rows=ROWS, vocab=VOCAB))
    if request.param == "many alike":
        head = found.model.lm_head[torch.arange(VOCAB) % 9].clone()  # of equal scores the lower token is the likelier
        found.model = replace(found.model, lm_head=head)
    return found


def asked_of(kind: dict[str, float], tokens: list[list[int]]) -> RowSampling:
    of = NOTHING | kind
    penalties = (of["repetition"], of["presence"], of["frequency"])
    counted = None if penalties == (1.0, 0.0, 0.0) else TokenCounts.of(*tokens)
    log_min_p = float(torch.tensor(of["min_p"]).log())
    return RowSampling(log_min_p, of["top_p"], int(of["top_k"]), *penalties, counted)


def chosen_by_reference(logits: Any, draws: Draws, generation: Any, kinds: Any, tokens: Any) -> Any:
    """The same from the logits [steps, rows, V] of a run, each step counting the tokens of those before it."""

    def each(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([(NOTHING | kind)[name] for kind in kinds], dtype=dtype)

    seen, counts = torch.zeros(ROWS, VOCAB, dtype=torch.uint8), torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    for row, (prompt, answer) in enumerate(tokens):
        seen[row, prompt] = 1
        counts[row] += torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=VOCAB).int()
    cuts = Cuts(each("min_p"), each("top_k", torch.int64), each("top_p"))
    penalties = Penalties(each("repetition"), each("presence"), each("frequency"), seen, counts)
    rows = SamplingRows(*map(torch.from_numpy, (draws.temperatures, draws.seeds, draws.indices)), cuts, penalties)
    found = []
    for taken, step in enumerate(logits):
        token, _ = reference.sample(torch.from_numpy(step), rows, torch.from_numpy(generation + taken))
        reference.count_tokens(counts, token)
        found.append(token.numpy())
    return np.stack(found)


@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_are_those_of_the_reference(case: Case, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    kinds = [KINDS[place] for place in numbers.permutation(len(KINDS))[:ROWS]]
    tokens = [[numbers.integers(VOCAB, size=size).tolist() for size in (150, 4)] for _ in range(ROWS)]
    draws = Draws(
        numbers.choice(np.array([0.0, 0.4, 1.0, 4.0, 20.0], np.float32), ROWS),
        numbers.integers(2**63, size=ROWS),
        numbers.integers(3, size=ROWS),
        [asked_of(kind, own) for kind, own in zip(kinds, tokens, strict=True)],
    )
    chosen, scores, logits = case.decode(STEPS, draws=draws, num_threads=1 + seed % 3)
    wanted = chosen_by_reference(logits, draws, case.rows.generation, kinds, tokens)
    np.testing.assert_array_equal(chosen, wanted)
    assert np.isfinite(scores).all()


def test_nan_logits_give_no_finite_score_with_any_parameters(case: Case) -> None:
    spoilt = Case(case.shape)
    head = spoilt.model.lm_head.clone()
    head[5] = float("nan")
    spoilt.model = replace(spoilt.model, lm_head=head)
    asked = [asked_of(kind, [[1, 2], [3]]) for kind in KINDS[:ROWS]]
    draws = Draws(np.ones(ROWS, np.float32), np.arange(ROWS), np.zeros(ROWS, np.int64), asked)
    tokens, scores, _ = spoilt.decode(1, draws=draws)
    assert not np.isfinite(scores).any()
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_a_counted_token_outside_the_vocabulary_is_refused(case: Case) -> None:
    asked = [asked_of({"presence": 1.0}, [[VOCAB], []])] * ROWS
    draws = Draws(np.ones(ROWS, np.float32), np.arange(ROWS), np.zeros(ROWS, np.int64), asked)
    with pytest.raises(NativeError, match="a token id"):
        case.decoder().run(case.rows, 1, draws=draws)
