"""A plan: everything that one engine step needs, as arrays.

There is no prefill mode and no decode mode: a plan is a list of *chunks*, each a run of tokens of one sequence that
all run the same layers. Chunks are ordered by depth, deepest first, so that under one nested schedule the rows that run
a layer are a prefix of the batch. A *span* is a run of neighbouring layers that the same rows run; the executor walks
the spans, and no branch for a token or a layer is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from d3engine.depth import ExitRule
from d3engine.request.hidden_states import Positions, Steer
from d3engine.request.outputs import Logprob
from d3engine.scheduling.kv_cache import FlatCopies, IntArray
from d3engine.scheduling.sampling_mode import SamplingMode
from d3engine.scheduling.sequence import Cycle, Proposal, Sequence

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Part: TypeAlias = Literal["layer", "attention", "mlp"]
"""What of its layers a span runs: all, or one of the two parts, which a draft may leave out one by one."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring layers that the same chunks run.

    `chunks` and `rows` are None on the fast path: the span's rows are the first `num_rows`, its chunks the first
    `num_chunks`. Otherwise they list them in order. `projected_rows` are rows that skip these layers but leave a
    projected entry there (`on_skip="project"`), or None. A span that runs a `part` of a layer has that layer alone.
    """

    layers: range
    num_chunks: int
    num_rows: int
    chunks: IntArray | None
    rows: IntArray | None
    projected_rows: IntArray | None
    part: Part = "layer"


@dataclass(frozen=True, slots=True)
class BridgedRows:
    """Rows that leave out the layers [first, stop) and cross them by a map of the bridges of this name."""

    bridges: str
    first: int
    stop: int
    rows: IntArray


@dataclass(frozen=True, slots=True)
class ExitingChunks:
    """Chunks of one row each that may leave early under equal rules; the step's confidence decides at which layer."""

    rule: ExitRule
    chunks: IntArray  # [n]
    thresholds: FloatArray  # [n]


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows whose hidden states are wanted in front of `layer`; the number of layers: after the final norm."""

    layer: int
    rows: IntArray


@dataclass(frozen=True, slots=True)
class SteeredRows:
    """Rows to which `steer` adds its change in front of `layer`; in a run, at those steps that are at `positions`."""

    layer: int
    steer: Steer
    positions: Positions
    rows: IntArray


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows whose logits give the log-probabilities of a prompt's tokens: row r predicts token `position + 1 + r`."""

    sequence: Sequence
    position: int
    rows: range


class RunControl:
    """What host and device know of each other in a run whose steps the host takes one by one, as they are made.

    `words` int32 [2] lie in memory that the device's own code may use as well, while the host does: whether no further
    step is to begin, and how many have begun. `takes_all` says whether the host takes all steps that are done when it
    comes, or the next one alone.
    """

    __slots__ = ("takes_all", "words")

    def __init__(self) -> None:
        self.takes_all = False
        self.words: npt.NDArray[np.int32] = np.zeros(2, np.int32)

    def end(self) -> None:
        """Let the device begin no further step."""
        self.words[0] = 1

    @property
    def is_ended(self) -> bool:
        return bool(self.words[0])

    @property
    def num_begun(self) -> int:
        """Steps of the run that the device has begun; it may be more by the time that the caller looks at it."""
        return int(self.words[1])


@dataclass(frozen=True, slots=True)
class DraftModelRows:
    """Where the second model stands with the rows of some cycles: its block tables, and positions computed."""

    tables: IntArray  # [slots, its layers, max_blocks]
    positions: IntArray  # [C]


@dataclass(frozen=True, slots=True)
class MultiStep:
    """The next `num_steps` steps of a batch in which every row decodes one token per step.

    At each of them layer l runs for the rows with `steps + taken < cutoffs[:, l]`, and these rows come first. Where all
    rows draft they are no steps but `cycles`, each of a whole draft and its verification: then layer l runs in the
    drafts that begin before `cutoffs[:, l]`.

    A run that `opens` has one step before these, which is counted among `num_steps`: that of the plan's own rows,
    prompts perhaps, each of whose chunks yields the token that its row begins with.
    """

    num_steps: int
    steps: IntArray  # [C] generation steps of the first of them; of the one behind the opening
    cutoffs: IntArray  # [C, L]
    choice: SamplingMode  # what choosing a token takes, for the row that asks for most
    control: RunControl | None = None  # of steps that the host takes one by one: the plan comes again for each of them
    bridges: tuple[
        str | None, ...
    ] = ()  # [C] by whose maps each row crosses the layers that it leaves out; (): none does
    cycles: bool = False
    opens: bool = False
    draft_model: DraftModelRows | None = None  # of cycles in which a second model may draft
    history: IntArray | None = None  # of cycles: tokens of earlier answers where lookups may find continuations
    num_taken: int = 1  # with a course: steps that the host has taken
    num_passes: int = 1  # of cycles that the host has taken: the passes of their drafts and verifications


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """What an executor can do of a run by itself.

    `choice` is the kind of choice that it has at most; of rows that want log-probabilities it keeps `logits` rows of
    logits in one run. `drafts` says whether the steps may be those of drafts: it keeps their hidden states then.
    `bridges` says whether rows may cross by maps the layers that they leave out. `openings` says whether a run may
    follow a step of prompts without the host. `text_drafts` says whether the drafts of such steps may also be those of
    a second model and of lookups: sequences that draft so then draft nowhere else. `students` says whether all rows may
    run the weights of one student: a run ends where a row changes its own. `hooks`: whether rows may have their hidden
    states captured, of which it keeps `states` in one run, or changed. `launched_ahead`: where the host takes the steps
    of every run one by one, the steps that the device has been given beyond; the host can end the run at each of them
    at no cost, and make it longer.
    """

    choice: SamplingMode = SamplingMode.PENALISE
    logits: int = 0
    drafts: bool = False
    bridges: bool = False
    openings: bool = False
    text_drafts: bool = False
    students: bool = False
    hooks: bool = False
    states: int = 0
    launched_ahead: int = 0


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows whose hidden states, below `layer`, the executor keeps at (or takes back from) these places."""

    layer: int
    rows: IntArray
    places: IntArray


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What a step does for sequences that draft.

    `proposing` are places among the plan's sampled chunks whose token continues a draft. `judging` maps the places of
    sequences that verify one to the rows that judge its tokens, in order; the sampled row itself judges none, it yields
    what follows if all are accepted. `kept` and `resumed` are rows that leave hidden states behind or go on from them.
    `model` is the plan of a second model that drafts; its sampled chunks have the places after the plan's own.
    `lengths` are the tokens that it drafts for each of these without the host; None: one each, which the host chooses.
    """

    proposing: frozenset[int]
    judging: dict[int, IntArray]
    kept: tuple[HiddenRows, ...] = ()
    resumed: tuple[HiddenRows, ...] = ()
    model: Plan | None = None
    lengths: IntArray | None = None

    @property
    def judging_rows(self) -> IntArray:
        """All rows that judge a token, those of one sequence after those of the other."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self.judging.values()])


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step: C chunks of R rows in all, deepest chunks first.

    `tables` is the cache's own [slots, L, max_blocks]; it stays as it is until the next `schedule()`.
    `copies_before` and `copies_after` are (sources, targets) of flat entries for copy-on-skip, or None.
    `depths` and `spans` are those of chunks that leave at no layer before; `exits` names the chunks that may.
    `bridged` are the windows that rows cross by a map, by their first layer. In front of a layer states are steered
    first, then captured, then bridged.
    """

    sequences: list[Sequence]
    slots: IntArray  # [C]
    starts: IntArray  # [C] the position of each chunk's first row
    stops: IntArray  # [C] the position after its last row: the entries its layers hold after the step
    steps: IntArray  # [C] the generation step of its first row; -1 in the prompt
    query_starts: IntArray  # [C + 1] each chunk's first row, and R
    token_ids: IntArray  # [R]
    positions: IntArray  # [R]
    row_chunks: IntArray  # [R] the chunk of each row
    prompt_lengths: IntArray  # [C]
    depths: IntArray  # [C] layers that each chunk runs
    tables: IntArray
    spans: tuple[Span, ...]
    sampled: IntArray  # chunks whose last row yields a token
    sample_rows: IntArray  # those rows
    greedy: bool  # every sampled row takes the likeliest token and wants nothing else
    prompt_rows: tuple[PromptRows, ...]
    copies_before: FlatCopies
    copies_after: FlatCopies
    exits: tuple[ExitingChunks, ...] = ()
    drafts: DraftWork | None = None
    bridged: tuple[BridgedRows, ...] = ()
    captured: tuple[CapturedRows, ...] = ()  # by layer
    steered: tuple[SteeredRows, ...] = ()  # by layer
    multi_step: MultiStep | None = None  # the steps that a device may take by itself; None: this one, told by the host

    @property
    def num_steps(self) -> int:
        """Steps that the plan stands for: tokens that each of its rows yields, or passes that they took to be drafted
        and verified."""
        multi_step = self.multi_step
        if multi_step is None:
            return 1
        if multi_step.cycles:
            return multi_step.num_passes
        return multi_step.num_taken if multi_step.control is not None else multi_step.num_steps

    @property
    def num_rows(self) -> int:
        return int(self.query_starts[-1])

    def take_all_done(self, takes_all: bool) -> None:
        """Say whether of a run that goes on by itself all steps that are done are taken, or the next one alone."""
        if self.multi_step is not None and self.multi_step.control is not None:
            self.multi_step.control.takes_all = takes_all

    def ended_after(self, num_steps: int, num_passes: int | None = None) -> Plan:
        """The same, if this number of its steps were taken: its run was over since every answer was, or goes on.

        Of cycles `num_passes` says how many steps they were.
        """
        multi_step = self.multi_step
        if multi_step is not None and num_passes is not None:
            return replace(self, multi_step=replace(multi_step, num_taken=num_steps, num_passes=num_passes))
        if multi_step is None or num_steps == self.num_steps:
            return self
        if multi_step.control is not None:
            return replace(self, multi_step=replace(multi_step, num_taken=num_steps))
        return replace(self, multi_step=replace(multi_step, num_steps=num_steps))

    @property
    def logit_rows(self) -> IntArray:
        """The rows that go through the LM head: those to sample, then the prompt rows, then those that judge drafts."""
        if not self.prompt_rows and self.drafts is None:
            return self.sample_rows
        prompt = [np.arange(p.rows.start, p.rows.stop) for p in self.prompt_rows]
        judging = [] if self.drafts is None else [self.drafts.judging_rows]
        return np.concatenate([self.sample_rows, *prompt, *judging])


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a device that runs ahead has chosen by itself: S steps of the plan's C chunks.

    `logits` are those of the chunks whose sequences want log-probabilities. `faults` says what else went wrong with a
    chunk than its logits. `opened` is when the first step was done, by the monotonic clock, where it was the opening of
    the others.
    """

    token_ids: IntArray  # [S, C]
    scores: npt.NDArray[np.float32]  # [S, C]; a row without a finite one has met a fault
    logits: npt.NDArray[np.float32] | None = None  # [S, those chunks, V]
    faults: dict[int, str] = field(default_factory=dict)
    opened: float | None = None

    @property
    def num_steps(self) -> int:
        """Steps that were taken."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Cycled:
    """What a device has drafted and verified by itself: S cycles of the plan's C chunks.

    `counts` say how many tokens a draft had, how many of them full depth takes as well, and its own token behind these,
    -1 where its logits were not finite; then who drafted, as a `Drafter`, and how many positions a second model has
    computed. All are -1 of a chunk whose sequence had come to its end. `logits` are those of the verified tokens, where
    a sequence wants log-probabilities. `faults` are as in `Chosen`.
    """

    drafted: IntArray  # [S, C, tokens of a draft at most]
    counts: IntArray  # [S, C, 5]
    logits: npt.NDArray[np.float32] | None = None  # [S, C, tokens + 1, V]
    faults: dict[int, str] = field(default_factory=dict)

    @property
    def num_passes(self) -> int:
        """Passes through layers: of each cycle those of its longest draft, and one that verifies."""
        return int(np.maximum(self.counts[:, :, 0], 0).max(axis=1).sum()) + len(self.counts)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The new tokens of each of the plan's sampled chunks, in order: one, or several where a step yields more.

    `logprobs[row]` holds one entry for each token, or None for rows that did not ask. `prompt_logprobs[k]` belongs to
    the plan's k-th prompt rows. `faults` maps rows that end after their tokens (if any) to what went wrong. `proposals`
    are the drafted tokens of rows that have none to give yet. Where the device has drafted and verified by itself,
    `cycles[row]` is all there is. `opened` is when the first tokens were there, by the monotonic clock, where that was
    before the others.
    """

    token_ids: list[list[int]]
    logprobs: list[list[dict[int, Logprob]] | None] | None = None
    prompt_logprobs: list[list[dict[int, Logprob]]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    proposals: dict[int, list[Proposal]] = field(default_factory=dict)
    cycles: list[list[Cycle]] | None = None
    opened: float | None = None


def spans_of(active: BoolArray, projected: BoolArray | None, query_starts: IntArray) -> tuple[Span, ...]:
    """The spans of a batch: `active` [C, L] says which chunks run which layers, deepest chunk first."""
    key = active if projected is None else np.concatenate((active, projected))
    differs = key[:, 1:] != key[:, :-1]
    changes = (differs[0] if len(key) == 1 else differs.any(axis=0)).nonzero()[0] + 1
    spans = []
    for low, high in pairwise([0, *changes.tolist(), active.shape[1]]):
        runs = active[:, low]
        count = int(np.count_nonzero(runs))
        beside = None
        if projected is not None and projected[:, low].any():
            beside = rows_of(projected[:, low].nonzero()[0], query_starts)
        if runs[:count].all():
            if count or beside is not None:
                spans.append(Span(range(low, high), count, int(query_starts[count]), None, None, beside))
            continue
        chunks = runs.nonzero()[0]
        rows = rows_of(chunks, query_starts)
        spans.append(Span(range(low, high), count, rows.size, chunks, rows, beside))
    return tuple(spans)


def spans_of_parts(
    attention: BoolArray, mlps: BoolArray, projected: BoolArray | None, query_starts: IntArray
) -> tuple[Span, ...]:
    """The spans of a batch in which some chunks run one part of a layer without the other: both [C, L].

    The parts are looked at as if each was a layer; whatever then holds both of one is that layer again.
    """
    both = np.stack((attention, mlps), axis=2).reshape(len(attention), -1)
    beside = None if projected is None else projected.repeat(2, axis=1)
    return tuple(whole for span in spans_of(both, beside, query_starts) for whole in _layers_of_parts(span))


def _layers_of_parts(span: Span) -> list[Span]:
    """A span over parts as spans over layers, and over a part of the first and of the last one."""
    found, low, high = [], span.layers.start, span.layers.stop
    if low % 2:
        if span.num_rows:
            found.append(replace(span, layers=range(low // 2, low // 2 + 1), projected_rows=None, part="mlp"))
        low += 1
    if high - low > 1:
        found.append(replace(span, layers=range(low // 2, high // 2)))
    if high % 2 and high > low:
        found.append(replace(span, layers=range(high // 2, high // 2 + 1), part="attention"))
    return found


def rows_of(chunks: IntArray, query_starts: IntArray) -> IntArray:
    """The rows of at least one chunk, in the order of `chunks`."""
    return np.concatenate([np.arange(query_starts[c], query_starts[c + 1]) for c in chunks])
