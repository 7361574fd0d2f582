"""Runs a plan with a call an operation. Of a span the rows are a prefix of the batch on
the fast path, so a skipped layer costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from d3engine.executor.adapters import adapters_of
from d3engine.executor.bridging import BridgeStore, crossings
from d3engine.executor.choosing import choice_of_step, choose_across_ranks
from d3engine.executor.early_exit import EarlyExits
from d3engine.executor.hidden_states import Due, HiddenStateCache, LayerHooks, StateHooks
from d3engine.executor.interface import Computed, Executor, ExecutorStats
from d3engine.executor.students import StudentExecutors
from d3engine.kernels.kv_pool import FP8, Fp8Pool, KVPool
from d3engine.model.adapters import AdapterSlots, RowAdapters
from d3engine.model.config import ModelConfig
from d3engine.model.llama import Llama, Rope
from d3engine.model.shard import Ranks
from d3engine.model.weights import LlamaWeights
from d3engine.scheduling.kv_cache import FlatCopies, IntArray
from d3engine.scheduling.plan import Chosen, Plan, Span
from d3engine.scheduling.sampling_mode import SamplingMode

if TYPE_CHECKING:
    from d3engine.executor.native_spans import NativeSpans


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A plan's rows as tensors: what every layer reads."""

    rotations: Tensor  # [R, D / 2]
    entries: Tensor  # [L, R, 2] where each row's key and value go
    block_tables: Tensor  # [L, C, blocks]


class EagerExecutor(Executor):
    """Owns the KV pool's tensor; `run(plan)` computes float32 logits for the plan's `logit_rows`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device,
        kernels: Any,
        ranks: Ranks | None = None,
        bridges: BridgeStore | None = None,
        tells_prompts: bool = False,
        adapter_slots: tuple[int, int] | None = None,
    ) -> None:
        """`config` and `weights` are those of this rank's part where there are `ranks`.

        `kv_dtype` is that of the pool: None that of activations, `dtype`, or else float8_e4m3fn. `bridges` has what
        plans name. With `tells_prompts` the kernels get the rows of prompts. `adapter_slots`: adapters in a step at
        most, and their largest rank; None: rows run without adapters, as those of a draft model do.
        """
        self.device = device
        self.block_size = block_size
        self.kernels = kernels
        self.model = Llama(config, weights, self.kernels, ranks)
        self.rope = Rope(config, max_model_len, device)
        # One block more than the pool hands out: id 0 is what an empty table entry reads.
        shape = (num_blocks + 1, 2, block_size, config.num_kv_heads, config.head_dim)
        self.pool = _new_pool(shape, kv_dtype or dtype, device)
        self.stats = ExecutorStats()
        self.bridges = bridges
        self.students = StudentExecutors(bridges, weights, self.with_weights, self.stats)
        self._tells_prompts = tells_prompts
        if bridges is not None:
            bridges.count_in(self.stats)
        self._adapter_slots = adapter_slots
        self.slots = self._new_slots()
        self.kept_states = HiddenStateCache(config.hidden_size, dtype, device)
        self._hooks = StateHooks(config.num_layers, dtype, device)
        self.watch: Callable[[Plan, Tensor], Iterable[Due]] = lambda plan, hidden: ()
        """What a second model reads of a step's residual stream [R, H]."""

    def with_weights(self, weights: LlamaWeights) -> EagerExecutor:
        """The same over the same pool with other weights of such a model: a student's."""
        other = copy(self)
        other.model = Llama(self.model.config, weights, self.kernels, self.model.ranks)
        other.students = StudentExecutors(None, weights, other.with_weights, self.stats)
        return other

    def over_small_pool(self, num_blocks: int) -> EagerExecutor:
        """The same model over another pool, for a thread that runs prompts while this executor runs steps."""
        other = copy(self)
        other.pool = _new_pool((num_blocks + 1, *self.pool.shape[1:]), self.pool.dtype, self.device)
        other.slots = self._new_slots()
        other.stats = ExecutorStats()
        return other

    def _new_slots(self) -> AdapterSlots | None:
        given = self._adapter_slots
        return None if given is None else AdapterSlots(self.model.config, *given, self.device)

    def make_students(self) -> None:
        """Those that run step by step."""
        self.students.make_known()

    def take_largest(self) -> None:
        """The students of the engine's policy; what else a step needs is gone after it."""
        self.make_students()

    def run(self, plan: Plan) -> Computed:
        """Run one step; KV entries are written into the pool."""
        if (names := self.students.named(plan)) is not None:
            return self.students.run(plan, names, self, self.copy_entries)
        return self.run_share(plan)

    @torch.inference_mode()
    def run_share(self, plan: Plan, native: Callable[[Tensor], NativeSpans] | None = None) -> Computed:
        """Run one step of which all rows run these weights.

        `native` makes of the residual stream [R, H] what runs layers and LM head in this executor's place.
        """
        if native is None:
            self.stats.eager_steps += 1
        self.copy_entries(plan.copies_before)
        inputs = self._inputs(plan)
        hidden = self.model.embed(self._tensor(plan.token_ids))
        adapters = self._adapters(plan)
        captured: list[Tensor] = []
        hooks = LayerHooks(
            self._hooks.changes(plan.steered, hidden),
            self._hooks.captures(plan.captured, hidden, self.model.final_states, captured),
            self.kept_states.due(plan.drafts, hidden),
            crossings(self.bridges, plan.bridged, hidden, self.kernels),
            self.watch(plan, hidden),
        )
        spans = None if native is None else native(hidden)
        exits = None
        if plan.exits:
            own = partial(self._logits_of, hidden, adapters)
            exits = EarlyExits(plan, self.model, hidden, own if spans is None else spans.logits)
        for span in hooks.cut(plan.spans if exits is None else exits.spans()):
            hooks.up_to(span.layers.start)
            if span.projected_rows is not None:
                self._project(span, inputs, hidden, adapters)
            if span.num_rows == 0:
                continue
            if spans is None:
                self._run_span(span, plan, inputs, hidden, adapters)
            else:
                spans.run(span)
        hooks.up_to(self.model.config.num_layers)
        self.copy_entries(plan.copies_after)
        if exits is not None:
            exits.copy_entries(self.pool, inputs.entries)
            return replace(exits.computed(), captured=tuple(captured))
        logits = self._logits(plan, hidden, adapters) if spans is None else spans.logits(plan.logit_rows)
        return Computed(logits, captured=tuple(captured))

    def _logits(self, plan: Plan, hidden: Tensor, adapters: RowAdapters | None) -> Tensor | Chosen:
        """The logits of the plan's rows, or the tokens that ranks have chosen among themselves."""
        rows = plan.logit_rows
        if self.model.ranks is not None and (kind := choice_of_step(plan)) is not SamplingMode.HOST:
            return choose_across_ranks(self.model, hidden[self._tensor(rows)], plan, kind)
        if rows.size == plan.num_rows and not plan.prompt_rows and plan.drafts is None:
            return self.model.logits(hidden, adapters=adapters)
        return self._logits_of(hidden, adapters, rows)

    def _logits_of(self, hidden: Tensor, adapters: RowAdapters | None, rows: IntArray) -> Tensor:
        """The logits [n, V] of these rows."""
        chosen = self._tensor(rows)
        return self.model.logits(hidden[chosen], adapters=None if adapters is None else adapters.of(chosen))

    def _adapters(self, plan: Plan) -> RowAdapters | None:
        """Those of a plan's rows; None where no row has one."""
        own = adapters_of(plan.sequences)
        if own is None or self.slots is None:
            return None
        return self.slots.of_rows(own, plan.row_chunks)

    def copy_entries(self, copies: FlatCopies) -> None:
        """Copy entries of the pool, flat (sources, targets), as a plan has them before or after a step."""
        if copies is not None:
            sources, targets = copies
            with torch.inference_mode():
                self.kernels.copy_entries(self.pool, self._tensor(sources), self._tensor(targets))

    def _inputs(self, plan: Plan) -> _Inputs:
        blocks = -(-int(plan.stops.max()) // self.block_size)
        tables = plan.tables[plan.slots, :, :blocks].transpose(1, 0, 2).astype(np.int64)
        offset = plan.positions % self.block_size
        keys = tables[:, plan.row_chunks, plan.positions // self.block_size] * (2 * self.block_size) + offset
        entries = np.stack((keys, keys + self.block_size), axis=-1)
        lengths = None
        if self.rope.depends_on_length:
            lengths = np.maximum(plan.prompt_lengths[plan.row_chunks], plan.positions + 1)
        rotations = self.rope.rotations(
            self._tensor(plan.positions), None if lengths is None else self._tensor(lengths)
        )
        on_device = torch.from_numpy(np.ascontiguousarray(tables)).to(self.device, self.kernels.TABLE_DTYPE)
        return _Inputs(rotations, self._tensor(entries), on_device)

    def _run_span(self, span: Span, plan: Plan, inputs: _Inputs, hidden: Tensor, adapters: RowAdapters | None) -> None:
        if span.rows is None or span.chunks is None:
            which: slice | IntArray = slice(0, span.num_chunks)
            chunks: slice | Tensor = slice(0, span.num_chunks)
            rows: slice | Tensor = slice(0, span.num_rows)
            starts = plan.query_starts[: span.num_chunks + 1]
        else:
            chunks, rows = self._tensor(span.chunks), self._tensor(span.rows)
            sizes = np.diff(plan.query_starts)[span.chunks]
            starts = np.concatenate(([0], np.cumsum(sizes)))
            which = span.chunks
        state = hidden[rows]  # a view of a prefix, a copy of scattered rows
        own = None if adapters is None else adapters.of(rows)
        if span.part == "mlp":
            self.model.mlp(span.layers.start, state, adapters=own)
        else:
            layers = slice(span.layers.start, span.layers.stop)
            run = self.model.layer if span.part == "layer" else self.model.attention
            told = {"prompt_lengths": plan.prompt_lengths[which].tolist()} if self._tells_prompts else {}
            attention = self.kernels.attention_inputs(
                starts.tolist(), plan.stops[which].tolist(), inputs.block_tables[layers, chunks], **told
            )
            entries = inputs.entries[layers, rows].unbind()
            rotations = self.rope.of_layers(inputs.rotations[rows])
            for layer, own_entries, own_attention in zip(span.layers, entries, attention, strict=True):
                run(layer, state, rotations[layer], self.pool, own_entries, own_attention, adapters=own)
        if span.rows is not None:
            hidden[rows] = state

    def _project(self, span: Span, inputs: _Inputs, hidden: Tensor, adapters: RowAdapters | None) -> None:
        assert span.projected_rows is not None
        rows = self._tensor(span.projected_rows)
        rotations = self.rope.of_layers(inputs.rotations[rows])
        own = None if adapters is None else adapters.of(rows)
        for layer in span.layers:
            entries = inputs.entries[layer, rows]
            self.model.project(layer, hidden[rows], rotations[layer], self.pool, entries, adapters=own)

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)


def _new_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> KVPool:
    values = _zeros(shape, dtype, device)
    if dtype != FP8:
        return values
    blocks, halves, block_size, kv_heads, _ = shape
    return Fp8Pool(values, _zeros((blocks, halves, kv_heads, block_size), torch.float32, device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, but on a CPU of pages that the system hands out when they are first touched.

    A pool is made for all that may come; what never comes then costs neither time nor memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    first = -pages.ctypes.data % _ALIGNMENT
    return torch.from_numpy(pages[first : first + size]).view(dtype).view(shape)


_ALIGNMENT = 64
"""Bytes at which torch's own memory begins: a cache line."""
