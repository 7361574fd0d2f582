"""Bridges of every kind over skipped layers, in C++; no row depends on the batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import FORMS, Case, Shape, assert_same_bits_in_batches, forms_and_isas

from d3engine.kernels.native.model import Linear, NativeBridge, NativeBridges, NativeError

LAYERS, ROWS, STEPS = 5, 7, 4
SHAPE = Shape(layers=LAYERS, hidden=136, intermediate=72, rows=ROWS, seed=3)


def bridges_of(case: Case, rank: int | None = None) -> NativeBridges:
    """Over every window, far from the identity; with a `rank`, a third of them has it, and a third twice that."""
    hidden = case.shape.hidden
    found = []
    for first in range(LAYERS):
        for stop in range(first + 1, LAYERS + 1):
            inner = (rank or 0) * ((first + stop) % 3)
            weight = Linear(case._matrix(hidden, inner or hidden), case._normal(hidden))
            found.append(NativeBridge(first, stop, weight, Linear(case._matrix(inner, hidden)) if inner else None))
    return NativeBridges(found)


def case_of(form: str = "float32", rank: int | None = None) -> Case:
    """Rows that skip windows of every kind, which change from step to step; the second row has no bridges."""
    case = Case(replace(SHAPE, form=form))
    own, others = bridges_of(case, rank), bridges_of(case)
    by_row: list[NativeBridges | None] = [own, None, others, own, own, own, others]
    cutoffs = np.random.default_rng(2).integers(1, 9, size=(ROWS, LAYERS))
    case.rows = replace(case.rows, cutoffs=cutoffs, generation=np.ones(ROWS, np.int64), bridges=by_row)
    return case


@pytest.mark.parametrize(("form", "isa"), forms_and_isas())
@pytest.mark.parametrize("rank", [None, 5], ids=["full", "of low rank"])
def test_bridged_rows_are_those_of_the_reference(form: str, rank: int | None, isa: str) -> None:
    case = case_of(form, rank)
    tokens, _, logits = case.decode(STEPS, isa=isa, num_threads=2)
    wanted_tokens, _, wanted = case.reference(STEPS)
    np.testing.assert_array_equal(tokens, wanted_tokens)
    errors = np.linalg.norm(logits - wanted, axis=2) / np.linalg.norm(wanted, axis=2)
    assert errors.max() < 2e-5
    bare = replace(case.rows, bridges=None)
    _, _, without = case.decode(STEPS, bare, isa=isa, num_threads=2)
    crossed = [nth for nth in range(ROWS) if nth != 1]
    assert not np.isclose(without[-1, crossed], logits[-1, crossed]).all(axis=1).any(), "bridges that change nothing"
    np.testing.assert_array_equal(without[:, 1].view(np.int32), logits[:, 1].view(np.int32))


@pytest.mark.parametrize("form", FORMS)
def test_bridged_rows_have_the_same_bits_alone_and_in_any_batch(form: str) -> None:
    case = case_of(form, rank=20)
    assert_same_bits_in_batches(case, STEPS, ([0], [6], [2, 0, 5], [1, 3, 4, 6]))


def test_many_rows_on_one_bridge_have_the_bits_of_each_alone() -> None:
    case = Case(replace(SHAPE, rows=60))
    own = bridges_of(case, rank=9)
    cutoffs = np.full((60, LAYERS), 1000)
    cutoffs[:, 2:4] = 0
    case.rows = replace(case.rows, cutoffs=cutoffs, bridges=[own] * 60)
    assert_same_bits_in_batches(case, 1, ([0], [41], [59]))


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_row_with_rows_on_other_bridges(form: str) -> None:
    """Rows of other bridges stay finite."""
    case = Case(replace(SHAPE, form=form))
    own = bridges_of(case, rank=5)
    cutoffs = np.full((ROWS, LAYERS), 1000)
    cutoffs[0, :2] = 0  # of rank 10: it leaves numbers in the first row's memory
    cutoffs[1:, 3:4] = 0  # of rank 5
    rows = case.rows = replace(case.rows, cutoffs=cutoffs, bridges=[own] * ROWS)
    _, _, healthy = case.decode(1)
    case.model.embedding[int(rows.tokens[0])] = torch.nan
    _, _, logits = case.decode(1)
    assert np.isnan(logits[:, 0]).all()
    np.testing.assert_array_equal(logits[:, 1:].view(np.int32), healthy[:, 1:].view(np.int32))


def wrong(case: Case) -> dict[str, Any]:
    hidden = case.shape.hidden
    full = Linear(torch.zeros(hidden, hidden), torch.zeros(hidden))
    narrow = Linear(torch.zeros(hidden, 3), torch.zeros(hidden))
    return {
        "another window": NativeBridge(1, 4, full),
        "other sizes": NativeBridge(1, 3, narrow),
        "another rank": NativeBridge(1, 3, narrow, Linear(torch.zeros(4, hidden))),
        "no offset": NativeBridge(1, 3, Linear(torch.zeros(hidden, hidden))),
    }


@pytest.mark.parametrize("which", ["another window", "other sizes", "another rank", "no offset"])
def test_a_window_without_a_fitting_bridge_is_refused(which: str) -> None:
    """Before any step runs."""
    case = Case(SHAPE)
    cutoffs = np.full((ROWS, LAYERS), 1000)
    cutoffs[2, 1:3] = 3  # from the third step on
    rows = replace(case.rows, cutoffs=cutoffs, generation=np.zeros(ROWS, np.int64))
    before = case.pool.clone()
    bridges = [None, None, NativeBridges([wrong(case)[which]]), *[None] * (ROWS - 3)]
    with pytest.raises(NativeError, match="a row leaves out layers for which it has no bridge"):
        case.decoder().run(replace(rows, bridges=bridges), STEPS)
    assert torch.equal(case.pool, before)
    case.decoder().run(replace(rows, bridges=bridges), 3)


def test_bridges_are_given_for_each_row() -> None:
    case = Case(SHAPE)
    with pytest.raises(NativeError, match="for each of 7 rows; got 1"):
        case.decoder().run(replace(case.rows, bridges=[None]), 1)
