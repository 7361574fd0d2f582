"""Interleaved int8 and int4 matrices: int4 has the bits of the plain layout; no row depends on the batch."""

from dataclasses import replace

import numpy as np
import pytest
from native_models import Case, Shape, assert_same_bits_in_any_chunks, assert_same_bits_in_batches, with_matrices

from d3engine.kernels.interleaved import LanesWeight, in_lanes
from d3engine.kernels.matrices import Weight
from d3engine.kernels.native.library import isas_here, reads_interleaved
from d3engine.kernels.native.model import NativeError, NativeModel
from d3engine.kernels.quantized import Int8Weight

READERS = [isa for isa in isas_here() if reads_interleaved(isa)]
needs_reader = pytest.mark.skipif(not READERS, reason="no instruction set of this machine reads lanes")
SHAPES = {
    "odd columns": Shape(rows=60, hidden=200, intermediate=608, heads=4, head_dim=24, vocab=320, bias=True),
    "one step": Shape(rows=60, hidden=64, intermediate=96, heads=4, head_dim=32, vocab=320),
    "several blocks": Shape(rows=60, hidden=576, intermediate=1536, heads=4, head_dim=32, vocab=96),
    "some matrices stay": Shape(rows=60, hidden=96, intermediate=72, heads=4, head_dim=16, vocab=97),
}


def interleaved_case(shape: Shape, form: str) -> tuple[Case, NativeModel]:
    """A case with interleaved matrices where their rows fill groups, and the same case without."""
    case = Case(replace(shape, form=form))
    held, case.model = case.model, with_matrices(case.model, in_lanes)
    assert all(isinstance(layer.qkv.weight, LanesWeight) for layer in case.model.layers)
    return case, held


@needs_reader
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("isa", READERS)
def test_logits_are_those_of_the_reference(isa: str, shape: Shape, form: str) -> None:
    case, held = interleaved_case(shape, form)
    tokens, _, logits = case.decode(2, isa=isa, num_threads=2)
    case.model = held
    wanted_tokens, _, wanted = case.reference(2)
    assert np.abs(logits - wanted).max() < 2e-5 * np.abs(wanted).max()
    np.testing.assert_array_equal(tokens, wanted_tokens)


@needs_reader
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("isa", READERS)
def test_a_row_finds_the_same_bits_in_every_batch(isa: str, shape: Shape, form: str) -> None:
    """Alone, with as many vectors as one pass has, with more, and with more than one turn has."""
    case, held = interleaved_case(shape, form)
    batches = [[0], [1], [16], [59], *([*range(count - 1), 59] for count in (2, 3, 7, 16, 17, 30))]
    logits = assert_same_bits_in_batches(case, 2, batches, isa=isa)
    if form == "int4":
        case.model = held
        of_rows = assert_same_bits_in_batches(case, 2, batches, isa=isa)
        np.testing.assert_array_equal(logits.view(np.int32), of_rows.view(np.int32))


@needs_reader
@pytest.mark.parametrize("isa", READERS)
def test_a_prompt_finds_the_same_bits_in_any_chunks(isa: str) -> None:
    case, _ = interleaved_case(replace(SHAPES["odd columns"], rows=1, max_positions=160), "int8")
    assert_same_bits_in_any_chunks(case, isa=isa)


@needs_reader
def test_an_embedding_is_read_from_interleaved_rows() -> None:
    """That of int8, which is the head too."""
    case = Case(replace(SHAPES["one step"], form="int8", head="int8"))
    assert isinstance(case.model.lm_head, Int8Weight)
    table = in_lanes(case.model.lm_head)
    wanted = case.decode(1, isa=READERS[0])[2]
    case.model = replace(case.model, lm_head=table, embedding=table)
    found = case.decode(1, isa=READERS[0])[2]
    assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_other_instruction_sets_refuse_it() -> None:
    case, _ = interleaved_case(SHAPES["one step"], "int4")
    for isa in set(isas_here()) - set(READERS):
        with pytest.raises(NativeError, match="a weight is of a kind that is not known"):
            case.decoder(isa=isa)
    assert not reads_interleaved("portable")
    assert not reads_interleaved("none of them")
    assert reads_interleaved() == reads_interleaved(isas_here()[0])


@needs_reader
def test_an_unaligned_matrix_is_refused() -> None:
    case, _ = interleaved_case(SHAPES["one step"], "int4")
    layer = case.model.layers[0]
    weight: Weight = layer.qkv.weight
    assert isinstance(weight, LanesWeight)
    apart = weight.packed.new_empty(weight.packed.numel() + 4)[4:].view(weight.packed.shape).copy_(weight.packed)
    broken = replace(layer, qkv=replace(layer.qkv, weight=replace(weight, packed=apart)))
    case.model = replace(case.model, layers=(broken, *case.model.layers[1:]))
    with pytest.raises(NativeError, match="a weight is of a kind that is not known"):
        case.decoder(isa=READERS[0])
