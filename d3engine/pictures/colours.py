"""The colours of terminal, pictures and pages, chosen once: depth on a ramp, everything else from one small set.

The one idea: a reader with any colour vision, or a grey printer, must see the same. The ramp is viridis without its
ends, dark for many layers and light for few; letters on it are black or white, whichever reads better.
"""

from __future__ import annotations

from collections.abc import Iterable

RAMP = ("#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962")
"""Viridis from deep to shallow: perceptually even, and told apart with any colour vision."""

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#999999"
"""Okabe and Ito's set: told apart with any colour vision. Blue and orange are told apart in grey too."""

INK = "#767676"
"""Of text and lines in pictures without a ground of their own: its contrast to white is 4.5, to black 4.6 (WCAG 2)."""


def ramp(position: float) -> tuple[int, int, int]:
    """The sRGB colour, parts from 0 to 255, at `position` of the ramp: 0 is deep, 1 is shallow."""
    place = position * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    first, second = (_parts(RAMP[i]) for i in (low, low + 1))
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(first, second, strict=True))
    return red, green, blue


def line_ramp(position: float) -> str:
    """The ramp as "#rrggbb", without its darkest part, of which a thin line would be lost on a dark page."""
    return "#{:02x}{:02x}{:02x}".format(*ramp(0.3 + 0.7 * position))


def depth_position(depth: int, depths: Iterable[int]) -> float:
    """Where `depth` stands on the ramp when `depths` are all that occur; 0 where there is only one."""
    most, least = max(depths), min(depths)
    return 0.0 if most == least else min(max((most - depth) / (most - least), 0.0), 1.0)


def depth_colours(depths: Iterable[int]) -> dict[int, tuple[str, str]]:
    """For each depth, deepest first: the colour of its background, "#rrggbb", and of letters on it."""
    known = sorted(set(depths), reverse=True)
    found = {}
    for depth in known:
        parts = ramp(depth_position(depth, known))
        found[depth] = ("#{:02x}{:02x}{:02x}".format(*parts), letters_on(*parts))
    return found


def letters_on(red: int, green: int, blue: int) -> str:
    """Black or white: at a relative luminance of 0.179 both have the same contrast (WCAG 2)."""
    return "#000000" if _luminance(red, green, blue) > 0.179 else "#ffffff"


def _luminance(*parts: int) -> float:
    """Relative luminance of an sRGB colour, from 0 to 1 (WCAG 2)."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
