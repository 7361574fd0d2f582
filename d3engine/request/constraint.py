"""What may come next in an answer that must have a form: the seam between sampling and whatever knows the form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Allowed: TypeAlias = npt.NDArray[np.uint8]
"""One bit for each token id, the lowest of the first byte for id 0; bits beyond the vocabulary say nothing."""

FAULT_PREFIX = "structured_outputs: "
"""How the fault of a form begins: by it a server tells the request's own fault from the engine's."""


class Constraint(Protocol):
    """Of one sequence. It knows the tokens that the sequence has, and is asked about drafts that may follow them.

    What ends the sequence (end of text, stop tokens) is allowed exactly where the form may end. A fault of its own (a
    limit of time or memory) allows nothing any more: it ends this sequence.
    """

    @property
    def fault(self) -> str | None:
        """What went wrong, as a sentence; None as long as nothing has."""

    @property
    def token_seconds(self) -> float:
        """Processor time that a token of the form may take, from the latest ones; 0 before the first."""

    def allowed(self, drafted: Sequence[int] = ()) -> Allowed | None:
        """The tokens that may follow `drafted`; None where the form is over by then, so that none counts."""

    def take(self, token: int) -> None:
        """The sequence has grown by this token, which is none of those that end it."""

    def copy(self) -> Constraint:
        """Another that stands where this one does; what one of them takes, the other does not."""

    def is_over(self, drafted: Sequence[int] = ()) -> bool:
        """Whether the form is complete after `drafted`, and nothing can follow."""


class Form(Protocol):
    """A form that has been checked and compiled; threads may share it."""

    def begin(self, end_token_ids: frozenset[int]) -> Constraint:
        """At the beginning of a sequence that these tokens end."""
