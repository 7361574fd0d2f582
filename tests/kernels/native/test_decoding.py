"""The native library agrees with the reference operations; no row depends on the batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import FORMS, Case, Shape, assert_same_bits_in_batches, forms_and_isas, isas

from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Draws, HiddenStates

SHAPES = {
    "the smallest": Shape(
        layers=1, hidden=2, intermediate=1, heads=1, kv_heads=1, head_dim=2, vocab=2, block_size=1, rows=1
    ),
    "nothing a multiple of a vector": Shape(
        hidden=35, intermediate=51, heads=6, kv_heads=2, head_dim=10, vocab=131, bias=True
    ),
    "one row, one block": Shape(hidden=64, head_dim=16, block_size=40, rows=1, bias=True),
    "as many rows as there may be": Shape(rows=64, hidden=32, intermediate=130, seed=1),
    "several chunks of attention": Shape(
        hidden=128, intermediate=200, heads=4, kv_heads=1, head_dim=80, block_size=16, max_positions=300, rows=7
    ),
    "norms of heads, and a layer without rope": Shape(
        layers=3, heads=6, kv_heads=2, head_dim=18, head_norms=True, bias=True, layers_without_rope=(1,)
    ),
    "windows": Shape(layers=3, heads=4, kv_heads=2, head_dim=20, max_positions=900, rows=7, windows=(1, 70, 300)),
    "norms behind alone, and over whole projections": Shape(
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=18,
        norms_before=False,
        norms_behind=True,
        projection_norms=True,
        bias=True,
    ),
    "norms on both sides, GeGLU, soft caps and a scaled embedding": Shape(
        layers=3,
        heads=4,
        kv_heads=1,
        head_dim=256,
        rows=9,
        max_positions=300,
        windows=(20,),
        norms_behind=True,
        head_norms=True,
        activation="gelu_tanh",
        embedding_scale=6.0,
        caps=(1.5, 2.0),
    ),
    "several pieces of a product": Shape(layers=1, hidden=300, intermediate=600, head_dim=32, vocab=1000, rows=3),
}
STEPS = 5


@pytest.mark.parametrize(("form", "isa"), forms_and_isas())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_run_is_that_of_the_reference(shape: Shape, form: str, isa: str) -> None:
    assert_as_reference(Case(replace(shape, form=form)), isa=isa, num_threads=2)


@pytest.mark.parametrize("isa", isas())
def test_tied_int8_head_matches_the_reference_in_any_batch(isa: str) -> None:
    """An int8 LM head that is the embedding too."""
    case = Case(Shape(rows=7, hidden=136, vocab=300, form="int4", head="int8"))
    assert_as_reference(case, isa=isa, num_threads=2)
    assert_same_bits_in_batches(case, 3, [[row] for row in range(7)], isa=isa)


def test_a_tied_int4_head_is_refused() -> None:
    """An int4 LM head cannot be the embedding too."""
    with pytest.raises(NativeError, match="a weight is of a kind that is not known"):
        Case(Shape(form="int4", head="int4")).decoder()


@pytest.mark.parametrize("form", FORMS)
def test_auto_isa_takes_amx_and_vnni_for_narrow_matrices(form: str) -> None:
    """Without an explicit instruction set."""
    only_bytes_are_not = dict.fromkeys(("int8", "bfloat16", "packed"), ("avx512-vnni",)) | {"int4": ()}
    not_for_it = only_bytes_are_not.get(form, ("avx512-vnni", "amx"))
    best = next(isa for isa in isas() if isa not in not_for_it)
    assert Case(Shape(form=form)).decoder().isa == best


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_share_a_head_of_keys_and_values(group: int) -> None:
    assert_as_reference(Case(Shape(heads=3 * group, kv_heads=3, head_dim=6, rows=2, seed=group)))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("group", [1, 3, 5, 8])
def test_rows_of_long_contexts_have_the_same_bits_in_any_batch(group: int, isa: str) -> None:
    """Chunks and spans end behind, at and before their last positions. With many rows all heads are one tile."""
    shape = Shape(rows=9, heads=3 * group, kv_heads=3, head_dim=18, block_size=16, max_positions=700, seed=group)
    case = Case(shape)
    positions = np.array([690, 62, 63, 64, 255, 256, 320, 500, 3])
    case.rows = replace(case.rows, positions=positions, cutoffs=np.full((9, 2), 20))
    assert_as_reference(case, isa=isa, num_threads=2)
    assert_same_bits_in_batches(case, 3, ([0], [0, 7, 1], range(9), [6, 7, 5, 0, 4], range(1, 9)), isa=isa)


def assert_as_reference(case: Case, **decoding: Any) -> None:
    tokens, scores, logits = case.decode(STEPS, **decoding)
    wanted_tokens, wanted_scores, wanted = case.reference(STEPS)
    np.testing.assert_array_equal(tokens, wanted_tokens)
    errors = np.linalg.norm(logits - wanted, axis=2) / np.linalg.norm(wanted, axis=2)
    assert errors.max() < 2e-5
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(case.entries, case.reference_entries, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "isa"), forms_and_isas())
def test_logits_have_the_same_bits_in_any_batch_on_any_threads(form: str, isa: str) -> None:
    """Alone, in a batch, with one thread or several."""
    shape = Shape(rows=14, hidden=136, intermediate=200, head_dim=24, max_positions=150, vocab=300, form=form)
    numbers = np.random.default_rng(0)
    batches = [numbers.permutation(14)[:size] for size in range(1, 14)]
    assert_same_bits_in_batches(Case(shape), 3, batches, isa=isa)


@pytest.mark.parametrize(("form", "isa"), forms_and_isas())
def test_logits_of_many_rows_and_column_blocks_keep_their_bits(form: str, isa: str) -> None:
    """More rows than a micro-tile has, and several blocks of columns."""
    case = Case(Shape(layers=1, rows=35, hidden=144, intermediate=600, head_dim=24, vocab=300, form=form))
    batches = ([34], [16, 33], [0, 17, 32, 5], range(9), range(18), range(2, 35))
    assert_same_bits_in_batches(case, 1, batches, isa=isa)


@pytest.mark.parametrize("form", FORMS)
def test_logits_keep_their_bits_where_weights_are_prefetched(form: str) -> None:
    """More than 32 MiB of weights: fewer are assumed to stay in caches. Rows skip layers, and so prefetched weights."""
    case = Case(Shape(layers=6, rows=35, hidden=136, intermediate=20000, head_dim=24, form=form))
    assert_same_bits_in_batches(case, 2, ([34], [0, 17, 32, 5], range(9), range(2, 20)))


def test_rows_without_logits_change_nothing_for_the_others() -> None:
    """`yields` selects rows."""
    case = Case(Shape(rows=7))
    tokens, scores, logits = case.decode(1, num_threads=2)
    entries = case.entries
    for asked in ([4], [0, 6], []):
        yields = np.isin(np.arange(7), asked)
        some = case.decode(1, yields=yields, num_threads=2)
        for found, wanted in zip(some, (tokens, scores, logits), strict=True):
            np.testing.assert_array_equal(found[:, yields], wanted[:, yields])
        assert np.isnan(some[2][:, ~yields]).all()
        assert torch.equal(case.entries, entries)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_resumes_its_saved_state_with_the_same_bits(form: str) -> None:
    """One step up to layer 1, which saves states, and one from there on, as in a draft's verification."""
    case = Case(Shape(rows=6, layers=3, form=form))
    rows, none, places = case.rows, np.full(6, -1), np.array([4, 0, 9, -1, 2, 7])
    everywhere = replace(rows, cutoffs=np.full_like(rows.cutoffs, 1000))
    _, _, wanted = case.decode(1, everywhere, num_threads=2)
    decoder, logits = case.decoder(num_threads=2), np.zeros_like(wanted)
    states, kept = np.zeros((10, case.shape.hidden), np.float32), case.pool.clone()
    below, above = np.array([[1000, 0, 0]] * 6), np.array([[0, 1000, 1000]] * 6)
    left = HiddenStates(states, np.where(places < 0, -1, 1), places, none)
    decoder.run(replace(rows, cutoffs=below), 1, states=left)
    decoder.run(replace(rows, cutoffs=above), 1, logits=logits, states=HiddenStates(states, none, none, places))
    case.pool.copy_(kept)
    who = places >= 0
    np.testing.assert_array_equal(logits[:, who].view(np.int32), wanted[:, who].view(np.int32))
    assert not np.array_equal(logits[:, ~who], wanted[:, ~who])  # it started from its embedding
    assert not states[[1, 3, 5, 6, 8]].any()


@pytest.mark.parametrize("vocab", [2, 301])
def test_draws_are_those_of_the_sampler(vocab: int) -> None:
    """Philox and Gumbel by seed, index, step and token, with rows that take the likeliest token."""
    case = Case(Shape(rows=12, vocab=vocab))
    draws = Draws(
        np.array([0.0, 0.3, 1.0, 2.0, 5.0, 50.0] * 2, np.float32),
        np.array([1, 2, 3, 2**63 - 1, 2**32, 2**32 + 3] * 2, np.int64),
        np.repeat([0, 7], 6),
    )
    tokens, scores, _ = case.decode(STEPS, draws=draws, num_threads=2)
    wanted, wanted_scores, _ = case.reference(STEPS, draws)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-4)
    assert vocab == 2 or (tokens[:, 2:6] != tokens[:, 8:12]).any(), "another index draws other numbers"


@pytest.mark.parametrize(("form", "isa"), forms_and_isas())
def test_nan_stays_in_its_row_and_foreign_blocks_are_not_read(form: str, isa: str) -> None:
    """Rows read no block but their own."""
    case = Case(Shape(rows=4, max_positions=100, form=form))
    before, _, healthy = case.decode(2, isa=isa)
    case.pool[0] = np.nan  # the block that fills unused table places
    spoilt = case.rows.tables[case.rows.slots[1], 0, 0]
    case.pool[spoilt] = np.nan
    for row in range(4):
        end = case.rows.positions[row] + 2
        for table in case.rows.tables[case.rows.slots[row]]:
            case.pool[table[end // 4 + 1 :].astype(np.int64)] = np.nan  # beyond the row's end
    tokens, scores, logits = case.decode(2, isa=isa)
    assert not np.isfinite(scores[:, 1]).any()
    others = [0, 2, 3]
    np.testing.assert_array_equal(logits[:, others].view(np.int32), healthy[:, others].view(np.int32))
    np.testing.assert_array_equal(tokens[:, others], before[:, others])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("windows", [(1, 257), (256, 700)])
def test_windowed_context_keeps_its_bits_on_any_threads(windows: tuple[int, ...], isa: str) -> None:
    """A long context in windows has the same bits on any number of threads."""
    sizes: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 1, "head_dim": 64, "max_positions": 1500}
    case = Case(Shape(layers=2, rows=2, windows=windows, **sizes))
    case.rows.positions[:] = 1300, 205
    _, _, wanted = case.decode(4, isa=isa)
    for threads in (2, 4, 7):
        _, _, found = case.decode(4, isa=isa, num_threads=threads)
        np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))
    assert_as_reference(case, isa=isa, num_threads=2)
