"""Which layers a model can spare: the next token's loss by every window of layers, skipped
in a given text from some step on as D3 skips them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import atan, cos, isnan, pi, sin, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.errors import require, require_integer
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.observer import CachedPass, Observer
from d3engine.research.analysis.report import Table, counted, step_groups, steps_in_words

MEASURES = ("kl", "extra", "agrees")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """A mean over tokens, and half the width of its 95 % interval, by the spread between texts; NaN of one text."""

    value: float
    arm: float

    @property
    def known_arm(self) -> float | None:
        """The arm for machines; None where it is NaN."""
        return None if isnan(self.arm) else self.arm

    @property
    def interval(self) -> str:
        """ "90.1% to 92.3%", of a share; nothing where it is not known."""
        return "" if isnan(self.arm) else f"{self.value - self.arm:.1%} to {self.value + self.arm:.1%}"


@dataclass(frozen=True)
class LayerLoss:
    """What windows of `widths[w]` layers from layer f on lose, skipped from generation step `from_steps[s]` on.

    `texts` has for each text float64 [S, W, L, 3, T]: by step, width, first layer, measure and generation step; NaN
    where a window does not fit or is not skipped yet. The measures are the KL divergence of the skipped distribution
    from full depth's, in nats; how much less likely the text's own token became, in nats; and whether the likeliest
    token stayed.
    """

    num_layers: int
    widths: tuple[int, ...]
    from_steps: tuple[int, ...]
    texts: Sequence[FloatArray]

    def mean(self, measure: str, step: int, width: int, first: int, among: range | None = None) -> Mean:
        """Over the tokens that were skipped, of the generation steps `among`; all if that is None."""
        place = (self.from_steps.index(step), self.widths.index(width), first, MEASURES.index(measure))
        steps = slice(None) if among is None else slice(among.start, among.stop)
        values = [text[place][steps] for text in self.texts]
        sums = np.array([np.nansum(one) for one in values])
        counts = np.array([np.count_nonzero(~np.isnan(one)) for one in values])
        return mean_of_clusters(sums, counts)

    def means(self, measure: str, step: int) -> FloatArray:
        """Float64 [W, L]: the mean for every window, NaN where it does not fit."""
        found = np.full((len(self.widths), self.num_layers), np.nan)
        for place, width in enumerate(self.widths):
            for first in self.firsts(width):
                found[place, first] = self.mean(measure, step, width, first).value
        return found

    def firsts(self, width: int) -> range:
        """The layers at which a window of this width can begin."""
        return range(self.num_layers - width + 1)

    def cheapest(self, step: int, width: int) -> int:
        """The first layer of the window of this width whose KL divergence is least."""
        means = self.means("kl", step)[self.widths.index(width)]
        return min(self.firsts(width), key=lambda first: float(means[first]))

    @property
    def longest(self) -> int:
        return max(len(text[0, 0, 0, 0]) for text in self.texts)

    def table(self) -> Table:
        """For every step and width the window that costs least, beside the median of all windows of that width."""
        rows = []
        for step in self.from_steps:
            for place, width in enumerate(self.widths):
                first = self.cheapest(step, width)
                median = float(np.nanmedian(self.means("kl", step)[place]))
                cells = self._cells(step, width, first)
                rows.append((f"{step}", f"{width}", _window(first, width), *cells, f"{median:.3f}"))
        header = ("from step", "skipped", "cheapest", *_HEADER, "KL, median window")
        tokens = sum(text.shape[-1] - 1 for text in self.texts)
        texts = f"{counted(len(self.texts), 'text')}, {tokens} tokens after the first of each"
        return Table(f"Loss of the next token by layers skipped, {texts}", header, rows)

    def position_table(self) -> Table:
        """The cheapest windows of the first step, and those windows begun at later steps, by generation step."""
        rows = []
        early = self.from_steps[0]
        for width in self.widths:
            first = self.cheapest(early, width)
            for group in step_groups(self.longest):
                for step in self.from_steps:
                    if step <= group.start:
                        cells = self._cells(step, width, first, group)
                        rows.append((_window(first, width), steps_in_words(group), f"{step}", *cells))
        title = "The same windows by place in the text; a smaller step means that earlier tokens were skipped too"
        return Table(title, ("layers", "step (from 0)", "skipped from", *_HEADER), rows)

    def _cells(self, step: int, width: int, first: int, among: range | None = None) -> tuple[str, str, str]:
        kl, extra, agrees = (self.mean(measure, step, width, first, among) for measure in MEASURES)
        more = f"{100 * (np.exp(extra.value) - 1):+.1f}%"
        return f"{kl.value:.3f} +- {kl.arm:.3f}", more, f"{agrees.value:.1%}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "texts": len(self.texts),
            "tokens": [text.shape[-1] for text in self.texts],
            "windows": [
                self._window_as_dict(step, width, first)
                for step in self.from_steps
                for width in self.widths
                for first in self.firsts(width)
            ],
        }

    def _window_as_dict(self, step: int, width: int, first: int) -> dict[str, Any]:
        groups = [group for group in step_groups(self.longest) if group.stop > step]
        return {
            "from_step": step,
            "first_layer": first,
            "layers_skipped": width,
            **self._means_as_dict(step, width, first, None),
            "by_step": [
                {"steps": steps_in_words(group), **self._means_as_dict(step, width, first, group)} for group in groups
            ],
        }

    def _means_as_dict(self, step: int, width: int, first: int, among: range | None) -> dict[str, float | None]:
        kl, extra, agrees = (self.mean(measure, step, width, first, among) for measure in MEASURES)
        return {
            "kl_nats": kl.value,
            "kl_nats_arm_95": kl.known_arm,
            "perplexity_ratio": float(np.exp(extra.value)),
            "same_first_choice": agrees.value,
        }


_HEADER = ("KL, nats", "extra perplexity", "same first choice")


def measure_layers(
    observer: Observer,
    answered: Sequence[Answered],
    widths: Sequence[int],
    from_steps: Sequence[int],
    progress: Callable[[], None] = lambda: None,
    gather: Callable[[Iterable[FloatArray]], list[FloatArray]] = list,
) -> LayerLoss:
    """Skip every window in every text; `progress` hears of each pass, of which there are `passes` for a text.

    `gather` takes each text when it is measured, and may end before the last; steps that no text has reached by then
    are left out.

    Raises `InvalidValueError` where no text reaches a step.
    """
    num_layers = observer.config.num_layers
    for width in widths:
        require_integer("widths", width, 1, num_layers)
    longest = max(len(one.token_ids) for one in answered)
    for step in from_steps:
        require_integer("from_steps", step, 1)
        require(step < longest, "--from-step", step, f"below {longest}, the tokens of the longest text")
    loss = LayerLoss(num_layers, tuple(widths), tuple(from_steps), [])
    ordered = sorted(answered, key=lambda one: len(one.token_ids) <= min(from_steps))  # what says nothing comes last
    texts = gather(_of_text(observer, one, loss, progress) for one in ordered)
    reached = [nth for nth, step in enumerate(from_steps) if any(step < text.shape[-1] for text in texts)]
    return replace(loss, from_steps=tuple(from_steps[nth] for nth in reached), texts=[text[reached] for text in texts])


def passes(num_layers: int, widths: Sequence[int], from_steps: Sequence[int]) -> int:
    """The windows that are skipped in each text."""
    return len(from_steps) * sum(num_layers - width + 1 for width in widths)


@torch.inference_mode()
def _of_text(observer: Observer, one: Answered, loss: LayerLoss, progress: Callable[[], None]) -> FloatArray:
    count, num_layers = len(one.token_ids), loss.num_layers
    found = np.full((len(loss.from_steps), len(loss.widths), num_layers, len(MEASURES), count), np.nan)
    walk = CachedPass(observer, len(one.prompt_ids), len(one.sequence))
    rows = one.answer_rows
    if rows.start:
        walk.feed(one.sequence[: rows.start])
    fed = one.sequence[rows]
    states = [observer.embedded(fed), *walk.feed(fed)]
    targets = torch.tensor(one.token_ids, device=observer.device)
    full = observer.logits(states[-1]).log_softmax(dim=-1)
    for step, place, width, first in _windows(loss):
        if step < count:
            hidden = walk.resume(states[first][step:].clone(), first + width, rows.start + step)
            skipped = observer.logits(hidden).log_softmax(dim=-1)
            found[loss.from_steps.index(step), place, first, :, step:] = compared(full[step:], skipped, targets[step:])
        progress()
    return found


def _windows(loss: LayerLoss) -> Iterator[tuple[int, int, int, int]]:
    """Step, place of the width, width, first layer. Late steps first: a pass overwrites entries from its step on, and
    the steps before must still be full depth's."""
    for step in sorted(loss.from_steps, reverse=True):
        for place, width in enumerate(loss.widths):
            for first in loss.firsts(width):
                yield step, place, width, first


def compared(full: Tensor, skipped: Tensor, targets: Tensor) -> FloatArray:
    """Float64 [3, T], in the order of `MEASURES`, of log-probabilities [T, V] and the text's tokens [T]."""
    kl = (full.exp() * (full - skipped)).sum(dim=-1).clamp(min=0)  # below it by rounding alone
    extra = (full - skipped).gather(1, targets[:, None])[:, 0]
    agrees = full.argmax(dim=-1) == skipped.argmax(dim=-1)
    return torch.stack((kl.double(), extra.double(), agrees.double())).cpu().numpy()


def mean_of_clusters(sums: FloatArray, counts: npt.NDArray[np.int64]) -> Mean:
    """The mean of all tokens, with the interval of a ratio of sums over texts, whose tokens are not independent."""
    has = counts > 0
    texts, total = int(has.sum()), int(counts.sum())
    if not texts:
        return Mean(float("nan"), float("nan"))
    value = float(sums.sum() / total)
    if texts == 1:
        return Mean(value, float("nan"))
    residuals = sums[has] - value * counts[has]
    error = float(np.sqrt(texts / (texts - 1) * (residuals**2).sum()) / total)
    return Mean(value, quantile_of_t(texts - 1) * error)


@lru_cache
def quantile_of_t(freedom: int) -> float:
    """How many standard errors a 95 % interval reaches, by Student's distribution."""
    # The normal distribution's 1.96 covers 91 % at best where eight texts say what the spread is.
    low, high = 0.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance_within(middle, freedom) < 0.95 else (low, middle)
    return high


def _chance_within(value: float, freedom: int) -> float:
    """The chance of a value nearer to 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = atan(value / sqrt(freedom)), freedom % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for number in range(odd + 2, freedom + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (number - 1) / number
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


def mean_over(texts: Iterable[FloatArray]) -> Mean:
    """As `mean_of_clusters`, of one value for each token of each text."""
    values = list(texts)
    return mean_of_clusters(np.array([one.sum() for one in values]), np.array([one.size for one in values]))


def _window(first: int, width: int) -> str:
    """ "24", or "24-26"."""
    return f"{first}" if width == 1 else f"{first}-{first + width - 1}"


EARLY = range(4, 16)
LATE = 32
"""The generation steps that are compared: the first few are the prompt's affair as much as the place's."""


def mean_at(texts: Sequence[FloatArray], group: range) -> Mean:
    """Over the tokens of these generation steps, one value each in `texts`; with the interval over texts."""
    return mean_over(text[group.start : group.stop] for text in texts)


def late_less_early(texts: Sequence[FloatArray]) -> tuple[int, Mean]:
    """How many texts reach the late steps, and the mean over these of late less early; NaN where there is none."""
    differences = [text[LATE:].mean() - text[EARLY.start : EARLY.stop].mean() for text in texts if len(text) > LATE]
    return len(differences), mean_over(np.array([one]) for one in differences)


def in_words(texts: Sequence[FloatArray], unit: str) -> tuple[str, ...]:
    """The comparison as a note below a table; nothing where fewer than two texts reach the late steps."""
    count, mean = late_less_early(texts)
    if count < 2:
        return ()
    steps = f"steps {EARLY.start} to {EARLY.stop - 1}"
    return (
        f"Steps from {LATE} on less {steps} of the same text, over {counted(count, 'text')} that reach them: "
        f"{mean.value:+.2f} {unit} (95 %: {mean.value - mean.arm:+.2f} to {mean.value + mean.arm:+.2f}).",
    )


def as_dict(texts: Sequence[FloatArray]) -> dict[str, Any]:
    """The comparison for machines; what is not known is None."""
    count, mean = late_less_early(texts)
    return {"texts": count, "value": None if isnan(mean.value) else mean.value, "arm_95": mean.known_arm}


def groups_as_dict(texts: Sequence[FloatArray]) -> list[dict[str, Any]]:
    """The mean of every group of steps for machines; `arm_95` is None where one text reaches it."""
    found = []
    for group in step_groups(max(map(len, texts))):
        mean = mean_at(texts, group)
        found.append({"steps": steps_in_words(group), "mean": mean.value, "arm_95": mean.known_arm})
    return found


def with_arm(mean: Mean, form: str) -> str:
    """ "25.42 +- 0.61", or the mean alone where there is one text."""
    return format(mean.value, form) + ("" if isnan(mean.arm) else f" +- {mean.arm:.2g}")
