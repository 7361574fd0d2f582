"""Accesses out of bounds are refused with a message, before anything is read or written."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape

from d3engine.kernels.low_rank import LowRankMap
from d3engine.kernels.native.model import Linear, NativeError, NativeMaps
from d3engine.kernels.native.runs import STEERINGS, HiddenStates, Hooks
from d3engine.kernels.quantized import Int8Weight

CASE = Case(Shape())
ROWS = CASE.rows


def changed(array: Any, value: int) -> Any:
    other = np.array(array)
    other.flat[-1] = value
    return other


def without_a_block(block: int) -> Any:
    tables = ROWS.tables.copy()
    tables[ROWS.slots[0], 0, 0] = block
    return tables


WRONG = {
    "rows": (replace(ROWS, tokens=np.zeros(0)), 1),
    "no steps": (ROWS, 0),
    "a token id": (replace(ROWS, tokens=changed(ROWS.tokens, 97)), 1),
    "a token": (replace(ROWS, tokens=changed(ROWS.tokens, -1)), 1),
    "a position": (replace(ROWS, positions=changed(ROWS.positions, 38)), 3),
    "outside the rotations": (replace(ROWS, positions=changed(ROWS.positions, -1)), 1),
    "a slot": (replace(ROWS, slots=changed(ROWS.slots, 5)), 1),
    "no block of the pool": (replace(ROWS, tables=without_a_block(0)), 1),
    "a layer runs for a row": (replace(ROWS, tables=without_a_block(1000)), 1),
    "tables must have the shape": (replace(ROWS, tables=ROWS.tables[:, :, :3]), 1),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_run_that_would_leave_its_memory_is_refused(said: str) -> None:
    rows, steps = WRONG[said]
    before = CASE.pool.clone()
    if said == "rows":
        rows = replace(rows, cutoffs=np.zeros((0, 2)), positions=rows.tokens, generation=rows.tokens, slots=rows.tokens)
    with pytest.raises(NativeError, match=said):
        CASE.decoder().run(rows, steps)
    assert torch.equal(CASE.pool, before)


@pytest.mark.parametrize("kind", ["kept_places", "resumed_places"])
def test_hidden_states_stay_within_what_the_run_brings(kind: str) -> None:
    none = np.full(len(ROWS.tokens), -1)
    states = HiddenStates(np.zeros((4, CASE.shape.hidden), np.float32), none, none, none)
    with pytest.raises(NativeError, match="a place is outside the hidden states"):
        CASE.decoder().run(ROWS, 2, states=replace(states, **{kind: changed(none, 3)}))
    with pytest.raises(NativeError, match="hidden states must be a contiguous array"):
        CASE.decoder().run(ROWS, 2, states=replace(states, states=states.states[:, 1:]))


@pytest.mark.parametrize(
    ("captures", "steering"),
    [
        ([(0, len(ROWS.tokens))], []),
        ([(0, -1)], []),
        ([(3, 0)], []),
        ([(-1, 0)], []),
        ([(1, 0), (0, 0)], []),
        ([], [(2, 0, 0, 9, 1, 1, 0)]),
        ([], [(0, 0, 0, 9, 0, 1, 0)]),
        ([], [(0, 0, 0, 9, 1, 0, 0)]),
    ],
)
def test_hooks_stay_within_rows_and_layers(captures: list[tuple[int, int]], steering: list[Any]) -> None:
    vector = np.zeros(CASE.shape.hidden, np.float32)
    steerings = np.array(steering, STEERINGS)
    steerings["vector"] *= vector.ctypes.data
    pairs = np.array(captures, np.int32).reshape(-1, 2)
    hooks = Hooks(steerings, pairs, np.zeros((2, len(pairs), CASE.shape.hidden), np.float32), vector)
    with pytest.raises(NativeError, match="a hook outside its rows"):
        CASE.decoder().run(ROWS, 2, hooks=hooks)


def test_a_map_that_steers_has_the_sizes_of_a_hidden_state() -> None:
    narrow = LowRankMap(torch.ones(2, CASE.shape.hidden - 1), torch.ones(2, CASE.shape.hidden))
    maps = NativeMaps((narrow.to(torch.float32, torch.device("cpu")),))
    steerings = np.array([(0, 0, 0, 9, 1, 0, maps.address)], STEERINGS)
    hooks = Hooks(steerings, np.zeros((0, 2), np.int32), np.zeros((2, 0, CASE.shape.hidden), np.float32), maps)
    with pytest.raises(NativeError, match="a map has other sizes"):
        CASE.decoder().run(ROWS, 2, hooks=hooks)


def test_captured_states_have_room_for_every_step() -> None:
    hooks = Hooks(np.array([], STEERINGS), np.zeros((1, 2), np.int32), np.zeros((1, 1, CASE.shape.hidden), np.float32))
    with pytest.raises(NativeError, match="captured states must be a contiguous array"):
        CASE.decoder().run(ROWS, 2, hooks=hooks)


def test_a_skipped_layer_needs_no_blocks_in_the_table() -> None:
    asleep = ROWS.cutoffs.copy()
    asleep[:, 1] = 0
    tables = ROWS.tables.copy()
    tables[:, 1] = 0
    tokens, _, _ = CASE.decode(2, replace(ROWS, cutoffs=asleep))
    again, _, _ = CASE.decode(2, replace(ROWS, cutoffs=asleep, tables=tables))
    np.testing.assert_array_equal(again, tokens)


def test_more_rows_than_a_decoder_was_made_for_are_refused() -> None:
    with pytest.raises(NativeError, match="more rows than the decoder was made for"):
        CASE.decoder(max_rows=4).run(ROWS, 1)


def test_a_run_of_steps_asks_every_row_for_its_token() -> None:
    with pytest.raises(NativeError, match="no rows or no steps"):
        CASE.decoder().run(ROWS, 2, yields=np.ones(len(ROWS.tokens), bool))


def test_models_of_other_sizes_and_kinds_are_refused() -> None:
    layer = CASE.model.layers[0]
    wrong = {
        "do not fit": replace(CASE.model, num_heads=3),
        "knows no torch.float64": replace(CASE.model, lm_head=CASE.model.embedding.double()),
        "is not contiguous": replace(CASE.model, final_norm=torch.ones(80)[::2]),
        "torch.float64 tensor on cpu": replace(
            CASE.model, layers=(replace(layer, mlp_norm=torch.ones(40).double()),) * 2
        ),
        "the sizes of the model": replace(CASE.model, layers=(layer, replace(layer, down=Linear(torch.ones(40, 71))))),
    }
    for said, model in wrong.items():
        case = Case(Shape())
        case.model = model
        with pytest.raises(NativeError, match=said):
            case.decoder()


def test_a_format_that_the_library_does_not_know_is_named() -> None:
    """An engine decodes by PyTorch then."""

    class Unknown(Int8Weight):
        native_kind = None  # type: ignore[assignment]

    with pytest.raises(NativeError, match="knows no matrices of Unknown"):
        Linear(Unknown(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2))).structure()
