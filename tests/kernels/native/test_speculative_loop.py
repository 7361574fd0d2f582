"""Draft-and-verify iterations in one call find what single steps find, for any rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape, at_places

from d3engine.kernels.native.library import Decoder
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Rows
from d3engine.kernels.native.speculative_loop import Drafts

CASE = Case(Shape(layers=4, rows=5, max_positions=64))
MOST, CYCLES, NEVER = 4, 6, 2**31 - 1
PLAIN = Drafts(
    begun=np.array([[0] * 4, [7, 8, 0, 0], [0] * 4, [0] * 4, [3, 4, 5, 0]]),
    num_begun=np.array([0, 2, 0, 0, 3]),
    first_lengths=np.array([4, 2, 3, 0, 4]),
    lengths=np.array([4, 2, 3, 1, 4]),
    most_lengths=np.array([4, 2, 4, 4, 4]),
    adapts=np.array([0, 0, 1, 1, 0]),
    rooms=np.array([50, 24, 20, 5, 9]),
    places=np.array([0, -1, 4, -1, -1]),
)


def rows_of_case(case: Case) -> Rows:
    """Rows with room for answers; some layers are skipped from the start, some later; one row skips none."""
    cutoffs = np.full((5, 4), NEVER)
    cutoffs[0, 2:] = cutoffs[1, 1:3] = cutoffs[2, 1] = 1
    cutoffs[2, 2], cutoffs[3, 3], cutoffs[4, 0] = 12, 5, 1
    return replace(
        case.rows, positions=np.array([3, 20, 0, 11, 9]), generation=np.array([3, 2, 9, 1, 2]), cutoffs=cutoffs
    )


def states_of(case: Case, count: int = 12) -> Any:
    return np.zeros((count, case.shape.hidden), np.float32)


class BySteps:
    """The iterations of one row by single steps: each drafted token and each verifying row by itself."""

    def __init__(self, decoder: Decoder, rows: Rows, drafts: Drafts, row: int, ends: list[int]) -> None:
        self._decoder, self._row, self._ends = decoder, at_places(rows, [row]), ends
        self._token, self._position, self._step = (int(a[row]) for a in (rows.tokens, rows.positions, rows.generation))
        self._room, self._length = int(drafts.rooms[row]), int(drafts.lengths[row])
        self._most, self._adapts = int(drafts.most_lengths[row]), bool(drafts.adapts[row])
        self._cutoffs = rows.cutoffs[row]
        self._drafted, self._wanted = (
            drafts.begun[row, : drafts.num_begun[row]].tolist(),
            int(drafts.first_lengths[row]),
        )
        self.has_ended = False

    def _choose(self, token: int, behind: int, active: Any) -> int:
        places = {"tokens": np.array([token]), "positions": np.array([self._position + behind])}
        step = replace(self._row, **places, generation=np.zeros(1), cutoffs=np.asarray(active)[None].astype(np.int32))
        return int(self._decoder.run(step, 1)[0][0, 0])

    def cycle(self) -> tuple[list[int], list[int]]:
        """The tokens of a draft, and the counts."""
        drafted = self._drafted
        while len(drafted) < self._wanted:
            drafted.append(self._choose([self._token, *drafted][-1], len(drafted), self._step < self._cutoffs))
            if drafted[-1] in self._ends:
                break
        fed = [self._token, *drafted]
        judged = [self._choose(token, behind, np.ones(len(self._cutoffs))) for behind, token in enumerate(fed)]
        accepted = next((n for n, token in enumerate(drafted) if judged[n] != token), len(drafted))
        self._settle(drafted, accepted, judged[accepted])
        return drafted, [len(drafted), accepted, judged[accepted]]

    def _settle(self, drafted: list[int], accepted: int, token: int) -> None:
        self.has_ended = accepted + 1 >= self._room or any(t in self._ends for t in [*drafted[:accepted], token])
        if self._adapts and drafted:
            self._length = min(max(self._length + (1 if accepted == len(drafted) else -1), 1), self._most)
        self._token, self._drafted = token, []
        self._position, self._step, self._room = (
            self._position + accepted + 1,
            self._step + accepted + 1,
            self._room - accepted - 1,
        )
        self._wanted = min(self._length, self._room - 1) if (self._step >= self._cutoffs).any() else 0


def by_steps(case: Case, rows: Rows, ends: list[int]) -> list[list[tuple[list[int], list[int]]]]:
    """The iterations of each row, on the initial pool."""
    kept, found = case.pool.clone(), []
    for row in range(5):
        one, cycles = BySteps(case.decoder(), rows, PLAIN, row, ends), []
        while not one.has_ended and len(cycles) < CYCLES:
            cycles.append(one.cycle())
        found.append(cycles)
    case.pool.copy_(kept)
    return found


def as_lists(drafted: Any, counts: Any) -> list[list[tuple[list[int], list[int]]]]:
    return [
        [
            (drafted[n, row, : counts[n, row, 0]].tolist(), counts[n, row, :3].tolist())
            for n in range(len(counts))
            if counts[n, row, 0] >= 0
        ]
        for row in range(counts.shape[1])
    ]


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("with_ends", [False, True])
def test_iterations_equal_drafts_and_checks_by_single_steps(followed: bool, with_ends: bool) -> None:
    """Iterations equal drafts and verifications by single steps."""
    rows = rows_of_case(CASE)
    ends: list[int] = []
    wanted = by_steps(CASE, rows, ends)
    if with_ends:  # one of a draft, and one of full depth only
        ends = [wanted[0][0][0][1], wanted[2][2][1][2]]
        wanted = by_steps(CASE, rows, ends)
    kept = CASE.pool.clone()
    given = np.array([ends or [-1]] * 5)
    decoder = CASE.decoder(max_rows=13)  # more rows than that are verified in two parts
    if followed:
        control = np.zeros(2, np.int32)
        decoder.begin_speculative_loop(rows, CYCLES, control, PLAIN, states_of(CASE), ends=given)
        taken = [decoder.take(all_done=n % 2 == 1) for n in range(CYCLES) if control[1] < CYCLES or n < 2]
        while sum(len(counts) for _, counts in taken) < CYCLES:
            taken.append(decoder.take())
        decoder.finish()
        drafted, counts = (np.concatenate(arrays) for arrays in zip(*taken, strict=True))
    else:
        drafted, counts = decoder.run_speculative_loop(rows, CYCLES, PLAIN, states_of(CASE), ends=given)
    CASE.pool.copy_(kept)
    assert as_lists(drafted, counts) == wanted
    accepted = counts[:, :, 1]
    assert (accepted > 0).any() or with_ends
    assert len(counts) == CYCLES


def test_a_call_is_over_with_the_last_of_its_answers() -> None:
    rows, kept = rows_of_case(CASE), CASE.pool.clone()
    short = replace(PLAIN, rooms=np.maximum(PLAIN.first_lengths + 1, 2))
    _, counts = CASE.decoder().run_speculative_loop(rows, 40, short, states_of(CASE))
    CASE.pool.copy_(kept)
    tokens = (counts[:, :, 1] + 1).clip(0).sum(axis=0)
    assert len(counts) < 6
    assert tokens.tolist() == short.rooms.tolist()


def test_logits_not_finite_end_a_draft_or_the_answer() -> None:
    """Those of a draft end the draft, those at full depth the answer."""
    case = Case(Shape(layers=4, rows=5, max_positions=64, seed=1))
    rows = rows_of_case(case)
    clean = case.pool.clone()
    drafted, counts = case.decoder().run_speculative_loop(rows, 2, PLAIN, states_of(case))
    case.pool.copy_(clean)
    first = int(counts[0, 0, 2])  # the token of full depth after the first row's accepted ones
    case.model.embedding[first] = torch.nan
    again, found = case.decoder().run_speculative_loop(rows, 2, PLAIN, states_of(case))
    assert found[0, 0].tolist() == counts[0, 0].tolist()
    assert again[0, 0].tolist() == drafted[0, 0].tolist()
    assert found[1, 0, :3].tolist() == [0, 0, -1], "no token could be drafted, nor taken instead"


WRONG: dict[str, tuple[Any, Any]] = {
    "a draft is longer": ({}, {"first_lengths": np.array([5, 2, 3, 0, 4])}),
    "or than the room of its answer": ({}, {"rooms": np.array([4, 24, 20, 5, 9])}),
    "a token id is outside": ({}, {"begun": np.where(PLAIN.begun == 7, 97, PLAIN.begun)}),
    "a position is outside": ({"positions": np.array([40, 20, 0, 11, 9])}, {}),
    "a slot is outside": ({"slots": np.array([0, 1, 2, 3, 5])}, {}),
    "a place is outside": ({}, {"places": np.array([0, -1, 9, -1, -1])}),
    "no block of the pool": (
        {"tables": np.where(CASE.rows.tables == CASE.rows.tables[2, 3, 0], 0, CASE.rows.tables)},
        {},
    ),
    "no rows or no steps": ({}, {}),
}


@pytest.mark.parametrize("said", WRONG)
def test_iterations_out_of_bounds_are_refused(said: str) -> None:
    of_rows, of_drafts = WRONG[said]
    before = CASE.pool.clone()
    cycles = 0 if said == "no rows or no steps" else CYCLES
    with pytest.raises(NativeError, match=said):
        CASE.decoder().run_speculative_loop(
            replace(rows_of_case(CASE), **of_rows), cycles, replace(PLAIN, **of_drafts), states_of(CASE)
        )
    assert torch.equal(CASE.pool, before)


def test_hidden_states_and_cutoffs_of_another_shape_are_refused() -> None:
    rows = rows_of_case(CASE)
    with pytest.raises(NativeError, match="hidden states must be a contiguous array"):
        CASE.decoder().run_speculative_loop(rows, 1, PLAIN, states_of(CASE)[:, 1:])
    with pytest.raises(NativeError, match="tables must have the shape"):
        CASE.decoder().run_speculative_loop(replace(rows, cutoffs=rows.cutoffs[:, :3]), 1, PLAIN, states_of(CASE))
