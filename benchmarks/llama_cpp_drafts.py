"""llama.cpp's speculative decoding as a peer, greedy: the loop of its example `speculative-simple`.

It runs in a separate process, which answers one line of JSON with another, so that it can take turns with the engine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.children import Child
from benchmarks.llama_cpp import LlamaCpp


def answer(target: LlamaCpp, draft: LlamaCpp, prompt: list[int], tokens: int, draft_length: int) -> dict[str, Any]:
    """At most `tokens` greedy tokens behind `prompt`, `draft_length` of them drafted at a time, or none for 0.

    Returns `token_ids`, seconds of the whole and of the prompt pass, and counts of drafted and accepted tokens and of
    verifications.
    """
    target.keep(0)
    draft.keep(0)
    begun = time.perf_counter()
    known, drafted_so_far = list(prompt), 0  # tokens; how many of them the draft model has entries for
    target.decode(_rows(known, 0), len(known) - 1)
    if draft_length:
        draft.decode(_rows(known, 0), len(known) - 1)
        drafted_so_far = len(known)
    known += target.likeliest(1)
    prompt_seconds = time.perf_counter() - begun
    counts = {"drafted": 0, "accepted": 0, "verifications": 0}
    while len(known) - len(prompt) < tokens and not target.ends_with(known[-1]):
        length = min(draft_length, tokens - (len(known) - len(prompt)) - 1)
        ahead = list[int]()
        while len(ahead) < length:
            fed = [*known, *ahead]
            draft.decode(_rows(fed, drafted_so_far), len(fed) - 1)
            drafted_so_far = len(fed)
            ahead += draft.likeliest(1)
        target.decode(_rows([*known, *ahead], len(known) - 1), len(known) - 1)
        chosen = target.likeliest(len(ahead) + 1)
        accepted = 0
        while accepted < len(ahead) and ahead[accepted] == chosen[accepted] and not target.ends_with(chosen[accepted]):
            accepted += 1
        if ahead:
            counts["drafted"] += len(ahead)
            counts["accepted"] += accepted
            counts["verifications"] += 1
        known += chosen[: accepted + 1]
        target.keep(len(known) - 1)
        drafted_so_far = min(drafted_so_far, len(known) - 1)
        draft.keep(drafted_so_far)
    seconds = time.perf_counter() - begun
    return {"token_ids": known[len(prompt) :], "seconds": seconds, "prompt_seconds": prompt_seconds, **counts}


def _rows(tokens: list[int], first: int) -> list[tuple[int, int, int]]:
    return [(0, place, tokens[place]) for place in range(first, len(tokens))]


def start(target: str, draft: str, threads: int, length: int) -> tuple[Child, str]:
    """The process that answers, both models loaded once for all draft lengths, and llama.cpp's version."""
    child = Child("llama_cpp_drafts", start_new_session=True)  # Ctrl-C is for the benchmark; it ends with its stdin
    return child, child.ask({"target": target, "draft": draft, "threads": threads, "length": length})["version"]


def main() -> None:
    """Load the models that the first line of stdin names, and answer every further line."""
    from benchmarks.llama_cpp import version

    given = json.loads(sys.stdin.readline())
    target, draft = (
        LlamaCpp(Path(given[name]), threads=given["threads"], rows=1, length=given["length"], has_own_defaults=True)
        for name in ("target", "draft")
    )
    print(json.dumps({"version": version()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(target, draft, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
