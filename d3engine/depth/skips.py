"""Policies that leave out layers, known beforehand or by confidence, and full depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Any, ClassVar

import numpy as np

from d3engine.depth.policy import BatchRule, Confidence, DepthPolicy, ExitRule, option
from d3engine.depth.schedule import (
    AUTO_BRIDGES,
    NEVER,
    BoolArray,
    Level,
    OnSkip,
    Schedule,
    check_skips,
    check_student,
    checked_layers,
    cutoffs_without,
    exact_fraction,
    first_step_below,
    plain_number,
    window_cutoffs,
)
from d3engine.depth.statistics import (
    EXIT_CONFIDENCES,
    MAX_TOKENS,
    SHORTGPT_ORDER,
    SKIP_DECODE_MEANS,
    mean_depth,
    of_layers,
    preset,
)
from d3engine.errors import InvalidValueError, require, require_integer, require_number

ON_SKIP = option("KV of skipped layers: none, copy or project [default: none; early-exit: project]", is_common=True)
BRIDGES = option("file of `d3engine bridge fit` that stands in for skipped layers, or auto", is_common=True)


@dataclass(frozen=True)
class FullDepth(DepthPolicy):
    """Every layer runs for every token."""

    name: ClassVar[str] = "full"
    label: ClassVar[str] = "Full depth"

    def schedule(self, num_layers: int) -> Schedule:
        """All cutoffs `NEVER`."""
        return Schedule.nested(np.full(require_integer("num_layers", num_layers, 1), NEVER))


@dataclass(frozen=True)
class D3(DepthPolicy):
    """Power-law depth decay (the D3 paper, section 3).

    With L layers and i = 0, 1, 2 ... the generated tokens of the sequence:

        first  = floor(start * L)                            exactly: start is the number as it is written
        keep_i = max(floor(L * alpha**i), first + tail)      in float64
        skip_i = layers [first, first + L - keep_i)

    The prompt pass yields token 0 at full depth. A small `start` on a small model can leave no layer at all
    for late tokens; that is what the formula says, and the engine does it.

    Args:
        alpha: the decay, in (0, 1]; 1 never skips.
        start: the fraction of the layers below the window, in (0, 1); float, Fraction, Decimal, or text such
            as "1/3".
        tail: this many last layers are never skipped (ours, not in the paper).
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    alpha: float = field(metadata=option("the decay, in (0, 1]"))
    start: float | Fraction = field(metadata=option("the fraction of the layers below the skipped window, in (0, 1)"))
    tail: int = field(default=0, metadata=option("last layers that are never skipped"))
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "d3"
    label: ClassVar[str] = "D3"

    def __post_init__(self) -> None:
        alpha = require_number("alpha", self.alpha, 0, 1, open_low=True)
        start = exact_fraction("start", self.start)
        require(0 < start < 1, "start", self.start, "a finite number in (0, 1)")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "start", plain_number(start))
        object.__setattr__(self, "tail", require_integer("tail", self.tail, 0))
        check_skips(self)

    def first_layer(self, num_layers: int) -> int:
        """The lowest layer that is ever skipped, `floor(start * L)` in exact arithmetic."""
        return math.floor(exact_fraction("start", self.start) * num_layers)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` if `tail` reaches below the window."""
        require_integer("num_layers", num_layers, 1)
        first = self.first_layer(num_layers)
        require(
            first + self.tail <= num_layers,
            "tail",
            self.tail,
            f"at most {num_layers - first}, since the window starts at layer {first} of {num_layers}",
        )
        cutoffs = window_cutoffs(num_layers, first, num_layers - self.tail, lambda step: num_layers * self.alpha**step)
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    @classmethod
    def preset(cls, task: str, num_layers: int) -> D3:
        """The setting of the D3 paper for "bbh" or "gsm8k" and a Llama-2 of `num_layers`."""
        alpha, start = preset(task, num_layers)
        return cls(alpha, start)


@dataclass(frozen=True)
class SkipDecode(DepthPolicy):
    """Linear depth decay over `max_tokens` steps.

    With N = max_tokens, at step i >= 1 the layers [warmup, warmup + L - n_i) are skipped, where

        n_i = max(min_layers, round(max_layers - (max_layers - min_layers) * i / (N - 1)))

    Halves are rounded up (towards more layers), in integer arithmetic. From step N - 1 on the depth stays
    `min_layers`. Step 0 is at full depth whatever `max_layers` says, because the prompt pass yields it. The
    windows are nested, so no entries are needed; `on_skip="copy"` reproduces the published behaviour (same
    tokens).

    Args:
        max_tokens: N, the steps of the decay, at least 2.
        min_layers: the depth of the last step, at least `warmup`; None where `mean_layers` is given.
        max_layers: the depth the line starts from; None is all layers.
        warmup: this many lowest layers always run.
        on_skip: what the cache holds at a skipped layer.
        mean_layers: the mean depth over `max_tokens` steps, instead of `min_layers` and `max_layers`: a decay from all
            layers to the `min_layers` that `for_mean` finds once their number is known.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    max_tokens: int = field(metadata=option("steps over which the depth falls or has its mean", "decay-steps"))
    min_layers: int | None = field(default=None, metadata=option("depth after the last of these steps; or mean-layers"))
    max_layers: int | None = field(default=None, metadata=option("depth at the first step [default: all layers]"))
    warmup: int = field(default=1, metadata=option("lowest layers that always run [default: 1]"))
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)
    mean_layers: float | None = None
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "skipdecode"
    label: ClassVar[str] = "SkipDecode"

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", require_integer("max_tokens", self.max_tokens, 2))
        object.__setattr__(self, "warmup", require_integer("warmup", self.warmup, 0))
        if self.mean_layers is not None:
            given = {"min_layers": self.min_layers, "max_layers": self.max_layers}
            for field, value in given.items():
                require(value is None, field, value, "absent beside mean_layers")
            mean = float(exact_fraction("mean_layers", self.mean_layers))
            require(mean > 0, "mean_layers", self.mean_layers, "a finite number above 0")
            object.__setattr__(self, "mean_layers", mean)
        else:
            require(self.min_layers is not None, "min_layers", None, "given, or mean_layers in its place")
            object.__setattr__(self, "min_layers", require_integer("min_layers", self.min_layers, max(1, self.warmup)))
        if self.max_layers is not None:
            object.__setattr__(self, "max_layers", require_integer("max_layers", self.max_layers, self.min_layers or 1))
        check_skips(self)

    def layers_at(self, step: int, num_layers: int) -> int:
        """`n_i` of the class's formula, for any step."""
        assert self.min_layers is not None, "the policy is one of a mean depth"
        lowest = self.min_layers
        highest = num_layers if self.max_layers is None else self.max_layers
        last_step = self.max_tokens - 1
        numerator = highest * last_step - (highest - lowest) * min(step, last_step)
        return (2 * numerator + last_step) // (2 * last_step)  # round half up

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` if the depths do not fit `num_layers`."""
        require_integer("num_layers", num_layers, 1)
        if self.mean_layers is not None:
            found = self.for_mean(
                self.mean_layers, num_layers=num_layers, max_tokens=self.max_tokens, warmup=self.warmup
            )
            return replace(found, on_skip=self.on_skip, bridges=self.bridges).schedule(num_layers)
        lowest = require_integer("min_layers", self.min_layers, 1, num_layers)
        if self.max_layers is not None:
            require_integer("max_layers", self.max_layers, 1, num_layers)
        end = self.warmup + num_layers - lowest
        cutoffs = window_cutoffs(num_layers, self.warmup, end, lambda step: self.layers_at(step, num_layers))
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    @classmethod
    def for_mean(cls, mean_layers: float, *, num_layers: int, max_tokens: int, warmup: int = 1) -> SkipDecode:
        """The decay from full depth whose mean depth over `max_tokens` steps is closest to `mean_layers`.

        `min_layers` is a whole number, so the mean is met to about a quarter of a layer; of two equally close
        ones the deeper is returned. Raises `InvalidValueError` for a mean that no `min_layers` reaches.
        """
        require_integer("num_layers", num_layers, 1)
        lowest = require_integer("warmup", warmup, 0, num_layers)
        candidates = [cls(max_tokens, layers, warmup=warmup) for layers in range(num_layers, max(lowest, 1) - 1, -1)]
        means = [mean_depth(candidate.schedule(num_layers), max_tokens) for candidate in candidates]
        wanted = require_number("mean_layers", mean_layers, means[-1], num_layers)
        distances = [abs(mean - wanted) for mean in means]
        return candidates[distances.index(min(distances))]

    @classmethod
    def preset(cls, task: str, num_layers: int) -> SkipDecode:
        """The mean depth that the D3 paper's Table 6 prints for SkipDecode on "bbh" or "gsm8k", of Llama-2."""
        mean = of_layers(SKIP_DECODE_MEANS, task, num_layers)
        return cls(MAX_TOKENS[task], mean_layers=mean)


@dataclass(frozen=True)
class UnifiedSkip(DepthPolicy):
    """Keep K = floor(L / speedup) layers: the first, the last, and every layer in between whose number is a multiple
    of floor(L / (K - 1)), from below, until there are K.

    At speed-ups of 2 and more they are spread over the model. Below about 2 the interval is 1, and what is left out is
    one piece below the last layer: then `EvenSkip` spreads them. The set is the same at every step >= 1; the prompt
    pass, which yields step 0, is full.

    Args:
        speedup: the wanted layer speed-up, at least 1; float, Fraction, Decimal, or text such as "4/3".
        on_skip: what the cache holds at a skipped layer; the authors copy ("copy"), which changes no token.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    speedup: float | Fraction = field(metadata=option("layers of the model over layers kept"))
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "unified"
    label: ClassVar[str] = "Unified skipping"

    def __post_init__(self) -> None:
        speedup = exact_fraction("speedup", self.speedup)
        require(speedup >= 1, "speedup", self.speedup, "a finite number of at least 1")
        object.__setattr__(self, "speedup", plain_number(speedup))
        check_skips(self)

    def kept_layers(self, num_layers: int) -> list[int]:
        """The layers that run at every step >= 1, ascending."""
        kept = math.floor(num_layers / exact_fraction("speedup", self.speedup))
        require(
            kept >= min(2, num_layers),
            "speedup",
            self.speedup,
            f"at most {num_layers / 2:g}, since the first and the last of {num_layers} layers always run",
        )
        return self._spread(num_layers, kept)

    def _spread(self, num_layers: int, kept: int) -> list[int]:
        """`kept` of the layers, the first and the last among them."""
        interval = num_layers // max(kept - 1, 1)
        inner = range(interval, num_layers - 1, interval)[: max(kept - 2, 0)]
        return sorted({0, *inner, num_layers - 1})

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule: cutoff 1 for the layers left out."""
        cutoffs = np.full(require_integer("num_layers", num_layers, 1), 1)
        cutoffs[self.kept_layers(num_layers)] = NEVER
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)


@dataclass(frozen=True)
class EvenSkip(UnifiedSkip):
    """Keep K = floor(L / speedup) layers whose distances differ by one layer at most (ours, not published).

    The distance is the real number (L - 1) / (K - 1), and kept layer j is number j times the distance, halves rounded
    up, j = 0 .. K - 1. Arguments, prompt and step 0 are those of `UnifiedSkip`.
    """

    name: ClassVar[str] = "even"
    label: ClassVar[str] = "Even skipping"

    def _spread(self, num_layers: int, kept: int) -> list[int]:
        # The spacing is at least 1, so no two fall together.
        gaps = max(kept - 1, 1)
        return [(2 * j * (num_layers - 1) + gaps) // (2 * gaps) for j in range(kept)]


@dataclass(frozen=True)
class FixedSkip(DepthPolicy):
    """Leave out the same layers at every step >= 1; the prompt pass, which yields step 0, is full.

    Args:
        skip_layers: ids of the layers, from 0; at least one.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    skip_layers: Sequence[int] = field(metadata=option("layers left out, such as 3,5,8-11"))
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "fixed"
    label: ClassVar[str] = "Fixed skipping"

    def __post_init__(self) -> None:
        layers = checked_layers("skip_layers", self.skip_layers)
        require(len(layers) > 0, "skip_layers", [], "at least one layer id")
        object.__setattr__(self, "skip_layers", layers)
        check_skips(self)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule: cutoff 1 for the layers left out; refuses a layer that the model has not."""
        require_integer("num_layers", num_layers, 1)
        cutoffs = cutoffs_without("skip_layers", self.skip_layers, num_layers)
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)

    @classmethod
    def preset(cls, method: str, num_layers: int) -> FixedSkip:
        """The layers that ShortGPT ("shortgpt") removes from Llama-2 of 32 or 40 layers, a quarter of them or more."""
        return cls(of_layers(SHORTGPT_ORDER, method, num_layers))


@dataclass(frozen=True)
class Distilled(DepthPolicy):
    """A student's weights at every step >= 1, without the layers that it leaves out (ours).

    `d3engine depth train` makes students: narrower MLPs, or a layer trained to stand for a window. The prompt pass,
    which yields step 0, runs the model's own weights, and each layer of a student goes on with the KV cache of that
    layer. Nothing is left out of the cache but what skipped layers have.

    Args:
        skip_layers: ids of the layers that the student leaves out, from 0: those of its file.
        student: a file of `d3engine depth train`, or "auto" for the one beside the weights.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
    """

    skip_layers: Sequence[int] = field(default=(), metadata=option("layers left out, such as 3,5,8-11"))
    student: str = field(default=AUTO_BRIDGES, metadata=option("file of `d3engine depth train`, or auto"))
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)

    name: ClassVar[str] = "distilled"
    label: ClassVar[str] = "Distilled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip_layers", checked_layers("skip_layers", self.skip_layers))
        check_student(self.student)
        check_skips(self)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule: cutoff 1 for the layers left out; refuses a layer that the model has not."""
        require_integer("num_layers", num_layers, 1)
        cutoffs = cutoffs_without("skip_layers", list(self.skip_layers), num_layers)
        return Schedule.nested(cutoffs, self.on_skip, students=[Level(1, self.student)])


@dataclass(frozen=True)
class TailSkip(DepthPolicy):
    """The lowest layers only, from step 1 on, so that the mean over `max_tokens` steps is `mean_layers`.

    This is the budget-matched baseline of comparisons at equal mean depth. With N = max_tokens and L layers, step 0 is
    at full depth and the other N - 1 steps share what is left of the budget, `round(N * mean_layers) - L` layer runs
    (halves up), as evenly as whole layers allow: the first ones run one layer more than the rest. The mean is so met to
    within half a layer run in all. From step N on the depth stays that of step N - 1.

    Args:
        mean_layers: the mean depth; float, Fraction, Decimal, or text such as "32/3".
        max_tokens: N, the steps that the mean is over, at least 2.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    mean_layers: float | Fraction = field(metadata=option("mean depth over the decay-steps"))
    max_tokens: int
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "tail-skip"
    label: ClassVar[str] = "Tail skipping"

    def __post_init__(self) -> None:
        mean = exact_fraction("mean_layers", self.mean_layers)
        require(mean > 0, "mean_layers", self.mean_layers, "a finite number above 0")
        object.__setattr__(self, "mean_layers", plain_number(mean))
        object.__setattr__(self, "max_tokens", require_integer("max_tokens", self.max_tokens, 2))
        check_skips(self)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` for a mean that 1 to `num_layers` layers do not reach."""
        require_integer("num_layers", num_layers, 1)
        later_steps = self.max_tokens - 1
        budget = floor(exact_fraction("mean_layers", self.mean_layers) * self.max_tokens + Fraction(1, 2)) - num_layers
        lowest = (num_layers + later_steps) / self.max_tokens
        allowed = f"from {lowest:g} (1 layer after step 0) to {num_layers}"
        require(later_steps <= budget <= later_steps * num_layers, "mean_layers", self.mean_layers, allowed)
        layers, steps_with_one_more = divmod(budget, later_steps)
        cutoffs = np.full(num_layers, NEVER)
        cutoffs[layers:] = 1
        if steps_with_one_more:
            cutoffs[layers] = 1 + steps_with_one_more
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)


ALLOWED = "(first, stop) of windows that have no layer in common, as [[6, 9], [12, 15]]"


@dataclass(frozen=True)
class Nested(DepthPolicy):
    """Power-law depth decay over several windows (ours, not published).

    With L layers and i = 0, 1, 2 ... the generated tokens of the sequence, `floor(L * alpha**i)` layers are to run. The
    windows of the list go in its order, each whole, as soon as it and those before it are no more layers than are to be
    left out. So never more layers are left out than by D3 of the same alpha, and at most all of the list.

    Args:
        alpha: the decay, in (0, 1]; 1 never skips.
        windows: (first, stop) for the layers first .. stop - 1, in the order in which they go. `d3engine bridge
            nest` finds one.
        on_skip: what the cache holds at a skipped layer; "none" is enough, since nothing reads it.
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights. Where
            neighbouring windows are left out together, the file must have their union.
    """

    alpha: float
    windows: Sequence[Sequence[int]] = field(
        metadata=option("windows of layers in the order in which they go, 6:9,12:15")
    )
    on_skip: OnSkip = field(default="none", metadata=ON_SKIP)
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "nested"
    label: ClassVar[str] = "Nested windows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", require_number("alpha", self.alpha, 0, 1, open_low=True))
        object.__setattr__(self, "windows", _checked(self.windows))
        check_skips(self)

    def schedule(self, num_layers: int) -> Schedule:
        """The nested schedule; raises `InvalidValueError` for a window that the model does not have."""
        require_integer("num_layers", num_layers, 1)
        last = max(stop for _, stop in self.windows)
        require(last <= num_layers, "windows", self.windows, f"within the {num_layers} layers of the model")
        cutoffs, left_out = np.full(num_layers, NEVER), 0
        for first, stop in self.windows:
            left_out += stop - first
            wanted = num_layers - left_out + 1
            cutoffs[first:stop] = first_step_below(lambda step: num_layers * self.alpha**step, wanted)
        return Schedule.nested(cutoffs, self.on_skip, self.bridges)


def _checked(windows: Any) -> tuple[tuple[int, int], ...]:
    """The windows as tuples."""
    try:
        found = tuple((int(first), int(stop)) for first, stop in windows)
        exact = all(pair == tuple(window) for pair, window in zip(found, windows, strict=True))
    except (TypeError, ValueError):
        raise InvalidValueError("windows", windows, ALLOWED) from None
    fits = exact and found and all(0 <= first < stop for first, stop in found)
    in_order = sorted(found)
    apart = all(before[1] <= behind[0] for before, behind in pairwise(in_order))
    require(bool(fits and apart), "windows", windows, ALLOWED)
    return found


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _checked_row(field: str, row: Any) -> tuple[int, ...] | tuple[bool, ...]:
    """A row as a tuple of Python bools, or of Python ints in ascending order."""
    if _is_sequence(row):
        if len(row) and all(isinstance(flag, bool | np.bool_) for flag in row):
            return tuple(bool(flag) for flag in row)
        if all(isinstance(layer, int | np.integer) and not isinstance(layer, bool) for layer in row):
            ids = tuple(sorted(int(layer) for layer in row))
            require(len(set(ids)) == len(ids), field, row, "layer ids without repeats")
            return ids
    raise InvalidValueError(field, row, "layer ids, or one bool for each layer")


def _flags(field: str, row: Sequence[int] | Sequence[bool], num_layers: int) -> BoolArray:
    """Bool [L] of a checked row."""
    if len(row) and isinstance(row[0], bool):
        require(len(row) == num_layers, field, row, f"{num_layers} bools, one for each layer")
        return np.array(row, dtype=np.bool_)
    in_range = not row or (row[0] >= 0 and row[-1] < num_layers)
    require(in_range, field, row, f"layer ids from 0 to {num_layers - 1}")
    flags = np.zeros(num_layers, dtype=np.bool_)
    flags[list(row)] = True
    return flags


@dataclass(frozen=True)
class EarlyExit(DepthPolicy):
    """Confidence-based early exit (Schuster et al. 2022, "Confident Adaptive Language Modeling").

    After layer l >= min_layer (of layers 0 .. L - 1) the confidence of each token is compared with the threshold of its
    step, `0.9 t + 0.1 t exp(-decay i / N)` with N the request's max_tokens. A token that reaches it takes the LM head's
    logits there and runs no further layer. Prompts always run at full depth.

    Under `batch="batch_min"`, the published rule for batches, all tokens that an engine step computes under equal
    options leave together, when the least confident of them may. **What a request answers then depends on who shares
    its batch**: the one policy here that does so. `batch="per_row"` has no such effect.

    Nothing is saved in the KV cache: later tokens may go deeper and read every layer, so skipped ones are filled, and
    blocks for all layers are taken before the step, when the depth is not known yet.

    Args:
        threshold: t, from 0 (leave at the first check) to 2 (never).
        confidence: "softmax_max" (the largest probability of the LM head), "softmax_diff" (its lead over the second;
            both run the LM head at every check), or "cosine" (of the layer's input and output).
        decay: how fast the threshold falls; CALM's 4. 0 keeps it at t.
        min_layer: the lowest layer after which a token may leave, so at least min_layer + 1 layers run.
        every: check only after layers min_layer, min_layer + every, min_layer + 2 every ...
        batch: "per_row" or "batch_min".
        on_skip: "project" (CALM: keys and values of the exit state at each skipped layer) or "copy" (the entry of the
            last layer that ran).
    """

    threshold: float = field(metadata=option("confidence that lets a token leave, 0 to 2"))
    confidence: Confidence = field(
        default="softmax_max", metadata=option("softmax_max, softmax_diff or cosine [default: softmax_max]")
    )
    decay: float = field(
        default=4.0, metadata=option("decay of the threshold; 0 keeps it [default: 4]", "threshold-decay")
    )
    min_layer: int = field(
        default=0,
        metadata=option("lowest layer, from 0, after which a token may leave [default: 0]", "exit-min-layer"),
    )
    every: int = field(
        default=1, metadata=option("distance of the layers after which a token may leave [default: 1]", "exit-every")
    )
    batch: BatchRule = field(
        default="per_row",
        metadata=option("per_row, or batch_min, where the batch changes answers [default: per_row]", "exit-batch"),
    )
    on_skip: OnSkip = field(default="project", metadata=ON_SKIP)

    name: ClassVar[str] = "early-exit"
    label: ClassVar[str] = "Early exit"

    def __post_init__(self) -> None:
        self._rule()
        allowed = "'project' or 'copy', since a later token may go deeper and would read entries nobody wrote"
        require(self.on_skip in ("project", "copy"), "on_skip", self.on_skip, allowed)

    def schedule(self, num_layers: int) -> Schedule:
        """Full depth: what the rule takes away is not known beforehand. Raises if `min_layer` does not fit."""
        self.exit_rule(num_layers)
        return Schedule.nested(np.full(num_layers, NEVER), self.on_skip)

    def exit_rule(self, num_layers: int) -> ExitRule:
        """The rule by which rows leave early."""
        require_integer("num_layers", num_layers, 1)
        require_integer("min_layer", self.min_layer, 0, num_layers - 1)
        return self._rule()

    @classmethod
    def preset(cls, num_layers: int) -> EarlyExit:
        """The confidence that the D3 paper's Table 2 prints for a Llama-2 of `num_layers` layers, as the threshold."""
        return cls(of_layers({"early-exit": EXIT_CONFIDENCES}, "early-exit", num_layers))

    def _rule(self) -> ExitRule:
        return ExitRule(self.confidence, self.threshold, self.decay, self.min_layer, self.every, self.batch)


@dataclass(frozen=True)
class LayerTable(DepthPolicy):
    """Row i holds the layers that run at step i; the last row holds for all later steps.

    Args:
        active: a sequence of rows; each row is either the ids of the layers that run, or one bool for each
            layer. Row 0 must name every layer, since the prompt pass yields step 0.
        on_skip: "copy" or "project"; "none" only for a nested table (a layer that is off stays off).
        bridges: what stands in for skipped layers: a file of bridges, or "auto" for the one beside the weights.
    """

    active: Sequence[Sequence[int]] | Sequence[Sequence[bool]]
    on_skip: OnSkip = field(default="copy", metadata=ON_SKIP)
    bridges: str | None = field(default=None, metadata=BRIDGES)

    name: ClassVar[str] = "table"
    label: ClassVar[str] = "Layer table"

    def __post_init__(self) -> None:
        check_skips(self)
        given: Any = self.active
        require(_is_sequence(given) and len(given) > 0, "active", given, "a sequence of rows, one for each step")
        rows = tuple(_checked_row(f"active[{step}]", row) for step, row in enumerate(given))
        object.__setattr__(self, "active", rows)

    def schedule(self, num_layers: int) -> Schedule:
        """The schedule, nested where the table is; raises `InvalidValueError` if a row does not fit."""
        require_integer("num_layers", num_layers, 1)
        rows = [_flags(f"active[{step}]", row, num_layers) for step, row in enumerate(self.active)]
        require(bool(rows[0].all()), "active[0]", self.active[0], "every layer, since the prompt pass yields step 0")
        return Schedule.from_table(np.stack(rows), self.on_skip, self.bridges)
