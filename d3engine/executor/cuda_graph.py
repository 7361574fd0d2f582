"""Decoding in CUDA graphs: one graph for each (rows, layers), so that a skipped layer costs nothing at all.

Which layers a step runs is known on the host, from positions alone: a step of depth d replays a graph that holds d
layers. Inside it, kernels read from device memory how many rows are young enough for each layer, so one graph serves
every mixture of ages below its youngest row. Tokens, positions, steps and block tables stay on the device and are
advanced there: the host starts a run of steps, and looks at the tokens when it is over, or while it goes on.

The rows that verify a draft are rows of decoding too, several of one sequence: a layer writes all their entries before
any of them attends. Where the host chooses their tokens, a graph ends with the logits. Prompts and whatever else is
neither go through the eager executor, on the same kernels and pool.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from d3engine.depth.schedule import NEVER, Schedule
from d3engine.executor.adapters import adapters_of
from d3engine.executor.choosing import DeviceChoice
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.graph_shapes import (
    CaptureMemoryError,
    CudaGraphs,
    GraphBridges,
    GraphShape,
    Repeats,
    Step,
    batch_sizes,
    crossed_at,
    expected_shapes,
)
from d3engine.executor.interface import Computed, DeviceBlockTables, Executor, to_device
from d3engine.executor.streaming import LAUNCHED_AHEAD, HostTokens, StreamingRun
from d3engine.executor.verification import after_draft
from d3engine.kernels.decode_rows import DecodeRows, tokens_and_scores
from d3engine.model.adapters import RowAdapters, matrices_of
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import Chosen, ExecutorCapabilities, MultiStep, Plan
from d3engine.scheduling.sampling_mode import SamplingMode, choice_of_token
from d3engine.scheduling.sequence import Sequence

_log = logging.getLogger(__name__)

MAX_GRAPHS = 2048
"""Graphs to keep: several times what one policy needs (sizes times depths), but each request may bring its own."""


@dataclass(frozen=True)
class DraftOnDevice:
    """Tokens that a device chooses: the first `lengths[n]` in the columns `columns[n]` of `rows.chosen`."""

    rows: DecodeRows
    columns: IntArray  # [N]
    lengths: IntArray  # [N]

    def chosen(self) -> Chosen:
        """Wait for the device: [most of `lengths`, N]."""
        yielded = tokens_and_scores(self.rows.yielded[: self.lengths.max()].cpu(), self.rows.tokens.shape[0])
        tokens, scores = (found.numpy()[:, self.columns] for found in yielded)
        return Chosen(tokens, scores)


class GraphExecutor(Executor):
    """Runs plans that a device can carry out by itself as graphs, and all others by `eager`.

    Args:
        eager: owns the pool, and says how a layer is run.
        max_num_seqs: rows of a decode step at most.
        max_model_len: entries of a sequence at most.
        max_steps: steps of a run at most.
        logit_rows: rows at most of a graph that leaves the choice of tokens to the host; 0: there is none.
        is_draft: whether the model drafts for another; such graphs hold rows of prompts too.
    """

    def __init__(
        self,
        eager: EagerExecutor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_steps: int,
        logit_rows: int = 0,
        is_draft: bool = False,
    ) -> None:
        config = eager.model.config
        self._eager = eager
        self.model, self.pool = eager.model, eager.pool
        self._kernels = eager.kernels
        self._device = eager.device
        self._has_ranks = eager.model.ranks is not None
        self._recorder = CudaGraphs(eager.device) if eager.device.type == "cuda" else Repeats()
        self._max_model_len = max_model_len
        blocks = -(-max_model_len // eager.block_size)
        self.logit_rows = logit_rows
        self._is_draft = is_draft
        self._sizes = batch_sizes(logit_rows if is_draft else max(max_num_seqs, logit_rows))
        self._rows = DecodeRows.empty(
            self._sizes[-1], config.num_layers, blocks, 2 * eager.rope.table.shape[1], max_steps, eager.device
        )
        self._host_tokens = HostTokens(self._rows)
        self._followed: StreamingRun | None = None
        self._tables = DeviceBlockTables(max_num_seqs, config.num_layers, blocks, eager.device)
        self._query_starts = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=eager.device)
        numbers = self._sizes[-1] * (3 + config.num_layers)
        self._from_host = torch.empty(numbers, dtype=torch.int64, pin_memory=eager.device.type == "cuda")
        self._choice = DeviceChoice(eager.model, self._sizes[-1], eager.device)
        self._all_layers = tuple(range(config.num_layers))
        held = self._size_for(logit_rows) if logit_rows else 0
        self._logits = torch.empty(held, config.vocab_size, dtype=torch.float32, device=eager.device)
        self._graphs: OrderedDict[GraphShape, Step] = OrderedDict()  # the one used last stands last
        self._expected: Iterator[GraphShape] = iter(())
        self._num_expected = self.num_deepest = 0
        self._has_told = False  # that there was no memory for a graph, not even in place of others
        self.max_steps = max_steps
        self._bridges = GraphBridges(eager.bridges, eager.kernels, self._sizes[-1], eager.device)
        self._adapters = torch.full((self._sizes[-1],), -1, dtype=torch.int32, device=eager.device)
        self.capabilities = ExecutorCapabilities(bridges=True, launched_ahead=LAUNCHED_AHEAD)
        self.stats = eager.stats
        self.stats.executor = "CUDA graphs"

    @property
    def eager(self) -> EagerExecutor:
        """What runs the steps that no graph holds."""
        return self._eager

    @torch.inference_mode()
    def run(self, plan: Plan) -> Computed:
        """Run the steps of a plan: tokens, where the device has chosen them itself, or logits as `eager` gives them."""
        if plan.multi_step is not None:
            self.stats.graph_steps += plan.num_steps
            return Computed(self._run_ahead(plan, plan.multi_step))
        if plan.num_rows > self.logit_rows or not self._runs_whole_rows(plan):
            return self._eager.run(plan)
        return Computed(self._logits_of(plan))

    def _run_ahead(self, plan: Plan, multi_step: MultiStep) -> Chosen:
        control, run = multi_step.control, self._followed
        is_new = run is None or run.control is not control
        if is_new:
            self._followed = run = None  # it is over, and holds its graphs
        num_given = 0 if run is None else run.num_steps
        if num_given < multi_step.num_steps:
            shapes = self._shapes(multi_step, self._write_adapters(plan.sequences), num_given)
            steps = [self._graph(shape) for shape in shapes]
            self._write_tables(plan, multi_step)  # all else of a run that becomes longer stands on the device
            if is_new:
                self._upload(plan, multi_step)
            if control is None:
                for step in steps:
                    step()
                return self._download(multi_step)
            if run is None:
                self._followed = run = StreamingRun(control, plan.num_rows, self._host_tokens)
            run.add(steps)
        assert run is not None
        return run.next_step()

    def _write_adapters(self, sequences: AnySequence[Sequence]) -> tuple[str, ...]:
        """Put the adapters of each row's sequence where graphs read them; the matrices that they have maps for."""
        slots, own = self._eager.slots, adapters_of(sequences)
        if slots is None or own is None:
            return ()
        self._adapters[: len(own)] = to_device(np.array(slots.numbers_of(own), dtype=np.int32), self._device)
        return matrices_of(own)

    # -- rows of drafts and verifications ------------------------------------------------------------------------

    def _runs_whole_rows(self, plan: Plan) -> bool:
        """Whether the rows of a plan are answers', or a draft's, through all layers, and nothing else is wanted."""
        first, drafts = plan.spans[0], plan.drafts
        others = (plan.prompt_rows, plan.exits, plan.captured, plan.steered, plan.bridged)
        return (
            first.layers == range(len(self._all_layers))
            and first.part == "layer"
            and (self._is_draft or bool((plan.starts >= plan.prompt_lengths).all()))
            and not any(others)
            and plan.copies_before is None
            and plan.copies_after is None
            and (drafts is None or not (drafts.kept or drafts.resumed))
            and self._eager.students.named(plan) is None
        )

    def _logits_of(self, plan: Plan) -> Tensor:
        """Float32 [plan.logit_rows, V]."""
        self.stats.graph_steps += 1
        adapted = self._write_adapters([plan.sequences[chunk] for chunk in plan.row_chunks.tolist()])
        step = self._graph(GraphShape(self._size_for(plan.num_rows), self._all_layers, SamplingMode.HOST, (), adapted))
        self._write_rows(plan, plan.row_chunks, plan.token_ids, plan.positions, plan.stops)
        step()
        return self._logits[to_device(plan.logit_rows, self._device)]

    @torch.inference_mode()
    def draft(self, plan: Plan, lengths: IntArray) -> DraftOnDevice:
        """Draft `lengths` [n] tokens for a plan's n sampled chunks, the first of them behind all of the plan's rows."""
        sequences = [plan.sequences[chunk] for chunk in plan.sampled.tolist()]
        choice = max(map(choice_of_token, sequences))
        longest_first = (-lengths).argsort(kind="stable")
        counts = [plan.num_rows, *(int((lengths > taken).sum()) for taken in range(1, int(lengths.max())))]
        steps = [self._graph(GraphShape(self._size_for(count), self._all_layers, choice)) for count in counts]
        others = np.delete(np.arange(plan.num_rows), plan.sample_rows)
        stops = plan.stops.copy()
        stops[plan.sampled] += lengths - 1
        order = np.concatenate((plan.sample_rows[longest_first], others))
        self._write_rows(plan, plan.row_chunks[order], plan.token_ids[order], plan.positions[order], stops)
        self._choice.write([after_draft(sequences[place]) for place in longest_first.tolist()], choice)
        for count, step in zip(counts, steps, strict=True):
            self._rows.num_rows.fill_(count)
            step()
        return DraftOnDevice(self._rows, longest_first.argsort(), lengths)

    @torch.inference_mode()
    def verify(self, plan: Plan, multi_step: MultiStep, known: list[list[int]], draft: DraftOnDevice) -> DraftOnDevice:
        """Choose what follows each drafted token, and the last one before it, of all chunks in turn: in one step.

        A chunk's tokens are those `known` [C], then those of its column of `draft`.
        """
        num_known = np.array([len(tokens) for tokens in known])
        counts = num_known + draft.lengths
        chunks = np.arange(counts.size).repeat(counts)
        nth = np.arange(chunks.size) - (np.cumsum(counts) - counts)[chunks]
        drafted = (nth >= num_known[chunks]).nonzero()[0]
        tokens = np.zeros(chunks.size, dtype=np.int64)
        tokens[nth < num_known[chunks]] = np.concatenate(known)
        sequences = [plan.sequences[chunk] for chunk in chunks.tolist()]
        adapted = self._write_adapters(sequences)
        shape = GraphShape(self._size_for(chunks.size), self._all_layers, multi_step.choice, (), adapted)
        step = self._graph(shape)
        self._write_rows(plan, chunks, tokens, plan.positions[chunks] + nth, plan.stops + counts - 1)
        taken, columns = (nth - num_known[chunks])[drafted], draft.columns[chunks[drafted]]
        to, at, of = to_device(np.stack((drafted, taken, columns)), self._device)
        self._rows.tokens[to] = draft.rows.chosen[at, of]
        self._choice.write(sequences, multi_step.choice)
        self.stats.graph_steps += 1
        step()
        return DraftOnDevice(self._rows, np.arange(chunks.size), np.ones_like(chunks))

    def _write_rows(
        self, plan: Plan, chunks: IntArray, token_ids: IntArray, positions: IntArray, stops: IntArray
    ) -> None:
        """Put rows of a plan's `chunks` where graphs read them, with the blocks of each chunk up to `stops` [C]."""
        rows, count = self._rows, chunks.size
        self._followed = None  # it is over: its rows give way
        blocks = -(-stops // self._eager.block_size)
        self._tables.write_rows(plan, blocks, rows.block_tables, plan.slots[chunks])
        steps = np.maximum(positions + 1 - plan.prompt_lengths[chunks], 0)
        numbers = np.stack((token_ids, positions, steps)).astype(np.int64)
        rows.tokens[:count], rows.positions[:count], rows.steps[:count] = to_device(numbers, self._device)
        rows.cutoffs[:count] = NEVER
        rows.num_rows.fill_(count)
        rows.taken.zero_()

    def make_students(self) -> None:
        """Those of the eager executor, which runs their rows."""
        self._eager.make_students()

    def take_largest(self) -> None:
        """Capture a graph that needs most memory: all rows through all layers, and a choice that needs logits and more.

        Penalties also need to know the tokens that each row has seen, of the whole vocabulary.
        """
        self._eager.take_largest()
        with torch.inference_mode():
            self._graph(GraphShape(self._sizes[-1], self._all_layers, SamplingMode.PENALISE))

    @torch.inference_mode()
    def draw_from_logits(self) -> None:
        """Draw a token as graphs do from the logits of adapters: others draw inside the product. Changes nothing."""
        logits = torch.zeros(1, self.model.config.vocab_size, dtype=torch.float32, device=self._device)
        self._choice.from_logits(logits, self._rows.steps[:1], SamplingMode.DRAW)

    def expect(self, schedule: Schedule | None) -> None:
        """`prepare_next` captures the graphs that answers of this schedule need, as many as are kept, and before them
        those that leave the choice of tokens to the host."""
        sizes = [size for size in self._sizes if size <= len(self._logits)]
        of_logits = (GraphShape(size, self._all_layers, SamplingMode.HOST) for size in reversed(sizes))
        others = () if schedule is None else expected_shapes(schedule, self._sizes, self._max_model_len)
        shapes = list(islice(chain(of_logits, others), MAX_GRAPHS))
        self._expected, self._num_expected = iter(shapes), len(shapes)
        self.num_deepest = len({shape for shape in shapes if shape.layers == shapes[0].layers})

    def expected_bytes(self) -> int:
        """About what the driver will take for the graphs that are expected; after `take_largest`."""
        return self._recorder.bytes_for(self._num_expected)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Capture one of the graphs that are expected and not there yet, as long as there is memory to spare."""
        shape = next((shape for shape in self._expected if shape not in self._graphs), None)
        if shape is None:
            return False
        if self._recorder.has_reserve() and self._try_capture(shape):
            return True
        self._expected = iter(())
        _log.warning("no memory to spare for further CUDA graphs: the rest is captured on first use")
        return False

    # -- graphs ------------------------------------------------------------------------------------------------

    def _size_for(self, count: int) -> int:
        """The rows of the smallest graph that holds `count`."""
        return next(size for size in self._sizes if size >= count)

    def _shapes(self, multi_step: MultiStep, adapted: tuple[str, ...], first: int) -> list[GraphShape]:
        """Rows and layers of each step of a run from `first` on; its first row is the one that runs most."""
        rows = self._size_for(multi_step.steps.size)
        runs = (multi_step.steps[0] + np.arange(first, multi_step.num_steps))[:, None] < multi_step.cutoffs[0]
        layers = [tuple(active.nonzero()[0].tolist()) for active in runs]
        return [
            GraphShape(rows, those, multi_step.choice, crossed_at(multi_step, taken), adapted)
            for taken, those in enumerate(layers, first)
        ]

    def _graph(self, shape: GraphShape) -> Step:
        if shape not in self._graphs and not self._try_capture(shape) and not self._try_again(shape):
            if not self._has_told:
                _log.warning("no memory for a CUDA graph: steps of %d rows run without one", shape.rows)
            self._has_told = True
            rows = self._rows.first(shape.rows)
            self._keep(shape, lambda: self._step(rows, shape))  # or every run would try again
        self._graphs.move_to_end(shape)
        return self._graphs[shape]

    def _try_capture(self, shape: GraphShape) -> bool:
        """Capture a graph; False where there is no memory for it."""
        # A trial step that one rank breaks off leaves its collectives to the others: that is the end.
        with suppress(CaptureMemoryError if self._has_ranks else torch.OutOfMemoryError):
            self._capture(shape)
            return True
        torch.cuda.empty_cache()  # with no error under way, which would hold what the step has taken
        return False

    def _try_again(self, shape: GraphShape) -> bool:
        """Capture a graph in the memory of the older half of the others."""
        # With ranks, one more trial step, or a graph that only this rank lacks, would wait for the others for ever.
        if self._has_ranks or self._has_told:  # or dropping graphs was of no use before
            return False
        for _ in range(len(self._graphs) // 2):
            self._drop_oldest()
        torch.cuda.empty_cache()
        return self._try_capture(shape)

    def _capture(self, shape: GraphShape) -> None:
        begun = time.perf_counter()
        rows = self._rows.first(shape.rows)
        num_rows, taken = rows.num_rows.clone(), rows.taken.clone()  # a run may be under way
        rows.num_rows.zero_()  # recording runs a step: on no rows
        self._bridges.prepare(shape.crossed)
        try:
            self._keep(shape, self._recorder.record(lambda: self._step(rows, shape)))
        finally:
            rows.num_rows.copy_(num_rows)
            rows.taken.copy_(taken)
        self.stats.graphs_captured += 1
        self.stats.graph_capture_seconds += time.perf_counter() - begun

    def _keep(self, shape: GraphShape, step: Step) -> None:
        """Keep what carries out this shape, and drop what was used longest ago where that is too much."""
        self._graphs[shape] = step
        while len(self._graphs) > MAX_GRAPHS:
            self._drop_oldest()
        # All ranks must keep the same graphs, and each measures bytes by itself: there the number alone decides.
        while not self._has_ranks and len(self._graphs) > 1 and self._recorder.is_full():
            self._drop_oldest()
        self.stats.graph_memory_bytes = self._recorder.memory_bytes()

    def _drop_oldest(self) -> None:
        """Drop the graph used longest ago; a run that needs it holds it until its tokens are there."""
        self._recorder.forget(self._graphs.popitem(last=False)[1])

    def _step(self, rows: DecodeRows, shape: GraphShape) -> None:
        """What a graph holds: from the tokens that stand in `rows` to the next ones."""
        kernels, model, rope = self._kernels, self.model, self._eager.rope
        kernels.begin_step(rows, rope.generated_table, self._eager.block_size)
        hidden = model.embed(rows.tokens)
        attention = kernels.decode_attention_inputs(
            rows, self._query_starts[: rows.tokens.shape[0] + 1], self._max_model_len
        )
        rotations = rope.of_layers(rows.rotations)
        crossings = self._bridges.begin(shape.crossed, rows)
        adapters, slots = None, self._eager.slots
        if shape.adapted and slots is not None:
            adapters = RowAdapters(slots, self._adapters[: rows.tokens.shape[0]], shape.adapted)
        for layer in shape.layers:
            if crossings is not None:
                crossings.up_to(layer, hidden)
            active = rows.active_rows[layer : layer + 1]
            entries = rows.entries[layer]
            model.layer(layer, hidden, rotations[layer], self.pool, entries, attention[layer], active, adapters)
        if crossings is not None:
            crossings.up_to(model.config.num_layers, hidden)
        if shape.choice is SamplingMode.HOST:
            self._logits[: shape.rows] = model.logits(hidden, rows.num_rows, adapters)
            return
        kernels.end_step(rows, *self._choice.choose(hidden, rows, shape.choice, adapters))

    # -- what goes to the device, and comes from it --------------------------------------------------------------

    def _write_tables(self, plan: Plan, multi_step: MultiStep) -> None:
        """Put the blocks for all steps of the run where the graphs read them; the device may be at some of these."""
        blocks = -(-(plan.stops + multi_step.num_steps - 1) // self._eager.block_size)
        self._tables.write_rows(plan, blocks, self._rows.block_tables, plan.slots)

    def _upload(self, plan: Plan, multi_step: MultiStep) -> None:
        """Put the plan's rows where the graphs read them."""
        rows, count = self._rows, plan.num_rows
        numbers = np.concatenate((plan.token_ids, plan.positions, multi_step.steps, multi_step.cutoffs.ravel()))
        given = self._from_host[: numbers.size]
        given.numpy()[:] = numbers
        given = given.to(self._device, non_blocking=True)  # the last run is over, so nothing reads the buffer any more
        rows.tokens[:count] = given[:count]
        rows.positions[:count] = given[count : 2 * count]
        rows.steps[:count] = given[2 * count : 3 * count]
        rows.cutoffs[:count] = given[3 * count :].view(count, -1)
        self._choice.write(plan.sequences, multi_step.choice)
        self._bridges.write(multi_step.bridges)
        rows.num_rows.fill_(count)
        rows.taken.zero_()

    def _download(self, multi_step: MultiStep) -> Chosen:
        """Wait for the run, and take its tokens."""
        steps, count = multi_step.num_steps, multi_step.steps.size
        chosen, scores = tokens_and_scores(self._rows.yielded[:steps].cpu(), self._rows.tokens.shape[0])
        return Chosen(chosen[:, :count].numpy(), scores[:, :count].numpy())
