"""Many rows of one sequence: the reference's numbers, and the same bits in chunks of any size."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape, forms_and_isas, isas, prompt_rows

from d3engine.kernels.native.library import Decoder

SHAPE = Shape(
    rows=2,
    hidden=136,
    intermediate=200,
    heads=6,
    kv_heads=2,
    head_dim=22,
    vocab=301,
    block_size=16,
    max_positions=600,
    bias=True,
)
FIRST = 190
"""Earlier rows fill the positions before it; attention chunks and spans end behind it."""


@pytest.mark.parametrize(("form", "isa"), forms_and_isas())
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden": 35, "intermediate": 51, "heads": 4, "kv_heads": 4, "head_dim": 10, "bias": False},
        {"head_norms": True, "layers_without_rope": (1,), "heads": 3, "kv_heads": 1, "head_dim": 80, "vocab": 2},
        {"windows": (5, 100)},
    ],
    ids=["bias", "nothing a multiple of a vector", "norms of heads", "windows"],
)
def test_a_prompt_is_that_of_the_reference(changes: dict[str, Any], form: str, isa: str) -> None:
    case = Case(replace(SHAPE, form=form, **changes))
    case.rows = prompt_rows(case, (1, FIRST, 75), (0, 0, 9))
    _, _, logits = case.decode(1, isa=isa, max_rows=128, num_threads=2)
    _, _, wanted = case.reference(1)
    errors = np.linalg.norm(logits - wanted, axis=2) / np.linalg.norm(wanted, axis=2)
    assert errors.max() < 2e-5
    np.testing.assert_allclose(case.entries, case.reference_entries, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "isa", "windows"),
    [
        *[(form, isa, ()) for form, isa in forms_and_isas()],
        *[("float32", isa, windows) for isa in isas() for windows in ((1, 3), (40, 64), (65, 300))],
    ],
)
def test_logits_are_the_same_bits_in_chunks_of_any_size(form: str, isa: str, windows: tuple[int, ...]) -> None:
    """Alone, row by row, with another prompt, in one chunk or in many, on any number of threads."""
    case = Case(replace(SHAPE, form=form, windows=windows))
    count = 151
    decoder = case.decoder(isa=isa, max_rows=192, num_threads=3)
    rows = prompt_rows(case, (0, 3, 37), (1, FIRST, count))
    wanted, entries = logits_and_entries(case, decoder, [rows])
    sizes = ([1] * count, [47, 104], [48, 49, 54], [2, 60, 89], [149, 2])
    for threads, chunks in enumerate(sizes, start=1):
        starts = FIRST + np.cumsum([0, *chunks[:-1]])
        parts = [prompt_rows(case, (1, int(s), c)) for s, c in zip(starts, chunks, strict=True)]
        other = case.decoder(isa=isa, max_rows=192, num_threads=threads)
        found, same = logits_and_entries(case, other, [prompt_rows(case, (0, 3, 37)), *parts])
        np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))
        assert torch.equal(same.view(torch.int32), entries.view(torch.int32))


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_rows_without_tokens_store_the_same_keys_and_values(form: str) -> None:
    """The last layer only stores their keys and values; the other rows have the same bits."""
    case = Case(replace(SHAPE, form=form))
    case.rows = prompt_rows(case, (0, 3, 37), (1, FIRST, 151), (0, 40, 2))
    decode = partial(case.decode, 1, max_rows=192, num_threads=2)
    _, _, wanted = decode()
    entries = case.entries
    for asked in ([36, 187], [0, 5, 40, 41, 43, 150, 188, 189], []):
        yields = np.isin(np.arange(190), asked)
        _, _, found = decode(yields=yields)
        np.testing.assert_array_equal(found[:, yields].view(np.int32), wanted[:, yields].view(np.int32))
        assert torch.equal(case.entries.view(torch.int32), entries.view(torch.int32))


def logits_and_entries(case: Case, decoder: Decoder, runs: list[Any]) -> tuple[Any, torch.Tensor]:
    """The logits of all rows of the runs, one after the other on one pool, which is then as it was."""
    kept, found = case.pool.clone(), []
    for rows in runs:
        logits = np.empty((1, len(rows.tokens), case.shape.vocab), np.float32)
        decoder.run(rows, 1, logits=logits)
        found.append(logits[0])
    entries = case.pool.clone()
    case.pool.copy_(kept)
    return np.concatenate(found), entries


@pytest.mark.parametrize("isa", isas())
def test_threads_share_the_context_of_one_row(isa: str) -> None:
    """One KV head, several spans: the same bits as on one thread, and the reference's numbers."""
    case = Case(Shape(rows=1, heads=5, kv_heads=1, head_dim=18, block_size=16, max_positions=1200))
    case.rows = prompt_rows(case, (0, 1100, 1))
    _, _, alone = case.decode(1, isa=isa)
    np.testing.assert_allclose(alone, case.reference(1)[2], rtol=2e-4, atol=2e-4)
    for threads in (2, 5, 16):
        _, _, shared = case.decode(1, isa=isa, num_threads=threads)
        np.testing.assert_array_equal(shared.view(np.int32), alone.view(np.int32))


def test_rows_see_nothing_of_later_ones() -> None:
    """Not even of NaN, which affects its own row and later ones; nor those that are computed together with it."""
    case = Case(SHAPE)
    rows = prompt_rows(case, (1, FIRST, 100))
    decoder = case.decoder(max_rows=128, num_threads=2)
    wanted, _ = logits_and_entries(case, decoder, [rows])
    spoilt = case.model.embedding.clone()
    case.model.embedding[rows.tokens[61]] = np.nan
    first = int(np.flatnonzero(rows.tokens == rows.tokens[61])[0])
    found, _ = logits_and_entries(case, decoder, [rows])
    case.model.embedding.copy_(spoilt)
    np.testing.assert_array_equal(found[:first].view(np.int32), wanted[:first].view(np.int32))
    assert not np.isfinite(found[first:]).any()
