"""A compiled grammar and a sequence's place in it; a question about a draft consumes its
tokens and rolls back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from d3engine.request.constraint import FAULT_PREFIX, Allowed, Constraint
from d3engine.text.structured.checker import in_words

if TYPE_CHECKING:
    from llguidance import LLMatcher

FADING = 0.97
"""What a token leaves of the time of the one before, so that one slow mask shortens the runs of some fifty tokens."""

T = TypeVar("T")
F = TypeVar("F")

FREE_SECONDS = 0.001
"""Of processor time for a mask or a move over one token; ordinary grammars take a tenth of it."""
BURST_SECONDS = 0.25
SHARE = 0.25
"""Of an engine's time that expensive masks may take in the long run."""


class MaskTime:
    """The time that all expensive masks of one engine share: a token bucket that fills with the wall clock."""

    def __init__(self) -> None:
        self._left = BURST_SECONDS
        self._filled = self.now()

    def is_spent(self) -> bool:
        """Whether no expensive mask may be computed now."""
        now = self.now()
        self._left = min(BURST_SECONDS, self._left + SHARE * (now - self._filled))
        self._filled = now
        return self._left <= 0

    def spend(self, seconds: float) -> None:
        """Take what a mask has used beyond its free time."""
        self._left -= seconds

    now = staticmethod(time.monotonic)
    used = staticmethod(time.thread_time)
    """Processor time of the calling thread, which is the one that computes its masks."""


_OUT_OF_TIME = (
    f"its tokens take more than {FREE_SECONDS * 1000:g} ms of processor time each, and the engine has no more"
)


class Grammar:
    """A grammar over a vocabulary, in which id `vocab_size` stands for the end; a `Form`.

    All matchers that are copied from one share its lexer, whose states are bounded in number. So a full lexer is
    replaced: the matcher at the beginning is compiled anew.
    """

    def __init__(self, compile_matcher: Callable[[], LLMatcher], vocab_size: int, time: MaskTime) -> None:
        self._compile = compile_matcher
        self._lock = Lock()
        self._start: LLMatcher | None = compile_matcher()
        self.vocab_size = vocab_size
        self.time = time
        self.token_seconds = 0.0
        """Processor time of a token: the largest of the latest, which fade."""
        self.balance = 0.0
        """Free time that the sequence asked last had left, where a new sequence begins: its first masks cost alike."""

    def begin(self, end_token_ids: frozenset[int]) -> Constraint:
        start, _ = self.start()
        ends = np.array(sorted(end_token_ids), dtype=np.int64)
        return GrammarPlace(self, start, start.deep_copy(), ends)

    def start(self, unlike: LLMatcher | None = None) -> tuple[LLMatcher, bool]:
        """A matcher at the beginning, to be copied, with another lexer than `unlike`; whether it was just compiled."""
        with self._lock:
            is_new = self._start is None or self._start is unlike
            if self._start is None or is_new:
                self._start = self._compile()
            return self._start, is_new

    def drop(self, start: LLMatcher) -> None:
        """Compile anew before the next use, if `start` is still in use."""
        with self._lock:
            if self._start is start:
                self._start = None


class GrammarPlace:
    """Where one sequence stands; a `Constraint`."""

    def __init__(
        self, grammar: Grammar, start: LLMatcher, matcher: LLMatcher, ends: np.typing.NDArray[np.int64]
    ) -> None:
        self._grammar = grammar
        self._start = start
        self._matcher = matcher
        self._ends = ends
        self._tokens: list[int] = []
        self._balance: float | None = None
        self._num_replayed = 0
        self.fault: str | None = None

    def allowed(self, drafted: Sequence[int] = ()) -> Allowed | None:
        nothing = np.zeros(-(-self._grammar.vocab_size // 8), dtype=np.uint8)
        if self.fault is not None:
            return nothing
        if self._current_balance() < 0 and self._grammar.time.is_spent():
            self.fault = FAULT_PREFIX + _OUT_OF_TIME
            return nothing
        return self._timed(lambda: self._settled(lambda: self._behind(drafted, self._mask), nothing), 1 + len(drafted))

    def take(self, token: int) -> None:
        def consume() -> None:
            self._check(self._matcher.consume_token(token))

        self._timed(lambda: self._settled(consume, None), 1)
        self._tokens.append(token)

    def copy(self) -> Constraint:
        other = GrammarPlace(self._grammar, self._start, self._matcher.deep_copy(), self._ends)
        other._tokens, other._balance, other.fault = self._tokens.copy(), self._balance, self.fault
        return other

    def is_over(self, drafted: Sequence[int] = ()) -> bool:
        if not drafted:
            return self.fault is None and self._matcher.is_stopped()
        return self._settled(lambda: self._behind(drafted, lambda: True), True) is None

    @property
    def token_seconds(self) -> float:
        return self._grammar.token_seconds

    def _timed(self, step: Callable[[], T], num_tokens: int) -> T:
        """Take a step that masks or moves over tokens, and charge its processor time beyond what they have free."""
        grammar, begun = self._grammar, self._grammar.time.used()
        self._num_replayed = 0
        found = step()
        taken = grammar.time.used() - begun
        num_tokens += self._num_replayed
        grammar.token_seconds = max(taken / num_tokens, FADING * grammar.token_seconds)
        free = num_tokens * FREE_SECONDS
        self._balance = grammar.balance = min(self._current_balance() + free - taken, FREE_SECONDS)
        if self._balance < 0:
            grammar.time.spend(min(taken, -self._balance))
        return found

    def _current_balance(self) -> float:
        return self._grammar.balance if self._balance is None else self._balance

    def _settled(self, step: Callable[[], T], at_fault: F) -> T | F:
        """The result of a step; after a fault `at_fault`. A full lexer is replaced, and the step taken once more."""
        error, is_new = self.fault, False
        while error is None or (_may_be_full(error) and not is_new and self.fault is None):
            try:
                if error is not None:
                    self._start, is_new = self._grammar.start(unlike=self._start)
                    self._replay()
                return step()
            except _MatcherError as raised:
                error = str(raised)
        if self.fault is None:
            self._grammar.drop(self._start)
            self.fault = FAULT_PREFIX + in_words(error)
        return at_fault

    def _replay(self) -> None:
        """Come to the same place from the current beginning, token by token.

        A mask refills what a lexer may spend until the next one: many tokens without masks between them exhaust it.
        """
        self._matcher = self._start.deep_copy()
        self._num_replayed += len(self._tokens)
        for token in self._tokens:
            self._matcher.compute_bitmask()
            self._check(self._matcher.consume_token(token))

    def _behind(self, drafted: Sequence[int], ask: Callable[[], T]) -> T | None:
        """What `ask` finds behind these tokens; None where the grammar does not go on there."""
        tokens = list(drafted)
        taken = self._matcher.try_consume_tokens(tokens) if tokens else 0
        if taken < len(tokens) and tokens[taken] not in self._ends:
            self._matcher.compute_bitmask()  # a full lexer refuses tokens too, and says so here alone
        self._check()
        # A token that cannot be taken is one that ends the sequence: nothing else was allowed.
        found = ask() if taken == len(tokens) and not self._matcher.is_stopped() else None
        if taken:
            self._check(self._matcher.rollback(taken))
        return found

    def _mask(self) -> Allowed:
        size = self._grammar.vocab_size
        found: Allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        self._check()
        may_end = found[size >> 3] >> (size & 7) & 1
        bits = (1 << (self._ends & 7)).astype(np.uint8)
        if may_end:
            np.bitwise_or.at(found, self._ends >> 3, bits)
        else:
            np.bitwise_and.at(found, self._ends >> 3, ~bits)
        return found[: -(-size // 8)]

    def _check(self, is_done: bool = True) -> None:
        if not is_done or self._matcher.is_error():
            raise _MatcherError(self._matcher.get_error())


def _may_be_full(error: str) -> bool:
    # A token that its mask has allowed is refused by a full lexer alone, which then names only the token.
    return "lexer error" in error or "doesn't satisfy the grammar" in error


class _MatcherError(Exception):
    """What llguidance reports."""
