"""The metrics of several servers as those of one: each sample says by a label whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>.*)")
LABEL = "replica"


def merged(texts: Mapping[str, str]) -> str:
    """What Prometheus reads, out of what each of the servers would tell it; every name is described once.

    Args:
        texts: by the id of the server, in Prometheus' text format.
    """
    families: dict[str, tuple[dict[str, None], list[str]]] = {}
    for replica, text in texts.items():
        found: tuple[dict[str, None], list[str]] = ({}, [])
        for line in filter(None, text.splitlines()):
            if line.startswith("# HELP "):
                found = families.setdefault(line.split(" ")[2], ({}, []))
            if line.startswith("#"):
                found[0].setdefault(line)
            else:
                found[1].append(_labelled(line, replica))
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))


def _labelled(line: str, replica: str) -> str:
    sample = SAMPLE.fullmatch(line)
    assert sample is not None, line
    labels = ",".join(filter(None, (f'{LABEL}="{replica}"', sample["labels"])))
    return f"{sample['name']}{{{labels}}} {sample['value']}"
