"""Leaving at the saturation depth, by an oracle (the D3 paper's section 3.2): what is lost if every token leaves there?

The one idea: every token runs through all layers, so that its saturation depth is known; then it is treated as if it
had left there. Its own prediction is the last layer's by definition. But the layers above hold no entry of it, and what
is put there instead, copied from its last layer or recomputed from the state it left with, is what later tokens read.
No policy can do this: it takes all layers to know where to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from d3engine.analysis.answers import Answered
from d3engine.analysis.copying import AGREEMENT
from d3engine.analysis.observer import CachedPass, Observer
from d3engine.analysis.perturbing import ENTRIES
from d3engine.analysis.report import Table, counted
from d3engine.analysis.saturation import saturation
from d3engine.errors import require, require_integer
from d3engine.evaluation.accuracy import wilson_interval
from d3engine.evaluation.benchmark import Question
from d3engine.text.tokenizer import Tokenizer

KEPT = "kept"
"""Entries of all layers, as full depth writes them: then nothing is changed, and the answer is full depth's."""


@dataclass(frozen=True)
class OracleAnswer:
    """Tokens, the layers after which each was settled and left, and the probability that the LM head gave it there.

    The first token, which the prompt pass yields, is settled like the others, but the prompt keeps all its entries.
    """

    token_ids: list[int]
    depths: list[int]
    confidence: list[float]


@torch.inference_mode()
def oracle_answer(
    observer: Observer,
    prompt_ids: Sequence[int],
    max_tokens: int,
    entries: str,
    is_over: Callable[[list[int]], bool] = lambda tokens: False,
) -> OracleAnswer:
    """A greedy answer whose tokens leave where they are settled; `entries` is "copied", "recomputed" or "kept".

    Ends after `max_tokens` tokens, or once `is_over` says so of the tokens so far.
    """
    require(entries in (KEPT, *ENTRIES), "entries", entries, f"one of {', '.join((KEPT, *ENTRIES))}")
    require_integer("max_tokens", max_tokens, 1)
    run = CachedPass(observer, len(prompt_ids), len(prompt_ids) + max_tokens)
    found = OracleAnswer([], [], [])
    fed = list(prompt_ids)
    while True:
        states = [state[-1:] for state in run.feed(fed)]
        best = [observer.logits(state).softmax(dim=-1).max(dim=-1) for state in states]
        choices = np.array([[int(one.indices)] for one in best])
        settled = saturation(choices, np.array([[float(one.values)] for one in best]))
        depth = int(settled.layers[0])
        if found.token_ids:  # the prompt's own entries stay
            _fill(run, depth, states[depth - 1], entries)
        found.token_ids.append(int(choices[-1, 0]))
        found.depths.append(depth)
        found.confidence.append(float(settled.confidence[0]))
        if len(found.token_ids) == max_tokens or is_over(found.token_ids):
            return found
        fed = found.token_ids[-1:]


def _fill(run: CachedPass, depth: int, state: torch.Tensor, entries: str) -> None:
    """What the layers from `depth` on hold of the newest token, as if it had run the layers below alone."""
    for layer in range(depth, run.num_layers):
        if entries == "copied":
            run.copy_newest(depth - 1, layer)
        elif entries == "recomputed":
            run.project_newest(layer, state)


def ask_oracle(
    observer: Observer,
    tokenizer: Tokenizer,
    answered: Iterable[Answered],
    max_tokens: int,
    stop: Sequence[str],
    questions: Sequence[Question] | None,
) -> Oracle:
    """The oracle's answers to the prompts of `answered`, for each kind of entries.

    Right is what `questions` say; without them, an answer that is full depth's.
    """

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens)

    def is_over(tokens: list[int]) -> bool:
        return tokens[-1] in observer.config.eos_token_ids or any(one in text(tokens) for one in stop)

    answers: dict[str, list[OracleAnswer]] = {entries: [] for entries in (KEPT, *ENTRIES)}
    right: dict[str, list[bool]] = {entries: [] for entries in answers}
    for number, one in enumerate(answered):
        for entries, found in answers.items():
            found.append(oracle_answer(observer, one.prompt_ids, max_tokens, entries, is_over))
            if questions is None:
                is_right = found[-1].token_ids == one.token_ids
            else:
                is_right = questions[number].is_right(_cut(text(found[-1].token_ids), stop))
            right[entries].append(is_right)
    measure = AGREEMENT if questions is None else "exact match"
    return Oracle(measure, observer.config.num_layers, answers, right)


def _cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts in it."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]


@dataclass(frozen=True)
class Oracle:
    """For each kind of entries, the answers and whether each was right."""

    measure: str
    num_layers: int
    answers: Mapping[str, Sequence[OracleAnswer]]
    right: Mapping[str, Sequence[bool]]

    def table(self) -> Table:
        """A row for each kind of entries; `kept` is full depth."""
        header = ("entries above", "right", "95 % interval", "layers, mean", "of all", "confidence", "tokens")
        rows = [self._row(name) for name in self.answers]
        count = len(next(iter(self.right.values())))
        title = f"Every token leaves where it is settled: {self.measure}, {counted(count, 'answer')}"
        return Table(title, header, rows)

    def _row(self, name: str) -> tuple[str, ...]:
        right, depths = self.right[name], self._later(name, "depths")
        interval = wilson_interval(sum(right), len(right))
        mean = float(np.mean(depths)) if depths else float("nan")
        return (
            f"{name} (full depth)" if name == KEPT else name,
            f"{sum(right) / len(right):.1%} ({sum(right)})",
            f"{interval.low:.1%} to {interval.high:.1%}",
            f"{mean:.2f}",
            f"{mean / self.num_layers:.0%}",
            f"{np.mean(self._later(name, 'confidence')):.2f}" if depths else "-",
            f"{len(depths)}",
        )

    def _later(self, name: str, field: str) -> list[float]:
        """Of the tokens after the first of each answer: it is the prompt pass's, and full depth."""
        return [value for answer in self.answers[name] for value in getattr(answer, field)[1:]]

    def as_dict(self) -> dict[str, Any]:
        """Every token."""
        return {
            "measure": self.measure,
            "num_layers": self.num_layers,
            "entries": {
                name: {
                    "right": sum(self.right[name]),
                    "answers": [asdict(answer) for answer in answers],
                    "interval_95": asdict(wilson_interval(sum(self.right[name]), len(self.right[name]))),
                }
                for name, answers in self.answers.items()
            },
        }
