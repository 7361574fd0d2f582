"""Rename identifiers in every Python file and, between backquotes, in comments, strings and pages.

    python tools/renames.py

The table stays here until all names follow docs/reference/glossary.md.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLASSES = {
    "RunAhead": "MultiStep",
    "Course": "RunControl",
    "Reach": "ExecutorCapabilities",
    "FollowedRun": "StreamingRun",
    "UnderWay": "ActiveRun",
    "Growing": "OutputUpdater",
    "next_chunks": "select_chunks",
    "Choice": "SamplingMode",
    "Rules": "LogitMask",
    "SecondModelRows": "DraftModelBatch",
    "PairedExecutor": "DraftTargetExecutor",
    "KeptStates": "HiddenStateCache",
    "Facts": "EngineProperties",
    "Life": "EngineState",
    "OneCaller": "CallLock",
    "InFlight": "RequestRegistry",
    "Delivery": "OutputQueue",
    "Prepared": "EngineRequest",
    "Switchboard": "Dispatcher",
    "Slot": "ReplyFuture",
    "Waker": "Notifier",
    "Outbox": "OutputBatcher",
    "Pulse": "HeartbeatClock",
    "OwnPulse": "LocalHeartbeatClock",
    "SharedPulse": "SharedHeartbeatClock",
    "Served": "AppState",
    "Job": "RequestContext",
    "News": "Delta",
    "Only": "AllowedValues",
    "Gathered": "WriteBuffer",
    "Outlet": "DirectWriter",
    "Straight": "DirectStream",
    "Exchange": "RequestLog",
    "Traffic": "AdmissionControl",
    "Door": "Proxy",
    "Hearing": "WorkerChannel",
    "Follower": "Worker",
    "PartOfCheckpoint": "CheckpointShard",
    "Waves": "IntervalAdmission",
}
VARIABLES = {
    "ahead": "multi_step",
    "course": "control",
    "courses": "controls",
    "reach": "capabilities",
    "switchboard": "dispatcher",
    "_switchboard": "_dispatcher",
    "waker": "notifier",
    "_waker": "_notifier",
    "outbox": "batcher",
    "_outbox": "_batcher",
}
SUFFIXES = (".py", ".md", ".toml")
OWN = ("tools/renames.py", "CHANGELOG.md")


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if name.endswith(SUFFIXES) and name not in OWN]


def in_words(text: str, table: dict[str, str]) -> str:
    """A comment, a string or a page: names between backquotes, in braces, and strings that are a name."""

    def renamed(found: re.Match[str]) -> str:
        return re.sub(r"\w+", lambda word: table.get(word[0], word[0]), found[0])

    if re.fullmatch(r"[rbf]*([\"'])\w+\1", text):
        return re.sub(r"\w+", lambda word: table.get(word[0], word[0]), text)
    return re.sub(r"`[^`\n]+`|\{[^{}\n\"]+\}", renamed, text)


def in_python(text: str, table: dict[str, str]) -> str:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    parts, at = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begin = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        if token.type == tokenize.NAME and token.string in table:
            new = table[token.string]
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            new = in_words(token.string, table)
        else:
            continue
        parts += [text[at:begin], new]
        at = end
    return "".join([*parts, text[at:]])


def main() -> None:
    for path in files():
        old = path.read_text(encoding="utf-8")
        new = in_python(old, CLASSES | VARIABLES) if path.suffix == ".py" else in_words(old, CLASSES | VARIABLES)
        if new != old:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
