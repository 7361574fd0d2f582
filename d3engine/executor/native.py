"""Decoding on a CPU by the native library: a whole run of steps is one call.

Like the graphs of a GPU it takes the plans whose steps need nothing of the host, and single steps, of answers or of
prompts, whose tokens it chooses as well unless more is wanted than one of each row. What is looked at between layers,
as early exits are, goes through them here, span by span; half layers go through the eager executor on the same weights
and the same pool, by themselves: their neighbours stay here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.depth import NEVER
from d3engine.executor.adapters import adapters_of
from d3engine.executor.choosing import choice_of_step
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.hidden_states import NativeStateHooks
from d3engine.executor.interface import Computed, Executor
from d3engine.executor.native_choices import (
    ChoicesOfStep,
    FormsOfRun,
    drafts_of,
    draws_of,
    ends_of,
    ends_of_all,
    reporting_chunks,
    text_drafts_of,
)
from d3engine.executor.native_spans import NativeSpans
from d3engine.executor.native_weights import native_bridges, native_model
from d3engine.executor.shares import joined, share_of
from d3engine.executor.streaming import GoingOn
from d3engine.executor.students import StudentExecutors
from d3engine.kernels.native.library import Decoder
from d3engine.kernels.native.model import NativeBridges, NativeMaps
from d3engine.kernels.native.runs import HiddenStates, Hooks, Rows
from d3engine.kernels.native.speculative_loop import DraftCosts, LoopLogits
from d3engine.model.adapters import Adapter
from d3engine.scheduling.kv_cache import IntArray
from d3engine.scheduling.plan import BoolArray, Chosen, Cycled, ExecutorCapabilities, MultiStep, Plan, RunControl
from d3engine.scheduling.sampling_mode import SamplingMode
from d3engine.scheduling.sequence import Sequence

MAX_ROWS = 512
"""Rows that go through the layers at once: more go one such part after the other. Enough that weights are widened
seldom, and few enough that what they leave behind between two products takes little memory."""


TIMED_ROWS = (1, 2, 4, 6, 8, 16, 32)
"""Rows of the steps that are timed, twice each, where drafts are to pay: the time of some 25 steps for each model."""

LOGITS_BYTES = 2**26
"""What a run may keep of the logits of rows that want log-probabilities, and of captured hidden states."""


class NativeExecutor(Executor):
    """Runs decode steps natively, and all others by `eager`.

    Args:
        eager: owns the pool and holds the model, whose activations are float32.
        max_num_seqs: rows of a run at most, and slots of the block tables.
        max_model_len: entries of a sequence at most.
        max_steps: steps of a run at most.
        num_threads: threads that a step is spread over, the caller's among them.
        isa: an instruction set of the library, "auto" for the best that this machine has.
        head_tokens: int64, ascending: of a draft model, the only tokens that it proposes; None: all.

    Raises:
        NativeError: for weights or sizes that the library does not know.
    """

    def __init__(
        self,
        eager: EagerExecutor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_steps: int,
        num_threads: int,
        isa: str = "auto",
        head_tokens: Tensor | None = None,
    ) -> None:
        self._eager = eager
        self.model, self.pool = eager.model, eager.pool
        given: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "max_steps": max_steps}
        given |= {"num_threads": num_threads, "isa": isa}
        self._students: StudentExecutors[NativeExecutor] = StudentExecutors(  # over the same pool
            eager.students.store,
            eager.model.weights,
            lambda weights: NativeExecutor(eager.with_weights(weights), **given),
            eager.stats,
        )
        self.max_steps = max_steps
        self._max_rows = max(max_num_seqs, MAX_ROWS)
        self._decoder = Decoder(
            native_model(eager, head_tokens),
            max_blocks=-(-max_model_len // eager.block_size),
            num_slots=max_num_seqs,
            max_rows=self._max_rows,
            num_threads=num_threads,
            isa=isa,
        )
        self._vocab = eager.model.config.vocab_size
        self.capabilities = ExecutorCapabilities(
            SamplingMode.REPORT,
            max(1, LOGITS_BYTES // (4 * self._vocab)),
            drafts=True,
            text_drafts=True,
            bridges=True,
            students=True,
            hooks=True,
            states=max(1, LOGITS_BYTES // (4 * eager.model.config.hidden_size)),
            openings=not eager.rope.depends_on_length,  # prompts are left to the eager executor otherwise
        )
        self._draft_model: NativeExecutor | None = None
        self._costs: DraftCosts | None = None
        self._bridges: dict[str, NativeBridges] = {}
        self._maps: weakref.WeakKeyDictionary[Adapter, NativeMaps] = weakref.WeakKeyDictionary()
        self._hooks = NativeStateHooks(eager.model)
        self._followed: _Run | None = None
        self.stats = eager.stats
        self.stats.backend = "native"
        self.stats.executor = f"native ({self._decoder.isa}, threads: {num_threads})"

    def make_students(self) -> None:
        """Those that run over this executor's pool."""
        self._students.make_known()

    def draft_with(self, draft_model: NativeExecutor | None) -> None:
        """Let a second model, of the same vocabulary, draft in multi-step plans, and time the steps of both."""
        self._draft_model = draft_model
        of_draft = None if draft_model is None else draft_model._step_seconds()
        self._costs = DraftCosts.of(self._step_seconds(), of_draft)

    def _step_seconds(self) -> dict[int, float]:
        """Seconds of a step by its rows, the better of two each: over the pool's own blocks, which nothing has yet."""
        found = {}
        layers, blocks = self._decoder.table_shape[1:]
        room = min(blocks * self._eager.block_size, self._eager.rope.generated_table.shape[0])
        for count in TIMED_ROWS:
            if count > room:
                break
            positions = np.arange(count)
            own = np.ones((1, layers, blocks), np.int32)  # block 1 stands for all: what is written there is of no use
            tables = np.concatenate((own, np.zeros((self._decoder.table_shape[0] - 1, layers, blocks), np.int32)))
            zeros = np.zeros(count, np.int64)
            rows = Rows(zeros, positions, zeros, zeros, np.full((count, layers), NEVER), tables)
            times = []
            for _ in range(2):
                begun = time.perf_counter()
                self._decoder.run(rows, 1)
                times.append(time.perf_counter() - begun)
            found[count] = min(times)
        return found

    def run(self, plan: Plan) -> Computed:
        """Run the steps of a plan: their tokens, or logits of a single step that is the host's to choose from."""
        names = self._students.named(plan)
        running = {None} if names is None else set(names)
        for name, other in ((None, self), *self._students.made()):
            if running != {name}:
                other._end_course()  # it would go on writing into the pool, which is others' now
        if names is None:
            return self._run(plan)
        return self._students.run(plan, names, self, self._eager.copy_entries)

    def run_share(self, plan: Plan) -> Computed:
        """The logits of a single step of which all rows run these weights; its copies are the caller's."""
        return self._divided(plan, self._ways(plan))

    def _run(self, plan: Plan) -> Computed:
        if plan.multi_step is not None:
            computed = (
                self._open(plan, plan.multi_step) if plan.multi_step.opens else self._run_ahead(plan, plan.multi_step)
            )
            found = computed.logits
            assert isinstance(found, Chosen | Cycled)
            self.stats.native_steps += found.num_steps if isinstance(found, Chosen) else found.num_passes
            return computed
        self._end_course()
        ways = self._ways(plan)
        if len(ways) < 2 and self._logits_of_step not in ways:
            return self._divided(plan, ways)  # with its copies
        self._eager.copy_entries(plan.copies_before)
        if len(ways) > 1:
            computed = self._divided(plan, ways)
        else:
            self.stats.native_steps += 1
            computed = self._single(plan)
        self._eager.copy_entries(plan.copies_after)
        return computed

    # -- runs --------------------------------------------------------------------------------------------------

    def _run_ahead(self, plan: Plan, multi_step: MultiStep) -> Computed:
        """A run, or the next step of one that goes on by itself; the first one begins it."""
        control, run = multi_step.control, self._followed
        if control is None or run is None or run.control is not control:
            self._end_course()
            run = self._begin(plan, multi_step)
        if control is not None:
            self._followed = run
            run.found = self._decoder.take(all_done=control.takes_all)
        if multi_step.cycles:
            return Computed(run.cycled())
        first, chosen = run.num_taken, run.chosen()
        captured = self._hooks.captured(plan, run.hooks, slice(first, run.num_taken))
        return Computed(chosen, captured=captured, num_before=first)

    def _begin(self, plan: Plan, multi_step: MultiStep) -> _Run:
        """Begin a run; one whose steps the host does not take one by one is over by then."""
        sequences, steps, control = plan.sequences, multi_step.num_steps, multi_step.control
        rows = self._rows(plan, multi_step)
        if multi_step.cycles:
            forms = FormsOfRun.of_loop(sequences)
            loop = self._loop(plan, multi_step, forms)
            run = _Run(control, forms, loop["logits"] and loop["logits"].logits)
            if control is None:
                run.found = self._decoder.run_speculative_loop(rows, steps, **loop)
            else:
                self._decoder.begin_speculative_loop(rows, steps, control.words, **loop)
            return run
        forms, hooks, asked = FormsOfRun.of(sequences), self._hooks.of(plan, steps), self._logits(plan, multi_step)
        run = _Run(control, forms, asked.get("logits"), hooks)
        asked |= {"draws": draws_of(sequences, multi_step.choice, forms, self._vocab), "hooks": hooks}
        if control is None:
            run.found = self._decoder.run(rows, steps, ends=ends_of_all(sequences), **asked)
        else:
            self._decoder.begin(rows, steps, control.words, **asked)
        return run

    def _open(self, plan: Plan, multi_step: MultiStep) -> Computed:
        """The plan's own step, and the run behind it."""
        self._end_course()
        opening = self._single(plan).logits
        assert isinstance(opening, Chosen), "a run opens with a step that wants nothing of the host"
        opened, going_on = time.monotonic(), GoingOn.of(plan, opening)
        if not going_on.chunks.size:
            return Computed(opening)
        found = self._decoder.run(
            self._rows(plan, multi_step, going_on),
            multi_step.num_steps - 1,
            draws=draws_of(going_on.sequences, multi_step.choice, FormsOfRun({}), self._vocab),
            ends=ends_of_all(going_on.sequences),
        )
        token_ids, scores = going_on.spread(*found)
        tokens, all_scores = np.concatenate((opening.token_ids, token_ids)), np.concatenate((opening.scores, scores))
        return Computed(Chosen(tokens, all_scores, opened=opened))

    def _loop(self, plan: Plan, multi_step: MultiStep, forms: FormsOfRun) -> dict[str, Any]:
        """What the library gets of the drafts of a plan, and of its choices."""
        sequences, iterations = plan.sequences, multi_step.num_steps
        are_open = all(sequence.draft is None or sequence.draft.rule.by_cost for sequence in sequences)
        costs = self._costs if are_open else None
        drafts = drafts_of(sequences, by_cost=costs is not None)
        logits, reporting = None, reporting_chunks(sequences)
        if reporting:
            reports = np.zeros(len(sequences), np.uint8)
            reports[reporting] = 1
            shape = (iterations, len(sequences), drafts.most + 1, self._vocab)
            logits = LoopLogits(np.empty(shape, np.float32), reports)
        has_model = multi_step.draft_model is not None
        return {
            "drafts": drafts,
            "states": self._eager.kept_states.with_room(int(drafts.places.max()) + drafts.most).numpy(),
            "ends": ends_of(sequences),
            "draws": draws_of(sequences, multi_step.choice, forms, self._vocab),
            "by_text": text_drafts_of(sequences, iterations * (drafts.most + 1), costs, multi_step),
            "draft_model": self._draft_model._decoder if has_model and self._draft_model is not None else None,
            "logits": logits,
        }

    def _rows(self, plan: Plan, multi_step: MultiStep, going_on: GoingOn | None = None) -> Rows:
        """The rows with which a run begins; behind an opening, of what goes on."""
        sequences, token_ids, positions, bridges = plan.sequences, plan.token_ids, plan.positions, multi_step.bridges
        chunks: IntArray | slice = slice(None)
        if going_on is not None:
            sequences, token_ids, chunks = going_on.sequences, going_on.token_ids, going_on.chunks
            positions = plan.stops[chunks]
            bridges = bridges and tuple(bridges[chunk] for chunk in going_on.chunks.tolist())
        return Rows(
            token_ids,
            positions,
            multi_step.steps[chunks],
            plan.slots[chunks],
            multi_step.cutoffs[chunks],
            plan.tables,
            [self._native(name) for name in bridges] or None,
            self._maps_of(sequences),
        )

    def _maps_of(self, sequences: list[Sequence]) -> list[NativeMaps | None] | None:
        """The maps of each sequence's adapter; None where none has one, or rows run without, as a draft model's do."""
        own = None if self._eager.slots is None else adapters_of(sequences)
        if own is None:
            return None
        for adapter in own:
            if adapter is not None and adapter not in self._maps:
                self._maps[adapter] = NativeMaps(adapter.maps)
        return [None if adapter is None else self._maps[adapter] for adapter in own]

    def _native(self, name: str | None) -> NativeBridges | None:
        """The bridges of this name as the library reads them."""
        if name is not None and name not in self._bridges:
            assert self._eager.bridges is not None, "a plan names bridges that no schedule was checked for"
            self._bridges[name] = native_bridges(self._eager.bridges.bridges(name).values())
        return None if name is None else self._bridges[name]

    def _logits(self, plan: Plan, multi_step: MultiStep) -> dict[str, Any]:
        """Where a run leaves the logits of the rows that want log-probabilities; empty if none does."""
        if multi_step.choice < SamplingMode.REPORT:
            return {}
        rows = reporting_chunks(plan.sequences)
        places = np.full(plan.num_rows, -1)
        places[rows] = np.arange(len(rows))
        return {"logits": np.empty((multi_step.num_steps, len(rows), self._vocab), np.float32), "logit_places": places}

    def _end_course(self) -> None:
        """End the run that goes on by itself: the pool is the caller's."""
        self._decoder.finish()
        self._followed = None

    # -- single steps ------------------------------------------------------------------------------------------

    def _ways(self, plan: Plan) -> dict[Callable[[Plan], Computed], BoolArray]:
        """How the chunks of a single step run, those of each way as bool [C]; of a step without a row there is none."""
        eager = _run_half_layers(plan)
        if self._eager.rope.depends_on_length:
            eager |= plan.steps < 0
        if _keeps_states(plan) and plan.num_rows > self._max_rows:
            eager[:] = True
        looked_at = np.zeros_like(eager)
        for group in plan.exits:
            looked_at[group.chunks] = True
        for span in plan.spans:
            if span.projected_rows is not None:
                looked_at[plan.row_chunks[span.projected_rows]] = True
        eager = _with_slots_of(plan, eager)
        looked_at = _with_slots_of(plan, looked_at) & ~eager
        all_ways = {
            self._logits_of_step: ~eager & ~looked_at,
            self._by_spans: looked_at,
            self._eager.run_share: eager,
        }
        return {way: chunks for way, chunks in all_ways.items() if chunks.any()}

    def _divided(self, plan: Plan, ways: Mapping[Callable[[Plan], Computed], BoolArray]) -> Computed:
        """The logits of a step, each share in its way."""
        if ways and self._eager.run_share not in ways:
            self.stats.native_steps += 1  # the eager executor counts its own
        if len(ways) < 2:
            (way,) = ways or (self._eager.run_share,)
            return way(plan)
        shares = [(way, share_of(plan, chunks.nonzero()[0])) for way, chunks in ways.items()]
        return joined(plan, [(share, way(share.plan)) for way, share in shares])

    def _by_spans(self, plan: Plan) -> Computed:
        """A step at which the host looks between layers."""
        of_chunks = self._maps_of(plan.sequences)
        maps = None if of_chunks is None else [of_chunks[chunk] for chunk in plan.row_chunks.tolist()]
        return self._eager.run_share(plan, lambda hidden: NativeSpans(self._decoder, plan, hidden, maps))

    def _single(self, plan: Plan) -> Computed:
        """The tokens of the sampled rows, or logits [plan.logit_rows, V] where more is wanted than these; and the
        captured states."""
        choice = choice_of_step(plan)
        if choice is SamplingMode.HOST:
            return self._logits_of_step(plan)
        choices, hooks = ChoicesOfStep(plan, choice, self._vocab), self._hooks.of(plan, 1)
        for part, rows, given in self._parts(plan, choices.steps, hooks):
            choices.take(part, *self._decoder.run(rows, 1, **choices.asked(part), **given))
        return Computed(choices.chosen(), captured=self._hooks.captured(plan, hooks))

    def _logits_of_step(self, plan: Plan) -> Computed:
        wanted, places = plan.logit_rows, np.full(plan.num_rows, -1)
        places[wanted] = np.arange(wanted.size)
        logits = np.empty((wanted.size, self._vocab), np.float32)  # of a long prompt a gigabyte: there is no second one
        hooks = self._hooks.of(plan, 1)
        for part, rows, given in self._parts(plan, np.zeros(plan.num_rows, np.int64), hooks):
            own = places[part]
            self._decoder.run(rows, 1, logits=logits[None], logit_places=own, yields=own >= 0, **given)
        return Computed(torch.from_numpy(logits), captured=self._hooks.captured(plan, hooks))

    def _parts(self, plan: Plan, steps: IntArray, hooks: Hooks | None) -> Iterator[tuple[slice, Rows, dict[str, Any]]]:
        """The rows of a single step, as many at a time as go through the layers together, at these steps [R].

        With them comes what the library is given of their hidden states; `hooks` takes in what that captures.
        Entries of one part are in the pool before the next one comes, whatever their layer.
        """
        cutoffs = np.zeros((plan.num_rows, plan.tables.shape[1]), np.int32)  # which no step is before
        for span in plan.spans:
            awake = slice(0, span.num_rows) if span.rows is None else span.rows
            cutoffs[awake, span.layers.start : span.layers.stop] = NEVER
        bridges, of_chunks = self._bridges_of_rows(plan), self._maps_of(plan.sequences)
        maps = None if of_chunks is None else [of_chunks[chunk] for chunk in plan.row_chunks.tolist()]
        states = self._states(plan)
        for start in range(0, plan.num_rows, self._max_rows):
            part = slice(start, min(start + self._max_rows, plan.num_rows))
            own = hooks and hooks.of_rows(part)
            yield (
                part,
                Rows(
                    plan.token_ids[part],
                    plan.positions[part],
                    steps[part],
                    plan.slots[plan.row_chunks[part]],
                    cutoffs[part],
                    plan.tables,
                    bridges and bridges[part],
                    maps and maps[part],
                ),
                {"states": states and states.of_rows(part), "hooks": own},
            )
            if hooks is not None and own is not None:
                hooks.take(part, own)

    def _bridges_of_rows(self, plan: Plan) -> list[NativeBridges | None] | None:
        """By what each row of a step crosses the layers that it leaves out; None where none does."""
        if not plan.bridged:
            return None
        own: list[NativeBridges | None] = [None] * plan.num_rows
        for crossing in plan.bridged:
            for row in crossing.rows.tolist():
                own[row] = self._native(crossing.bridges)
        return own

    def _states(self, plan: Plan) -> HiddenStates | None:
        """What the rows of drafts leave behind, and what they go on from."""
        drafts = plan.drafts
        if drafts is None or not _keeps_states(plan):
            return None
        layers, kept, resumed = np.full((3, plan.num_rows), -1)
        for rows in drafts.kept:
            layers[rows.rows], kept[rows.rows] = rows.layer, rows.places
        for rows in drafts.resumed:
            resumed[rows.rows] = rows.places
        most = int(max(kept.max(), resumed.max())) + 1
        return HiddenStates(self._eager.kept_states.with_room(most).numpy(), layers, kept, resumed)


@dataclass
class _Run:
    """A run, with a `control` where the host takes its steps one by one: its forms, and the logits [S, places, V] of
    who wants them. `found` is what the library has given last."""

    control: RunControl | None
    forms: FormsOfRun
    logits: npt.NDArray[np.float32] | None
    hooks: Hooks | None = None
    num_taken: int = 0
    found: tuple[npt.NDArray[np.int64], npt.NDArray[Any]] = field(init=False)

    def chosen(self) -> Chosen:
        """The steps that were waited for."""
        token_ids, scores = self.found
        return Chosen(token_ids, scores, logits=self._next_logits(), faults=self.forms.faults)

    def cycled(self) -> Cycled:
        """The same of drafts and their verifications."""
        drafted, counts = self.found
        return Cycled(drafted, counts, self._next_logits(), self.forms.faults)

    def _next_logits(self) -> npt.NDArray[np.float32] | None:
        first, self.num_taken = self.num_taken, self.num_taken + len(self.found[1])
        return None if self.logits is None else self.logits[first : self.num_taken]


def _keeps_states(plan: Plan) -> bool:
    """Whether drafts leave hidden states behind or go on from them: such rows go through the layers together."""
    return plan.drafts is not None and bool(plan.drafts.kept or plan.drafts.resumed)


def _with_slots_of(plan: Plan, chunks: BoolArray) -> BoolArray:
    """Bool [C]: these chunks, and those of the same sequences, which read their entries."""
    return np.isin(plan.slots, plan.slots[chunks]) if chunks.any() else chunks


def _run_half_layers(plan: Plan) -> BoolArray:
    """Bool [C]: the chunks that run one part of a layer without the other."""
    found = np.zeros(len(plan.sequences), np.bool_)
    halves: dict[int, BoolArray] = {}
    for span in plan.spans:
        if span.part != "layer":
            runs = halves.setdefault(span.layers.start, np.zeros_like(found))
            runs[slice(0, span.num_chunks) if span.chunks is None else span.chunks] ^= True
    for runs in halves.values():
        found |= runs
    return found
