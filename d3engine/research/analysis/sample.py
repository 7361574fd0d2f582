"""Answers token by token: the layers each ran, at the policy's own depths, and what the
model would have said after fewer (the D3 paper's Figure 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from d3engine.depth import DepthPolicy
from d3engine.depth.labels import policy_in_words
from d3engine.errors import require_integer
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.observer import Observer
from d3engine.research.analysis.report import Table
from d3engine.text.detokenizer import Detokenizer
from d3engine.text.tokenizer import Tokenizer

TOP = 3
"""Predictions shown for a layer."""


@dataclass(frozen=True)
class Guess:
    """The likeliest tokens after `layer + 1` layers, with their probabilities. `ran`: whether that layer ran."""

    layer: int
    ran: bool
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class SampleToken:
    """One token of an answer: the text that it settled, the layers it ran, and guesses along the way."""

    text: str
    depth: int
    guesses: tuple[Guess, ...]


@dataclass(frozen=True)
class SampleAnswer:
    """A prompt's answer under one policy."""

    policy: DepthPolicy
    prompt: str
    tokens: tuple[SampleToken, ...]

    @property
    def mean_layers(self) -> float:
        return sum(token.depth for token in self.tokens) / len(self.tokens)

    def heading(self, num_layers: int) -> str:
        """The line above it: its policy in words, and the layers that its tokens took, of `num_layers`."""
        return f"{policy_in_words(self.policy)}: {self.mean_layers:.2f} of {num_layers} layers per token"


@dataclass(frozen=True)
class Sample:
    """Answers to the same prompts under several policies; those of one prompt stand together."""

    num_layers: int
    answers: list[SampleAnswer]

    @property
    def depths(self) -> list[int]:
        """All depths that occur, deepest first."""
        return sorted({token.depth for answer in self.answers for token in answer.tokens}, reverse=True)

    def table(self) -> Table:
        rows = [
            (
                " ".join(str(value) for value in answer.policy.describe().values()),
                f"{len(answer.tokens)}",
                f"{answer.mean_layers:.2f} of {self.num_layers}",
            )
            for answer in self.answers
        ]
        return Table("Answers", ("policy", "tokens", "layers per token"), rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "answers": [
                {
                    "prompt": answer.prompt,
                    "depth": answer.policy.describe(),
                    "mean_layers": answer.mean_layers,
                    "tokens": [asdict(token) for token in answer.tokens],
                }
                for answer in self.answers
            ],
        }


def guess_layers(num_layers: int, count: int = 4) -> tuple[int, ...]:
    """`count` layers, evenly spread, the last one among them."""
    require_integer("num_layers", num_layers, 1)
    count = min(require_integer("count", count, 1), num_layers)
    return tuple((place + 1) * num_layers // count - 1 for place in range(count))


def take_sample(
    observer: Observer, tokenizer: Tokenizer, answered: Answered, policy: DepthPolicy, layers: Sequence[int]
) -> SampleAnswer:
    """Observe one answer at the depths that it was generated with; `layers` are those whose guesses are kept."""
    schedule = policy.schedule(observer.config.num_layers)
    guesses: list[list[Guess]] = [[] for _ in answered.token_ids]
    rows = answered.answer_rows
    for states in observer.layers(answered.sequence, len(answered.prompt_ids), schedule):
        if states.layer not in layers:
            continue
        best = observer.logits(states.after[rows]).softmax(dim=-1).topk(TOP, dim=-1)
        for place, (chances, ids) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            words = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
            top = tuple(zip(words, chances, strict=True))
            guesses[place].append(Guess(states.layer, rows.start + place < states.num_rows, top))
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=answered.prompt_ids)
    texts = [detokenizer.append(token) for token in answered.token_ids]  # what each settles; together the whole text
    texts[-1] += detokenizer.finish()
    tokens = zip(texts, answered.depths, guesses, strict=True)
    return SampleAnswer(
        policy, answered.prompt, tuple(SampleToken(text, depth, tuple(kept)) for text, depth, kept in tokens)
    )
