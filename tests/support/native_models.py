"""Small models for the native library, and the same steps taken by the reference operations."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from quantized_weights import fp8_of_groups
from torch import Tensor

from d3engine.kernels import reference
from d3engine.kernels.bfloat16_pairs import in_pairs
from d3engine.kernels.kv_pool import NO_WINDOW
from d3engine.kernels.matrices import Weight, looked_up
from d3engine.kernels.native.bf12 import pack
from d3engine.kernels.native.library import Decoder, LibraryMissing, isas_here
from d3engine.kernels.native.model import Linear, NativeLayer, NativeModel
from d3engine.kernels.native.runs import Draws, Rows
from d3engine.kernels.quantized import quantize_fp8, quantize_int4, quantize_int8
from d3engine.kernels.sampling import SamplingRows


def packed(matrix: Tensor) -> Weight:
    """As `pack` has it, some of the weights with exponents that are not among its own, and some zeros."""
    matrix = matrix.bfloat16()
    if matrix.numel() > 1000:  # a weight of a small one would be too many
        matrix[::60, 3] *= 2.0**-40
        matrix[1, -1] *= 2.0**5
    matrix[2::9, 0] = 0
    made = pack(matrix)
    assert made is not None
    return made


FORMS = {
    "float32": lambda matrix: matrix,
    "bfloat16": lambda matrix: matrix.bfloat16(),
    "float16": lambda matrix: matrix.half(),
    "packed": packed,
    "int8": quantize_int8,
    "fp8": quantize_fp8,
    "fp8 groups": fp8_of_groups,
    "int4": quantize_int4,
}
ROUNDING = {"pairs": lambda matrix: in_pairs(matrix.bfloat16())}
"""Forms that meet rounded rows: another order of sums may round a row in another way."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and of the rows that it decodes."""

    layers: int = 2
    hidden: int = 40
    intermediate: int = 72
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    vocab: int = 97
    block_size: int = 4
    max_positions: int = 40
    rows: int = 5
    form: str = "float32"
    head: str | None = None  # the form of an LM head that is the embedding too; None: one of its own, in `form`
    bias: bool = False
    head_norms: bool = False
    layers_without_rope: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()  # of the first layers
    norms_before: bool = True
    norms_behind: bool = False
    projection_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    caps: tuple[float | None, float | None] = (None, None)  # of scores, and of logits
    seed: int = 0


@dataclass(eq=False)
class Case:
    """A model over a pool of random entries, and rows at random positions with tables of blocks in random order."""

    shape: Shape
    model: NativeModel = field(init=False)
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        self.generator = torch.Generator().manual_seed(s.seed)
        numbers = np.random.default_rng(s.seed)
        blocks = -(-s.max_positions // s.block_size)
        count = s.rows * s.layers * blocks
        self.pool = self._normal(count + 1, 2, s.block_size, s.kv_heads, s.head_dim)
        angles = torch.arange(s.max_positions)[:, None] / 10.0 ** torch.arange(s.head_dim // 2)
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        q_size, kv_size = s.heads * s.head_dim, s.kv_heads * s.head_dim
        layers = tuple(
            NativeLayer(
                attention_norm=self._norm(s.hidden, s.norms_before),
                qkv=self._linear(q_size + 2 * kv_size, s.hidden),
                output=self._linear(s.hidden, q_size),
                mlp_norm=self._norm(s.hidden, s.norms_before),
                gate_up=self._linear(2 * s.intermediate, s.hidden),
                down=self._linear(s.hidden, s.intermediate),
                rotations=None if index in s.layers_without_rope else self.rotations,
                head_norms=1 + self._normal(2, s.head_dim) / 4 if s.head_norms else None,
                window=(*s.windows, *[NO_WINDOW] * s.layers)[index],
                projection_norms=self._norm(q_size + kv_size, s.projection_norms),
                attention_post_norm=self._norm(s.hidden, s.norms_behind),
                mlp_post_norm=self._norm(s.hidden, s.norms_behind),
            )
            for index in range(s.layers)
        )
        embedding = self._normal(s.vocab, s.hidden)
        own = FORMS[s.head or ("bfloat16" if s.form == "bfloat16" else "float32")](embedding)
        self.model = NativeModel(
            layers=layers,
            embedding=own,
            final_norm=1 + self._normal(s.hidden) / 4,
            lm_head=self._matrix(s.vocab, s.hidden) if s.head is None else own,
            pool=self.pool,
            num_heads=s.heads,
            max_positions=s.max_positions,
            eps=1e-5,
            scale=s.head_dim**-0.5,
            activation=s.activation,
            embedding_scale=s.embedding_scale,
            attention_cap=s.caps[0],
            logit_cap=s.caps[1],
        )
        self.rows = Rows(
            tokens=numbers.integers(s.vocab, size=s.rows),
            positions=numbers.integers(s.max_positions - 8, size=s.rows),
            generation=numbers.integers(1, 6, size=s.rows),
            slots=numbers.permutation(s.rows),
            cutoffs=np.sort(numbers.integers(2, 12, size=(s.rows, s.layers)))[:, ::-1].copy(),
            tables=(numbers.permutation(count) + 1).astype(np.int32).reshape(s.rows, s.layers, blocks),
        )

    def decoder(self, **changes: Any) -> Decoder:
        arguments: dict[str, Any] = {"max_rows": 64, "num_threads": 1, **changes}
        slots, _, blocks = self.rows.tables.shape
        return Decoder(self.model, max_blocks=blocks, num_slots=slots, **arguments)

    def decode(
        self, steps: int, rows: Rows | None = None, draws: Draws | None = None, yields: Any = None, **changes: Any
    ) -> Any:
        """Tokens, scores and logits of a run on the pool as it was in the beginning."""
        rows = rows or self.rows
        kept = self.pool.clone()
        logits = np.full((steps, len(rows.tokens), self.shape.vocab), np.nan, np.float32)
        tokens, scores = self.decoder(**changes).run(rows, steps, draws=draws, logits=logits, yields=yields)
        self.entries = self.pool.clone()
        self.pool.copy_(kept)
        return tokens, scores, logits

    def reference(self, steps: int, draws: Draws | None = None) -> tuple[Any, Any, Any]:
        """The same by the reference operations in float32, on a copy of the pool; its entries are kept afterwards."""
        model, given = self.model, self.rows
        order = np.arange(len(given.tokens))
        pool = self.pool.clone()
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        tokens = torch.from_numpy(given.tokens)
        for taken in range(steps):
            hidden = looked_up(model.embedding, tokens, torch.float32) * model.embedding_scale
            for index, layer in enumerate(model.layers):
                self._cross(index, given.generation + taken, hidden)
                active = order[given.generation + taken < given.cutoffs[:, index]]
                if active.size:
                    self._layer(layer, index, active, taken, hidden, pool)
            logits = reference.lm_head(hidden, model.final_norm, model.eps, wide(model.lm_head), cap=model.logit_cap)
            if draws is None:
                tokens, scores = logits.max(dim=-1)[1], logits.max(dim=-1)[0]
            else:
                asked = SamplingRows(*(torch.from_numpy(a) for a in (draws.temperatures, draws.seeds, draws.indices)))
                tokens, scores = reference.sample(logits, asked, torch.from_numpy(given.generation + taken))
            found.append((tokens, scores, logits))
        self.reference_entries = pool
        return tuple(torch.stack(parts).numpy() for parts in zip(*found, strict=True))

    def _cross(self, first: int, steps: Any, hidden: Tensor) -> None:
        """Rows that leave out layers from `first` on, and not the one before it, cross them by their bridges."""
        for row, own in enumerate(self.rows.bridges or ()):
            runs = np.append(steps[row] < self.rows.cutoffs[row], True)
            if own is None or runs[first] or (first and not runs[first - 1]):
                continue
            stop = first + int(runs[first:].argmax())
            (bridge,) = [one for one in own.bridges if (one.first, one.stop) == (first, stop)]
            state = hidden[row, None]
            inner = torch.zeros(1, bridge.weight.weight.shape[1])
            if bridge.down is None:
                inner = state.clone()
            else:
                reference.linear_residual(state, wide(bridge.down.weight), None, inner)
            reference.linear_residual(inner, wide(bridge.weight.weight), bridge.weight.bias, hidden[row, None])

    def _layer(self, layer: NativeLayer, index: int, active: Any, taken: int, hidden: Tensor, pool: Tensor) -> None:
        s, model, given = self.shape, self.model, self.rows
        positions = given.positions[active] + taken
        tables = given.tables[given.slots[active], index]
        keys = tables[np.arange(active.size), positions // s.block_size].astype(np.int64) * 2 * s.block_size
        keys += positions % s.block_size
        entries = torch.from_numpy(np.stack((keys, keys + s.block_size), axis=-1))
        rows = hidden[active]
        queries = reference.qkv(
            rows,
            layer.attention_norm,
            model.eps,
            wide(layer.qkv.weight),
            layer.qkv.bias,
            torch.ones_like(self.rotations[positions]) if layer.rotations is None else self.rotations[positions],
            pool,
            entries,
            s.heads,
            head_norms=layer.head_norms,
            projection_norms=layer.projection_norms,
        )
        attention = reference.attention_inputs(
            list(range(active.size + 1)), (positions + 1).tolist(), torch.from_numpy(tables).long()[None]
        )[0]
        attended = reference.paged_attention(
            queries, pool, attention, model.scale, window=layer.window, cap=model.attention_cap
        )
        self._add(attended, layer.output, layer.attention_post_norm, rows)
        matrix = wide(layer.gate_up.weight), layer.gate_up.bias
        gated = reference.gate_up(rows, layer.mlp_norm, model.eps, *matrix, activation=model.activation)
        self._add(gated, layer.down, layer.mlp_post_norm, rows)
        hidden[active] = rows

    def _add(self, x: Tensor, linear: Linear, post_norm: Tensor | None, rows: Tensor) -> None:
        product = rows if post_norm is None else torch.zeros_like(rows)
        reference.linear_residual(x, wide(linear.weight), linear.bias, product)
        if post_norm is not None:
            reference.add_norm(product, post_norm, self.model.eps, rows)

    def _norm(self, width: int, present: bool) -> Tensor | None:
        return 1 + self._normal(width) / 4 if present else None

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _matrix(self, rows: int, columns: int) -> Weight:
        return (FORMS | ROUNDING)[self.shape.form](self._normal(rows, columns) / math.sqrt(columns))

    def _linear(self, rows: int, columns: int) -> Linear:
        return Linear(self._matrix(rows, columns), self._normal(rows) if self.shape.bias else None)


def wide(weight: Weight) -> Weight:
    """A bfloat16 matrix as float32, which is what it stands for; others as they are."""
    return weight.float() if isinstance(weight, Tensor) else weight


def at_places(rows: Rows, places: Any) -> Rows:
    """Only these rows, in this order."""
    own: dict[str, Any] = {
        name: getattr(rows, name)[places] for name in ("tokens", "positions", "generation", "slots", "cutoffs")
    }
    return replace(rows, bridges=rows.bridges and [rows.bridges[place] for place in places], **own)


def with_matrices(model: NativeModel, change: Any) -> NativeModel:
    """The model with each matrix but its embedding as `change` makes it."""
    layers = []
    for layer in model.layers:
        linears = {name: getattr(layer, name) for name in ("qkv", "output", "gate_up", "down")}
        changed: Any = {name: replace(linear, weight=change(linear.weight)) for name, linear in linears.items()}
        layers.append(replace(layer, **changed))
    return replace(model, layers=tuple(layers), lm_head=change(model.lm_head))


def assert_same_bits_in_batches(case: Case, steps: int, batches: Any, **options: Any) -> Any:
    """Rows have the tokens and logits of all rows together in each of these batches; returns the logits."""
    tokens, _, together = case.decode(steps, num_threads=3, **options)
    for nth, batch in enumerate(batches):
        places = np.array(batch)
        some, _, logits = case.decode(steps, at_places(case.rows, places), num_threads=1 + nth % 4, **options)
        np.testing.assert_array_equal(logits.view(np.int32), together[:, places].view(np.int32))
        np.testing.assert_array_equal(some, tokens[:, places])
    return together


def prompt_rows(case: Case, *chunks: tuple[int, int, int]) -> Rows:
    """Rows of prompts, each (slot, first position, how many), through every layer; tokens go by slot and position."""
    slots = np.concatenate([np.full(count, slot) for slot, _, count in chunks])
    positions = np.concatenate([np.arange(first, first + count) for _, first, count in chunks])
    zeros, layers = np.zeros(len(slots), np.int64), case.shape.layers
    tokens = (31 * positions + 7 * slots) % case.shape.vocab
    return Rows(tokens, positions, zeros, slots, np.ones((len(slots), layers), np.int32), case.rows.tables)


def assert_same_bits_in_any_chunks(case: Case, **options: Any) -> None:
    """The last logits of a prompt of 150 tokens do not depend on where it is cut."""
    kept = case.pool.clone()

    def last_logits(*cuts: int) -> np.ndarray:
        case.pool.copy_(kept)
        decoder = case.decoder(max_rows=256, **options)
        for start, stop in zip((0, *cuts), (*cuts, 150), strict=True):
            logits = np.full((1, stop - start, case.shape.vocab), np.nan, np.float32)
            decoder.run(prompt_rows(case, (0, start, stop - start)), 1, logits=logits)
        return logits[0, -1]

    whole = last_logits()
    assert np.isfinite(whole).all()
    for cuts in ((149,), (1, 50), (60, 64, 128)):
        np.testing.assert_array_equal(last_logits(*cuts).view(np.int32), whole.view(np.int32))


def isas() -> list[str]:
    """The instruction sets of this machine, for a test's parameters; a name that fails where there is no library."""
    try:
        return isas_here()
    except LibraryMissing:
        return ["none"]


DIFFERENT_IN = {"amx": ("bfloat16", "int8", "int4"), "avx512-vnni": ("int4",)}
"""Of the instruction sets that are another one's but for some forms of matrices: those forms."""


def forms_and_isas() -> list[tuple[str, str]]:
    """Each form of matrices with each instruction set of this machine that has products of its own for it."""
    return [(form, isa) for isa in isas() for form in DIFFERENT_IN.get(isa, FORMS)]
