"""When Python looks for garbage: seldom, and never again among what has been loaded to stay."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Not 700: importing torch makes a million objects that all stay, and to look through them 370 times took an eighth of
the time to the first token."""


def collect_seldom() -> None:
    """For a process of ours, before it loads anything."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


def freeze_loaded() -> None:
    """For a process that serves, when it has loaded all that it needs: a full collection looks through what is made
    from now on, and no longer holds up every stream for the 190,000 objects that were there before."""
    gc.collect()
    gc.freeze()


def unfreeze_loaded() -> None:
    """Before a process lets go of what it had loaded to stay: a collection looks through all of it again."""
    gc.unfreeze()


def collect_now() -> None:
    """For a process that has let go of something large: its memory goes back to the system."""
    gc.collect()
    with suppress(AttributeError, OSError):  # another C library than glibc keeps no such heap, or has no name for it
        ctypes.CDLL(None).malloc_trim(0)
