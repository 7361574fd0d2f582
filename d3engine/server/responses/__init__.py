"""From the engine's outputs to answers, whole or as streams."""

from __future__ import annotations
