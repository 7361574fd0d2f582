"""Log-probabilities in OpenAI's two forms, that of completions and that of chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from d3engine.request.outputs import Logprob
from d3engine.server.shapes.answers import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob

Row: TypeAlias = Mapping[int, Logprob]
"""What is known of one place: the token that stands there, and the likeliest ones."""

LOWEST = -9999.0
"""In place of minus infinity, which JSON lacks; vLLM's number."""


@dataclass(frozen=True)
class LogprobWords:
    """How a request wants them: so many likeliest ones, tokens as their text or as "token_id:N"."""

    num_top: int
    as_ids: bool

    def of_completion(
        self, token_ids: Sequence[int], rows: Sequence[Row | None], places: Sequence[int], first: str = ""
    ) -> CompletionLogprobs:
        """Of these tokens; a row is None where nothing is known, which is at the first token of a prompt, whose text
        is `first`."""
        known: list[tuple[int, Row | None]] = list(zip(token_ids, rows, strict=True))
        return {
            "text_offset": list(places),
            "token_logprobs": [None if row is None else _number(row[token]) for token, row in known],
            "tokens": [
                self._spelled(token, first) if row is None else self._word(token, row[token]) for token, row in known
            ],
            "top_logprobs": [None if row is None else self._top(token, row) for token, row in known],
        }

    def of_chat(self, token_ids: Sequence[int], rows: Sequence[Row]) -> ChatLogprobs:
        content: list[TokenLogprob] = [
            {
                **self._entry(token, row[token]),
                "top_logprobs": [self._entry(*pair) for pair in _likeliest(row)[: self.num_top]],
            }
            for token, row in zip(token_ids, rows, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _top(self, token: int, row: Row) -> dict[str, float]:
        """Text -> log-probability, of the likeliest tokens and of the one that stands there; of two tokens with one
        text the likelier counts."""
        found: dict[str, float] = {}
        for candidate, logprob in [*_likeliest(row)[: self.num_top], (token, row[token])]:
            found.setdefault(self._word(candidate, logprob), _number(logprob))
        return found

    def _entry(self, token: int, logprob: Logprob) -> TopLogprob:
        return {
            "token": self._word(token, logprob),
            "logprob": _number(logprob),
            "bytes": None if logprob.bytes is None else list(logprob.bytes),
        }

    def _word(self, token: int, logprob: Logprob) -> str:
        return self._spelled(token, logprob.decoded_token or "")

    def _spelled(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self.as_ids else text


def _likeliest(row: Row) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda pair: pair[1].rank)


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def of_prompt(rows: Iterable[Row | None]) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`."""
    return [
        None if row is None else {str(token): _of_prompt_token(known) for token, known in row.items()} for row in rows
    ]


def _of_prompt_token(known: Logprob) -> dict[str, float | int | str | None]:
    return {"logprob": _number(known), "rank": known.rank, "decoded_token": known.decoded_token}
