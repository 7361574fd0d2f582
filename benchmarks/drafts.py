"""What benchmarks of drafts ask, and by which drafts of D3: their settings in common."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import option
from d3engine.engine.engine import Engine
from d3engine.research.analysis.answers import Prompt, read_prompts
from d3engine.research.evaluation.word_problems import format_prompt, problems

DRAFT = {"flag": "--draft", "action": "append", "nargs": 2, "type": float, "metavar": ("ALPHA", "START")}
DRAFT_HELP = "a setting of D3 to draft with; may be repeated"
LENGTHS_HELP = "draft lengths"


@dataclass(frozen=True)
class DraftSettings:
    """Prompts, and what drafts of D3 cross skipped layers by. `chat` is a file of prompts, one a line."""

    bridges: str | None = option(None, "bridges that drafts cross skipped layers by", metavar="FILE")
    prompts: int = option(4, "word problems, or lines of --chat")
    chat: str | None = option(None, "prompts for the chat template, one a line, not word problems", metavar="FILE")
    tokens: int = option(64, "tokens of an answer at most")


def prompts_for(engine: Engine, count: int, chat: str | None) -> list[Prompt]:
    """A given number of word problems, or as many lines of the file `chat` in the model's chat template."""
    if chat is None:
        return [format_prompt(problem.question) for problem in itertools.islice(problems("test", 1), count)]
    return [engine.chat_prompt([{"role": "user", "content": turn}]) for turn in read_prompts(Path(chat), count)]
