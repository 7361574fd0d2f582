"""What benchmarks of drafts ask, and by which drafts of D3: their options in common."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import positive
from d3engine.engine.engine import Engine
from d3engine.research.analysis.answers import Prompt, read_prompts
from d3engine.research.evaluation.word_problems import format_prompt, problems


def prompts_for(engine: Engine, count: int, chat: str | None) -> list[Prompt]:
    """A given number of word problems, or as many lines of the file `chat` in the model's chat template."""
    if chat is None:
        return [format_prompt(problem.question) for problem in itertools.islice(problems("test", 1), count)]
    return [engine.chat_prompt([{"role": "user", "content": turn}]) for turn in read_prompts(Path(chat), count)]


def add_draft_options(parser: argparse.ArgumentParser, lengths: Sequence[int], prompts: int, tokens: int) -> None:
    """By which drafts what is answered, and where the figures go; these three have defaults."""
    parser.add_argument(
        "--draft",
        dest="drafts",
        type=float,
        nargs=2,
        action="append",
        metavar=("ALPHA", "START"),
        help="a setting of D3 to draft with; may be repeated",
    )
    parser.add_argument("--bridges", metavar="FILE", help="bridges that drafts cross skipped layers by")
    parser.add_argument("--lengths", type=positive, nargs="+", default=lengths, help="draft lengths")
    parser.add_argument("--prompts", type=positive, default=prompts, help="word problems, or lines of --chat")
    parser.add_argument("--chat", metavar="FILE", help="prompts for the chat template, one a line, not word problems")
    parser.add_argument("--tokens", type=positive, default=tokens, help="tokens of an answer at most")
    parser.add_argument("--plot", metavar="FILE", help="also draw the figures to this PNG file (needs matplotlib)")
