"""The arithmetic that the policies share: exact fractions, and the cutoffs of a growing window.

The one idea: a layer's cutoff is where a falling function of the step first goes below a line, so a binary
search finds it in 31 evaluations, however slow the decay is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from d3engine.depth.schedule import NEVER, Int32Array
from d3engine.errors import InvalidValueError


def exact_fraction(field: str, value: Any) -> Fraction:
    """The number a person wrote: the float 0.29 is 29/100 here, so that 0.29 of 100 layers is 29 and not 28.

    A float that a division by up to 10,000 gives is that fraction: 2/3 of 3 layers are 2.
    Takes an int, a float, a Fraction, a Decimal, or one of them as text ("0.29", "1/3"), as JSON holds it.
    """
    if isinstance(value, int | float | Fraction | Decimal | str) and not isinstance(value, bool):
        try:
            exact = _exact(str(value))
        except (ValueError, ZeroDivisionError):
            exact = None  # not a number, or not a finite one
        if exact is not None and abs(exact) <= 10**300:
            return exact
    raise InvalidValueError(field, value, "a finite number, or a fraction as text such as '1/3'")


def _exact(text: str) -> Fraction:
    if "/" not in text:
        rounded = float(text)
        if not math.isfinite(rounded):
            raise ValueError(text)
        if rounded == 0:
            return Fraction(0)  # "1e-999999999" as well: its exact value would take minutes and gigabytes
        # The float 16/11 is no decimal that a person wrote: 16 / 1.4545454545454546 is below 11.
        simple = Fraction(text).limit_denominator(10_000)
        if float(simple) == rounded:
            return simple
    return Fraction(text)


def plain_number(value: Fraction) -> float | Fraction:
    """`value` as a float where a float says the same (3/5 is 0.6), so that equal policies compare equal."""
    return float(value) if Fraction(str(float(value))) == value else value


def first_step_below(falling: Callable[[int], float], limit: int) -> int:
    """The first step >= 1 at which `falling`, which never rises, is below `limit`; `NEVER` if none is."""
    low, high = 1, NEVER
    while low < high:
        middle = (low + high) // 2
        if falling(middle) < limit:
            high = middle
        else:
            low = middle + 1
    return low


def window_cutoffs(num_layers: int, start: int, end: int, layers_wanted: Callable[[int], float]) -> Int32Array:
    """Int32 [L]: the cutoffs of the window [start, start + L - keep_i), never past `end`.

    `keep_i` is `floor(layers_wanted(i))`, which must not rise with the step i. Layer start + j is in the
    window once `keep_i < L - j`, and for a whole number on the right the floor makes no difference.
    """
    cutoffs = np.full(num_layers, NEVER, np.int32)
    for layer in range(start, end):
        cutoffs[layer] = first_step_below(layers_wanted, num_layers - (layer - start))
    return cutoffs
