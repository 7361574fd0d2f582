"""Kinds of tokens, read off a token's text: known before the step that is fed with it, and
only after the step that yields it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from d3engine.depth import Schedule
from d3engine.errors import require
from d3engine.research.analysis.answers import Answered, same_beginning
from d3engine.research.analysis.layers import FloatArray, Mean, compared, mean_over
from d3engine.research.analysis.observer import Observer
from d3engine.research.analysis.report import Table, counted
from d3engine.research.analysis.saturation import settled_after
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.tokenizer import Tokenizer


class Kind(StrEnum):
    """What a token is, in the order of tables."""

    DIGITS = "digits"
    MARK = "####"
    NEWLINE = "newline"
    END = "end"
    WORDS = "words"
    PUNCTUATION = "punctuation"
    SPACES = "spaces"
    OTHER = "other"


class TokenKinds:
    """The kinds of one tokenizer's tokens; `end_ids` are those that end an answer."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._texts = TokenTexts(tokenizer)
        self._special = tokenizer.special_ids
        self._end = frozenset(end_ids)

    def of(self, token_id: int) -> Kind:
        """A special token that ends nothing is `OTHER`, and so is a piece of a character."""
        if token_id in self._end:
            return Kind.END
        return Kind.OTHER if token_id in self._special else kind_of(self._texts.of(token_id)[0])

    def among(self, token_ids: list[int]) -> npt.NDArray[np.str_]:
        """Str [n]: the kind of each."""
        return np.array([self.of(token).value for token in token_ids], dtype=np.str_)


def kind_of(text: str) -> Kind:
    """The kind of a token with this text; spaces around something do not count, line breaks beside spaces do.

    Digits beside letters, as in "3rd", are a word; digits beside other signs are digits. `MARK` is any run of "#",
    since a vocabulary may cut GSM8K's "####" into pieces.
    """
    seen = text.strip()
    if not seen:
        return Kind.NEWLINE if "\n" in text else Kind.SPACES if text else Kind.OTHER
    if "\N{REPLACEMENT CHARACTER}" in seen:
        return Kind.OTHER
    if not seen.strip("#"):
        return Kind.MARK
    if any(character.isalpha() for character in seen):
        return Kind.WORDS
    if any(character.isdecimal() for character in seen):
        return Kind.DIGITS
    return Kind.PUNCTUATION if seen.isprintable() else Kind.OTHER


SIDES = {"yielded": "that the step yields", "fed": "that the step is fed with"}
"""Whether steps are gathered by the token that they yield or by the one that they are fed with."""


@dataclass(frozen=True)
class TextByKind:
    """One text of n tokens, of which the last n - 1 are here: the kinds on either side of each step (str [n - 1]), and
    float64 [n - 1] each: layers until the prediction is settled, and in nats -log p of the token at full depth, the KL
    divergence of the policy from full depth and how much less likely the token is under it; whether the likeliest token
    stays (0 or 1)."""

    yielded: npt.NDArray[np.str_]
    fed: npt.NDArray[np.str_]
    layers: FloatArray
    surprise: FloatArray
    kl: FloatArray
    extra: FloatArray
    agrees: FloatArray


@dataclass(frozen=True)
class ByKind:
    """All texts of a model of `num_layers` under `policy`, in words.

    `parted` counts the answers that the policy gives by the kind of full depth's token at their first difference;
    None where the texts are not the model's own answers.
    """

    num_layers: int
    policy: str
    texts: Sequence[TextByKind]
    parted: Counter[str] | None = field(default=None)

    def kinds(self, side: str) -> list[Kind]:
        found = {str(kind) for text in self.texts for kind in getattr(text, side)}
        return [kind for kind in Kind if kind.value in found]

    def values(self, side: str, kind: Kind | None, measure: str) -> list[FloatArray]:
        """For each text what the steps of a kind have, of all kinds if None."""
        return [
            getattr(text, measure)[slice(None) if kind is None else getattr(text, side) == kind.value]
            for text in self.texts
        ]

    def mean(self, side: str, kind: Kind | None, measure: str) -> Mean:
        """Over steps, with its interval over texts."""
        return mean_over(self.values(side, kind, measure))

    def table(self, side: str = "yielded") -> Table:
        rows = [self._row(side, kind) for kind in (*self.kinds(side), None)]
        title = f"By the kind of the token {SIDES[side]}, {counted(len(self.texts), 'text')}: {self.policy}"
        last = ("answers part",) if self._parted(side) is not None else ()
        return Table(title, (*_HEADER, *last), rows)

    def _parted(self, side: str) -> Counter[str] | None:
        return self.parted if side == "yielded" else None

    def _row(self, side: str, kind: Kind | None) -> tuple[str, ...]:
        layers = np.concatenate(self.values(side, kind, "layers"))
        surprise, kl, extra, agrees = (self.mean(side, kind, one) for one in ("surprise", "kl", "extra", "agrees"))
        parted = self._parted(side)
        last = () if parted is None else (f"{parted.total() if kind is None else parted[kind.value]}",)
        return (
            "all" if kind is None else kind.value,
            f"{len(layers)}",
            f"{layers.mean():.2f}",
            f"{np.quantile(layers, 0.9, method='inverted_cdf'):g}",
            f"{np.exp(surprise.value):.4g}",
            f"{kl.value:.3g} +- {kl.arm:.2g}",
            f"{100 * (np.exp(extra.value) - 1):+.3g}%",
            f"{agrees.value:.1%}",
            *last,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "policy": self.policy,
            "texts": len(self.texts),
            **{side: [self._as_dict(side, kind) for kind in (*self.kinds(side), None)] for side in SIDES},
            "answers_that_part": None if self.parted is None else dict(self.parted),
        }

    def _as_dict(self, side: str, kind: Kind | None) -> dict[str, Any]:
        layers = np.concatenate(self.values(side, kind, "layers"))
        surprise, kl, extra, agrees = (self.mean(side, kind, one) for one in ("surprise", "kl", "extra", "agrees"))
        return {
            "kind": "all" if kind is None else kind.value,
            "tokens": len(layers),
            "layers_until_settled": float(layers.mean()),
            "perplexity": float(np.exp(surprise.value)),
            "kl_nats": kl.value,
            "kl_nats_arm_95": kl.known_arm,
            "perplexity_ratio": float(np.exp(extra.value)),
            "same_first_choice": agrees.value,
        }


_HEADER = (
    "kind",
    "tokens",
    "layers until settled",
    "90 % by",
    "perplexity",
    "KL, nats",
    "extra perplexity",
    "same first choice",
)


def measure_by_kind(
    observer: Observer,
    kinds: TokenKinds,
    answered: Sequence[Answered],
    schedule: Schedule,
    policy: str,
    decoded: Sequence[Answered] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> ByKind:
    """Two passes through every text of two tokens or more, at full depth and under a nested schedule.

    `decoded` are the answers to the same prompts that the policy gives by itself. `progress` hears of each text.
    Raises `InvalidValueError` for a schedule whose layers wake up again, and where no text has two tokens.
    """
    texts = []
    for one in answered:
        if len(one.token_ids) > 1:
            texts.append(_of_text(observer, kinds, one, schedule))
        progress()
    require(len(texts) > 0, "answers", counted(len(answered), "text"), "one of two tokens or more")
    parted = None
    if decoded is not None:
        found = (_first_difference(kinds, full, other) for full, other in zip(answered, decoded, strict=True))
        parted = Counter(kind.value for kind in found if kind is not None)
    return ByKind(observer.config.num_layers, policy, texts, parted)


def _of_text(observer: Observer, kinds: TokenKinds, one: Answered, schedule: Schedule) -> TextByKind:
    rows = slice(one.answer_rows.start + 1, one.answer_rows.stop)
    choices, last = [], torch.empty(0)
    for states in observer.layers(one.sequence, len(one.prompt_ids)):
        last = observer.logits(states.after[rows])
        choices.append(last.argmax(dim=-1))
    full = last.log_softmax(dim=-1)
    for states in observer.layers(one.sequence, len(one.prompt_ids), schedule):
        hidden = states.after
    skipped = observer.logits(hidden[rows]).log_softmax(dim=-1)
    targets = torch.tensor(one.token_ids[1:], device=observer.device)
    kl, extra, agrees = compared(full, skipped, targets)
    return TextByKind(
        yielded=kinds.among(one.token_ids[1:]),
        fed=kinds.among(one.token_ids[:-1]),
        layers=settled_after(torch.stack(choices).cpu().numpy()).astype(np.float64),
        surprise=-full.gather(1, targets[:, None])[:, 0].double().cpu().numpy(),
        kl=kl,
        extra=extra,
        agrees=agrees,
    )


def _first_difference(kinds: TokenKinds, full: Answered, other: Answered) -> Kind | None:
    """The kind of full depth's token where another answer first differs; None where it does not.

    Where one is the beginning of the other, it is that of the token that the longer one has there.
    """
    ours, theirs = full.token_ids, other.token_ids
    same = same_beginning(ours, theirs)
    if same == max(len(ours), len(theirs)):
        return None
    return kinds.of((ours if same < len(ours) else theirs)[same])
