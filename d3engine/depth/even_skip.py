"""Even skipping: as many layers as unified skipping keeps, spread as evenly as whole layers allow at any speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from d3engine.depth.unified_skip import UnifiedSkip


@dataclass(frozen=True)
class EvenSkip(UnifiedSkip):
    """Keep K = floor(L / speedup) layers whose distances differ by one layer at most (ours, not published).

    The distance is the real number (L - 1) / (K - 1), and kept layer j is number j times the distance, halves rounded
    up, j = 0 .. K - 1. Arguments, prompt and step 0 are those of `UnifiedSkip`.
    """

    name: ClassVar[str] = "even"

    def _spread(self, num_layers: int, kept: int) -> list[int]:
        # The spacing is at least 1, so no two fall together.
        gaps = max(kept - 1, 1)
        return [(2 * j * (num_layers - 1) + gaps) // (2 * gaps) for j in range(kept)]
