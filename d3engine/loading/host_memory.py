"""What an engine of these sizes would take of the host's memory, refused by name before anything is allocated.

A config.json may claim any number of positions. What grows with them are tables (rope, the tokens and blocks of every
slot) and, on a CPU, the KV cache, which always has room for one sequence of full length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from d3engine.errors import InvalidValueError
from d3engine.loading.host_cpus import control_groups
from d3engine.loading.settings import EngineSettings

GIB = 2**30


def machine_bytes() -> int | None:
    """The memory that a process may have here at most, its control groups included; None where no system says it."""
    limits = list(_group_limits())
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    except (AttributeError, ImportError, OSError, ValueError):
        pass  # not a Unix
    return min((limit for limit in limits if limit > 0), default=None)


def _group_limits() -> Iterator[int]:
    for group, is_second in control_groups("memory", ["memory"]):
        with suppress(OSError, ValueError):  # no file, or "max"
            yield int((group / ("memory.max" if is_second else "memory.limit_in_bytes")).read_text("utf-8"))


def table_bytes(settings: EngineSettings) -> int:
    """Bytes of all tables that have an entry for each position."""
    rope = 8 * (settings.config.head_dim // 2) * settings.max_model_len
    tokens = 4 * settings.max_num_seqs * settings.max_model_len
    blocks = 4 * settings.max_num_seqs * settings.sequence_blocks
    return rope + tokens + blocks


def check_length(settings: EngineSettings, *, sequence_bytes: int) -> None:
    """Raise `InvalidValueError` for a length that this machine has no memory for.

    `sequence_bytes`: what the host keeps of the KV cache for one sequence of this length.
    """
    there, tables = machine_bytes(), table_bytes(settings)
    if there is None or tables + sequence_bytes <= there:
        return
    allowed = f"a length that this machine has memory for, {there / GIB:.1f} GiB: tables for {settings.max_num_seqs}"
    allowed += f" sequences take {tables / GIB:.1f} GiB and the KV cache of one takes {sequence_bytes / GIB:.1f} GiB"
    allowed += " (None is one that fits)"
    raise InvalidValueError("max_model_len", settings.max_model_len, allowed)
