"""Whether later tokens need less than earlier ones of the same text, which is what D3 rests on.

The one idea: texts differ more than places in them do, and not every text reaches the later places. So a late part is
compared with the early part of the same text, and the interval is of texts, not of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from d3engine.analysis.layers import Mean, mean_of_clusters
from d3engine.analysis.report import counted

EARLY = range(4, 16)
LATE = 32
"""The generation steps that are compared: the first few are the prompt's affair as much as the place's."""

FloatArray = npt.NDArray[np.float64]


def mean_at(texts: Sequence[FloatArray], group: range) -> Mean:
    """Over the tokens of these generation steps, one value each in `texts`; with the interval over texts."""
    parts = [text[group.start : group.stop] for text in texts]
    return mean_of_clusters(np.array([part.sum() for part in parts]), np.array([len(part) for part in parts]))


def late_less_early(texts: Sequence[FloatArray]) -> tuple[int, Mean]:
    """How many texts reach the late steps, and the mean over these of late less early; NaN where there is none."""
    differences = [text[LATE:].mean() - text[EARLY.start : EARLY.stop].mean() for text in texts if len(text) > LATE]
    return len(differences), mean_of_clusters(np.array(differences), np.ones(len(differences), dtype=np.int64))


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
    value, arm = (None if isnan(one) else one for one in (mean.value, mean.arm))
    return {"texts": count, "value": value, "arm_95": arm}


def with_arm(mean: Mean, form: str) -> str:
    """ "25.42 +- 0.61", or the mean alone where there is one text."""
    return format(mean.value, form) + ("" if isnan(mean.arm) else f" +- {mean.arm:.2g}")
