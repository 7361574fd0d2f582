"""How many JSON schemas of a folder can be answered by, and whether an instance that breaks one is ever allowed.

    python -m benchmarks.json_schemas FOLDER --every 3

FOLDER holds JSONSchemaBench's files (its `maskbench/data`), each with a schema and with instances that satisfy or break
it, or those of the official JSON-Schema-Test-Suite (`tests/draft2020-12`). A schema is prepared and compiled as a
request's is; an instance goes through its grammar byte by byte, each of which the mask before it must allow.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.report import environment, tell
from d3engine import InvalidValueError
from d3engine.request.params import StructuredOutputsParams
from d3engine.text.structured.checker import MOST, in_words
from d3engine.text.structured.source import grammar_of


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take every N-th file, in the order of names")
    parser.add_argument("--json", help="write the report to this file")
    given = parser.parse_args(arguments)
    files = sorted(given.folder.rglob("*.json"))[:: given.every]
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    wrong = []
    for file in tqdm(files, unit="file"):
        for schema, tests in cases(json.loads(file.read_text(encoding="utf-8"))):
            counts["schemas"] += 1
            try:
                matcher = compiled(schema)
            except InvalidValueError as error:
                refusals[error.allowed.split(": ")[0][:80]] += 1
                continue
            counts["accepted"] += 1
            for value, is_valid in tests:
                kind = "valid" if is_valid else "invalid"
                counts[f"{kind} instances"] += 1
                if allows(matcher, value):
                    counts[f"{kind} instances allowed"] += 1
                    wrong += [] if is_valid else [f"{file.name}: {json.dumps(value)[:80]}"]
    report = {
        "environment": environment(
            "benchmarks.json_schemas", arguments or [given.folder.name, f"--every={given.every}"]
        ),
        "counts": dict(counts),
        "wrongly allowed": wrong,
        "refusals": dict(refusals.most_common()),
    }
    tell(report, show, width=120, file=given.json)


def cases(document: Any) -> Iterator[tuple[dict[str, Any], list[tuple[Any, bool]]]]:
    """The schemas of a file of either suite, each with its instances and whether they satisfy it."""
    for group in document if isinstance(document, list) else [document]:
        schema = group["schema"]
        if isinstance(schema, dict):
            yield schema, [(test["data"], test["valid"]) for test in group.get("tests", ())]


def compiled(schema: dict[str, Any]) -> Any:
    """A matcher at the beginning of a text. Raises `InvalidValueError` for a schema that cannot be enforced."""
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import LLParserLimits

    source = grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=LLParserLimits(**MOST))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidValueError("json", schema, in_words(matcher.get_error()))
    return matcher


def allows(matcher: Any, value: Any) -> bool:
    """Whether the grammar allows a value in its compact spelling, its properties in their own order."""
    place = matcher.deep_copy()
    for byte in json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace"):
        mask = place.compute_bitmask()
        if not mask[byte >> 3] >> (byte & 7) & 1 or not place.consume_token(byte):
            return False
    return bool(place.is_accepting())


def show(report: dict[str, Any], console: Console) -> None:
    """Print the counts, what was allowed wrongly, and why schemas were refused."""
    counts = report["counts"]
    console.print(f"{counts['accepted']} of {counts['schemas']} schemas: {counts['accepted'] / counts['schemas']:.1%}")
    for name, count in counts.items():
        console.print(f"{name}: {count}")
    for line in report["wrongly allowed"]:
        console.print(f"wrong: {line}", markup=False)
    for why, count in report["refusals"].items():
        console.print(f"refused {count}: {why}", markup=False)


if __name__ == "__main__":
    main()
