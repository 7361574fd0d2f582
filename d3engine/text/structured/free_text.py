"""Free text before a form: until a mark comes up, the same tokens may follow at each token, computed once and without
moving the grammar. Where reasoning is too long, its end is written for the model."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from d3engine.request.constraint import Allowed, Constraint, Form

MAY_BEGIN_CALL = (b"{", b"[", b"`")
"""First characters of an answer that may be a call as a whole, which is left to the grammar."""
LONGEST_BEGINNING = 32
"""Bytes in which a text must have turned out to be no reasoning: a grammar may refuse one there."""


@dataclass(frozen=True)
class FreeText:
    """Where a form leaves text free.

    Attributes:
        reasoning: the marks of reasoning that comes first; the first is empty where it has begun, None: there is none.
        openings: texts behind which the form begins; None: it begins at once, behind reasoning if there is one.
        special_ids: tokens that no free text has.
        bytes_of: what a token stands for.
        most_reasoning: tokens of reasoning without its end, which is then written for the model; None: any number.
        closing_ids: the tokens of that end.
        vocab_size: of the masks.
    """

    reasoning: tuple[bytes, bytes] | None
    openings: tuple[bytes, ...] | None
    special_ids: frozenset[int]
    bytes_of: Callable[[int], bytes]
    most_reasoning: int | None = None
    closing_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    masks: dict[tuple[frozenset[int], _Stage], Allowed] = field(default_factory=dict)

    def only(self, token: int) -> Allowed:
        """A mask of one token."""
        found: Allowed = np.zeros(-(-self.vocab_size // 8), dtype=np.uint8)
        found[token >> 3] = 1 << (token & 7)
        return found


class _Stage(Enum):
    BEGIN = auto()  # it is not known yet whether reasoning comes
    REASONING = auto()
    REST = auto()  # nor whether the answer is a call as a whole
    FREE = auto()
    HELD = auto()


@dataclass(frozen=True)
class _Place:
    """How far a sequence has come.

    `text` is what matters of its end. With `rests` the grammar stands at an earlier place of the same free text, behind
    which only `pending` has to be seen: nothing where no mark has begun. Of its `num_tokens` the last `num_closing` end
    reasoning that was too long.
    """

    stage: _Stage
    text: bytes = b""
    rests: bool = False
    pending: tuple[int, ...] = ()
    num_tokens: int = 0
    num_closing: int = 0


class FreeForm:
    """A form with free text before it; a `Form`."""

    def __init__(self, form: Form, free: FreeText) -> None:
        self._form = form
        self._free = free

    def begin(self, end_token_ids: frozenset[int]) -> Constraint:
        reasoning = self._free.reasoning
        begun = _Place(_Stage.REST if reasoning is None else _Stage.BEGIN if reasoning[0] else _Stage.REASONING)
        return _FreePlace(self._form.begin(end_token_ids), self._free, begun, end_token_ids)


class _FreePlace:
    """Where one sequence stands; a `Constraint`."""

    def __init__(self, inner: Constraint, free: FreeText, place: _Place, ends: frozenset[int]) -> None:
        self._inner = inner
        self._free = free
        self._place = place
        self._ends = ends

    @property
    def fault(self) -> str | None:
        return self._inner.fault

    @property
    def token_seconds(self) -> float:
        return 0.0 if self._place.rests else self._inner.token_seconds

    def allowed(self, drafted: Sequence[int] = ()) -> Allowed | None:
        behind = self._behind(drafted)
        if behind is None:
            return None
        place, taken = behind
        if _is_too_long(self._free, place) and self._inner.fault is None:
            return self._free.only(self._free.closing_ids[place.num_closing])
        if not place.rests or place.pending:
            return self._inner.allowed([*taken, *place.pending])
        key = self._ends, place.stage
        if key not in self._free.masks:
            found = self._inner.allowed(taken)
            if found is None or self._inner.fault is not None:
                return found
            found.flags.writeable = False  # sequences share it
            self._free.masks[key] = found
        return self._free.masks[key]

    def take(self, token: int) -> None:
        self._place, taken = _step(self._free, self._place, token)
        for one in taken:
            self._inner.take(one)

    def copy(self) -> Constraint:
        return _FreePlace(self._inner.copy(), self._free, self._place, self._ends)

    def is_over(self, drafted: Sequence[int] = ()) -> bool:
        behind = self._behind(drafted)
        if behind is None:
            return True
        place, taken = behind
        return self._inner.is_over([*taken, *place.pending])

    def _behind(self, drafted: Sequence[int]) -> tuple[_Place, list[int]] | None:
        """The place behind some tokens, and those of them that the grammar would have taken there; None where one of
        them is not the next token of an end of reasoning that is due."""
        place, taken = self._place, list[int]()
        for token in drafted:
            if _is_too_long(self._free, place) and token != self._free.closing_ids[place.num_closing]:
                return None
            place, more = _step(self._free, place, token)
            taken += more
        return place, taken


def _step(free: FreeText, place: _Place, token: int) -> tuple[_Place, tuple[int, ...]]:
    """The place one token later, and the tokens that the grammar takes on the way."""
    if place.stage is _Stage.HELD:
        return place, (token,)
    if token in free.special_ids:
        return _Place(_Stage.HELD), (*place.pending, token)
    num_tokens, num_closing = place.num_tokens + 1, place.num_closing + _is_too_long(free, place)
    stage, text = _stage_of(free, place.stage, place.text + free.bytes_of(token))
    marks = _marks_of(free, stage)
    is_open = marks is not None and _is_open(text, marks)
    kept = text if marks is None else text[-max(map(len, marks)) :]
    if place.rests and stage is place.stage:
        return _Place(stage, kept, True, () if is_open else (*place.pending, token), num_tokens, num_closing), ()
    return _Place(stage, kept, is_open, (), num_tokens, num_closing), (*place.pending, token)


def _is_too_long(free: FreeText, place: _Place) -> bool:
    """Whether a place is in reasoning whose end is due."""
    most = free.most_reasoning
    return most is not None and place.stage is _Stage.REASONING and place.num_tokens >= most


def _marks_of(free: FreeText, stage: _Stage) -> tuple[bytes, ...] | None:
    """The marks that end the free text of a stage; None where none is."""
    if stage is _Stage.REASONING and free.reasoning is not None:
        return free.reasoning[1:]
    return free.openings or None if stage is _Stage.FREE else None


def _stage_of(free: FreeText, stage: _Stage, text: bytes) -> tuple[_Stage, bytes]:
    """The stage that a text of `stage` leads to, and what of it belongs there."""
    if stage is _Stage.BEGIN:
        assert free.reasoning is not None
        begins, opening = text.lstrip(), free.reasoning[0]
        if opening.startswith(begins) and begins != opening:
            return stage, text
        stage, text = (_Stage.REASONING, begins[len(opening) :]) if begins.startswith(opening) else (_Stage.REST, text)
    if stage is _Stage.REASONING:
        assert free.reasoning is not None
        _, mark, behind = text.partition(free.reasoning[1])
        if not mark:
            return stage, text
        stage, text = _Stage.REST, behind
    if stage is _Stage.REST:
        begins = text.lstrip()
        if not free.openings or begins.startswith(MAY_BEGIN_CALL):
            return _Stage.HELD, b""
        stage = _Stage.REST if len(begins) < LONGEST_BEGINNING else _Stage.FREE
    if free.openings and any(opening in text for opening in free.openings):
        return _Stage.HELD, b""
    return stage, text


def _is_open(text: bytes, marks: tuple[bytes, ...]) -> bool:
    """Whether no mark and no character has begun at the end of a text."""
    if any(text.endswith(mark[:size]) for mark in marks for size in range(1, len(mark))):
        return False
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text[-4:])
    return not decoder.getstate()[0]
